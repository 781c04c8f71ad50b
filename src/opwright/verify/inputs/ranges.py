"""The integers that a reference takes, found by asking it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from opwright.contract.sweep import Case
from opwright.verify.target import Target
from opwright.verify.tensors import copy_of, tensors_of

# What grows with an integer ends the search before it takes long.
_MAX_SECONDS, _MAX_ELEMENTS = 0.005, 2**25
_TRIES = 4  # of a call that takes longer: another process may have had the processor


class Range(NamedTuple):
    """The integers that a reference takes, as far as they are known.

    Attributes:
        low: the smallest, or the smallest that was tried.
        high: the largest, or the largest that was tried.
        below: the largest integer below `low` that is refused; None where none is.
        above: the smallest above `high` that is refused; None where none is.
    """

    low: int
    high: int
    below: int | None
    above: int | None


def find_range(takes: Callable[[int], bool | None], start: int, least: int, most: int) -> Range | None:
    """Returns the range around an integer, from the verdicts on integers at ever larger distances from it.

    Args:
        takes: whether the reference takes an integer; None: it takes too long, or too much memory.
    """
    if not takes(start):
        return None
    high, above = _find_end(takes, start, most)
    low, below = _find_end(takes, start, least)
    return Range(low, high, below, above)


def _find_end(takes: Callable[[int], bool | None], start: int, end: int) -> tuple[int, int | None]:
    """Returns the last integer that is taken on the way to `end`, and the first that is refused."""
    sign = 1 if end >= start else -1
    taken, step = start, 1
    while taken != end:
        tried = start + sign * min(step, abs(end - start))
        verdict = takes(tried)
        if verdict is None:
            return taken, None
        if not verdict:
            break
        taken, step = tried, 2 * step
    else:
        return taken, None
    while abs(tried - taken) > 1:
        middle = (taken + tried) // 2
        if takes(middle):
            taken = middle
        else:
            tried = middle
    return taken, tried


def is_taken(target: Target, case: Case) -> bool | None:
    """Returns whether the reference takes a case; None where it takes too long, or makes too much."""
    for _ in range(_TRIES):
        values = copy_of(case.values)
        started = time.perf_counter()
        try:
            outputs = target.reference(values)
        except Exception:  # whatever a reference may raise to refuse
            outputs = None
        is_slow = time.perf_counter() - started > _MAX_SECONDS
        if sum(t.numel() for t in tensors_of(outputs or ())) > _MAX_ELEMENTS:
            return None
        if not is_slow:
            return outputs is not None
    return None
