"""Checks of how gradients are asked for: of which inputs, with which layouts, how often."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from opwright.spec.fill import lay_out
from opwright.spec.samples import Case
from opwright.verify.finding import Finding, Skipped, first_line
from opwright.verify.gradients import (
    as_leaves,
    check_gradients,
    differentiable,
    expected_gradients,
    floats_of,
    need_gradient,
    pull_back,
    seed_like,
)
from opwright.verify.repeats import agree
from opwright.verify.subject import Subject
from opwright.verify.tensors import are_same, copy_of, is_same, storage_bytes, tensors_of

_EVERY_SUBSET = 4  # of that many tensors at most; of more, each alone and all but each


def _cases(subject: Subject) -> list[Case]:
    """Returns a small input of each dtype with each combination of options; of all but one dtype one, if quick."""
    need_gradient(subject)
    if subject.operator is None or subject.has_samples:
        return subject.run_cases()
    found = [(dtype, case) for dtype, case in subject.cases() if case.label == "base"]
    if subject.effort == "quick":
        first = {id(case) for case in dict(reversed(found)).values()}
        found = [(d, c) for d, c in found if d == found[0][0] or id(c) in first]
    return [case for _, case in found]


def gradient_subsets(subject: Subject) -> Iterator[Finding]:
    """Gradients of some inputs only, every choice of them, against those of the reference in float64."""
    has_some = False
    for case in _cases(subject):
        names = subject.float_names(case)
        count = len(names)
        expected = expected_gradients(subject, case) if count > 1 else []
        for asked in _subsets(count):
            has_some = True
            got = pull_back(subject, subject.run, subject.inputs(case), asked=asked)
            label = f"{case}, gradients of {', '.join(names[i] for i in sorted(asked))} alone"
            yield check_gradients(subject, case, label, got, expected, asked)
    if not has_some:
        raise Skipped("one floating-point input")


def _subsets(count: int) -> Iterator[set[int]]:
    if count <= _EVERY_SUBSET:
        for size in range(1, count):
            yield from map(set, itertools.combinations(range(count), size))
    else:
        everything = set(range(count))
        for i in range(count):
            yield {i}
            yield everything - {i}


def gradient_layouts(subject: Subject) -> Iterator[Finding]:
    """Gradients of outputs that are transposed, sliced, offset in memory, or one number expanded."""
    for case in _cases(subject):
        expected = expected_gradients(subject, case)
        for layout in ("transposed", "sliced", "offset"):

            def laid_out(output: torch.Tensor, layout: str = layout) -> torch.Tensor:
                seed = seed_like(output)
                return lay_out(seed.new_empty, tuple(seed.shape), layout).copy_(seed)

            label = f"{case}, gradient {layout}"
            try:
                got = pull_back(subject, subject.run, subject.inputs(case), laid_out)
            except RuntimeError as error:
                if not _refuses(subject, case, laid_out):  # the reference takes it
                    yield Finding(label, f"raised {type(error).__name__}: {first_line(error)}")
                continue
            yield check_gradients(subject, case, label, got, expected)

        got = pull_back(subject, subject.run, subject.inputs(case), _seed_expanded)
        expected = expected_gradients(subject, case, _seed_expanded)
        yield check_gradients(subject, case, f"{case}, gradient expanded", got, expected)


def _seed_expanded(output: torch.Tensor) -> torch.Tensor:
    return torch.full((), 0.75, dtype=output.dtype, device=output.device).expand(output.shape)


def _refuses(subject: Subject, case: Case, seeds: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Returns whether the reference refuses such gradients: that of a view of complex numbers wants them in pairs."""
    try:
        pull_back(subject, subject.reference, copy_of(case.values), seeds)
    except RuntimeError:
        return True
    return False


def repeated_backward(subject: Subject) -> Iterator[Finding]:
    """The backward twice on a kept graph: the same bits; inputs, outputs and gradients of outputs unchanged."""
    for case in _cases(subject):
        leaves = as_leaves(subject.inputs(case))
        inputs = floats_of(leaves)
        with torch.enable_grad():
            results = subject.run(leaves)
        outputs = [o for o in differentiable(subject, results) if o.requires_grad]
        if not outputs:
            continue
        seeds = [seed_like(o) for o in outputs]
        given = copy_of([seeds, [o.detach() for o in tensors_of(results)]])
        kept = {"allow_unused": True, "retain_graph": True}
        first = copy_of(list(torch.autograd.grad(outputs, inputs, seeds, **kept)))
        second = list(torch.autograd.grad(outputs, inputs, seeds, **kept))
        message = ""
        if not agree(subject, second, first, _gradients_that_are, case.values, of_gradient=True):
            message = "the second backward on a kept graph gives other values than the first"
        elif not are_same(given, [seeds, tensors_of(results)]):
            message = "the backward writes into its argument or into an output"
        elif not all(
            is_same(storage_bytes(b), storage_bytes(a))
            for a, b in zip(tensors_of(case.values), tensors_of(leaves), strict=True)
        ):
            message = "the backward writes into an input"
        yield Finding(str(case), message)


def _gradients_that_are(subject: Subject, values: list[Any]) -> list[torch.Tensor]:
    return [g for g in pull_back(subject, subject.reference, values) if g is not None]
