"""Tensors on the meta device, which has no autocast: shapes and types as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import opwright_ops


def halves(*shape: int, device: str) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device=device)


def fuse(device: str) -> Tensor:
    parts = (halves(*shape, device=device) for shape in ((2, 4, 3), (2, 3, 3), (7, 3)))
    labels, lengths = torch.ones(2, 2, dtype=torch.int64), torch.tensor([2, 2])
    return opwright_ops.transducer_loss_fused(*parts, None, labels, lengths, lengths)


CALLS: dict[str, Callable[[str], Any]] = {
    "cross_entropy": lambda d: opwright_ops.cross_entropy(
        halves(4, 6, device=d), torch.zeros(4, dtype=torch.int64, device=d)
    ),
    "softmax along rows": lambda d: opwright_ops.softmax(halves(4, 6, device=d), 0),
    "rms_norm": lambda d: opwright_ops.rms_norm(halves(4, 6, device=d), torch.ones(6, device=d)),
    "RMSNorm": lambda d: opwright_ops.RMSNorm(6, device=d)(halves(4, 6, device=d)),
    "LSTM": lambda d: opwright_ops.LSTM(6, 5, device=d, dtype=torch.bfloat16)(halves(3, 2, 6, device=d))[0],
    "transducer_loss_fused": fuse,
}


@pytest.mark.parametrize("name", CALLS)
def test_the_meta_device_in_16_bits(name: str) -> None:
    found, wanted = CALLS[name]("meta"), CALLS[name]("cpu")
    assert found.is_meta
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
