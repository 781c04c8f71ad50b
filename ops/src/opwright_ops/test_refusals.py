"""What is not a tensor is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import opwright_ops as ops

X, LENGTHS = torch.randn(2, 3, 4, 8), torch.tensor([3, 2])
CALLS: dict[str, Callable[[Any], Any]] = {
    "q": lambda wrong: ops.rope(wrong, X, X[0, 0, :, :4], X[0, 0, :, :4]),
    "sin": lambda wrong: ops.rope_(X, X, X[0, 0, :, :4], wrong),
    "logits": lambda wrong: ops.transducer_loss(wrong, LENGTHS[:, None], LENGTHS, LENGTHS),
    "targets": lambda wrong: ops.transducer_loss(X, wrong, LENGTHS, LENGTHS),
    "logit_lengths": lambda wrong: ops.transducer_loss_fused(
        X[0], X[0], X[0, 0], None, LENGTHS[:, None], wrong, LENGTHS
    ),
    "weight": lambda wrong: ops.transducer_loss_fused(X[0], X[0], wrong, None, LENGTHS[:, None], LENGTHS, LENGTHS),
    "g": lambda wrong: ops.transducer_joint(X[0], wrong),
    "input": lambda wrong: ops.RMSNorm(8)(wrong),
}


@pytest.mark.parametrize("wrong", [None, [1.0, 2.0]], ids=["None", "list"])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_a_tensor_is_named(name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=rf"[`']{name}[`'].* must be a? ?[tT]ensor"):
        CALLS[name](wrong)
