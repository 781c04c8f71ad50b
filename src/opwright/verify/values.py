"""Checks of values: numerics, repeatability, memory, the promise of variadic axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opwright.dispatch.vmap import joined_axes
from opwright.spec.samples import Case
from opwright.verify.devices import DeviceLost, wait_for
from opwright.verify.finding import Finding, Skipped, first_line, need_operator
from opwright.verify.oracle import compare, expect, pattern_of
from opwright.verify.subject import Subject
from opwright.verify.tensors import are_same, bits_of, copy_of, is_same, storage_bytes, tensors_of

# --- numerics --------------------------------------------------------------------------------------------


def numerics(subject: Subject) -> Iterator[Finding]:
    """Every output of every case against the float64 oracle; inputs unchanged; nothing aliased."""
    mutated = subject.mutated()

    def reference(values: Any) -> list[Any]:
        values = list(values)
        outputs = subject.reference(values)
        return [*outputs, *(values[i] for i in mutated)]

    with torch.no_grad():
        for _, case in subject.cases():
            values = subject.inputs(case)
            expected = expect(reference, case.values)
            try:
                outputs = subject.run(values)
            except DeviceLost:
                raise
            except Exception as error:
                yield Finding(str(case), f"raised {type(error).__name__}: {first_line(error)}")
                continue
            yield _judge(subject, case, values, [*outputs, *(values[i] for i in mutated)], expected, mutated)


def _judge(
    subject: Subject,
    case: Case,
    values: list[Any],
    outputs: list[Any],
    expected: list[Any],
    mutated: list[int],
) -> Finding:
    finding = Finding(str(case), worst_ulp=0.0, worst_ratio=0.0)
    if len(outputs) != len(expected):
        finding.message = f"returned {len(outputs)} outputs, expected {len(expected)}"
        return finding
    names = [o.name for o in subject.contract.outputs] if subject.contract else []
    for i, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        name = names[i] if i < len(names) else f"output{i}"
        if wanted is None:
            continue
        shape = wanted.shape if isinstance(wanted, torch.Tensor) else wanted.exact.shape
        dtype = wanted.dtype
        if not isinstance(output, torch.Tensor) or output.shape != shape or output.dtype != dtype:
            got = f"{output.dtype} {list(output.shape)}" if isinstance(output, torch.Tensor) else str(output)
            finding.message = f"`{name}`: got {got}, expected {dtype} {list(shape)}"
            return finding
        difference = compare(output, wanted)
        finding.worst_ulp = max(finding.worst_ulp, difference.worst_ulp)
        finding.worst_ratio = max(finding.worst_ratio, difference.worst_ratio)
        if difference.message and not finding.message:
            finding.message, finding.pattern = f"`{name}`: {difference.message}", pattern_of(difference.wrong)
    if not finding.message:
        finding.message = _side_effects(case, values, outputs[: len(outputs) - len(mutated)], mutated)
    return finding


def _side_effects(case: Case, values: list[Any], outputs: list[Any], mutated: list[int]) -> str:
    for i, (before, after) in enumerate(zip(case.values, values, strict=True)):
        if i not in mutated:
            for a, b in zip(tensors_of([before]), tensors_of([after]), strict=True):
                if not is_same(storage_bytes(b), storage_bytes(a)):
                    return f"argument {i} was changed by the call"
    inputs = {t.untyped_storage().data_ptr() for t in tensors_of(values) if t.untyped_storage().nbytes()}
    for i, output in enumerate(tensors_of(outputs)):
        if output.untyped_storage().nbytes() and output.untyped_storage().data_ptr() in inputs:
            return f"output {i} shares memory with an argument"
    return ""


# --- repeatability and memory ----------------------------------------------------------------------------


def determinism(subject: Subject) -> Iterator[Finding]:
    """The same input twice, with another one in between, gives the same bits."""
    cases = [case for _, case in subject.cases()]
    with torch.no_grad():
        for case, other in zip(cases, [*cases[1:], *cases[:1]], strict=True):
            first = tensors_of(subject.run(subject.inputs(case)))
            first = [bits_of(t).clone() for t in first]
            subject.run(subject.inputs(other))
            second = [bits_of(t) for t in tensors_of(subject.run(subject.inputs(case)))]
            same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            yield Finding(str(case), "" if same else "the second call gave other bits than the first")


_GUARD = 64  # elements on either side of an output
_WRITES_ELSEWHERE = "the kernel writes outside of its output"


def outputs_written(subject: Subject) -> Iterator[Finding]:
    """`out=` tensors filled with garbage, between guard bands: all written, nothing around them.

    This check comes first, because a kernel that writes elsewhere would bring the process down in any other.
    """
    operator = need_operator(subject)
    if not operator.contract.outputs:
        raise Skipped("no outputs: it only mutates")
    with torch.no_grad():
        for _, case in subject.cases():
            buffers, outs = [], []
            for like in subject.reference(copy_of(case.values)):
                like = tensors_of(case.values)[0].new_empty(0) if like is None else like
                size = like.numel() + 2 * _GUARD
                buffer = torch.full((size,), _poison(like.dtype), dtype=like.dtype, device=subject.device)
                buffers.append(buffer)
                outs.append(buffer[_GUARD : _GUARD + like.numel()].view(like.shape))
            operator.call_with_out(tuple(subject.inputs(case)), outs[0] if len(outs) == 1 else tuple(outs))
            wait_for(subject.device)
            for out, buffer in zip(outs, buffers, strict=True):
                edges = torch.cat([buffer[:_GUARD], buffer[_GUARD + out.numel() :]])
                if not is_same(edges, torch.full_like(edges, _poison(edges.dtype))):
                    yield Finding(str(case), _WRITES_ELSEWHERE, is_fatal=_WRITES_ELSEWHERE)
                    return
            same = are_same(subject.run(subject.inputs(case)), outs)
            yield Finding(
                str(case), "" if same else "the out variant gives other values, or leaves some unwritten"
            )


def _poison(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return -1234.5
    return True if dtype == torch.bool else 77


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
            expected = expect(subject.reference, part_of(case.values))
            message = ""
            for w, a, e in zip(whole, alone, expected, strict=True):
                if isinstance(e, torch.Tensor) or e is None:
                    message = message or ("" if is_same(w, a) else "differs")
                else:
                    message = message or compare(w, e).message
            yield Finding(
                str(case), message and f"entries 1.. of the whole differ from the call on them: {message}"
            )


def _without_first(value: Any, dim: int | None) -> Any:
    """Returns a tensor without its first entry along a dimension; what has none, as it is."""
    if dim is None or value is None or value.ndim <= dim or not value.shape[dim]:
        return value
    return value.narrow(dim, 1, value.shape[dim] - 1)
