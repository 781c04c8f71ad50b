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
