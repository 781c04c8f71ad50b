"""`torch.utils.flop_counter` counts what `@name.cost` declares."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from opwright import operator


def declare(per_element: int):
    @operator("flop_counter::scaled")
    def scaled(x: Float[Tensor, "*batch n"], scale: float = 2.0) -> Float[Tensor, "*batch n"]:
        return x * scale

    @scaled.backward
    def scaled_backward(grad_output, scale=2.0):
        return grad_output * scale

    @scaled.cost
    def cost(x, scale=2.0):
        return 8 * x.numel(), per_element * x.numel() * (1 if scale == 2.0 else 10)

    @scaled_backward.cost
    def backward_cost(grad_output, scale=2.0):
        return 8 * grad_output.numel(), 7 * grad_output.numel()

    return scaled


def count(call) -> dict[str, int]:
    with FlopCounterMode(display=False) as mode:
        call()
    return {str(name).rpartition(".")[2]: flop for name, flop in mode.get_flop_counts()["Global"].items()}


def test_forward_and_backward() -> None:
    scaled = declare(1)
    x = torch.randn(3, 5, requires_grad=True)
    assert count(lambda: scaled(x)) == {"scaled": 15}
    assert count(lambda: scaled(x, scale=3.0)) == {"scaled": 150}
    assert count(lambda: torch.ops.flop_counter.scaled(x)) == {"scaled": 15}
    assert count(lambda: scaled(x).sum().backward()) == {"scaled": 15, "scaled_backward": 105}


def test_declared_again() -> None:
    declare(1)
    scaled = declare(3)
    assert count(lambda: scaled(torch.ones(4))) == {"scaled": 12}


def test_beside_operators_of_pytorch() -> None:
    scaled = declare(1)
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    assert count(lambda: scaled(a @ b)) == {"mm": 2 * 2 * 3 * 4, "scaled": 8}
