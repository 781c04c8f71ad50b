"""How long cases may take: a large input, estimated from parts of it, and all cases of a check."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from opwright.contract.sweep import Case
from opwright.quantities import round_to
from opwright.verify.oracle import few_threads, to_oracle
from opwright.verify.rounding import OperatorWatch
from opwright.verify.tensors import count_elements

PART = 8
_HOPELESS = 4  # times the limit: a call that takes longer than this is not repeated
_MAX_PART_SECONDS = 0.5  # of a call that is watched, operator by operator
_MAX_GROWTH = 3  # where the input doubles, a tensor of all pairs of its rows grows by 4


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
            for case, times in zip(parts, (1, _MAX_GROWTH, PART), strict=True):
                watched.append(OperatorWatch())
                started = time.perf_counter()
                with watched[-1]:  # in float64, where PyTorch may take more steps
                    reference([to_oracle(v) for v in case.values])
                few, many = watched[0], watched[-1]
                is_growing = len(many.operators) > len(few.operators) or many.largest > times * few.largest
                if is_growing or time.perf_counter() - started > _MAX_PART_SECONDS or is_slow(case):
                    return True
    except Exception:  # whatever either may raise to refuse
        return True
    return PART * many.largest > most


def takes_longer(call: Callable[[Any], Any], make: Callable[[], Any], seconds: float) -> bool:
    """Returns whether three calls take longer, each with arguments of its own, or one many times as long."""
    for _ in range(3):
        values = make()
        with few_threads(values):
            started = time.perf_counter()
            call(values)
            taken = time.perf_counter() - started
        if taken <= seconds or taken > _HOPELESS * seconds:
            return taken > seconds
    return True


def is_quick(call: Callable[[Any], Any], make: Callable[[], Any], seconds: float) -> bool:
    """Returns whether a reference takes the arguments that `make` returns, and takes no longer than this."""
    try:
        return not takes_longer(call, make, seconds)
    except Exception:  # whatever a reference may raise to refuse
        return False


CHECK_SECONDS = 20.0  # for the cases of a check on a quiet machine, unless all are wanted


def seconds_for_check() -> float:
    """Returns the time limit for the cases of a check, longer where other work slows the machine."""
    return CHECK_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Pace:
    """Skips the cases of a check that do not fit into its time.

    A case may take what one has taken that is not larger. So small cases go on where large ones would take seconds.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds, self._spent = seconds_for_check() if seconds is None else seconds, 0.0
        self._costs: list[tuple[int, float]] = []  # elements, seconds
        self._skipped, self._has_more = 0, False

    def choose(self, cases: Iterable[Case]) -> Iterator[Case]:
        """Yields the cases that fit into the time, samples as they were given and the first of a sweep in any case."""
        for case in cases:
            size, is_over = count_elements(case.values), self._spent > self._seconds
            if is_over and not isinstance(cases, Sequence):  # making one takes time as well
                self._skipped, self._has_more = self._skipped + 1, True
                return
            cost = max((seconds for elements, seconds in self._costs if elements <= size), default=0.0)
            if self._spent + cost > self._seconds and not _is_needed(case):
                self._skipped += 1
                continue
            started = time.perf_counter()
            yield case
            self._costs.append((size, time.perf_counter() - started))
            self._spent += self._costs[-1][1]

    def tell(self) -> str:
        """Returns how many cases were tried, as `12 of 40 cases: one takes up to 1.2 s`; "" if all were."""
        if not self._skipped:
            return ""
        tried, longest = len(self._costs), max(seconds for _, seconds in self._costs)
        total = f"{'more than ' if self._has_more else ''}{tried + self._skipped}"
        return f"{tried} of {total} cases: one takes up to {round_to(longest, 2)} s"


def _is_needed(case: Case) -> bool:
    return "," not in case.label and (case.label == "base" or case.label.startswith("sample"))
