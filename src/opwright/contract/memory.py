"""Which tensors share memory: what `native/src/overlap.c` decides for kernels, for calls of the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

_MAX_VISITS = 10_000


class _Term(NamedTuple):
    """One unknown of an equation: `step` times a whole number from `low` to `high`."""

    step: int
    low: int
    high: int


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has elements at an address; traced and meta tensors have none."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return False
    try:
        return tensor.numel() > 0 and tensor.data_ptr() != 0
    except RuntimeError:  # a wrapper of functorch
        return False


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Returns whether two indices of a tensor lead to one element; of a traced tensor, whether it is expanded."""
    pairs = list(zip(tensor.shape, tensor.stride(), strict=True))
    if any(isinstance(size, int) and isinstance(step, int) and size > 1 and not step for size, step in pairs):
        return tensor.numel() != 0
    if not has_memory(tensor) or tensor.is_contiguous():
        return False
    terms = sorted((_Term(step, 1 - size, size - 1) for size, step in pairs if size > 1), reverse=True)
    # Two indices differ by a vector that is not zero; its first entry that is not zero can be taken as positive.
    return any(_can_sum_to([term._replace(low=1), *terms[i + 1 :]], 0) for i, term in enumerate(terms))


def find_shared(tensors: Sequence[torch.Tensor], is_written: Sequence[bool]) -> tuple[int, int] | None:
    """Returns the indices of two tensors that share memory, at least one of them written; None if there are none."""
    spans = sorted((*_span(tensor), i) for i, tensor in enumerate(tensors) if has_memory(tensor))
    for at, (_, end, i) in enumerate(spans):
        for other_begin, _, k in itertools.islice(spans, at + 1, None):
            if other_begin >= end:
                break
            if (is_written[i] or is_written[k]) and _share_memory(tensors[i], tensors[k]):
                return (i, k) if is_written[i] else (k, i)
    return None


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors that have memory have a byte in common."""
    begin, end = _span(one)
    other_begin, other_end = _span(other)
    if end <= other_begin or other_end <= begin:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    ranges: dict[int, list[int]] = {1: [1 - other.element_size(), one.element_size() - 1]}
    for tensor, at, sign in ((one, 1, 1), (other, 0, -1)):
        for size, step in zip(tensor.shape, tensor.stride(), strict=True):
            ranges.setdefault(step * tensor.element_size(), [0, 0])[at] += sign * (size - 1)
    terms = [_Term(step, low, high) for step, (low, high) in ranges.items() if step and low < high]
    return _can_sum_to(sorted(terms, reverse=True), other_begin - begin)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def _can_sum_to(terms: list[_Term], target: int) -> bool:
    """Returns whether terms of falling steps can sum to a number; True where that takes too long to tell."""
    visits = 0

    def search(level: int, rest: int) -> bool:
        nonlocal visits
        if level == len(terms):
            return rest == 0
        visits += 1
        if visits > _MAX_VISITS:
            return True
        step, below = terms[level].step, terms[level + 1 :]
        if rest % math.gcd(step, *(term.step for term in below)):
            return False
        least = sum(term.step * term.low for term in below)
        most = sum(term.step * term.high for term in below)
        first = max(terms[level].low, -((most - rest) // step))
        last = min(terms[level].high, (rest - least) // step)
        return any(search(level + 1, rest - step * value) for value in range(first, last + 1))

    return search(0, target)
