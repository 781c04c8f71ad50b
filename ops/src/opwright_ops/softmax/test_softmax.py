"""softmax where the generic suite does not look: rows without a maximum, long rows, and the whole of verify."""

from __future__ import annotations

import pytest
import torch

import opwright
from opwright_ops.softmax import softmax


@pytest.mark.compiler
def test_verify() -> None:
    record = opwright.verify(softmax)
    assert record.passed, record.failures
    assert record.backends == ["cpu"]


def test_special_rows() -> None:
    x = torch.zeros(4, 7)
    x[0] = -torch.inf
    x[1, 5] = torch.nan
    x[2, 5] = torch.inf
    x[3, 5] = 1e30
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        got = softmax(x.to(dtype))
        assert got[:3].isnan().all()
        assert got[3].tolist() == [0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_against_float64(dtype: torch.dtype) -> None:
    """As near to float64 as PyTorch's own but for the last rounding, at every width, rows apart and transposed."""
    for n in (1, 2, 7, 64, 257, 4096, 70_000):
        base = torch.randn(n + 1, 9, dtype=torch.float64).to(dtype)
        for x in (base[1:].T, base.T.contiguous()[:, 1:]):
            exact = torch.softmax(x.double(), -1)
            own = (torch.softmax(x, -1).double() - exact).abs().max()
            allowed = torch.finfo(dtype).eps * exact + 2 * own
            assert ((softmax(x).double() - exact).abs() <= allowed).all(), n
