"""What several operators ask of tensors and do with them."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """Returns 16-bit values in float32, others as they are."""
    return x.float() if x.element_size() == 2 else x


def bytes_of(*tensors: Tensor | None) -> int:
    """Returns the bytes that all elements take."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def is_autocast_on(x: Tensor) -> bool:
    """Whether autocast is on for the device of a tensor: never for devices without it, such as "meta"."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
