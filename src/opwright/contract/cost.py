"""What a call must cost at least: the bytes it has to move, the operations it has to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from opwright.contract.contract import Contract


class Cost(NamedTuple):
    """The least work of one call.

    Attributes:
        bytes_moved: bytes read and written, each once.
        flop: floating-point operations; None where nobody said.
    """

    bytes_moved: int
    flop: int | None = None


def default_cost(contract: Contract, values: Sequence[Any], outputs: Sequence[torch.Tensor]) -> Cost:
    """Returns the cost that follows from the contract: every input read once, every output written once.

    Mutated arguments count twice; an expanded tensor counts the memory behind it.
    """
    total = sum(_bytes(tensor) for tensor in outputs)
    for parameter, value in zip(contract.parameters, values, strict=True):
        tensors = value if isinstance(value, (list, tuple)) else [value]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                total += _bytes(tensor) * (2 if parameter.mutated else 1)
    return Cost(total)


def _bytes(tensor: torch.Tensor) -> int:
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride != 0 or size == 0 else 1
    return count * tensor.element_size()
