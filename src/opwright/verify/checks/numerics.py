"""Checks of what calls compute: numerics, the same bits again, results that follow the data, nothing left behind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from opwright import _torch
from opwright.contract.memory import overlaps_itself
from opwright.contract.sweep import Case
from opwright.dispatch.vmap import joined_axes
from opwright.errors import OpwrightError, plural
from opwright.verify.checks.finding import (
    Finding,
    Skipped,
    adds_in_any_order,
    agree,
    find_difference,
    first_line,
    is_own,
    origin,
    outputs_and_mutated,
    outputs_of_reference,
    tell_reference,
)
from opwright.verify.devices import CPU
from opwright.verify.global_state import read_passing_state
from opwright.verify.inputs.boundaries import boundary_cases, negative_cases
from opwright.verify.inputs.values import holds_infinities
from opwright.verify.inputs.variations import cases_with_other_options, is_of_one, resized_cases
from opwright.verify.oracle import are_finite, few_threads, to_oracle, try_reference
from opwright.verify.oracle_process import Output
from opwright.verify.target import Target
from opwright.verify.tensors import (
    are_same,
    bits_of,
    copy_of,
    fill_from,
    is_same,
    is_sorted,
    shares_memory,
    storage_bytes,
    tensors_of,
    two_alike,
)

RAISED = "raised "  # how the message of a finding starts that is about an exception
SHARES = "shares memory"
_ACCEPTED = "returned a result"


def numerics(target: Target) -> Iterator[Finding]:
    """Every output of every case against the float64 oracle; inputs unchanged; nothing aliased."""
    with torch.no_grad():
        for case in target.within_time():
            yield _check_case(
                target, case, lambda case: target.remember(("numerics", id(case)), lambda: expected_of(target, case))
            )
        # Where a failing case is made smaller, its parts are all there is.
        if target.operator is not None and target.boundaries is None and not target.has_samples:
            for case in negative_cases(target):
                yield _check_case(target, case, lambda case: expected_of(target, case))


def _check_case(target: Target, case: Case, expect: Callable[[Case], list[Output | None]]) -> Finding:
    try:
        expected = expect(case)
    except Exception as error:
        if target.operator is None:
            raise
        return _tell_raised(target, case, error, f", {_why_refused(target, case)}")
    return check_call(target, case, target.inputs(case), expected)


def _tell_raised(target: Target, case: Case, error: Exception, more: str = "") -> Finding:
    text = f"{RAISED}{type(error).__name__}: {first_line(error)}{origin(error, target)}{more}"
    return Finding(str(case), text)


def _why_refused(target: Target, case: Case) -> str:
    """Returns why the oracle cannot compute a case whose values the reference takes."""
    if try_reference(target.reference, case.values) is None:
        remedy = "copy with `x.clone(memory_format=torch.contiguous_format)` if PyTorch's operator does not"
        return f"for a tensor laid out like this: a reference must take any strides and offsets; {remedy}"
    return "for the same values in float64: a reference takes the dtype of its arguments"


def expected_of(target: Target, case: Case) -> list[Output | None]:
    """Returns what the outputs of a case must be, and behind them the arguments that are written into."""
    is_loose = target.operator is None and holds_infinities(case)
    return target.expect(outputs_and_mutated, case.values, is_loose=is_loose)


def check_call(target: Target, case: Case, values: list[Any], expected: list[Output | None]) -> Finding:
    """Calls the target and compares outputs and side effects with what they must be.

    Args:
        case: what is called, with the values that the arguments must have kept.
        values: the arguments on the device.
    """
    versions = [_torch.version_of(t) for t in _unwritten(target, values)]
    try:
        outputs = target.run(values)
    except Exception as error:
        return _tell_raised(target, case, error)
    finding = Finding(str(case), worst_ulp=0.0, worst_ratio=0.0)
    results = [*outputs, *target.written(values)]
    if len(results) != len(expected):
        wanted = len(expected) - len(target.written(values))
        finding.message = f"returned {plural(len(outputs), 'output')}, expected {wanted}"
        return finding
    names = [*target.output_names(len(outputs)), *target.written_names(case)]
    for i, (output, wanted) in enumerate(zip(results, expected, strict=True)):
        if wanted is None:
            continue
        finding.message = _form_of(target, output, wanted, is_output=i < len(outputs))
        if finding.message:
            finding.message = tell_reference(target, case, expected) or f"{names[i]}: {finding.message}"
            return finding
        difference = target.compare(output, wanted)
        if difference.message and _is_pytorch_wrong(target, case, expected):
            continue
        finding.note_worst(difference)
        if difference.message:
            finding.message, finding.pattern = f"{names[i]}: {difference.message}", difference.pattern
            return finding
    finding.message = _side_effects(target, case, values, outputs, versions)
    return finding


def _form_of(target: Target, output: Any, wanted: Output, is_output: bool) -> str:
    """Returns what is wrong with an output before its values are looked at."""
    if not isinstance(output, torch.Tensor) or output.shape != wanted.shape or output.dtype != wanted.dtype:
        got = f"{output.dtype} {list(output.shape)}" if isinstance(output, torch.Tensor) else str(output)
        return f"got {got}, expected {wanted.dtype} {list(wanted.shape)}"
    if is_output and type(output) is not torch.Tensor:
        # A subclass may compute its values when they are asked for, or answer comparisons as it likes.
        return f"got a `{type(output).__qualname__}`, expected a plain torch.Tensor"
    device = wanted.device if target.operator is None else target.device
    if output.device.type != device.type or device.index not in (None, output.device.index):
        return f"got a tensor on {output.device}, expected {device}"
    if output.layout != torch.strided:
        return f"got a tensor of layout {output.layout}, expected torch.strided"
    return ""


def _unwritten(target: Target, values: list[Any]) -> list[torch.Tensor]:
    """Returns the tensors among the arguments that a call must leave alone."""
    return tensors_of([v for i, v in enumerate(values) if i not in target.mutated()])


def _side_effects(target: Target, case: Case, values: list[Any], outputs: list[Any], versions: list[int]) -> str:
    mutated, names = target.mutated(), target.argument_names(case)
    for i, (before, after) in enumerate(zip(case.values, values, strict=True)):
        if i not in mutated:
            for a, b in zip(tensors_of([before]), tensors_of([after]), strict=True):
                if not is_same(storage_bytes(b), storage_bytes(a)):
                    return f"{names[i]} was changed by the call"
    # Writing to an empty tensor, such as an empty view of a bias, counts its version up as well.
    is_empty = any(not t.numel() for t in tensors_of(values))
    if not is_empty and [_torch.version_of(t) for t in _unwritten(target, values)] != versions:
        return "an argument was written to, although it holds the same values again"
    of_outputs = target.output_names(len(outputs))
    for i, output in enumerate(outputs):
        for name, value in zip(names, values, strict=False):
            if shares_memory([output], [value]):
                return f"{of_outputs[i]} {SHARES} with {name}"
        for name, other in zip(of_outputs, outputs[:i], strict=False):
            if target.operator is not None and shares_memory([output], [other]):
                return f"{of_outputs[i]} {SHARES} with {name}"
    return ""


def boundaries(target: Target) -> Iterator[Finding]:
    """Integers of the whole range that the reference takes, special values at every place, sizes beside those of tiles.

    What the reference refuses is refused.
    """
    if target.has_samples:
        raise Skipped("its inputs are its samples")
    with torch.no_grad():
        for case in target.within_time(target.boundaries or boundary_cases(target)):
            finding = _check_boundary(target, case)
            yield finding
            if finding.message.startswith(_ACCEPTED):  # what is farther beyond may crash it
                return


def _check_boundary(target: Target, case: Case) -> Finding:
    try:
        expected = expected_of(target, case)
    except Exception as error:  # whatever a reference may raise to refuse
        return Finding(str(case), _tell_accepted(target, case, error))
    return check_call(target, case, target.inputs(case), expected)


def _is_pytorch_wrong(target: Target, case: Case, expected: list[Output | None]) -> bool:
    """Returns whether it is PyTorch that computes here, and is wrong: no author has a kernel to correct.

    With AMX a NaN spreads to other rows in products of bfloat16 matrices, as of 67 by 67 and 67 by 2. On a GPU
    `topk` takes others of equal numbers, and `index_add` adds 16-bit numbers in 16 bits.
    """
    if target.operator is None or is_own(target):
        return False
    if adds_in_any_order(target, outputs_of_reference, case.values):
        return True
    outputs = try_reference(target.reference, target.inputs(case))
    return outputs is not None and bool(find_difference(target, outputs, expected, [""] * len(outputs))[0])


def _tell_accepted(target: Target, case: Case, refusal: Exception) -> str:
    """Returns how a call did not refuse what its reference refuses, "" if it did.

    The type is the reference's, or one of Opwright's: a kernel may say in its own words that it cannot go on.
    """
    wanted = f"the reference raises {type(refusal).__name__}: {first_line(refusal)}"
    values, bands = target.inputs_between_guards(case)
    try:
        outputs = target.run(values)
    except Exception as error:
        is_refused = isinstance(error, (type(refusal), OpwrightError))
        return "" if is_refused else f"raised {type(error).__name__}: {first_line(error)}, where {wanted}"
    if not any(t.numel() for t in tensors_of(outputs)):  # no kernel is called for an empty output: none can refuse
        return ""
    return f"{_ACCEPTED}, where {wanted}" + ("" if bands.are_intact() else "; it wrote outside of its inputs")


_MODERATE, _ROUNDED = 1e4, 1e-3  # inputs, and a share of the largest result that rounding in float64 stays far below


def independence(target: Target) -> Iterator[Finding]:
    """The promise of a variadic axis: an entry depends neither on others nor on its position, also in the reference.

    If the operator is declared batch invariant, the results have the same bits. Outputs without the axis, such as the
    gradient of a weight, are not compared.
    """
    contract, is_invariant = target.operator.contract, target.operator.declaration.batch_invariant
    at = [p.type.variadic_at if p.type else None for p in contract.parameters]
    if joined_axes(contract, [position is not None for position in at]) is None and not is_invariant:
        raise Skipped("no `*` axis is in all outputs")
    with torch.no_grad():
        for case in target.within_time():
            batched = [
                (p.type, v, i)
                for p, v, i in zip(contract.parameters, case.values, at, strict=True)
                if i is not None and v is not None
            ]
            counts = {v.shape[i] if v.ndim >= type_.rank else 0 for type_, v, i in batched}
            if len(counts) != 1 or min(counts) < 2:
                continue
            whole = target.run(target.inputs(case))
            starts = (1, max(counts) - 1) if is_invariant else (1,)  # without the first; the last alone
            messages = (_compare_part(target, case, at, whole, start) for start in starts)
            yield Finding(str(case), next(filter(None, messages), ""))


def _compare_part(target: Target, case: Case, at: list[int | None], whole: Sequence[Any], start: int) -> str:
    """Returns how the entries from `start` on differ from a call on them alone; "" if they do not."""
    operator = target.operator

    def part_of(values: Any) -> tuple[Any, ...]:
        return tuple(_entries_from(start, v, i) for v, i in zip(values, at, strict=True))

    outputs = operator.contract.outputs
    kept = [_entries_from(start, t, o.type.variadic_at) for t, o in zip(whole, outputs, strict=True)]
    alone = target.run(part_of(target.inputs(case)))
    if operator.declaration.batch_invariant:
        for output, a, b in zip(outputs, kept, alone, strict=True):
            if output.type.variadic_at is not None and a is not None and not is_same(_one_nan(a), _one_nan(b)):
                return f"`{output.name}`: the entries from {start} on have different bits in a call on them alone"
        return ""
    if are_same(kept, alone):
        return ""
    names = [f"`{o.name}`" for o in outputs]
    expected = target.expect(outputs_of_reference, part_of(case.values))
    message, _ = find_difference(target, kept, expected, names)
    # PyTorch may add up the whole in another order than the part, as in products of matrices. Both are right then.
    if message and find_difference(target, whole, target.expect(outputs_of_reference, case.values), names)[0]:
        return f"entries 1.. of the whole differ from the call on them: {message}"
    if message and _is_dependent(target, case, part_of, start):
        axes = " and ".join(dict.fromkeys(f"`{o.type.axes[o.type.variadic_at]}`" for o in outputs))
        return (
            f"the reference gives entries 1.. of {axes} other results when called on them alone; entries of a `*` axis "
            'must not depend on each other or on their position, so name the axis, for example "n"'
        )
    return ""


def _is_dependent(target: Target, case: Case, part_of: Callable[[Any], tuple[Any, ...]], start: int) -> bool:
    """Returns whether the reference itself breaks the promise of a variadic axis, by far more than it rounds.

    Indices of equal numbers may come in any order, so integers are not compared.
    """
    values, part = to_oracle(list(case.values)), to_oracle(list(part_of(case.values)))
    if not all(bool((v.double().abs() < _MODERATE).all()) for v in tensors_of(values)):  # NaN neither
        return False  # what is left where large terms cancel
    with few_threads(values):
        whole, alone = target.reference(values), target.reference(part)
    for output, a, b in zip(target.operator.contract.outputs, whole, alone, strict=True):
        if not isinstance(a, torch.Tensor) or not a.is_floating_point():  # an absent gradient is None
            continue
        kept, b = _entries_from(start, a, output.type.variadic_at).double(), b.double()
        room = _ROUNDED * b.abs().amax().item() if b.numel() else 0.0
        if are_finite([kept, b]) and not torch.allclose(kept, b, rtol=_ROUNDED, atol=room):
            return True
    return False


def _one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in which all NaNs have the same bits."""
    return tensor.masked_fill(tensor.isnan(), math.nan) if tensor.is_floating_point() else tensor


def _entries_from(start: int, value: Any, dim: int | None) -> Any:
    """Returns a tensor without its first entries along a dimension; what has none, as it is."""
    if dim is None or value is None or value.ndim <= dim or not value.shape[dim]:
        return value
    return value.narrow(dim, start, value.shape[dim] - start)


# --- determinism -------------------------------------------------------------------------------------------


def determinism(target: Target) -> Iterator[Finding]:
    """The same input gives the same bits: at once, and after another one; in memory of its own.

    And one tensor for two arguments, or two that overlap, give what two of their own memory would.
    """
    cases, for_one_tensor = target.cases(), target.run_cases()
    others = {id(case): other for case, other in zip(cases, [*cases[1:], *cases[:1]], strict=True)}
    with torch.no_grad():
        for case in target.within_time():
            other = others[id(case)]
            kept = tensors_of(target.run(target.inputs(case)))
            copies = copy_of(kept)
            first = [bits_of(t) for t in copies]

            def repeats(results: Any, case: Case = case, copies: Any = copies) -> bool:
                return agree(target, tensors_of(results), copies, outputs_of_reference, case.values)

            second = tensors_of(target.run(target.inputs(case)))
            message = ""
            if shares_memory(kept, second):
                message = "its outputs lie in memory that the next call writes into"
            elif not repeats(second):
                what = "two calls with the same inputs give different results"
                if _is_steady_in_place(target, case):
                    what = "equal inputs elsewhere in memory give different results: it goes by their address"
                message = f"{what}{_how_far(target, kept, second)}"
            else:
                target.run(target.inputs(other))
                if not repeats(target.run(target.inputs(case))):
                    message = "different bits after a call with other inputs: it keeps something from call to call"
                elif not _have_bits(kept, first):
                    message = "its outputs lie in memory that the next call writes into"
            if not message and any(case is each for each in for_one_tensor):
                message = _wrong_for_one_tensor_twice(target, case)
            yield Finding(str(case), message)


def _is_steady_in_place(target: Target, case: Case) -> bool:
    """Returns whether calls with the very same tensors give the same bits."""
    if target.mutated():
        return False
    values = target.inputs(case)
    first = [bits_of(t).clone() for t in tensors_of(target.run(values))]
    return all(_have_bits(tensors_of(target.run(values)), first) for _ in range(4))


def _how_far(target: Target, first: list[torch.Tensor], second: list[torch.Tensor]) -> str:
    if len(first) != len(second):
        return ""
    for name, a, b in zip(target.output_names(len(first)), first, second, strict=False):
        if a.shape == b.shape and a.dtype == b.dtype and not is_same(a, b):
            differ = (bits_of(a) != bits_of(b)).sum()
            return f"; {int(differ)} of {a.numel()} elements of {name} differ"
    return ""


def interchangeable(target: Target, case: Case) -> tuple[int, int] | None:
    """Returns the positions of two arguments that may be one tensor, if there are any."""
    count = len(case.values) if target.callables is None else case.values[-1].arguments
    pair = two_alike(case.values[:count])
    if pair is None or target.mutated() or not set(pair) <= target.free_tensors(case):
        return None
    return pair if case.values[pair[0]].dtype == case.values[pair[1]].dtype else None


def _wrong_for_one_tensor_twice(target: Target, case: Case) -> str:
    pair = interchangeable(target, case)
    if pair is None:
        return ""
    names = target.argument_names(case)
    for share, what in (
        (lambda tensor: (tensor, tensor), "are one tensor"),
        (_overlapping, "share memory, one element apart"),
    ):
        values = target.inputs(case)
        values[pair[0]], values[pair[1]] = share(values[pair[0]])
        try:
            given = copy_of(values, CPU if target.operator is not None else None)
            expected = target.expect(outputs_of_reference, given)
        except Exception:  # not an input that it takes
            return ""
        results = target.run(values)
        message, _ = find_difference(target, results, expected, target.output_names(len(expected)))
        if message and not agree(target, target.run(copy_of(values)), results, outputs_of_reference, given):
            return f"{names[pair[0]]} and {names[pair[1]]} {what}: {message}"
    return ""


def _overlapping(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tensors of the values of one; the second begins one element behind the first."""
    flat = tensor.reshape(-1)
    memory = torch.cat([flat, flat[:1]])
    return memory[:-1].view(tensor.shape), memory[1:].view(tensor.shape)


def _have_bits(tensors: list[torch.Tensor], bits: list[torch.Tensor]) -> bool:
    return len(tensors) == len(bits) and all(torch.equal(bits_of(t), b) for t, b in zip(tensors, bits, strict=True))


# --- fresh data --------------------------------------------------------------------------------------------


def fresh_data(target: Target) -> Iterator[Finding]:
    """New values in the same memory: the outputs follow, also where ends, sum and extremes stay the same."""
    with torch.no_grad():
        for case in representatives(target):
            at = target.free_tensors(case)
            if not at:
                continue
            original = _change_case(target, case, at, _on_grid) if not case.label.startswith("sample") else case
            variants = [
                ("", original),
                ("two elements in the middle exchanged", _change_case(target, original, at, _exchange)),
                ("an element in the middle changed", _change_case(target, original, at, _change_one)),
                ("other values", _change_case(target, original, at, _reverse)),
                ("the first values again", original),
            ]
            if target.effort != "full" and case.label == "large":
                variants = variants[:2]
            values = target.inputs(original)
            finding = Finding(str(case))
            for i, (what, variant) in enumerate(variants):
                if variant is not original and try_reference(target.reference, variant.values) is None:
                    continue
                if what:
                    fill_from(values, target.inputs(variant))
                key = "fresh data", id(case), 0 if variant is original else i
                expected = target.remember(key, lambda v=variant: expected_of(target, v))
                finding = check_call(target, variant, values, expected)
                if finding.message:
                    finding.message = f"the same memory with {what}: {finding.message}" if what else finding.message
                    break
            finding.case = str(case)
            yield finding


def representatives(target: Target) -> list[Case]:
    """Returns a small input of each dtype, and a large one."""
    if target.operator is None or target.has_samples:
        return target.run_cases()
    small = {case.dtype: case for case in reversed(target.cases()) if case.label == "base"}
    return list({id(c): c for c in [*small.values(), *target.run_cases()]}.values())


def _change_case(target: Target, case: Case, at: set[int], change: Any) -> Case:
    """Returns a case whose floating-point tensors are changed, within their domains.

    Where there are none, whole numbers are exchanged.
    """
    has_floats = any(t.is_floating_point() for t in tensors_of([v for i, v in enumerate(case.values) if i in at]))

    def can_change(value: torch.Tensor) -> bool:
        if has_floats:
            return value.is_floating_point()
        return change is _exchange and value.dtype != torch.bool

    def changed(value: Any, position: int) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(changed(v, position) for v in value)
        if not isinstance(value, torch.Tensor) or not can_change(value):
            return value
        if not value.numel() or overlaps_itself(value):
            return value
        made = copy_of(value)
        if is_sorted(value) and case.label.startswith("sample"):  # edges or offsets must stay sorted
            return made.mul_(0.75) if change is _reverse and value.is_floating_point() else value
        made.copy_(target.fold(change(value.reshape(-1).clone()), position).view(value.shape))
        return made

    values = tuple(changed(v, i) if i in at else v for i, v in enumerate(case.values))
    return replace(case, values=values)


def _on_grid(flat: torch.Tensor) -> torch.Tensor:
    """Rounds to eighths, of which every sum is exact in any order: what adds them up sees no exchange."""
    return (flat * 8).round().clamp(-32, 32) / 8


def _exchange(flat: torch.Tensor) -> torch.Tensor:
    inner = flat[1:-1]
    if inner.numel() > 1:
        low, high = int(inner.argmin()), int(inner.argmax())
        flat[[1 + low, 1 + high]] = flat[[1 + high, 1 + low]]
    return flat


def _change_one(flat: torch.Tensor) -> torch.Tensor:
    flat[flat.numel() // 2] += 0.5
    return flat


def _reverse(flat: torch.Tensor) -> torch.Tensor:
    return 0.5 * flat.flip(0)


# --- global state ------------------------------------------------------------------------------------------


def global_state(target: Target) -> Iterator[Finding]:
    """A call leaves random numbers, the environment and the threads of the process as they were.

    Settings are compared at every call of every check, by `Guard`.
    """
    for case in target.run_cases():
        with torch.no_grad():
            values = target.inputs(case)
            before = read_passing_state(target.device)
            target.run(values)
            after = read_passing_state(target.device)
        changed = [name for name, value in before.items() if after.get(name) != value]
        yield Finding(str(case), f"the call changed {', '.join(changed)}" if changed else "")


def numerics_of_samples(target: Target) -> Iterator[Finding]:
    """Every output of every case against the float64 oracle; and of other options and sizes, unless it refuses them."""
    yield from numerics(target)
    with torch.no_grad():
        more = itertools.chain(cases_with_other_options(target), resized_cases(target))
        for case in target.within_time(more):
            finding = check_call(target, case, target.inputs(case), expected_of(target, case))
            if not finding.message.startswith(RAISED) and not (is_of_one(case) and SHARES in finding.message):
                yield finding
