"""d_sigmoid against mpmath, where the generic suite has only PyTorch to compare with."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

import opwright
from opwright_ops.d_sigmoid import d_sigmoid

mpmath.mp.dps = 60
POINTS = [0.0, 1e-8, 0.5, 1.0, 5.0, 16.7, 20.0, 36.0, 37.5, 50.0, 80.0, 87.0, 88.5, 100.0, 300.0, 700.0]


def exact(z: float) -> mpmath.mpf:
    e = mpmath.exp(-abs(mpmath.mpf(z)))
    return e / (1 + e) ** 2


def exact_slope(z: float) -> mpmath.mpf:
    return -exact(z) * mpmath.tanh(mpmath.mpf(z) / 2)


def ulp(value: mpmath.mpf, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    size = abs(value)
    if size < info.smallest_normal:
        return info.smallest_normal * info.eps
    return info.eps * 2.0 ** int(mpmath.floor(mpmath.log(size, 2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_tails(dtype: torch.dtype) -> None:
    """(1 - s) * s is 0 in float32 from z = 17 on; the kernel is right to the last normal number."""
    z = torch.tensor([s * p for p in POINTS for s in (1, -1)], dtype=torch.float64).to(dtype)
    got = d_sigmoid(z)
    for zi, yi in zip(z.tolist(), got.tolist(), strict=True):
        wanted = exact(zi)
        assert abs(yi - wanted) <= 5 * ulp(wanted, dtype), (zi, yi, wanted)
    assert torch.equal(got[::2], got[1::2])  # an even function, to the bit


def test_special_values() -> None:
    z = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])
    got = d_sigmoid(z)
    assert got[:2].tolist() == [0.0, 0.0]
    assert math.isnan(got[2])
    assert got[3:].tolist() == [0.25, 0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradient_in_the_tails(dtype: torch.dtype) -> None:
    z = torch.tensor([s * p for p in POINTS for s in (1, -1)], dtype=dtype, requires_grad=True)
    d_sigmoid(z).sum().backward()
    for zi, gi in zip(z.tolist(), z.grad.tolist(), strict=True):
        wanted = exact_slope(zi)
        assert abs(gi - wanted) <= 6 * ulp(wanted, dtype), (zi, gi, wanted)


def test_second_gradient() -> None:
    z = torch.linspace(-6, 6, 25, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(d_sigmoid(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z)
    wanted = [float(mpmath.diff(exact_slope, zi)) if zi else -0.125 for zi in z.tolist()]
    assert torch.allclose(second, torch.tensor(wanted, dtype=torch.float64), atol=1e-12)


@pytest.mark.compiler
def test_verify() -> None:
    record = opwright.verify(d_sigmoid)
    assert record.passed, record.failures
    assert record.backends == ["cpu"]
