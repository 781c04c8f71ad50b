"""Faults that end a process's use of the GPU, each in a process of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_HEAD = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parent)!r})
from gpu_operators import broken, plus
from opwright.errors import *
x = torch.ones(3, device="cuda")
"""


def test_an_illegal_address_names_the_operator(start_python) -> None:
    program = (
        _HEAD
        + """
plus(x)
try:
    broken(x, True)
except DeviceFaultError as error:
    print(error)
"""
    )
    text = start_python(program, env={"CUDA_LAUNCH_BLOCKING": "1"}).stdout
    assert "`broken`: its kernel faulted" in text
    assert "sm_" in text
    assert "cudaErrorIllegalAddress" in text
    assert "compute-sanitizer" in text


def test_an_illegal_address_that_shows_later_names_the_suspects(start_python) -> None:
    program = (
        _HEAD
        + """
plus(x)
broken(x, True)
try:
    torch.cuda.synchronize()
except RuntimeError:
    pass
try:
    plus(x)
except DeviceFaultError as error:
    print(error)
"""
    )
    text = start_python(program).stdout
    assert "`plus`: it, or a kernel launched before it, faulted" in text
    assert "broken" in text
    assert "CUDA_LAUNCH_BLOCKING=1" in text


def test_no_code_for_this_gpu(start_python) -> None:
    # PTX and machine code of an architecture that is newer than any GPU here.
    program = (
        _HEAD
        + """
import os, torch
if torch.cuda.get_device_capability()[0] >= 12:
    sys.exit("skip")
os.environ["OPWRIGHT_ARCH"] = "120"
try:
    plus(x)
except ArchitectureError as error:
    print(error)
del os.environ["OPWRIGHT_ARCH"]
broken(x, False)  # another operator still works
torch.cuda.synchronize()
print("works")
"""
    )
    text = start_python(program, check=False).stdout
    if not text:
        pytest.skip("this GPU is as new as the newest architecture that nvcc knows")
    assert "`plus`: its library holds no code for this GPU" in text
    assert "sm_90" in text or "sm_" in text
    assert "OPWRIGHT_ARCH" in text
    assert text.endswith("works\n")


def test_ptx_alone_is_compiled_by_the_driver(start_python) -> None:
    program = (
        _HEAD
        + """
import os
os.environ["OPWRIGHT_ARCH"] = "75"
print(plus(x).tolist())
"""
    )
    assert start_python(program).stdout.strip() == "[2.0, 2.0, 2.0]"


def test_without_nvcc_the_reference_runs_with_one_warning(start_python, tmp_path) -> None:
    program = (
        _HEAD
        + """
import warnings
import opwright.backends.cuda as cuda
cuda._places = lambda home: iter(())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(plus(x).tolist(), broken(x, False).tolist())
print(*[w.message for w in caught])
"""
    )
    environment = {"OPWRIGHT_REQUIRE_KERNELS": "0", "OPWRIGHT_CACHE_DIR": str(tmp_path / "empty")}
    text = start_python(program, env=environment).stdout
    assert "[1001.0, 1001.0, 1001.0] [1.0, 1.0, 1.0]" in text
    assert text.count("nvcc") >= 1
    assert "pip install nvidia-cuda-nvcc" in text
    assert "not found" not in text or "was found" in text


@pytest.mark.parametrize(
    ("frames", "lengths", "labels", "rows", "message"),
    [
        (3, [4, 2], [1, 0], 10, "cudaErrorAssert|device-side assert"),
        (3, [], [], 4, "the number of rows is not that which the lengths make"),
        (0, [2], [1], 4, "the number of rows is not that which the lengths make"),
    ],
)
def test_a_packed_joint_checks_its_lengths(start_python, frames, lengths, labels, rows, message) -> None:
    """Rows without a frame stayed as they were in memory; without any utterance the process ended by SIGFPE."""
    program = f"""
import torch
from opwright_ops.transducer.op import transducer_join
torch.set_default_device("cuda")
f, g = torch.randn({len(lengths)}, {frames}, 8), torch.randn({len(lengths)}, 2, 8)
lengths = torch.tensor({lengths}, dtype=torch.int64), torch.tensor({labels}, dtype=torch.int64)
try:
    transducer_join(f, g, *lengths, rows={rows}, is_packed=True)
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error)
"""
    text = start_python(program, env={"OPWRIGHT_REQUIRE_KERNELS": "1"}).stdout
    assert re.search(message, text), text
