"""Which C++ compiler is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from opwright.backends.toolchain import find_compiler


@pytest.mark.parametrize("command", ["{}", "ccache {}", "/usr/lib/ccache/ccache {}", "sccache {} -m64"])
def test_a_compiler_behind_a_launcher(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For `CXX="ccache clang++"`, the compiler `c++` was taken."""
    program = tmp_path / "my-c++"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    monkeypatch.delenv("OPWRIGHT_CXX", raising=False)
    monkeypatch.setenv("CXX", command.format(program))
    compiler = find_compiler(tmp_path / "identities")
    assert compiler is not None
    assert (compiler.path, compiler.identity) == (str(program), "mine")


@pytest.mark.parametrize("command", ["{} c++", "env X=1 {}", "{} 'an open quote"])
def test_a_command_that_begins_with_another_program_is_not_a_compiler(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "zig"
    program.write_text("#!/bin/sh\necho mine\n")
    program.chmod(0o755)
    monkeypatch.delenv("OPWRIGHT_CXX", raising=False)
    monkeypatch.setenv("CXX", command.format(program))
    compiler = find_compiler(tmp_path / "identities")
    assert compiler is None or "mine" not in compiler.identity
