"""softmax where the generic suite does not look: rows without a maximum, and the whole of verify."""

from __future__ import annotations

import pytest
import torch

import opwright
from opwright_ops.softmax import softmax


@pytest.mark.slow
def test_verify() -> None:
    record = opwright.verify(softmax)
    assert record.passed, record.failures


def test_special_rows() -> None:
    x = torch.zeros(4, 7)
    x[0] = -torch.inf
    x[1, 5] = torch.nan
    x[2, 5] = torch.inf
    x[3, 5] = 1e30
    got = softmax(x)
    assert got[:3].isnan().all()
    assert got[3].tolist() == [0, 0, 0, 0, 0, 1, 0]
