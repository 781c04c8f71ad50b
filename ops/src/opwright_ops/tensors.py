"""What references and costs of several operators do with tensors."""

from __future__ import annotations

from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Returns 16-bit values in float32, others as they are."""
    return x.float() if x.element_size() == 2 else x


def bytes_of(*tensors: Tensor | None) -> int:
    """Returns the bytes that all elements take."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
