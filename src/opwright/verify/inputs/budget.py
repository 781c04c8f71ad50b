"""Whether a reference can be asked about a large input, as its calls with parts of it tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opwright.contract.sweep import Case
from opwright.verify.modes import OperatorWatch
from opwright.verify.oracle import few_threads, to_oracle

PART = 8
_HOPELESS = 4  # times the limit: no other call will be within it
_TWICE = 3  # times as large may be what a part twice as long makes; of all rows with each other it is four times


def parts_of(size: int) -> tuple[int, int, int]:
    """Returns the sizes of the parts to try: an eighth of an eighth, twice that, and an eighth."""
    return size // PART**2 + 1, 2 * (size // PART**2) + 1, size // PART + 1


def is_too_large(
    reference: Callable[[Sequence[Any]], Any], parts: Sequence[Case], most: int, is_slow: Callable[[Case], bool]
) -> bool:
    """Returns whether the whole is too much, as its parts tell, from the smallest on.

    The reference refuses a part, or it is slow. Or it loops over what grows, or makes a tensor that grows faster
    than its input, of all rows with each other, say, or one of more than `most` elements. The part twice as long as the
    smallest tells both before the largest is tried, which may take minutes and all of the memory.
    """
    watched: list[OperatorWatch] = []
    try:
        with torch.no_grad():
            for case, times in zip(parts, (1, _TWICE, PART), strict=True):
                watched.append(OperatorWatch())
                with watched[-1]:  # in float64, where PyTorch may take more steps
                    reference([to_oracle(v) for v in case.values])
                few, many = watched[0], watched[-1]
                is_growing = len(many.operators) > len(few.operators) or many.largest > times * few.largest
                if is_growing or is_slow(case):
                    return True
    except Exception:  # whatever either may raise to refuse
        return True
    return PART * many.largest > most


def takes_longer(call: Callable[[Any], Any], make: Callable[[], Any], seconds: float) -> bool:
    """Returns whether each of three calls takes longer, with arguments of its own; or the first one many times as long."""
    for _ in range(3):
        values = make()
        with few_threads(values):
            started = time.perf_counter()
            call(values)
            taken = time.perf_counter() - started
        if taken <= seconds or taken > _HOPELESS * seconds:
            return taken > seconds
    return True
