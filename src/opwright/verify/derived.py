"""Inputs that follow from a sample: other values, other layouts.

A candidate may be right on the samples alone: a polynomial on the numbers of torch.rand, a kernel that takes
every tensor for contiguous. Sizes stay here, and so do integers and what holds whole numbers only: indices, masks,
labels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opwright.spec.fill import LAYOUTS, lay_out
from opwright.spec.samples import Case
from opwright.verify.oracle import to_oracle
from opwright.verify.tensors import copy_of, tensors_of

_SCALES = (1.0, 1e-3, 10.0, 1e3)
_MIXED = ("transposed", "contiguous", "sliced", "offset")
_NEUTRAL = (-0.0, 1.0)  # to add, where 0.0 would take the sign of a negative zero, and to multiply
_MOST_ELEMENTS = 2**24  # of a sample that others are made from: each costs a dozen runs in float64


def derived_cases(
    given: Sequence[Case],
    arguments: Callable[[Case], int],
    reference: Callable[[Sequence[Any]], list[Any]],
    mutates: bool,
    announce: Callable[[Case], None],
) -> Iterator[Case]:
    """Yields inputs made from samples, those only that the reference accepts: finite ones give finite results.

    Args:
        given: the samples.
        arguments: returns how many of the first values of a case may be changed.
        reference: the computation.
        mutates: whether it writes into its arguments.
        announce: called with each case that the reference is asked about.
    """

    def accepts(case: Case, is_finite: bool = True, is_number: bool = False) -> bool:
        announce(case)
        try:
            with torch.no_grad():
                exact, plain = reference(to_oracle(list(case.values))), reference(copy_of(list(case.values)))
        except Exception:  # whatever a reference may raise to refuse
            return False
        if is_number and any(isinstance(e, torch.Tensor) and bool(e.isnan().any()) for e in exact):
            return False
        return all(map(_is_finite if is_finite else _is_alike, exact, plain))

    def depends(case: Case, other: Case) -> bool:
        """Whether the two give different results."""
        with torch.no_grad():
            pairs = zip(reference(to_oracle(list(case.values))), reference(to_oracle(list(other.values))), strict=True)
            return any(isinstance(a, torch.Tensor) and not torch.equal(a, b) for a, b in pairs)

    for case in given:
        tensors = [i for i, v in enumerate(case.values[: arguments(case)]) if _is_real(v)]
        if not tensors or sum(t.numel() for t in tensors_of(case.values)) > _MOST_ELEMENTS:
            continue
        # With no finite result to start from, numbers are no guide to which others would be in its domain.
        free = [i for i in tensors if accepts(case) and bool((case.values[i] != case.values[i].round()).any())]
        if free:
            yield from _other_values(case, free, accepts, depends)
        for layout in LAYOUTS:
            if not (mutates and layout == "expanded"):  # writing through stride 0 has no defined result
                changed = _with(case, layout, {i: _laid_out(case.values[i], layout) for i in tensors})
                if accepts(changed, is_finite=False):
                    yield changed
        if len(tensors) > 1:
            layouts = zip(tensors, itertools.cycle(_MIXED))  # no end of them
            changed = _with(case, "mixed layouts", {i: _laid_out(case.values[i], layout) for i, layout in layouts})
            if accepts(changed, is_finite=False):
                yield changed


def _is_finite(exact: Any, plain: Any) -> bool:
    return not isinstance(exact, torch.Tensor) or bool(torch.isfinite(exact).all())


def _is_alike(exact: Any, plain: Any) -> bool:
    """Whether the reference gives infinities and NaN at the same places in float64 and in the dtype itself."""
    if not isinstance(exact, torch.Tensor) or not exact.is_floating_point():
        return True
    return torch.equal(exact.isnan(), plain.isnan()) and torch.equal(exact.isinf(), plain.isinf())


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 0


def _other_values(
    case: Case, free: Sequence[int], accepts: Callable[..., bool], depends: Callable[[Case, Case], bool]
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
        for values in (drawn, {i: v.abs() for i, v in drawn.items()}):
            changed = _with(case, f"values around {scale:g}", values)
            if accepts(changed):
                yield changed
                break
    kinds = (("special values", _FINITE), ("values of all sizes", _SIZES), ("infinities and NaN", _NOT_FINITE))
    for label, special in kinds:
        changed = _with(case, label, {free[0]: _filled(case.values[free[0]], special)})
        if accepts(changed, is_finite=special is _FINITE, is_number=special is _SIZES):
            yield changed
        for at in free if len(free) > 1 and special is not _SIZES else ():  # what the others hold may hide them
            filled = {at: _filled(case.values[at], special)}
            for number in _NEUTRAL if special is _FINITE else _NEUTRAL[::-1]:  # 0 times infinity is NaN
                others = {i: torch.full_like(case.values[i], number) for i in free if i != at}
                changed = _with(case, f"{label} in argument {at}, others {number:g}", filled | others)
                if accepts(changed, is_finite=special is _FINITE) and depends(changed, _with(case, label, others)):
                    yield changed
                    break


def _filled(tensor: torch.Tensor, numbers: Sequence[float]) -> torch.Tensor:
    """Returns a copy in float64 that starts with these numbers, among finite ones with tiny ones of its dtype."""
    info = torch.finfo(tensor.dtype)
    more = (info.tiny, -info.tiny / 2, info.eps) if numbers is _FINITE else ()
    drawn = tensor.detach().double().reshape(-1).clone()
    special = torch.tensor([*numbers, *more], dtype=torch.float64)
    drawn[: len(special)] = special[: drawn.numel()]
    return drawn.view(tensor.shape)


_FINITE = (0.0, -0.0, 1.0, -1.0, *(s * m for m in (0.5, 2, 3, 4, 5, 6, 8, 10, 13, 20, 40) for s in (1, -1)))
_SIZES = tuple(s * 10.0**e for e in (2, 3, 4, 5, 6, 8, 12, 20, 30, -2, -4, -6, -12, -20, -30) for s in (1, -1))
_NOT_FINITE = (math.inf, -math.inf, math.nan)


def _with(case: Case, what: str, changes: dict[int, torch.Tensor]) -> Case:
    values = [
        changes[i].to(v) if i in changes and changes[i].dtype != v.dtype else changes.get(i, v)
        for i, v in enumerate(case.values)
    ]
    return Case(f"{case.label}, {what}", tuple(values), case.options)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "expanded":
        return tensor.detach()[:1].clone().expand(tensor.shape) if tensor.ndim else tensor.detach()
    made = lay_out(lambda shape: torch.zeros(shape, dtype=tensor.dtype, device=tensor.device), tensor.shape, layout)
    return made.copy_(tensor.detach())
