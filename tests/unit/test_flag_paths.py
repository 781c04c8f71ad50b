"""The files that flags of extensions name."""

from __future__ import annotations

from pathlib import Path

import pytest

from opwright.backends.flag_paths import absolute, absolute_in_link, linked_files


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["{}/libq.a", "-O2", "{}/libq.a"], ["libq.a"]),
        (["{}/a,b.o"], ["a,b.o"]),
        (["-Wl,--whole-archive,{}/libq.a", "-Wl,--version-script={}/q.map", "@{}/q.rsp"], ["libq.a", "q.map", "q.rsp"]),
        (["-L{}", "-lq", "-l:libboth.so", "-lboth", "-lnowhere"], ["libq.a", "libboth.so"]),
        (["-L", "{}", "-Wl,-Bstatic", "-lboth"], ["libboth.a"]),
        (["-T{}/q.map"], ["q.map"]),
        (["-Wl,-rpath,{}", "-lm", "-l", "-L"], []),
    ],
)
def test_files_that_a_link_depends_on(flags: list[str], expected: list[str], tmp_path: Path) -> None:
    for name in ("libq.a", "a,b.o", "q.map", "q.rsp", "libboth.a", "libboth.so"):
        (tmp_path / name).touch()
    found = linked_files([flag.format(tmp_path) for flag in flags])
    assert sorted(found) == sorted(tmp_path / name for name in expected)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["-Iinc", "-I", "inc", "-I../inc"], ["-I{}/inc", "-I", "{}/inc", "-I{}/../inc"]),
        (["-isystem", "inc", "-isysteminc"], ["-isystem", "{}/inc", "-isystem{}/inc"]),
        (["-iquote", "inc"], ["-iquote", "{}/inc"]),
        (["-include", "pre.h", "-includepre.h"], ["-include", "{}/pre.h", "-include{}/pre.h"]),
        (["-imacros", "pre.h"], ["-imacros", "{}/pre.h"]),
        (["-include", "vector", "-includevector"], ["-include", "vector", "-includevector"]),
        (["-Llib", "-L", "lib", "-lm", "lib"], ["-L{}/lib", "-L", "{}/lib", "-lm", "lib"]),
        (["-Xcompiler", "-isystem", "-Xcompiler", "a"], ["-Xcompiler", "-isystem", "-Xcompiler", "a"]),
        (["-I/inc", "-I=inc", "-DI", "-O2", "-I"], ["-I/inc", "-I=inc", "-DI", "-O2", "-I"]),
    ],
)  # fmt: skip
def test_paths_of_flags_become_absolute(flags: list[str], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "pre.h").touch()
    assert absolute(flags, str(tmp_path)) == [flag.format(tmp_path) for flag in expected]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["q.o", "./q.o", "build/../q.o", "a,b.o"], ["{}/q.o", "{}/./q.o", "{}/build/../q.o", "{}/a,b.o"]),
        (
            ["-Wl,--whole-archive", "q.o", "-Wl,--no-whole-archive"],
            ["-Wl,--whole-archive", "{}/q.o", "-Wl,--no-whole-archive"],
        ),
        (
            ["-Wl,--whole-archive,q.o,q.o", "-Wl,-Bsymbolic,q.o"],
            ["-Wl,--whole-archive,{}/q.o,{}/q.o", "-Wl,-Bsymbolic,{}/q.o"],
        ),
        (
            ["-Wl,--version-script=q.map", "-Wl,--version-script,q.map"],
            ["-Wl,--version-script={}/q.map", "-Wl,--version-script,{}/q.map"],
        ),
        (["-Xlinker", "--dynamic-list", "-Xlinker", "q.map"], ["-Xlinker", "--dynamic-list", "-Xlinker", "{}/q.map"]),
        (["-T", "q.map", "-Tq.map", "@q.map"], ["-T", "{}/q.map", "-T{}/q.map", "@{}/q.map"]),
        (["-Llib", "-L", "lib", "-l:q.o"], ["-L{}/lib", "-L", "{}/lib", "-l:q.o"]),
        (
            ["-Wl,-soname,q.o", "-Wl,-soname=q.o", "-Wl,-Map,q.map"],
            ["-Wl,-soname,q.o", "-Wl,-soname=q.o", "-Wl,-Map,q.map"],
        ),
        (
            ["-Xlinker", "-h", "-Xlinker", "q.o", "-u", "q.o", "q.o"],
            ["-Xlinker", "-h", "-Xlinker", "q.o", "-u", "q.o", "{}/q.o"],
        ),
        (
            ["nowhere.o", "-Wl,-rpath,build", "-Wl,-rpath,$ORIGIN"],
            ["nowhere.o", "-Wl,-rpath,build", "-Wl,-rpath,$ORIGIN"],
        ),
    ],
)
def test_files_of_a_link_become_absolute(flags: list[str], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    for name in ("q.o", "a,b.o", "q.map"):
        (tmp_path / name).touch()
    assert absolute_in_link(flags, str(tmp_path)) == [flag.replace("{}", str(tmp_path)) for flag in expected]
