"""The files that flags of extensions name."""

from __future__ import annotations

from pathlib import Path

import pytest

from opwright.cpp_extension.flag_paths import linked_files


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["{}/libq.a", "-O2", "{}/libq.a"], ["libq.a"]),
        (["{}/a,b.o"], ["a,b.o"]),
        (["-Wl,--whole-archive,{}/libq.a", "-Wl,--version-script={}/q.map", "@{}/q.rsp"], ["libq.a", "q.map", "q.rsp"]),
        (["-L{}", "-lq", "-l:libboth.so", "-lboth", "-lnowhere"], ["libq.a", "libboth.so"]),
        (["-L", "{}", "-Wl,-Bstatic", "-lboth"], ["libboth.a"]),
        (["-Wl,-rpath,{}", "-lm", "-l", "-L"], []),
    ],
)
def test_files_that_a_link_depends_on(flags: list[str], expected: list[str], tmp_path: Path) -> None:
    for name in ("libq.a", "a,b.o", "q.map", "q.rsp", "libboth.a", "libboth.so"):
        (tmp_path / name).touch()
    found = linked_files([flag.format(tmp_path) for flag in flags])
    assert sorted(found) == sorted(tmp_path / name for name in expected)
