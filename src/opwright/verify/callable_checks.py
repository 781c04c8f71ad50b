"""Checks of a callable, where those of an operator need its contract.

There is no `out=` to fill with garbage, no schema, no float64 to take finite differences in; there are the
samples, and what the reference gives for them.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from opwright.spec.samples import Case
from opwright.verify.checks import CHECKS, Check
from opwright.verify.concurrency import other_values
from opwright.verify.devices import DeviceLost
from opwright.verify.finding import Finding, Skipped, first_line
from opwright.verify.gradients import recorded_wrong, seed_like
from opwright.verify.options import cases_with_other_options
from opwright.verify.oracle_process import Output
from opwright.verify.repeats import outputs_of_reference
from opwright.verify.resized import is_of_one, resized_cases
from opwright.verify.subject import Subject
from opwright.verify.tensors import are_same, copy_of, tensors_of
from opwright.verify.values import RAISED, SHARES, check_call, expected_of

_THREADS, _ROUNDS = 4, 4


def check_for(name: str, subject: Subject) -> Check:
    """Returns the check of that name for this subject."""
    return CHECKS[name] if subject.operator is not None else _CHECKS.get(name, CHECKS[name])


def _other(subject: Subject, values: Sequence[Any], alone: Sequence[Any], outputs: Sequence[Any]) -> tuple[str, str]:
    """Returns how outputs are wrong that are not, bit for bit, those of a call alone; and the pattern."""
    found, wanted = tensors_of(outputs), tensors_of(alone)
    if len(found) == len(wanted) and are_same(found, wanted):
        return "", ""
    with torch.no_grad():
        expected = subject.expect(outputs_of_reference, list(values))
        return _difference(subject, outputs, expected, subject.output_names(len(expected)))


def _difference(
    subject: Subject, outputs: Sequence[Any], expected: Sequence[Output | None], names: Sequence[str]
) -> tuple[str, str]:
    """Returns the first difference between results and what they must be, with its name, and its pattern."""
    if len(outputs) != len(expected):
        return f"returned {len(outputs)} outputs, expected {len(expected)}", ""
    for name, output, wanted in zip(names, outputs, expected, strict=True):
        if isinstance(output, torch.Tensor) and wanted is not None:
            found = subject.compare(output, wanted)
            if found.message:
                return f"{name}: {found.message}", found.pattern
    return "", ""


def outputs_written(subject: Subject) -> Iterator[Finding]:
    """With memory that torch.empty fills with NaN, or the largest integer: nothing of it is left.

    It comes first, so the first call of all is here: it gives what later ones give.
    """
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    for case in subject.run_cases():
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of operators that have no deterministic algorithm
            alone = subject.run(subject.inputs(case))
            values = subject.inputs(case)
            try:
                torch.use_deterministic_algorithms(True, warn_only=True)
                torch.utils.deterministic.fill_uninitialized_memory = True
                outputs = subject.run(values)
            finally:
                torch.use_deterministic_algorithms(was[0], warn_only=was[1])
                torch.utils.deterministic.fill_uninitialized_memory = filled
        yield _first_and_second(subject, case, alone, outputs)


def _first_and_second(subject: Subject, case: Case, alone: Sequence[Any], outputs: Sequence[Any]) -> Finding:
    """Judges two calls where they differ; where both are wrong in the same way, that is for other checks to say."""
    for what, first, second in (
        ("in memory full of NaN", alone, outputs),
        ("the first call with it is wrong, the second right", outputs, alone),
    ):
        message, pattern = _other(subject, case.values, first, second)
        if message:
            return Finding(str(case), f"{what}: {message}", pattern)
    return Finding(str(case))


def numerics(subject: Subject) -> Iterator[Finding]:
    """Every output of every case against the float64 oracle; and of other options and sizes, unless it refuses them."""
    yield from CHECKS["numerics"](subject)
    with torch.no_grad():
        for case in itertools.chain(cases_with_other_options(subject), resized_cases(subject)):
            finding = check_call(subject, case, subject.inputs(case), expected_of(subject, case))
            if not finding.message.startswith(RAISED) and not (is_of_one(case) and SHARES in finding.message):
                yield finding


def second_gradients(subject: Subject) -> Iterator[Finding]:
    """The gradient of a gradient, by the arguments and by the gradient of the outputs, against that in float64.

    A backward that cannot be differentiated is not a finding; one whose result lacks a graph is.
    """
    if subject.mutated():
        raise Skipped("it mutates its arguments")
    for case in subject.run_cases()[:1]:
        at = _differentiable_at(subject, case)
        if not at or not any(o.requires_grad for o in _recorded(subject, case, at)):
            raise Skipped("nothing to differentiate")
        try:
            expected = subject.expect(_second_gradients_of_reference, case.values, at, room=_SECOND_SHARE)
        except RuntimeError as error:
            raise Skipped(f"the reference has no second gradient: {first_line(error)}") from None
        try:
            found = _second_gradients(subject.run, subject.inputs(case), at)
        except RuntimeError as error:
            if not any(text in str(error) for text in ("differentiate", "derivative", "double backward")):
                raise
            raise Skipped(f"its backward refuses to be differentiated: {first_line(error)}") from None
        names = subject.argument_names(case)
        of_inputs = [f"by {names[i]}" for i in at]
        of_seeds = ["by the gradient of an output"] * (len(expected) - len(at))
        message, pattern = _difference(subject, found, expected, [*of_inputs, *of_seeds])
        if message:
            message = f"the gradient of its gradient {message}; {_NO_SECOND}"
        yield Finding(str(case), message, pattern)


# The tolerance of gradgradcheck. Autograd derives these formulas, a different one for each way to compute the same
# result; terms that cancel in them are not a fault of the candidate.
_SECOND_SHARE = 1e-3
_NO_SECOND = "a backward that has none can say so with `torch.autograd.function.once_differentiable`"


def gradient_numerics(subject: Subject) -> Iterator[Finding]:
    """Gradients of the samples against those of the reference in float64, parameters of modules included."""
    if subject.mutated():
        raise Skipped("it mutates its arguments")
    compared = False
    given = [c for _, c in subject.cases() if not c.label.partition(", ")[2].removesuffix("values around 1")]
    for case in given:
        at = _differentiable_at(subject, case)
        if not at:
            continue
        outputs = _recorded(subject, case, at)
        if not any(o.requires_grad for o in outputs):
            if any(v.requires_grad for v in case.values if isinstance(v, torch.Tensor)):
                compared = True
                yield Finding(str(case), "its outputs have no gradient, though the sample requires one")
            continue
        compared = True
        expected = subject.expect(_gradients_of_reference, case.values, at, room=0.0)
        names = subject.argument_names(case)
        got = _gradients(subject.run, subject.inputs(case), at)
        message, pattern = _difference(subject, got, expected, [f"gradient of {names[i]}" for i in at])
        message = message or recorded_wrong(subject, case, _leaves(subject.inputs(case), at))
        yield Finding(str(case), message, pattern)
    if not compared:
        raise Skipped("nothing to differentiate")


def _differentiable_at(subject: Subject, case: Case) -> list[int]:
    """Returns the positions by which the reference can be differentiated: by the mean of a batch norm it cannot."""

    def can(positions: list[int]) -> bool:
        try:
            outputs = _outputs(subject.reference, copy_of(case.values), positions)
            return any(output.requires_grad for output in outputs)
        except RuntimeError:
            return False

    every = subject.callables.differentiable_at(case)
    return every if can(every) else [i for i in every if can([i])]


def _leaves(values: Sequence[Any], at: Sequence[int]) -> list[Any]:
    return [v.detach().requires_grad_() if i in at else v for i, v in enumerate(values)]


def _outputs(function: Any, values: Sequence[Any], at: Sequence[int]) -> list[torch.Tensor]:
    with torch.enable_grad():
        return tensors_of(function(_leaves(values, at)))


def _recorded(subject: Subject, case: Case, at: Sequence[int]) -> list[torch.Tensor]:
    """Returns the outputs of a call that is recorded for a gradient.

    Raises:
        Skipped: it refuses tensors that need gradients, as numpy does, and no sample has such.
    """
    try:
        return _outputs(subject.run, subject.inputs(case), at)
    except DeviceLost:
        raise
    except Exception as error:
        if any(v.requires_grad for v in case.values if isinstance(v, torch.Tensor)):
            raise
        raise Skipped(f"it takes no tensors that need gradients: {first_line(error)}") from None


def _gradients(function: Any, values: Sequence[Any], at: Sequence[int]) -> list[torch.Tensor]:
    leaves = _leaves(values, at)
    with torch.enable_grad():
        outputs = [o for o in tensors_of(function(leaves)) if o.requires_grad]
    inputs = [leaves[i] for i in at]
    found = torch.autograd.grad(outputs, inputs, [seed_like(o) for o in outputs], allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for g, v in zip(found, inputs, strict=True)]


def _gradients_of_reference(subject: Subject, values: Sequence[Any], at: Sequence[int]) -> list[torch.Tensor]:
    with subject.formulas_for(values):  # for the backward as well
        return _gradients(subject.reference, values, at)


def _second_gradients_of_reference(subject: Subject, values: Sequence[Any], at: Sequence[int]) -> list[torch.Tensor]:
    with subject.formulas_for(values):  # for the backward as well
        return _second_gradients(subject.reference, values, at)


def _second_gradients(function: Any, values: Sequence[Any], at: Sequence[int]) -> list[torch.Tensor]:
    leaves = _leaves(values, at)
    inputs = [leaves[i] for i in at]
    with torch.enable_grad():
        outputs = [o for o in tensors_of(function(leaves)) if o.requires_grad]
        seeds = [seed_like(o).requires_grad_() for o in outputs]
        found = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, create_graph=True)
    firsts = [g for g in found if g is not None and g.requires_grad]
    wanted = [*inputs, *seeds]
    if not firsts:
        return [torch.zeros_like(v) for v in wanted]
    # By all that they were made of: a backward that refuses to be differentiated does so on the way to no input.
    found = torch.autograd.grad(firsts, [*wanted, *_made_of(firsts)], [seed_like(g) for g in firsts], allow_unused=True)
    return [torch.zeros_like(v) if g is None else g for g, v in zip(found[: len(wanted)], wanted, strict=True)]


def _made_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the leaves of the graph behind some tensors."""
    pending = [t.grad_fn for t in tensors]
    seen, found = set(pending), []
    while pending:
        node = pending.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            found.append(leaf)
        fresh = {behind for behind, _ in node.next_functions} - seen
        seen |= fresh
        pending += fresh
    return found


def compiled(subject: Subject) -> Iterator[Finding]:
    """Called within torch.compile, graph breaks allowed, it gives what the reference gives."""
    if subject.mutated():
        raise Skipped("it mutates its arguments")
    torch._dynamo.reset()
    call = torch.compile(lambda values: subject.call(values), backend="eager")
    for case in subject.run_cases()[:1]:
        with torch.no_grad():
            alone, outputs = subject.run(subject.inputs(case)), call(subject.inputs(case))
        message, pattern = _other(subject, case.values, alone, outputs)
        yield Finding(str(case), message and f"within torch.compile: {message}", pattern)


def threads(subject: Subject) -> Iterator[Finding]:
    """In several threads at once, each with data of its own, it gives what it gives alone."""
    if subject.device.type != "cpu":
        yield from CHECKS["threads"](subject)
        return
    if subject.mutated():
        raise Skipped("it mutates its arguments")
    if subject.callables.are_shared and subject.callables.parameters:
        raise Skipped("a module is given its parameters call by call")
    for case in subject.run_cases()[:1]:
        yield Finding(str(case), _in_threads(subject, case))


def _in_threads(subject: Subject, case: Case) -> str:
    values = subject.inputs(case)
    with torch.no_grad():
        given = [(values, subject.run(copy_of(values)))]
        while len(given) < _THREADS:
            values = other_values(values)
            try:
                given.append((values, subject.run(copy_of(values))))
            except Exception:  # not an input that it takes
                values, alone = given[0]
                given.append((values, alone))
    start, bad = threading.Barrier(_THREADS), []

    def work(values: list[Any], alone: list[Any]) -> None:
        try:
            copies = [copy_of(values) for _ in range(_ROUNDS)]
            start.wait(60)
            with torch.no_grad():
                results = [subject.call(copied) for copied in copies]
            messages = [_other(subject, values, alone, outputs)[0] for outputs in results]
            bad.extend(f"in several threads at once: {message}" for message in messages if message)
        except Exception as error:
            start.abort()
            bad.append(f"raised {type(error).__name__} in a thread: {first_line(error)}")

    running = [threading.Thread(target=work, args=pair) for pair in given]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return bad[0] if bad else ""


_CHECKS: dict[str, Check] = {
    "outputs written": outputs_written,
    "numerics": numerics,
    "second gradients": second_gradients,
    "gradient numerics": gradient_numerics,
    "compile": compiled,
    "threads": threads,
}
