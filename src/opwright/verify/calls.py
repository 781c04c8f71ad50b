"""Checks of one call after another: the same bits again, results that follow the data, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opwright.spec.samples import Case
from opwright.verify.devices import CPU
from opwright.verify.finding import Finding
from opwright.verify.process_state import passing_state
from opwright.verify.repeats import agree, outputs_of_reference
from opwright.verify.subject import Subject
from opwright.verify.tensors import bits_of, copy_of, is_same, shares_memory, tensors_of, two_alike
from opwright.verify.values import check_call, expected_of

_TIMES = 4

# --- determinism -------------------------------------------------------------------------------------------


def determinism(subject: Subject) -> Iterator[Finding]:
    """The same input gives the same bits: at once, and after another one; in memory of its own.

    And one tensor for two arguments, or two that overlap, give what two of their own memory would.
    """
    cases, for_one_tensor = [case for _, case in subject.cases()], subject.run_cases()
    with torch.no_grad():
        for case, other in zip(cases, [*cases[1:], *cases[:1]], strict=True):
            kept = tensors_of(subject.run(subject.inputs(case)))
            copies = copy_of(kept)
            first = [bits_of(t) for t in copies]

            def repeats(results: Any, case: Case = case, copies: Any = copies) -> bool:
                return agree(subject, tensors_of(results), copies, outputs_of_reference, case.values)

            second = tensors_of(subject.run(subject.inputs(case)))
            message = ""
            if shares_memory(kept, second):
                message = "its outputs lie in memory that the next call writes into"
            elif not repeats(second):
                what = "equal inputs elsewhere in memory give other results: it goes by their address"
                what = (
                    what if _is_steady_in_place(subject, case) else "two calls with the same inputs give other results"
                )
                message = f"{what}{_how_far(subject, kept, second)}"
            else:
                subject.run(subject.inputs(other))
                if not repeats(subject.run(subject.inputs(case))):
                    message = "it gives other bits after a call with other inputs: it keeps something from call to call"
                elif not _have_bits(kept, first):
                    message = "its outputs lie in memory that the next call writes into"
            if not message and any(case is each for each in for_one_tensor):
                message = _wrong_for_one_tensor_twice(subject, case)
            yield Finding(str(case), message)


def _is_steady_in_place(subject: Subject, case: Case) -> bool:
    """Returns whether calls with the very same tensors give the same bits."""
    if subject.mutated():
        return False
    values = subject.inputs(case)
    first = [bits_of(t).clone() for t in tensors_of(subject.run(values))]
    return all(_have_bits(tensors_of(subject.run(values)), first) for _ in range(_TIMES))


def _how_far(subject: Subject, first: list[torch.Tensor], second: list[torch.Tensor]) -> str:
    """Returns words for the first output in which two calls differ."""
    if len(first) != len(second):
        return ""
    for name, a, b in zip(subject.output_names(len(first)), first, second, strict=False):
        if a.shape == b.shape and a.dtype == b.dtype and not is_same(a, b):
            differ = (bits_of(a) != bits_of(b)).sum()
            return f"; {int(differ)} of {a.numel()} elements of {name} differ"
    return ""


def interchangeable(subject: Subject, case: Case) -> tuple[int, int] | None:
    """Returns the positions of two arguments that may be one tensor, if there are any."""
    count = len(case.values) if subject.callables is None else case.values[-1].arguments
    pair = two_alike(case.values[:count])
    if pair is None or subject.mutated() or not set(pair) <= subject.free_tensors(case):
        return None
    return pair if case.values[pair[0]].dtype == case.values[pair[1]].dtype else None


def _wrong_for_one_tensor_twice(subject: Subject, case: Case) -> str:
    """Returns how the outputs are wrong where two arguments are one tensor, "" if they are not."""
    pair = interchangeable(subject, case)
    if pair is None:
        return ""
    names = subject.argument_names(case)
    for share, what in ((_one_tensor, "are one tensor"), (_overlapping, "share memory, one element apart")):
        values = subject.inputs(case)
        values[pair[0]], values[pair[1]] = share(values[pair[0]])
        try:
            given = copy_of(values, CPU if subject.operator is not None else None)
            expected = subject.expect(outputs_of_reference, given)
        except Exception:  # not an input that it takes
            return ""
        for output, wanted in zip(subject.run(values), expected, strict=True):
            has_both = output is not None and wanted is not None
            message = subject.compare(output, wanted).message if has_both else ""
            if message:
                return f"{names[pair[0]]} and {names[pair[1]]} {what}: {message}"
    return ""


def _one_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor, tensor


def _overlapping(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors of the values of one; the second begins one element behind the first."""
    flat = tensor.reshape(-1)
    memory = torch.cat([flat, flat[:1]])
    return memory[:-1].view(tensor.shape), memory[1:].view(tensor.shape)


def _have_bits(tensors: list[torch.Tensor], bits: list[torch.Tensor]) -> bool:
    return len(tensors) == len(bits) and all(torch.equal(bits_of(t), b) for t, b in zip(tensors, bits, strict=True))


# --- fresh data --------------------------------------------------------------------------------------------


def fresh_data(subject: Subject) -> Iterator[Finding]:
    """New values in the same memory: the outputs follow, also where ends, sum and extremes stay the same."""
    with torch.no_grad():
        for case in representatives(subject):
            at = subject.free_tensors(case)
            if not at:
                continue
            original = _with(subject, case, at, _on_grid) if not case.label.startswith("sample") else case
            variants = [
                ("two elements in the middle exchanged", _with(subject, original, at, _exchanged)),
                ("an element in the middle changed", _with(subject, original, at, _changed)),
                ("other values", _with(subject, original, at, _reversed)),
                ("the first values again", original),
            ]
            if subject.effort == "quick" and case.label == "large":
                variants = variants[:1]
            values = subject.inputs(original)
            key = ("fresh data", id(case))
            expected = subject.remember(key, lambda o=original: expected_of(subject, o))
            finding = check_call(subject, original, values, expected)
            variants = [(what, v) for what, v in variants if v is original or _is_input(subject, v)]
            for i, (what, variant) in enumerate(variants):
                if finding.message:
                    break
                _write_into(values, variant, subject)
                if variant is not original:
                    expected = subject.remember((*key, i), lambda v=variant: expected_of(subject, v))
                else:
                    expected = subject.remember(key, lambda o=original: expected_of(subject, o))
                finding = check_call(subject, variant, values, expected)
                if finding.message:
                    finding.message = f"the same memory with {what}: {finding.message}"
            finding.case = str(case)
            yield finding


def _is_input(subject: Subject, variant: Case) -> bool:
    """Returns whether the reference takes it: integers in another order may no longer be valid indices."""
    try:
        with torch.no_grad():
            subject.reference(copy_of(variant.values))
    except Exception:  # whatever a reference may raise to refuse
        return False
    return True


def representatives(subject: Subject) -> list[Case]:
    """Returns a small input of each dtype, and a large one."""
    if subject.operator is None or subject.has_samples:
        return subject.run_cases()
    small = {dtype: case for dtype, case in reversed(subject.cases()) if case.label == "base"}
    return list({id(c): c for c in [*small.values(), *subject.run_cases()]}.values())


def _with(subject: Subject, case: Case, at: set[int], change: Any) -> Case:
    """Returns a case whose floating-point tensors are changed, within their domains; where there are none, whole numbers are exchanged."""
    has_floats = any(t.is_floating_point() for t in tensors_of([v for i, v in enumerate(case.values) if i in at]))

    def can_change(value: torch.Tensor) -> bool:
        if has_floats:
            return value.is_floating_point()
        return change is _exchanged and value.dtype != torch.bool

    def changed(value: Any, position: int) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(changed(v, position) for v in value)
        if not isinstance(value, torch.Tensor) or not can_change(value):
            return value
        if not value.numel() or torch._debug_has_internal_overlap(value):
            return value
        made = copy_of(value)
        made.copy_(subject.fold(change(value.reshape(-1).clone()), position).view(value.shape))
        return made

    values = tuple(changed(v, i) if i in at else v for i, v in enumerate(case.values))
    return Case(case.label, values, case.options)


def _on_grid(flat: torch.Tensor) -> torch.Tensor:
    """Rounds to eighths, of which every sum is exact in any order: what adds them up sees no exchange."""
    return (flat * 8).round().clamp(-32, 32) / 8


def _exchanged(flat: torch.Tensor) -> torch.Tensor:
    inner = flat[1:-1]
    if inner.numel() > 1:
        low, high = int(inner.argmin()), int(inner.argmax())
        flat[[1 + low, 1 + high]] = flat[[1 + high, 1 + low]]
    return flat


def _changed(flat: torch.Tensor) -> torch.Tensor:
    flat[flat.numel() // 2] += 0.5
    return flat


def _reversed(flat: torch.Tensor) -> torch.Tensor:
    return 0.5 * flat.flip(0)


def _write_into(values: list[Any], case: Case, subject: Subject) -> None:
    for target, source in zip(tensors_of(values), tensors_of(subject.inputs(case)), strict=True):
        if not torch._debug_has_internal_overlap(target):
            target.copy_(source)


# --- global state ------------------------------------------------------------------------------------------


def global_state(subject: Subject) -> Iterator[Finding]:
    """A call leaves random numbers, the environment and the threads of the process as they were.

    Settings are compared at every call of every check, by `Guard`.
    """
    for case in subject.run_cases():
        with torch.no_grad():
            values = subject.inputs(case)
            before = passing_state(subject.device)
            subject.run(values)
            after = passing_state(subject.device)
        changed = [name for name, value in before.items() if after.get(name) != value]
        yield Finding(str(case), f"the call changed {', '.join(changed)}" if changed else "")
