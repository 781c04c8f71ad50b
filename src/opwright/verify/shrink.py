"""Makes a failing case smaller, as long as it fails in the same way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from opwright._torch import tree_map
from opwright.contract.sweep import Case
from opwright.verify.checks.finding import Finding
from opwright.verify.oracle import try_reference
from opwright.verify.target import Target
from opwright.verify.tensors import count_elements, tensors_of

_SECONDS = 2.0
_MAX_NUMBERS = 8
_DIGITS = {1: 3, 2: 5, 4: 9, 8: 17}  # that tell each number of a type from the others, by its bytes

Check = Callable[[Target], Iterator[Finding]]


def shrink(check: Check, target: Target, case: Case, found: Finding) -> Finding | None:
    """Returns what a check finds on the smallest part of a case on which it still fails; None if there is none.

    An axis is halved, from either end, then shortened by one: in all tensors that have an axis of its size, since
    those belong together. Values, layout and dtype stay. Inputs that the reference or the contract refuses are not
    cases, and no axis becomes so short that an index along it, in a tensor without that axis, is outside.
    """
    deadline = time.perf_counter() + _SECONDS
    smallest = None
    is_smaller = True
    while is_smaller and time.perf_counter() < deadline:
        is_smaller = False
        for part in _parts(case):
            if time.perf_counter() > deadline:
                break
            again = _fails(check, target, part, found)
            if again is not None:
                case, smallest, is_smaller = part, again, True
                break
    if smallest is not None:
        smallest.numbers = tell_numbers(target, case)
    return smallest


def tell_numbers(target: Target, case: Case) -> str:
    """Returns the numbers in the tensors of a small case, as `x = [0.5], weight = [2.0]`; "" of a large one."""
    if not 0 < count_elements(case.values) <= _MAX_NUMBERS:
        return ""
    named = zip(target.argument_names(case), case.values, strict=False)
    told = [(name.strip("`"), v) for name, v in named if tensors_of([v])]
    return ", ".join(f"{name} = {_tell(v)}" for name, v in told)


def _tell(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_tell, value))}]"
    if isinstance(value, torch.Tensor) and value.ndim:
        return _tell(list(value))
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return f"{value.item():.{_DIGITS[value.element_size()]}g}"
    return str(value.item() if isinstance(value, torch.Tensor) else value)


def _parts(case: Case) -> Iterator[Case]:
    sizes = sorted({s for t in tensors_of(case.values) for s in t.shape if s > 1}, reverse=True)
    for is_half in (True, False):
        for size in sizes:
            kept = size // 2 if is_half else size - 1
            if any(size not in t.shape and _has_between(t, kept, size) for t in tensors_of(case.values)):
                continue
            for start in (0, size - kept):
                yield replace(case, values=tree_map(lambda v, a=(size, start, kept): _narrow(v, *a), case.values))


def _narrow(value: Any, size: int, start: int, kept: int) -> Any:
    for dim in range(value.ndim) if isinstance(value, torch.Tensor) else ():
        if value.shape[dim] == size:
            value = value.narrow(dim, start, kept)
    return value


def _has_between(tensor: torch.Tensor, low: int, high: int) -> bool:
    """Returns whether a tensor has an integer in `[low, high)`: an index along an axis that had `high` elements."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return is_integer and bool(((tensor >= low) & (tensor < high)).any())


def _fails(check: Check, target: Target, case: Case, found: Finding) -> Finding | None:
    if not _is_input(target, case):
        return None
    # That part and nothing that follows from it.
    alone = replace(target, current=None, memo=None, expand=False, pace=None)
    alone._cases = alone.boundaries = [case]
    try:
        again = next((f for f in check(alone) if f.message), None)
    except KeyboardInterrupt:
        raise
    except BaseException:  # another failure than the one that is made smaller
        return None
    # A part that the target refuses, where it took the whole, has failed in another way. So has a part with a NaN, such
    # as the variance of one number, where the whole had wrong numbers.
    same = again is not None and _kind(again) == _kind(found)
    return again if same else None


def _kind(finding: Finding) -> tuple[str, bool]:
    raised = finding.message.partition(":")[0] if finding.message.startswith("raised ") else ""
    return raised, finding.worst_ratio == math.inf


def _is_input(target: Target, case: Case) -> bool:
    if target.contract is not None:
        return target.contract.fits(case.values) and target.accepts(case)
    return try_reference(target.reference, case.values) is not None
