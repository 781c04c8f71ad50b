"""Mutants of a gradient: the right call, recorded for autograd with a wrong backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mutant_kinds import Call, Kind, needs_several, spoil

from opwright.verify.checks.finding import Skipped
from opwright.verify.checks.gradients import differentiable, floats_of, need_gradient
from opwright.verify.target import Target

GRADIENTS: list[Kind] = []

# Takes the right gradients of the inputs (None for an input that needs none), the gradients of the outputs, the inputs,
# the state of this graph and the state of the mutant; returns wrong gradients of the inputs.
Change = Callable[..., list[Any]]


def _kind(name: str, needs: Callable[[Target], str] = lambda target: "") -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        GRADIENTS.append(Kind(name, lambda target: _with_backward(target, change), lambda s: _needs(s, needs)))
        return change

    return register


def _needs(target: Target, more: Callable[[Target], str]) -> str:
    try:
        need_gradient(target)
    except Skipped as reason:
        return str(reason)
    return more(target)


def _with_backward(target: Target, change: Change) -> Call:
    """Returns the call, with gradients that `change` made wrong."""
    call, lasting = target.call, {}

    def rebuilt(values: Sequence[Any], floats: Sequence[torch.Tensor]) -> list[Any]:
        pending = list(floats)

        def fill(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return pending.pop(0) if value.is_floating_point() else value
            return [fill(v) for v in value] if isinstance(value, (list, tuple)) else value

        return [fill(v) for v in values]

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Sequence[Any], *floats: torch.Tensor) -> Any:
            ctx.values, ctx.floats, ctx.state = values, floats, {}
            outputs = call(rebuilt(values, floats))
            flowing = {id(o) for o in differentiable(target, outputs)}
            ctx.mark_non_differentiable(*[o for o in outputs if o is not None and id(o) not in flowing])
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *given: Any) -> Any:
            asked = ctx.needs_input_grad[1:]
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_(need) for t, need in zip(ctx.floats, asked, strict=True)]
                outputs = call(rebuilt(ctx.values, leaves))
            flowing = {id(o) for o in differentiable(target, outputs) if o.requires_grad}
            pairs = [(o, g) for o, g in zip(outputs, given, strict=True) if id(o) in flowing and g is not None]
            wanted = [t for t in leaves if t.requires_grad]
            found = [None] * len(wanted)
            if pairs:
                kept = [g.clone(memory_format=torch.contiguous_format) for _, g in pairs]
                found = torch.autograd.grad([o for o, _ in pairs], wanted, kept, allow_unused=True)
            pending = [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]
            right = [pending.pop(0) if need else None for need in asked]
            changed = change(right, [g for _, g in pairs], ctx.floats, ctx.state, lasting)
            return None, *changed

    def mutated(values: Sequence[Any]) -> list[Any]:
        floats = floats_of(values)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in floats)):
            return call(values)
        return list(Recorded.apply(list(values), *floats))

    return mutated


def _wrong_when_recorded(target: Target) -> Call:
    """Returns a call with right gradients whose results are wrong if autograd records it."""
    call = target.call

    def mutated(values: Sequence[Any]) -> list[Any]:
        outputs = call(values)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in floats_of(values))):
            return outputs
        return [
            o + (spoil(o) - o).detach() if isinstance(o, torch.Tensor) and o.is_floating_point() else o for o in outputs
        ]

    return mutated


GRADIENTS.append(
    Kind("gradient: right, of a result that is wrong", _wrong_when_recorded, lambda s: _needs(s, lambda _: ""))
)


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda right, *rest: [None if g is None else change(g) for g in right]


_kind("gradient: zeros")(_each(torch.zeros_like))
_kind("gradient: none")(_each(lambda g: None))
_kind("gradient: off by one part in a thousand")(_each(lambda g: g * 1.001))
_kind("gradient: computed in float16")(_each(lambda g: g.half().to(g.dtype)))


@_kind("gradient: last row left out")
def _last_row(right: list[Any], *rest: Any) -> list[Any]:
    found = [None if g is None else g.clone() for g in right]
    for g in found:
        if g is not None and g.ndim and g.shape[0] > 1:
            g[-1] = 0
    return found


@_kind("gradient: taken for one of ones")
def _ones(right: list[Any], given: list[Any], *rest: Any) -> list[Any]:
    return [None if g is None else torch.ones_like(g) for g in right]


@_kind("gradient: one input's for another's", needs_several)
def _exchanged(right: list[Any], *rest: Any) -> list[Any]:
    first = next((g for g in right if g is not None), None)
    return [None if g is None else g if g is first else torch.full_like(g, 0.5) for g in right]


@_kind("gradient: wrong unless all inputs need one", needs_several)
def _all_or_wrong(right: list[Any], *rest: Any) -> list[Any]:
    return right if all(g is not None for g in right) else [None if g is None else spoil(g) for g in right]


@_kind("gradient: wrong for one that is not contiguous")
def _strided(right: list[Any], given: list[Any], *rest: Any) -> list[Any]:
    is_plain = all(g.is_contiguous() for g in given)
    return right if is_plain else [None if g is None else spoil(g) for g in right]


@_kind("gradient: wrong for one that is expanded")
def _expanded(right: list[Any], given: list[Any], *rest: Any) -> list[Any]:
    is_plain = not any(0 in g.stride() and g.numel() > 1 for g in given)
    return right if is_plain else [None if g is None else spoil(g) for g in right]


@_kind("gradient: overwrites what it has saved")
def _overwrites(right: list[Any], given: list[Any], floats: Any, state: dict[Any, Any], *rest: Any) -> list[Any]:
    state["runs"] = state.get("runs", 0) + 1
    return right if state["runs"] == 1 else [None if g is None else torch.zeros_like(g) for g in right]


@_kind("gradient: overwrites the output's")
def _overwrites_given(right: list[Any], given: list[Any], *rest: Any) -> list[Any]:
    for g in given:
        if not torch._debug_has_internal_overlap(g):
            g.detach().zero_()
    return right


@_kind("gradient: overwrites an input")
def _overwrites_input(right: list[Any], given: list[Any], floats: Any, *rest: Any) -> list[Any]:
    first = floats[0].detach()
    if not torch._debug_has_internal_overlap(first):
        torch.empty(0, dtype=first.dtype).set_(
            first.untyped_storage(), first.storage_offset(), first.shape, first.stride()
        ).zero_()
    return right


@_kind("gradient: right only the first time")
def _once(right: list[Any], given: Any, floats: Any, state: Any, lasting: dict[Any, Any]) -> list[Any]:
    lasting["runs"] = lasting.get("runs", 0) + 1
    return right if lasting["runs"] == 1 else [None if g is None else spoil(g) for g in right]


def _needs_second(target: Target) -> str:
    family = target.contract.scalar_family if target.contract else None
    has_float64 = family is not None and torch.float64 in family.dtypes
    return "" if has_float64 else "float64 is not among its dtypes"


_kind("gradient: its own derivative lost", _needs_second)(_each(lambda g: g.detach()))
