"""Inputs that follow from a sample: other values, other layouts.

A candidate may be right on the samples alone: a polynomial on the numbers of torch.rand, a kernel that takes
every tensor for contiguous. Sizes stay here, and so do integers and what holds whole numbers only, indices, masks,
labels, but for what is all zeros or all ones: a state at its start, weights that nothing has trained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from opwright.contract.fill import APART, LAYOUTS, put_in_layout
from opwright.contract.sweep import Case
from opwright.verify.callables import Callables
from opwright.verify.inputs.sweep import ZEROS
from opwright.verify.oracle import are_finite, to_oracle, try_reference
from opwright.verify.tensors import count_elements, tensors_of

_SCALES = (1.0, 1e-3, 10.0, 1e3)
_MIXED = ("transposed", "contiguous", "sliced", "offset")
_NEUTRAL = (-0.0, 1.0)  # to add, where 0.0 would take the sign of a negative zero, and to multiply
_MAX_ELEMENTS = 2**24  # of a sample that others are made from: each costs a dozen runs in float64


def derived_cases(
    given: Sequence[Case], callables: Callables, mutates: bool, announce: Callable[[Case], None]
) -> Iterator[Case]:
    """Yields inputs made from samples, those only that the reference accepts: finite ones give finite results.

    Args:
        given: the samples.
        callables: the candidate and its reference.
        mutates: whether the reference writes into its arguments.
        announce: called with each case that the reference is asked about.
    """
    reference = callables.call_reference

    def accepts(case: Case, is_finite: bool = True, is_number: bool = False, is_real: bool = False) -> bool:
        announce(case)
        exact = try_reference(reference, case.values, is_exact=True)
        plain = try_reference(reference, case.values)
        if exact is None or plain is None:
            return False
        if is_number and any(bool(e.isnan().any()) for e in tensors_of(exact)):
            return False
        if is_real and not all(e.is_floating_point() for e in tensors_of(exact)):
            return False  # indices of equal numbers may come in any order
        return are_finite(exact) if is_finite else all(map(_is_alike, exact, plain))

    def compare_exactly(values: Sequence[Any], others: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with torch.no_grad():
            pairs = zip(reference(to_oracle(list(values))), reference(list(others)), strict=True)
            return [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]

    def depends(case: Case, other: Case) -> bool:
        """Whether the two give different results."""
        return any(not torch.equal(a, b) for a, b in compare_exactly(case.values, to_oracle(list(other.values))))

    def is_limit(case: Case, at: int) -> bool:
        """Whether -inf in an argument gives what ever larger negative numbers tend to, as it does where it is a mask."""
        large = [v.clamp(min=-_LARGE) if i == at else v for i, v in enumerate(to_oracle(list(case.values)))]
        # Infinite results are those of rows that are masked as a whole, and reduced.
        axes, pairs = case.values[at].ndim, compare_exactly(case.values, large)
        return bool(pairs) and all(  # a function that only writes into its arguments returns nothing to compare
            torch.allclose(_bound(a), _bound(b), rtol=1e-6, atol=1e-6) and (a.ndim < axes or bool(a.isfinite().all()))
            for a, b in pairs
        )

    for case in given:
        if count_elements(case.values) > _MAX_ELEMENTS:
            continue
        arguments = case.values[: case.values[-1].arguments]
        varied = _vary(case.values[:-1] if callables.are_shared else arguments)
        tried = (varied, *({i: v} for i, v in varied.items())) if len(varied) > 1 else (varied,)
        yield from _first(accepts, (_with(case, "zeros and ones replaced", some) for some in tried if some))
        if drawn := _draw_integers(arguments):
            yield from _first(accepts, [_with(case, "other integers", drawn)])
        for i, value in enumerate(arguments):
            if isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.ndim and value.numel():
                for what, mask in _masks(value):
                    yield from _first(accepts, [_with(case, f"argument {i} {what}", {i: mask})])
        tensors = [i for i, v in enumerate(arguments) if _is_real(v)]
        if not tensors:
            continue
        # With no finite result to start from, the numbers do not show which others are in its domain.
        free = [i for i in tensors if accepts(case) and bool((case.values[i] != case.values[i].round()).any())]
        if free:
            yield from _other_values(case, free, accepts, depends, is_limit)
        is_deep = any(case.values[i].ndim > 2 for i in tensors)
        for layout in (*LAYOUTS, APART) if is_deep else LAYOUTS:
            if not (mutates and layout == "expanded"):  # writing through stride 0 has no defined result
                changed = _with(case, layout, {i: put_in_layout(case.values[i], layout) for i in tensors})
                yield from _first(accepts, [changed], is_finite=False)
        if len(tensors) > 1:
            layouts = zip(tensors, itertools.cycle(_MIXED))  # no end of them
            changed = _with(case, "mixed layouts", {i: put_in_layout(case.values[i], layout) for i, layout in layouts})
            yield from _first(accepts, [changed], is_finite=False)


def _first(accepts: Callable[..., bool], cases: Iterable[Case], **how: bool) -> Iterator[Case]:
    """Yields the first case that is accepted, if one is."""
    yield from itertools.islice((case for case in cases if accepts(case, **how)), 1)


def holds_infinities(case: Case) -> bool:
    """Whether infinities were put into a sample, of which another formula makes NaN: inf - inf * x is (1 - x) * inf."""
    return f", {_INFINITIES}" in case.label


def _bound(value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in float64 in which all that is very large is the same."""
    return value.double().clamp(-_LARGE / 1e10, _LARGE / 1e10)


def _is_alike(exact: Any, plain: Any) -> bool:
    """Whether the reference gives infinities and NaN at the same places in float64 and in the dtype itself."""
    if not isinstance(exact, torch.Tensor) or not exact.is_floating_point():
        return True
    return torch.equal(exact.isnan(), plain.isnan()) and torch.equal(exact.isinf(), plain.isinf())


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def _vary(values: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Returns other values for what is all zeros or all ones: somewhat larger ones, as a variance may be; masks with holes."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not value.numel() or not bool((value == value.reshape(-1)[0]).all()):
            continue
        drawn = torch.rand(value.shape, generator=generator, dtype=torch.float64).to(value.device)
        if value.dtype == torch.bool:
            found[i] = value ^ (drawn < 0.25)
        elif _is_real(value) and float(value.reshape(-1)[0]) in (0, 1):
            found[i] = (value.detach() + (drawn / 2 + 0.1).to(value.dtype)).clone()
    return found


def _masks(value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields masks of that shape: with other holes, and with one entry of each row, its last, unlike the others."""
    generator = torch.Generator().manual_seed(0)
    yield "with other holes", value ^ (torch.rand(value.shape, generator=generator) < 0.25).to(value.device)
    for others in (True, False):
        mask = torch.full_like(value, others)
        mask[..., -1] = not others
        yield f"{not others} at the end of rows alone", mask


def _draw_integers(values: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Returns other values for integers of both signs, which are not indices: as large, and in 8 bits any."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or value.dtype not in _SIGNED:
            continue
        if not value.numel() or not int(value.min()) < 0 < int(value.max()):
            continue
        most = max(-int(value.min()), int(value.max()))
        ends = (-128, 127) if value.dtype == torch.int8 else (-most, most)
        drawn = torch.randint(ends[0], ends[1] + 1, (value.numel(),), generator=generator)
        drawn[:2] = torch.tensor(ends)[: value.numel()]
        found[i] = drawn.to(value).view(value.shape)
    return found


def _other_values(
    case: Case,
    free: Sequence[int],
    accepts: Callable[..., bool],
    depends: Callable[[Case, Case], bool],
    is_limit: Callable[[Case, int], bool],
) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(0)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    def shuffled(tensor: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
        return tensor.detach().reshape(-1)[order].view(tensor.shape)

    yield _with(case, "shuffled", {i: shuffled(case.values[i]) for i in free})
    for scale in _SCALES:
        drawn = {i: noise(case.values[i]) * scale for i in free}
        # Where negative numbers are not accepted, positive ones may be.
        tried = (drawn, {i: v.abs() for i, v in drawn.items()})
        yield from _first(accepts, (_with(case, f"values around {scale:g}", values) for values in tried))
    # A variance as the mean of squares less the square of the mean loses its digits here.
    far = {i: noise(case.values[i]) + _FAR for i in free}
    yield from _first(accepts, [_with(case, f"values around {_FAR:g}", far)])
    # Candidates may divide by a norm, or by a running mean of squares, which is zero here.
    for at in free:
        row = {at: _with_in_first_row(case.values[at], slice(None), 0.0)}
        yield from _first(accepts, [_with(case, f"{ZEROS} a row of argument {at}", row)], is_real=True)
    if len(free) > 1:
        zeros = {at: torch.zeros_like(case.values[at]) for at in free}
        yield from _first(accepts, [_with(case, f"{ZEROS} all arguments", zeros)], is_real=True)
    for at in free:
        width = case.values[at].shape[-1] if case.values[at].ndim else 1
        # What masks leave. What is right for +inf may depend on the formula: inf - inf * x, say, is (1 - x) * inf.
        for what, where in (("-inf last", slice(width - 1, None)), ("all -inf", slice(None))):
            masked = _with_in_first_row(case.values[at], where, -math.inf)
            changed = _with(case, f"a row of argument {at} {what}", {at: masked})
            # A NaN of the reference may come from its formula: infinity less infinity; and so may a zero.
            if accepts(changed, is_finite=False, is_number=True, is_real=True) and is_limit(changed, at):
                yield changed
        # Alone in its row: beside an infinity, a NaN of the result may come from that.
        middle = width // 2
        single = _with_in_first_row(case.values[at], slice(middle, middle + 1), math.nan)
        changed = _with(case, f"a row of argument {at} with one NaN", {at: single})
        yield from _first(accepts, [changed], is_finite=False, is_real=True)
    kinds = (("special values", _FINITE), ("values of all sizes", _SIZES), (_INFINITIES, _NOT_FINITE))
    for label, special in kinds:
        for part, numbers in _parts(case.values[free[0]], special):
            offered = _offer(case.values[free[0]], numbers, special is _FINITE)
            made = (_with(case, f"{label}{part}", {free[0]: values}) for values in offered)
            yield from _first(accepts, made, is_finite=special is _FINITE, is_number=special is _SIZES)
        for at in free if len(free) > 1 and special is not _SIZES else ():  # what the others hold may hide them
            neutral = _NEUTRAL if special is _FINITE else _NEUTRAL[::-1]  # 0 times infinity is NaN
            _, numbers = next(_parts(case.values[at], special))
            for number, values in itertools.product(neutral, _offer(case.values[at], numbers, special is _FINITE)):
                filled = {at: values}
                others = {i: torch.full_like(case.values[i], number) for i in free if i != at}
                changed = _with(case, f"{label} in argument {at}, others {number:g}", filled | others)
                if accepts(changed, is_finite=special is _FINITE) and depends(changed, _with(case, label, others)):
                    yield changed
                    break


def _parts(tensor: torch.Tensor, numbers: Sequence[float]) -> Iterator[tuple[str, Sequence[float]]]:
    """Yields as many of these numbers at a time as a tensor has room for, among finite ones tiny ones of its dtype."""
    if numbers is _FINITE:
        info = torch.finfo(tensor.dtype)
        numbers = (*numbers, info.tiny, -info.tiny / 2, info.eps)
    for part in range(min(math.ceil(len(numbers) / tensor.numel()), _MAX_PARTS)):
        some = numbers[part * tensor.numel() : (part + 1) * tensor.numel()]
        yield f", part {part + 1}" if part else "", some


def _offer(tensor: torch.Tensor, numbers: Sequence[float], is_finite: bool) -> Iterator[torch.Tensor]:
    """Yields a tensor with these numbers; of finite ones, where that is not accepted, those without sign, and from 0 to 1."""
    filled = tensor.detach().double().reshape(-1).clone()
    filled[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    filled = filled.view(tensor.shape)
    yield from (filled, filled.abs(), filled.clamp(0, 1)) if is_finite else (filled,)


def _with_in_first_row(tensor: torch.Tensor, where: slice, number: float) -> torch.Tensor:
    """Returns a copy in float64 with a number at some places of its first row, along the last axis."""
    changed = tensor.detach().double().reshape(-1, tensor.shape[-1] if tensor.ndim else 1).clone()
    changed[0, where] = number
    return changed.view(tensor.shape)


_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_FAR = 100.0
_MAX_PARTS = 8
_LARGE = 1e30
_INFINITIES = "infinities and NaN"
_FINITE = (0.0, -0.0, 1.0, -1.0, *(s * m for m in (0.5, 2, 3, 4, 5, 6, 8, 10, 13, 20, 40) for s in (1, -1)))
_SIZES = tuple(s * 10.0**e for e in (2, 3, 4, 5, 6, 8, 12, 20, 30, -2, -4, -6, -12, -20, -30) for s in (1, -1))
_NOT_FINITE = (math.inf, -math.inf, math.nan)


def _with(case: Case, what: str, changes: dict[int, torch.Tensor]) -> Case:
    values = [
        changes[i].to(v) if i in changes and changes[i].dtype != v.dtype else changes.get(i, v)
        for i, v in enumerate(case.values)
    ]
    return Case(f"{case.label}, {what}", tuple(values), case.options)
