"""Whether a reference can be asked about a large input, as its calls with two parts of it tell."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opwright.contract.sweep import Case
from opwright.verify.modes import OperatorWatch
from opwright.verify.oracle import few_threads, to_oracle

PART = 8


def parts_of(size: int) -> tuple[int, int]:
    """Returns the sizes of the smaller and the larger part to try: an eighth of an eighth, and an eighth."""
    return size // PART**2 + 1, size // PART + 1


def is_too_large(
    reference: Callable[[Sequence[Any]], Any], parts: Sequence[Case], most: int, is_slow: Callable[[Case], bool]
) -> bool:
    """Returns whether the whole is too much, as the smaller and the larger of two parts of it tell.

    The reference refuses a part, or it is slow. Or it loops over what grows, or makes a tensor that grows faster
    than its input, of all rows with each other, say, or one of more than `most` elements.
    """
    watched = [OperatorWatch() for _ in parts]
    try:
        with torch.no_grad():
            for case, watch in zip(parts, watched, strict=True):
                with watch:  # in float64, where PyTorch may take more steps
                    reference([to_oracle(v) for v in case.values])
                if is_slow(case):
                    return True
    except Exception:  # whatever either may raise to refuse
        return True
    few, many = watched
    return len(many.operators) > len(few.operators) or many.largest > PART * few.largest or PART * many.largest > most


def takes_longer(call: Callable[[Any], Any], make: Callable[[], Any], seconds: float) -> bool:
    """Returns whether each of three calls takes longer, with arguments of its own."""
    for _ in range(3):
        values = make()
        with few_threads(values):
            started = time.perf_counter()
            call(values)
            taken = time.perf_counter() - started
        if taken <= seconds:
            return False
    return True
