"""Which C++ compiler is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from opwright.backends.toolchain import find_compiler


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that calls itself "mine"."""
    monkeypatch.delenv("OPWRIGHT_CXX", raising=False)
    made = tmp_path / "my-c++"
    made.write_text("#!/bin/sh\necho mine\n")
    made.chmod(0o755)
    return made


@pytest.mark.parametrize("command", ["{}", "ccache {}", "/usr/lib/ccache/ccache {}", "sccache {} -m64"])
def test_a_compiler_behind_a_launcher(
    command: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `CXX="ccache clang++"`, the compiler `c++` was taken."""
    monkeypatch.setenv("CXX", command.format(program))
    compiler = find_compiler(tmp_path / "identities")
    assert compiler is not None
    assert (compiler.path, compiler.identity) == (str(program), "mine")


@pytest.mark.parametrize("command", ["{} c++", "env X=1 {}", "{} 'an open quote"])
def test_a_command_that_begins_with_another_program_is_not_a_compiler(
    command: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command.format(program))
    compiler = find_compiler(tmp_path / "identities")
    assert compiler is None or compiler.identity != "mine"
