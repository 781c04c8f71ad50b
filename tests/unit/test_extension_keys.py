"""What the address of an object is made of, beside the files that are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from opwright.cpp_extension import objects
from opwright.cpp_extension.objects import Source


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("-march=native",), True),
        (("-mtune=native",), True),
        (("-Xcompiler", "-march=native"), True),
        (("-Xcompiler=-march=native",), True),
        (("-Xcompiler=-march=native,-fopenmp",), True),
        (("-march=x86-64-v3",), False),
    ],
)
def test_flags_that_mean_another_thing_on_another_cpu(
    flags: tuple[str, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache on a shared disk gave an object for the CPU of one machine to all others."""
    source = Source("cpp", "int x;", flags=flags)
    before = source.key(False)
    monkeypatch.setattr(objects, "machine_identity", lambda: "another machine")
    assert (source.key(False) != before) == expected


@pytest.mark.parametrize(
    ("language", "flag", "expected"),
    [("cuda", "-lineinfo", True), ("cuda", "-G", True), ("cpp", "-g", True), ("cuda", "-O3", False)],
)
def test_debug_information_belongs_to_a_place(
    language: str, flag: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Profilers showed the lines of a kernel in the checkout that was compiled first."""
    if language == "cuda":
        monkeypatch.setenv("NVCC_APPEND_FLAGS", f"-O2 {flag}")
        keys = {Source(language, "int x;", Path(place) / "k.cu").key(True) for place in ("/one", "/two")}
        assert (len(keys) == 2) == expected
        monkeypatch.delenv("NVCC_APPEND_FLAGS")
    keys = {Source(language, "int x;", Path(place) / "k.cu", flags=(flag,)).key(True) for place in ("/one", "/two")}
    assert (len(keys) == 2) == expected


def test_the_architecture_of_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source("cuda", "int x;", flags=("-arch=native",))
    monkeypatch.setattr(objects.cuda, "gpu_architectures", lambda: ("90",))
    before = source.key(True)
    monkeypatch.setattr(objects.cuda, "gpu_architectures", lambda: ("100",))
    assert source.key(True) != before


@pytest.mark.parametrize("variable", ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"])
def test_flags_that_nvcc_takes_from_the_environment(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVCC_PREPEND_FLAGS changed nothing once an object was kept."""
    source = Source("cuda", "int x;")
    monkeypatch.delenv(variable, raising=False)
    before = source.key(True)
    monkeypatch.setenv(variable, "-DX")
    assert source.key(True) != before
