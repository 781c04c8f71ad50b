"""Tensors of drawn layouts in larger ones, whose other elements show what was written around them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

_MAX_SPAN = 1 << 18  # elements of the larger tensor
MAX_STRIDE = 2**61  # PyTorch itself takes no view of a tensor with twice the largest


class Placed:
    """A tensor that is a view of a flat one.

    Attributes:
        base, view: the larger tensor, and the one that is given to a call.
        index: where the elements of the view are in `base`.
        overlaps: whether two of them are the same.
    """

    def __init__(self, base: Tensor, view: Tensor) -> None:
        self.base, self.view = base, view
        self.before = torch.empty(0)
        pairs = [(n, s) for n, s in zip(view.shape, view.stride(), strict=True) if n > 1 and s]
        if not view.numel():  # its strides may be out of any range
            pairs = [(0, 1)]
        sizes, steps = [n for n, _ in pairs], [s for _, s in pairs]
        self.index = torch.arange(base.numel()).as_strided(sizes, steps, view.storage_offset()).flatten()
        self.overlaps = not view.is_contiguous() and int(self._mask().sum()) < view.numel()
        self.references = view._use_count()

    def remember(self) -> None:
        """Keeps what is in memory, to be compared with later."""
        self.before = self.base.clone()

    def is_kept(self, *others: Placed) -> bool:
        """Whether nothing was written since, except into `others`."""
        if torch.equal(_bytes(self.base), _bytes(self.before)):
            return True
        changed = (_bytes(self.base) != _bytes(self.before)).view(self.base.numel(), -1).any(1)
        for other in others:
            if other.base is self.base:
                changed[other.index] = False
        return not changed.any()

    def shares(self, other: Placed) -> bool:
        """Whether the two have an element in common."""
        if self.base is not other.base:
            return False
        return bool(self._mask()[other.index].any())

    def _mask(self) -> Tensor:
        mask = torch.zeros(self.base.numel(), dtype=torch.bool)
        mask[self.index] = True
        return mask


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def draw_strides(chance: random.Random, shape: Sequence[int], *, harmless: bool = False) -> list[int]:
    """Draws strides for a shape.

    Args:
        harmless: no two elements are one.
    """
    kinds = ["dense", "dense", "permuted", "padded", "padded permuted", *([] if harmless else ["expanded", "small"])]
    kind = chance.choice(kinds)
    order = list(range(len(shape)))[::-1]
    if "permuted" in kind:
        chance.shuffle(order)
    strides, step = [1] * len(shape), 1
    for d in order:
        if "padded" in kind:
            step = step * chance.choice([1, 1, 2, 3]) + chance.choice([0, 0, 1, 5])
        strides[d] = min(step, MAX_STRIDE)
        step *= max(shape[d], 1)
    if kind == "expanded":
        strides = [0 if chance.random() < 0.5 else s for s in strides]
    elif kind == "small":
        strides = [chance.randint(0, 7) for _ in shape]
    is_empty = 0 in shape
    for d, size in enumerate(shape):  # strides that lead nowhere can be anything
        if (is_empty or size == 1) and chance.random() < 0.3:
            strides[d] = chance.choice([0, 1, 3, 2**31, 2**40, MAX_STRIDE])
    reach = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if not is_empty else 0
    if reach > _MAX_SPAN and math.prod(shape) < reach + 1:
        return draw_strides(chance, shape, harmless=True)
    return strides


def place(chance: random.Random, values: Tensor, *, exactly: bool = False) -> Placed:
    """Returns a tensor of the shape and dtype of `values` in a layout that is drawn, with their elements.

    Where elements of the layout coincide, one of the values is in it.

    Args:
        exactly: no elements coincide.
    """
    shape = values.shape
    strides = draw_strides(chance, shape, harmless=exactly)
    is_empty = 0 in shape
    reach = 0 if is_empty else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    offset = chance.choice([0, 0, 1, 3, 16])
    base = _filler(offset + reach + chance.choice([0, 0, 1, 5]), values.dtype)
    placed = Placed(base, base.as_strided(shape, strides, offset))
    if not is_empty:  # as bytes: PyTorch cannot index every dtype
        given = values.contiguous().flatten()[: placed.index.numel()]
        _bytes(base).view(base.numel(), -1)[placed.index] = _bytes(given).view(given.numel(), -1)
    return placed


def place_on(chance: random.Random, other: Placed, shape: Sequence[int]) -> Placed | None:
    """Returns a tensor in the memory of another one, or None if the drawn layout does not fit."""
    strides = chance.choice([other.view.stride(), draw_strides(chance, shape)])
    if len(strides) != len(shape) or 0 in shape:
        return None
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    room = other.base.numel() - reach
    if room < 0:
        return None
    offset = min(room, chance.choice([other.view.storage_offset(), 0, room, chance.randint(0, room)]))
    return Placed(other.base, other.base.as_strided(shape, strides, offset))


def _filler(count: int, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((count,), float("nan"), dtype=dtype)
    return torch.full((count,), 1 if dtype == torch.bool else torch.iinfo(dtype).max, dtype=dtype)
