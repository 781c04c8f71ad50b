"""The parameters derived from a signature against those that the cubin names."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opwright.triton.worker.cubin import CubinKernel, read_cubin
from opwright.triton.worker.errors import WorkerError
from opwright.triton.worker.packfile import read_pack
from opwright.triton.worker.parameters import launch_parameters

from .conftest import Worker

pytestmark = pytest.mark.triton


@pytest.fixture(scope="module")
def cubin(newest: Any) -> bytes:
    newest.compile("add.py", "add_kernel", ["*fp32"] * 3 + ["i32", "=64"], num_warps=2)
    return next(entry.blob for entry in read_pack(newest.out) if entry.blob)


def test_a_cubin_is_read(cubin: bytes) -> None:
    found = read_cubin(cubin, "add_kernel")
    # Three pointers, an int, and two pointers to scratch memory, each at a multiple of its size.
    assert found.parameters == ((0, 8), (8, 8), (16, 8), (24, 4), (32, 8), (40, 8))
    assert found.required_threads == 64


def test_a_kernel_that_is_not_in_it(cubin: bytes) -> None:
    with pytest.raises(WorkerError, match="The cubin of `other` cannot be read: it has no section of that kernel"):
        read_cubin(cubin, "other")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_cubin_gives_an_error_or_parameters(cubin: bytes, data: st.DataObject) -> None:
    damaged = bytearray(cubin[: data.draw(st.integers(0, len(cubin)))])
    for at in data.draw(st.lists(st.integers(0, max(len(damaged) - 1, 0)), max_size=4)):
        if damaged:
            damaged[at] ^= data.draw(st.integers(1, 255))
    try:
        sizes = [size for _, size in read_cubin(bytes(damaged), "add_kernel").parameters]
    except WorkerError:
        sizes = []
    assert all(0 <= size < 1 << 14 for size in sizes)


@pytest.mark.parametrize(
    "sizes",
    [(8, 4, 8), (8, 4, 8, 8, 8), (8, 8, 8, 8), ()],
    ids=["one scratch, as 3.4", "one more", "another size", "none"],
)
def test_a_triton_that_passes_other_parameters_is_refused(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="4.0.0"))
    cubin = CubinKernel(tuple((8 * index, size) for index, size in enumerate(sizes)), None)
    with pytest.raises(WorkerError) as caught:
        launch_parameters(["*kfp32", "constexpr", "i32"], False, (4, 0), cubin, "k")
    assert caught.value.kind == "contract"
    assert caught.value.message == (
        f"`k`: Triton 4.0.0 made a kernel of {len(sizes)} parameters of {list(sizes)} bytes, expected 4: "
        "[0] *fp32 8, [2] i32 4, global_scratch *i8 8, profile_scratch *i8 8. This version of Triton cannot be used."
    )


def test_the_same_key_gives_the_same_bytes(newest: Any, triton_pythons: Any, tmp_path: Path) -> None:
    other = Worker(max(triton_pythons), tmp_path)
    packs = []
    for worker in (newest, other):
        worker.compile("add.py", "add_kernel", ["*fp32:16"] * 3 + ["i32:16", "=512"], num_warps=2)
        packs.append(worker.out.read_bytes())
    other.close()
    assert packs[0] == packs[1]
