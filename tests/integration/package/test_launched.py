"""Triton kernels in a wheel, launched from Python: here on the CPU, under Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from sample_wheels import build, write_project

from opwright.package.audit import audit_wheel

sys.path.insert(0, str(Path(__file__).parents[1] / "triton"))

import stub  # noqa: E402

pytestmark = pytest.mark.compiler

OP = '''
from typing import Literal

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from opwright import Mutates, operator


@operator("sample_ops::shifted")
def shifted(
    x: Float[Tensor, "*batch n"],
    shift: Float[Tensor, "n"] | None = None,
    *,
    scale: float = 1.0,
    mode: Literal["plain", "negative"] = "plain",
) -> Float[Tensor, "*batch n"]:
    y = x * scale
    y = y if shift is None else y + shift
    return y if mode == "plain" else -y


@shifted.backward
def shifted_backward(grad_output, x, shift=None, *, scale=1.0, mode="plain"):
    grad = grad_output if mode == "plain" else -grad_output
    return grad * scale, grad.reshape(-1, x.shape[-1]).sum(0) if shift is not None else None


IN_A_STRING = """
import triton
import triton.language as tl

@triton.jit
def kernel(x, output, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(output + at, tl.load(x + at) + 1)

def plus(x, output):
    kernel[(1,)](x, output, BLOCK=4)
"""


@operator("sample_ops::plus", triton=IN_A_STRING)
def plus(x: Float[Tensor, "4"]) -> Float[Tensor, "4"]:
    return x + 1


@operator("sample_ops::add_")
def add_(x: Mutates[Float[Tensor, "n"]], index: Mutates[Int[Tensor, "n"]],
         count: Mutates[Float32[Tensor, "n"]] | None = None) -> Int[Tensor, "n"]:
    x.add_(index)
    if count is not None:
        count.add_(1)
    index.add_(1)
    return 2 * index


@operator("sample_ops::double_")
def double_(x: Mutates[Float[Tensor, "*batch n"]]) -> None:
    x.mul_(2)
'''
TRITON = """
import triton
import triton.language as tl

from .negation import negative

DTYPES = ("float32", "float64")
calls = []
dtypes = []


@triton.jit
def kernel(x, shift, output, n, row_stride, column_stride, scale, HAS_SHIFT: tl.constexpr, MODE: tl.constexpr,
           BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    y = tl.load(x + row * row_stride + column * column_stride, mask=column < n) * scale
    if HAS_SHIFT:
        y += tl.load(shift + column, mask=column < n)
    if MODE == "negative":
        y = negative(y)
    tl.store(output + row * n + column, y, mask=column < n)


def shifted(x, shift, scale, mode, output):
    rows, n = x.shape
    assert n != 7, "rows of seven"
    calls.append(x.shape)
    kernel[(rows,)](x, shift, output, n, x.stride(0), x.stride(1), scale, HAS_SHIFT=shift is not None, MODE=mode,
                    BLOCK=triton.next_power_of_2(n))


@triton.jit
def add_kernel(x, index, count, output, n, HAS_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at, mask=at < n) + tl.load(index + at, mask=at < n), mask=at < n)
    if HAS_COUNT:
        tl.store(count + at, tl.load(count + at, mask=at < n) + 1, mask=at < n)
    tl.store(index + at, tl.load(index + at, mask=at < n) + 1, mask=at < n)
    tl.store(output + at, tl.load(index + at, mask=at < n) * 2, mask=at < n)


def add_(x, index, count, output):
    dtypes.append((str(index.dtype), str(output.dtype)))
    add_kernel[(1,)](x, index, count, output, x.shape[0], HAS_COUNT=count is not None, BLOCK=8)


def double_(x):
    rows, n = x.shape
    calls.append(x.shape)
    kernel[(rows,)](x, None, x, n, x.stride(0), x.stride(1), 2.0, HAS_SHIFT=False, MODE="plain",
                    BLOCK=triton.next_power_of_2(n))
"""

NEGATION = """
import triton
import triton.language as tl


@triton.jit
def negative(y):
    return tl.zeros_like(y) - y
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launched")
    package = write_project(folder / "project") / "src/sample_ops"
    (package / "shifted").mkdir()
    (package / "shifted" / "op.py").write_text(OP)
    (package / "shifted" / "triton.py").write_text(TRITON)
    (package / "shifted" / "negation.py").write_text(NEGATION)
    (package / "__init__.py").write_text(
        "from sample_ops.shifted.op import add_ as add_, double_ as double_, plus as plus, shifted as shifted\n"
    )
    done = build(folder / "project", folder / "dist")
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = (folder / "dist").glob("*.whl")
    return found


def test_a_wheel_has_them(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        made = json.loads(archive.read("sample_ops/_opwright/provenance.json"))
        assert {"sample_ops/shifted/triton.py", "sample_ops/_opwright/launched/plus.py"} <= {*archive.namelist()}
    assert made["operators"]["sample_ops::shifted"]["launched"] == {"cuda": "sample_ops.shifted.triton"}
    assert made["operators"]["sample_ops::shifted_backward"]["launched"] == {}
    audit = audit_wheel(wheel)
    assert audit.passed, audit.problems
    assert (
        "sample_ops::add_, sample_ops::double_, sample_ops::plus, sample_ops::shifted need Triton on a GPU"
        in " ".join(audit.remarks)
    )


def run(wheel: Path, folder: Path, program: str, python: Path, **settings: str) -> subprocess.CompletedProcess:
    """Runs a program with the wheel, whose kernels for GPUs are given out as kernels for the CPU."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    provenance = folder / "sample_ops/_opwright/provenance.json"
    provenance.write_text(provenance.read_text().replace('"cuda": "sample', '"cpu": "sample'))
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{Path(torch.__file__).parents[1]}", **settings}
    return subprocess.run([str(python), "-c", program], env=env, capture_output=True, text=True, timeout=300)


def test_they_compute(wheel: Path, tmp_path: Path) -> None:
    tritons = stub.find_tritons()
    if not tritons:
        pytest.skip("no Triton at .venv/triton-*/bin/python")
    program = """
import sys, torch, sample_ops
from sample_ops import double_, plus, shifted
assert torch.equal(plus(torch.ones(4)), torch.full((4,), 2.0)) and "_opwright.launched.plus" in " ".join(sys.modules)
x, shift = torch.randn(2, 3, 5), torch.randn(5)
for given in (x, x.double(), x.transpose(0, 1), torch.randn(4, 10)[:, ::2], x[0, 0], x[:0], x.half()):
    for other in (None, shift.to(given.dtype)):
        for mode in ("plain", "negative"):
            wanted = shifted.operator.declaration.reference(given, other, scale=1.5, mode=mode)
            torch.testing.assert_close(shifted(given, other, scale=1.5, mode=mode), wanted)
            torch.testing.assert_close(torch.ops.sample_ops.shifted(given, other, scale=1.5, mode=mode), wanted)
x, shift = x.requires_grad_(), shift.requires_grad_()
shifted(x, shift, scale=3, mode="negative").sum().backward()
assert x.grad.eq(-3).all() and shift.grad.eq(-6).all()
for y in (torch.ones(2, 3, 5), torch.ones(3, 2, 5).transpose(0, 1)):  # the latter has no view with one batch axis
    double_(y)
    assert y.eq(2).all()
try:
    shifted(torch.ones(2, 7))
except RuntimeError as error:
    print(error)
from sample_ops.shifted.triton import calls
print(len(calls), {len(shape) for shape in calls})
"""
    done = run(wheel, tmp_path, program, tritons[max(tritons)], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "`shifted`: its launch function refuses: rows of seven" in done.stdout
    assert (
        done.stdout.splitlines()[-1] == "43 {2}"
    )  # 5 layouts of 2 dtypes, twice 4 calls each; a gradient; two written


def test_other_dtypes_and_absent_tensors(wheel: Path, tmp_path: Path) -> None:
    """Kernels saw integers of a second family as they are, not as int64; the call without `count` ended in an error."""
    tritons = stub.find_tritons()
    if not tritons:
        pytest.skip("no Triton at .venv/triton-*/bin/python")
    program = """
import torch
from sample_ops import add_
for dtype in (torch.int64, torch.int32, torch.int8):
    for count in (None, torch.zeros(5)):
        x, index = torch.zeros(5), torch.arange(5, dtype=dtype)
        output = add_(x, index, count)
        assert x.tolist() == [0, 1, 2, 3, 4] and index.tolist() == [1, 2, 3, 4, 5] and index.dtype == dtype
        assert output.tolist() == [2, 4, 6, 8, 10] and output.dtype == dtype
        assert count is None or count.eq(1).all()
from sample_ops.shifted.triton import dtypes
print(dtypes == 6 * [("torch.int64", "torch.int64")])
"""
    done = run(wheel, tmp_path, program, tritons[max(tritons)], TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["True"]


def test_without_triton_the_references_run(wheel: Path, tmp_path: Path) -> None:
    program = """
import sys
sys.modules["triton"] = None  # torch for GPUs brings it
import torch, sample_ops
for _ in range(2):
    assert torch.equal(sample_ops.shifted(torch.ones(2, 3), scale=2.0), torch.full((2, 3), 2.0))
"""
    done = run(wheel, tmp_path, program, Path(sys.executable))
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        done.stderr.count("RuntimeWarning: sample_ops: the kernels of `sample_ops.shifted.triton` cannot be imported")
        == 1
    )
    assert "pip install triton" in done.stderr
