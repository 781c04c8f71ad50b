"""Checks of one call after another: the same bits again, results that follow the data, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opwright.spec.samples import Case
from opwright.verify.finding import Finding
from opwright.verify.process_state import modes, passing_state
from opwright.verify.subject import Subject
from opwright.verify.tensors import bits_of, copy_of, shares_memory, tensors_of
from opwright.verify.values import expected_of, judge_call

# --- determinism -------------------------------------------------------------------------------------------


def determinism(subject: Subject) -> Iterator[Finding]:
    """The same input twice, with another one in between, gives the same bits, in memory of its own."""
    cases = [case for _, case in subject.cases()]
    with torch.no_grad():
        for case, other in zip(cases, [*cases[1:], *cases[:1]], strict=True):
            kept = tensors_of(subject.run(subject.inputs(case)))
            first = [bits_of(t).clone() for t in kept]
            subject.run(subject.inputs(other))
            again = tensors_of(subject.run(subject.inputs(case)))
            message = ""
            if not _have_bits(again, first):
                message = "the second call gave other bits than the first"
            elif shares_memory(kept, again) or not _have_bits(kept, first):
                message = "its outputs lie in memory that the next call writes into"
            yield Finding(str(case), message)


def _have_bits(tensors: list[torch.Tensor], bits: list[torch.Tensor]) -> bool:
    return len(tensors) == len(bits) and all(
        torch.equal(bits_of(t), b) for t, b in zip(tensors, bits, strict=True)
    )


# --- fresh data --------------------------------------------------------------------------------------------


def fresh_data(subject: Subject) -> Iterator[Finding]:
    """New values in the same memory: the outputs follow, also where ends, sum and extremes stay the same."""
    with torch.no_grad():
        for case in _representatives(subject):
            at = subject.free_tensors(case)
            if not at:
                continue
            original = _with(case, at, _on_grid) if not case.label.startswith("sample") else case
            variants = [
                ("two elements in the middle exchanged", _with(original, at, _exchanged)),
                ("an element in the middle changed", _with(original, at, _changed)),
                ("other values", _with(original, at, _reversed)),
                ("the first values again", original),
            ]
            if subject.effort == "quick" and case.label == "large":
                variants = variants[:1]
            values = subject.inputs(original)
            key = ("fresh data", id(case))
            expected = subject.remember(key, lambda o=original: expected_of(subject, o))
            finding = judge_call(subject, original, values, expected)
            for i, (what, variant) in enumerate(variants):
                if finding.message:
                    break
                _write_into(values, variant, subject)
                if variant is not original:
                    expected = subject.remember((*key, i), lambda v=variant: expected_of(subject, v))
                else:
                    expected = subject.remember(key, lambda o=original: expected_of(subject, o))
                finding = judge_call(subject, variant, values, expected)
                if finding.message:
                    finding.message = f"the same memory with {what}: {finding.message}"
            finding.case = str(case)
            yield finding


def _representatives(subject: Subject) -> list[Case]:
    """Returns a small input of each dtype, and a large one."""
    if subject.operator is None or subject.has_samples:
        return subject.run_cases()
    small = {dtype: case for dtype, case in reversed(subject.cases()) if case.label == "base"}
    return list({id(c): c for c in [*small.values(), *subject.run_cases()]}.values())


def _with(case: Case, at: set[int], change: Any) -> Case:
    def changed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(changed(v) for v in value)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        if not value.numel() or torch._debug_has_internal_overlap(value):
            return value
        made = copy_of(value)
        made.copy_(change(value.reshape(-1).clone()).view(value.shape))
        return made

    values = tuple(changed(v) if i in at else v for i, v in enumerate(case.values))
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
    """A call leaves random numbers, modes, environment, folder and threads of the process as they were."""
    for case in subject.run_cases():
        with torch.no_grad():
            values = subject.inputs(case)
            before = passing_state(subject.device)
            subject.run(values)
            after = passing_state(subject.device)
        # Modes since the start of verify: a call that sets one has done so in earlier checks.
        changed = _changed_in(before, after) + _changed_in(subject.modes, modes())
        yield Finding(str(case), f"the call changed {', '.join(changed)}" if changed else "")


def _changed_in(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, value in before.items() if after.get(name) != value]
