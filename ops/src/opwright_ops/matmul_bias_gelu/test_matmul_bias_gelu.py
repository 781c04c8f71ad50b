"""matmul_bias_gelu: the whole of verify, and the tail of the GELU."""

from __future__ import annotations

import math

import pytest
import torch

import opwright
from opwright_ops.matmul_bias_gelu import matmul_bias_gelu


@pytest.mark.slow
def test_verify() -> None:
    record = opwright.verify(matmul_bias_gelu)
    assert record.passed, record.failures


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_tail(approximate: str) -> None:
    """-inf gives 0, and what is small and negative is not lost to cancellation."""
    x = torch.tensor([[-math.inf], [-8.0], [0.0], [math.inf]])
    got = matmul_bias_gelu(x, torch.ones(1, 1), torch.zeros(1), approximate=approximate).flatten()
    assert got[0] == 0
    assert -1e-14 < got[1] < 0
    assert got[2] == 0
    assert got[3] == math.inf
