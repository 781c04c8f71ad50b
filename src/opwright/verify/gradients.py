"""Checks of gradients: against finite differences in float64, against the oracle in every dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opwright.spec.samples import Case
from opwright.verify.devices import DeviceLost, is_lost, wait_for
from opwright.verify.difference import compare, pattern_of
from opwright.verify.finding import Finding, Skipped, first_line, need_operator
from opwright.verify.oracle import expect
from opwright.verify.subject import Subject
from opwright.verify.tensors import tensors_of

# Labels of the cases of a sweep whose gradients are checked in every dtype.
_WITH_GRADIENTS = ("base", "one element", "empty batch", "transposed", "sliced", "expanded", "large")


# Of the inputs, up to which finite differences are taken one by one; second ones take that many squared.
_MOST_ELEMENTS = 200


def need_gradient(subject: Subject) -> None:
    contract = need_operator(subject).contract
    if contract.mutated:
        raise Skipped("it mutates its arguments")
    if subject.operator.declaration.random:
        raise Skipped("it draws random numbers")
    if not any(p.is_differentiable for p in contract.parameters) or not any(
        o.type.family.is_floating and not o.is_constant for o in contract.outputs
    ):
        raise Skipped("nothing floating-point to differentiate")
    family = contract.scalar_family
    if family is None or torch.float64 not in family.dtypes:
        raise Skipped("float64 is not among its dtypes")


def gradients(subject: Subject) -> Iterator[Finding]:
    """First derivatives in float64 against finite differences."""
    yield from _gradcheck(subject, torch.autograd.gradcheck)


def second_gradients(subject: Subject) -> Iterator[Finding]:
    """Second derivatives in float64 against finite differences."""
    yield from _gradcheck(subject, torch.autograd.gradgradcheck)


def _gradcheck(subject: Subject, check: Callable[..., bool]) -> Iterator[Finding]:
    need_gradient(subject)
    for case in subject.tiny_cases(torch.float64):
        inputs, call = as_function_of_tensors(subject, case)
        # Of every element if they are few, else along random directions: a call or two for each.
        is_large = sum(t.numel() for t in inputs) > _MOST_ELEMENTS
        try:
            check(call, inputs, raise_exception=True, check_batched_grad=False, fast_mode=is_large)
            yield Finding(str(case))
        except Exception as error:
            if is_lost(subject.device):
                raise DeviceLost(str(error)) from error
            yield Finding(str(case), first_line(error, 3))


def as_function_of_tensors(subject: Subject, case: Case) -> tuple[list[torch.Tensor], Callable[..., Any]]:
    """Returns the floating-point tensors of a case, and the call as a function of them alone.

    What a backward gets of its operator's outputs is no argument of that function: it follows from the others.
    """
    computed = subject.computed
    values = [None if i in computed else v for i, v in enumerate(subject.inputs(case))]
    inputs = [t.detach().clone().requires_grad_() for t in tensors_of(values) if t.is_floating_point()]

    def call(*tensors: torch.Tensor) -> Any:
        pending = list(tensors)

        def fill(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return pending.pop(0) if value.is_floating_point() else value
            return [fill(v) for v in value] if isinstance(value, (list, tuple)) else value

        filled = [fill(v) for v in values]
        if computed:
            filled = subject.with_computed(filled)
        return tuple(_differentiable(subject, subject.call(filled)))

    return inputs, call


def _differentiable(subject: Subject, outputs: list[Any]) -> list[torch.Tensor]:
    found = zip(subject.operator.contract.outputs, outputs, strict=True)
    return [o for output, o in found if o is not None and o.is_floating_point() and not output.is_constant]


def seed_like(output: torch.Tensor) -> torch.Tensor:
    """Returns a cotangent whose entries differ, the same on every device and, but for rounding, in every dtype."""
    return torch.cos(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape).to(output)


def _with_gradients(subject: Subject) -> list[Case]:
    """Returns the cases whose gradients are checked in every dtype.

    Of samples that is all of them, but a few where the gradient is the reference's and only its way to there is ours.
    """
    if subject.operator.backward_operator is None and subject.has_samples:
        return [case for dtype in subject.contract.scalar_family.dtypes for case in subject.small_cases(dtype)]
    return [
        case
        for _, case in subject.cases()
        if case.label in _WITH_GRADIENTS or case.label.startswith("sample")
    ]


def gradient_numerics(subject: Subject) -> Iterator[Finding]:
    """Gradients in every dtype against those of the reference in float64."""
    need_gradient(subject)
    for case in _with_gradients(subject):

        def pull(function: Callable[[Any], list[Any]], values: Any) -> list[Any]:
            values = [
                v.detach().requires_grad_()
                if isinstance(v, torch.Tensor) and v.is_floating_point()
                else [i.detach().requires_grad_() for i in v]
                if isinstance(v, (list, tuple))
                else v
                for v in values
            ]
            with torch.enable_grad():
                # What is left out or empty may have been made without the inputs.
                outputs = [o for o in _differentiable(subject, function(values)) if o.requires_grad]
                inputs = [t for t in tensors_of(values) if t.requires_grad]
                seeds = [seed_like(o) for o in outputs]
                found = [None] * len(inputs)
                if outputs:
                    found = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
            return [torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=True)]

        expected = expect(lambda values: pull(subject.reference, values), case.values)
        got = pull(subject.run, subject.inputs(case))
        wait_for(subject.device)
        finding = Finding(str(case), worst_ulp=0.0, worst_ratio=0.0)
        for g, e in zip(got, expected, strict=True):
            difference = compare(g, e)
            finding.worst_ulp = max(finding.worst_ulp, difference.worst_ulp)
            finding.worst_ratio = max(finding.worst_ratio, difference.worst_ratio)
            if difference.message and not finding.message:
                finding.message, finding.pattern = difference.message, pattern_of(difference.wrong)
        yield finding
