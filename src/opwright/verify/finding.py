"""What checks have in common: findings, and how arguments and results are copied and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from opwright.verify.subject import Subject


class Skipped(Exception):
    """Raised by a check that does not apply; the text is the reason."""


@dataclass
class Finding:
    """What a check found on one case; `message` is empty when it passes.

    `is_fatal`: further calls may crash the process, so no other check runs.
    """

    case: str
    message: str = ""
    pattern: str = ""
    worst_ulp: float | None = None
    worst_ratio: float | None = None
    is_fatal: bool = False


def tensors_of(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
        elif isinstance(value, dict):
            found += tensors_of(value.values())
    return found


def clone_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # Keeps strides and offset, so that the copy has the layout of the original.
        base = value.untyped_storage().clone()
        return value.new_empty(0).set_(base, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, (list, tuple)):
        return type(value)(clone_of(v) for v in value)
    return {k: clone_of(v) for k, v in value.items()} if isinstance(value, dict) else value


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    if not tensor.is_floating_point():
        return tensor
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def need_operator(subject: Subject) -> Any:
    if subject.operator is None:
        raise Skipped("a plain callable, not an operator")
    return subject.operator


def first_line(error: object, lines: int = 1) -> str:
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(text[:lines])[:400] or type(error).__name__
