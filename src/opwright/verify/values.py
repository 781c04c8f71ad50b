"""Checks of values: numerics against the oracle, and the promise of variadic axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opwright.dispatch.vmap import joined_axes
from opwright.spec.samples import Case
from opwright.verify.derived import holds_infinities
from opwright.verify.devices import DeviceLost
from opwright.verify.finding import Finding, Skipped, first_line, need_operator, origin
from opwright.verify.oracle_process import Output
from opwright.verify.repeats import outputs_and_mutated, outputs_of_reference
from opwright.verify.subject import Subject
from opwright.verify.tensors import are_same, copy_of, is_same, shares_memory, storage_bytes, tensors_of

RAISED = "raised "  # how the message of a finding starts that is about an exception
SHARES = "shares memory"


def numerics(subject: Subject) -> Iterator[Finding]:
    """Every output of every case against the float64 oracle; inputs unchanged; nothing aliased."""
    with torch.no_grad():
        for _, case in subject.cases():
            try:
                expected = subject.remember(("numerics", id(case)), lambda case=case: expected_of(subject, case))
            except Exception as error:
                if subject.operator is None or isinstance(error, DeviceLost):
                    raise
                yield _raised(subject, case, error, f", {_why_refused(subject, case)}")
                continue
            yield check_call(subject, case, subject.inputs(case), expected)


def _raised(subject: Subject, case: Case, error: Exception, more: str = "") -> Finding:
    text = f"{RAISED}{type(error).__name__}: {first_line(error)}{origin(error, subject)}{more}"
    return Finding(str(case), text)


def _why_refused(subject: Subject, case: Case) -> str:
    """Returns why the oracle cannot compute a case whose values the reference takes."""
    try:
        subject.reference(copy_of(case.values))
    except Exception:  # whatever a reference may raise
        return "for a tensor laid out like this: a reference takes any strides, with `.contiguous()` if it must"
    return "for the same values in float64: a reference takes the dtype of its arguments"


def expected_of(subject: Subject, case: Case) -> list[Output | None]:
    """Returns what the outputs of a case must be, and behind them the arguments that are written into."""
    is_loose = subject.operator is None and holds_infinities(case)
    return subject.expect(outputs_and_mutated, case.values, is_narrow=True, is_loose=is_loose)


def check_call(subject: Subject, case: Case, values: list[Any], expected: list[Output | None]) -> Finding:
    """Calls the subject and compares outputs and side effects with what they must be.

    Args:
        case: what is called, with the values that the arguments must have kept.
        values: the arguments on the device.
    """
    versions = [t._version for t in _kept(subject, values)]
    try:
        outputs = subject.run(values)
    except DeviceLost:
        raise
    except Exception as error:
        return _raised(subject, case, error)
    finding = Finding(str(case), worst_ulp=0.0, worst_ratio=0.0)
    results = [*outputs, *(values[i] for i in subject.mutated())]
    if len(results) != len(expected):
        wanted = len(expected) - len(subject.mutated())
        finding.message = f"returned {len(outputs)} outputs, expected {wanted}"
        return finding
    arguments = subject.argument_names(case)
    names = [*subject.output_names(len(outputs)), *(arguments[i] for i in subject.mutated())]
    for i, (output, wanted) in enumerate(zip(results, expected, strict=True)):
        if wanted is None:
            continue
        finding.message = _form_of(subject, output, wanted, is_output=i < len(outputs))
        if finding.message:
            finding.message = f"{names[i]}: {finding.message}"
            return finding
        difference = subject.compare(output, wanted)
        finding.note_worst(difference)
        if difference.message:
            finding.message, finding.pattern = f"{names[i]}: {difference.message}", difference.pattern
            return finding
    finding.message = _side_effects(subject, case, values, outputs, versions)
    return finding


def _form_of(subject: Subject, output: Any, wanted: Output, is_output: bool) -> str:
    """Returns what is wrong with an output before its values are looked at."""
    if not isinstance(output, torch.Tensor) or output.shape != wanted.shape or output.dtype != wanted.dtype:
        got = f"{output.dtype} {list(output.shape)}" if isinstance(output, torch.Tensor) else str(output)
        return f"got {got}, expected {wanted.dtype} {list(wanted.shape)}"
    if is_output and type(output) is not torch.Tensor:
        # A subclass may compute its values when they are asked for, or answer comparisons as it likes.
        return f"got a `{type(output).__qualname__}`, expected a plain torch.Tensor"
    device = wanted.device if subject.operator is None else subject.device
    if output.device.type != device.type or device.index not in (None, output.device.index):
        return f"got a tensor on {output.device}, expected {device}"
    if output.layout != torch.strided:
        return f"got a tensor of layout {output.layout}, expected torch.strided"
    return ""


def _kept(subject: Subject, values: list[Any]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments that a call must leave alone."""
    return tensors_of([v for i, v in enumerate(values) if i not in subject.mutated()])


def _side_effects(subject: Subject, case: Case, values: list[Any], outputs: list[Any], versions: list[int]) -> str:
    mutated, names = subject.mutated(), subject.argument_names(case)
    for i, (before, after) in enumerate(zip(case.values, values, strict=True)):
        if i not in mutated:
            for a, b in zip(tensors_of([before]), tensors_of([after]), strict=True):
                if not is_same(storage_bytes(b), storage_bytes(a)):
                    return f"{names[i]} was changed by the call"
    if [t._version for t in _kept(subject, values)] != versions:
        return "an argument was written to during the call, and then restored"
    of_outputs = subject.output_names(len(outputs))
    for i, output in enumerate(outputs):
        for name, value in zip(names, values, strict=False):
            if shares_memory([output], [value]):
                return f"{of_outputs[i]} {SHARES} with {name}"
        for name, other in zip(of_outputs, outputs[:i], strict=False):
            if subject.operator is not None and shares_memory([output], [other]):
                return f"{of_outputs[i]} {SHARES} with {name}"
    return ""


def independence(subject: Subject) -> Iterator[Finding]:
    """The promise of a variadic axis: an entry's result does not depend on the other entries."""
    operator = need_operator(subject)
    contract = operator.contract
    if contract.mutated:
        raise Skipped("it mutates its arguments")
    at = [p.type.variadic_at if p.type else None for p in contract.parameters]
    if joined_axes(contract, [position is not None for position in at]) is None:
        raise Skipped("no variadic axis goes through all outputs")
    with torch.no_grad():
        for _, case in subject.cases():
            batched = [
                (p.type, v, i)
                for p, v, i in zip(contract.parameters, case.values, at, strict=True)
                if i is not None and v is not None
            ]
            counts = {v.shape[i] if v.ndim >= type_.rank else 0 for type_, v, i in batched}
            if len(counts) != 1 or min(counts) < 2:
                continue

            def part_of(values: Any) -> tuple[Any, ...]:
                return tuple(_without_first(v, i) for v, i in zip(values, at, strict=True))

            kept = zip(subject.run(subject.inputs(case)), contract.outputs, strict=True)
            whole = [_without_first(tensor, output.type.variadic_at) for tensor, output in kept]
            alone = subject.run(part_of(subject.inputs(case)))
            if are_same(whole, alone):
                yield Finding(str(case))
                continue
            expected = subject.expect(outputs_of_reference, part_of(case.values))
            message = ""
            for w, a, e in zip(whole, alone, expected, strict=True):
                if e is None or not e.dtype.is_floating_point:
                    message = message or ("" if is_same(w, a) else "differs")
                else:
                    message = message or subject.compare(w, e).message
            yield Finding(str(case), message and f"entries 1.. of the whole differ from the call on them: {message}")


def _without_first(value: Any, dim: int | None) -> Any:
    """Returns a tensor without its first entry along a dimension; what has none, as it is."""
    if dim is None or value is None or value.ndim <= dim or not value.shape[dim]:
        return value
    return value.narrow(dim, 1, value.shape[dim] - 1)
