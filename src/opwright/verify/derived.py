"""Inputs that follow from a sample: other values, other layouts.

A candidate may be right on the samples alone: a polynomial on the numbers of torch.rand, a kernel that takes
every tensor for contiguous. The sizes of a sample may have to agree in ways that nobody has said, so they stay,
and so do integers and what holds whole numbers only: indices, masks, labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opwright.spec.fill import LAYOUTS, lay_out
from opwright.spec.samples import Case
from opwright.verify.oracle import to_oracle
from opwright.verify.tensors import copy_of, tensors_of

_SCALES = (1.0, 1e-3, 10.0, 1e3)
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

    def accepts(case: Case, is_finite: bool = True) -> bool:
        announce(case)
        try:
            with torch.no_grad():
                exact, plain = reference(to_oracle(list(case.values))), reference(copy_of(list(case.values)))
        except Exception:  # whatever a reference may raise to refuse
            return False
        return all(map(_is_finite if is_finite else _is_alike, exact, plain))

    for case in given:
        tensors = [i for i, v in enumerate(case.values[: arguments(case)]) if _is_real(v)]
        if not tensors or sum(t.numel() for t in tensors_of(case.values)) > _MOST_ELEMENTS:
            continue
        # With no finite result to start from, numbers are no guide to which others would be in its domain.
        free = [i for i in tensors if accepts(case) and bool((case.values[i] != case.values[i].round()).any())]
        if free:
            yield from _other_values(case, free, accepts)
        for layout in LAYOUTS:
            if not (mutates and layout == "expanded"):  # writing through stride 0 has no defined result
                changed = _with(case, layout, {i: _laid_out(case.values[i], layout) for i in tensors})
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


def _other_values(case: Case, free: Sequence[int], accepts: Callable[..., bool]) -> Iterator[Case]:
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
    for label, special in (("special values", _FINITE), ("infinities and NaN", _NOT_FINITE)):
        first = case.values[free[0]].detach()
        drawn = first.double().reshape(-1).clone()
        info = torch.finfo(first.dtype)
        numbers = torch.tensor([*special, *((info.tiny, -info.tiny / 2, info.eps) if special is _FINITE else ())])
        drawn[: len(numbers)] = numbers[: drawn.numel()]
        changed = _with(case, label, {free[0]: drawn.view(first.shape)})
        if accepts(changed, is_finite=special is _FINITE):
            yield changed


_FINITE = (0.0, -0.0, 1.0, -1.0, *(s * m for m in (0.5, 2, 3, 4, 5, 6, 8, 10, 13, 20, 40) for s in (1, -1)))
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
