"""Checks of memory: what a call writes, and what it reads outside of its tensors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from opwright.contract.fill import LAYOUTS, lay_out
from opwright.contract.memory import overlaps_itself
from opwright.contract.sweep import Case
from opwright.dispatch.reference import absent_gradient
from opwright.errors import OpwrightError
from opwright.verify.checks.finding import (
    Finding,
    Skipped,
    agree,
    find_difference,
    first_line,
    outputs_by_contract,
    outputs_of_reference,
    tell_difference_from,
    tell_reference,
)
from opwright.verify.checks.numerics import expected_of
from opwright.verify.compare import pattern_of, tell_share
from opwright.verify.devices import raise_if_lost
from opwright.verify.oracle import try_reference
from opwright.verify.target import Target
from opwright.verify.tensors import are_same, bits_of, copy_of, fill_from, is_same, storage_bytes, tensors_of

_GUARD = 64  # elements on either side of an output
_WRITES_AROUND = "it writes outside of its inputs"
_WRITES_ELSEWHERE = "the kernel writes outside of its output"


def outputs_written(target: Target) -> Iterator[Finding]:
    """`out=` tensors filled with garbage, between guard bands: all written, nothing around them, in any layout.

    Outputs that share memory, with themselves or with an argument, are refused or right. This check comes first, because a kernel that writes elsewhere would bring the process down in any other.
    """
    operator = target.operator
    if not operator.contract.outputs:
        raise Skipped("no outputs: it only mutates")
    complaints: dict[torch.dtype | None, str] = {}
    generators, where = (torch.cuda, [target.device]) if target.device.type == "cuda" else (torch, [])
    with torch.no_grad():
        for case in target.within_time():
            outputs = outputs_by_contract(target, case)
            if case.dtype not in complaints:
                complaints[case.dtype] = tell_reference(
                    target, case, try_reference(target.reference, case.values) or []
                )
                if complaints[case.dtype]:
                    yield Finding(str(case), complaints[case.dtype])
            if complaints[case.dtype]:
                continue
            buffers, outs = [], []
            for shape, dtype in outputs:
                size = math.prod(shape)
                buffer = torch.full((size + 2 * _GUARD,), _poison(dtype), dtype=dtype, device=target.device)
                buffers.append(buffer)
                outs.append(buffer[_GUARD : _GUARD + size].view(shape))
            values, bands = target.inputs_between_guards(case)
            random = generators.get_rng_state(*where)
            try:
                target.call_with_out(values, outs)
            except OpwrightError:
                message = tell_reference(target, case, try_reference(target.reference, case.values) or [])
                if not message:
                    raise
                yield Finding(str(case), message)
                continue
            target.wait(target.device)
            if not bands.are_intact():
                yield Finding(str(case), _WRITES_AROUND, is_fatal=_WRITES_AROUND)
                return
            for out, buffer in zip(outs, buffers, strict=True):
                edges = torch.cat([buffer[:_GUARD], buffer[_GUARD + out.numel() :]])
                if not is_same(edges, torch.full_like(edges, _poison(edges.dtype))):
                    yield Finding(str(case), _WRITES_ELSEWHERE, is_fatal=_WRITES_ELSEWHERE)
                    return
            given = target.inputs(case)
            if operator.declaration.random:
                generators.set_rng_state(random, *where)
            results = target.run(given)
            is_same_again = agree(target, results, outs, outputs_of_reference, case.values)
            yield Finding(str(case)) if is_same_again else _tell_unwritten(target, case, outs, results)
        for case in [] if operator.declaration.random else target.run_cases():
            for what, message in _try_layouts(target, case):
                is_damage = _WRITES_ELSEWHERE if message == _WRITES_ELSEWHERE else ""
                yield Finding(f"{case}, {what}", message, is_fatal=is_damage)
                if is_damage:
                    return


def _tell_unwritten(target: Target, case: Case, outs: Sequence[torch.Tensor], results: Sequence[Any]) -> Finding:
    for name, out, result in zip(target.output_names(len(outs)), outs, results, strict=True):
        if result is None or result.shape != out.shape:
            continue
        poison = torch.full_like(out, _poison(out.dtype))
        left = (bits_of(out) == bits_of(poison)) & (result != poison)
        if bool(left.any()):
            count, total = int(left.sum()), left.numel()
            return Finding(str(case), f"{name}: {tell_share(count, total)} not written", pattern_of(left))
    return Finding(str(case), _tell_unsteady(target, case, outs, results))


def _tell_unsteady(target: Target, case: Case, outs: Sequence[torch.Tensor], results: Sequence[Any]) -> str:
    """Returns why a call with `out=` and one without give different values: neither need be the cause."""

    def differ(some: Sequence[Any], others: Sequence[Any]) -> bool:
        return not agree(target, some, others, outputs_of_reference, case.values)

    def call_into(fill: Any) -> list[torch.Tensor]:
        made = [torch.full_like(out, fill(out.dtype)) for out in outs]
        target.call_with_out(target.inputs(case), made)
        target.wait(target.device)
        return made

    if not target.operator.declaration.random:
        poisoned, zeroed = ([call_into(fill) for _ in range(2)] for fill in (_poison, lambda dtype: 0))
        is_steady = not differ(*zeroed) and not differ(*poisoned) and not differ(poisoned[0], outs)
        if is_steady and differ(zeroed[0], outs):
            return "it reads its output before it has written it; the memory of an output is not zero"
        if not is_steady or differ(target.run(target.inputs(case)), results):
            return "two calls with the same inputs give different results"
    return "the out variant gives different values than a call without `out=`"


def _try_layouts(target: Target, case: Case) -> Iterator[tuple[str, str]]:
    """Yields layouts of `out=` with what is wrong with the call, "" where nothing is."""
    contract, given = target.operator.contract, target.inputs(case)
    results = [
        absent_gradient(contract, declared, given) if result is None else result
        for declared, result in zip(contract.outputs, target.run(given), strict=True)
    ]
    for layout in LAYOUTS:
        if layout == "expanded":
            continue
        outs = [_make_out(result, layout) for result in results]
        around = [copy_of(out) for out in outs]
        message = _call_with(target, target.inputs(case), outs)
        if not message and any(
            not is_same(storage_bytes(out), storage_bytes(copy.copy_(out)))
            for out, copy in zip(outs, around, strict=True)
        ):
            message = _WRITES_ELSEWHERE
        yield f"{layout} `out=`", message or _tell_difference(target, case, outs, results)
    for layout, share in (("expanded", _expand), ("overlapping", _overlap)):
        shared = [share(result) for result in results]
        if any(overlaps_itself(out) for out in shared):
            message = _call_with(target, target.inputs(case), shared)
            yield f"{layout} `out=`", "" if message else "it is accepted, although its elements share memory"
    for i, result in enumerate(results):
        for at, value in enumerate(case.values):
            if at in target.mutated() or not isinstance(value, torch.Tensor) or not value.numel():
                continue
            if value.shape == result.shape and value.dtype == result.dtype:
                yield from _try_shared_with_argument(target, case, results, i, at)


def _try_shared_with_argument(
    target: Target, case: Case, results: list[torch.Tensor], i: int, at: int
) -> Iterator[tuple[str, str]]:
    """Yields an output that is an argument, and one that begins one element behind it."""
    for shift, what in ((0, "is"), (1, "overlaps")):
        values, like = target.inputs(case), results[i]
        buffer = torch.full((like.numel() + 1,), _poison(like.dtype), dtype=like.dtype, device=target.device)
        argument = buffer[: like.numel()].view(like.shape).copy_(values[at])
        values[at] = argument
        outs = [_make_out(result, "contiguous") for result in results]
        outs[i] = buffer[shift : shift + like.numel()].view(like.shape)
        message = _call_with(target, values, outs)
        # Refused is right, and so is the result.
        is_right = message or not _tell_difference(target, case, outs, results)
        output, argument_name = target.output_names(len(results))[i], target.argument_names(case)[at]
        yield (
            f"`out=` for {output} {what} {argument_name}",
            "" if is_right else "it is accepted, and the result is wrong",
        )


def _tell_difference(target: Target, case: Case, outs: list[torch.Tensor], results: list[torch.Tensor]) -> str:
    """Returns what is wrong with outputs; a kernel may round otherwise where they are laid out otherwise."""
    if are_same(outs, results):
        return ""
    expected = expected_of(target, case)[: len(outs)]  # behind the outputs: what is mutated
    message, _ = find_difference(target, outs, expected, target.output_names(len(outs)))
    return message and f"the out variant gives different values: {message}"


def _call_with(target: Target, values: list[Any], outs: list[torch.Tensor]) -> str:
    """Calls the out variant; returns how it refuses, "" if it does not."""
    try:
        target.call_with_out(values, outs)
        target.wait(target.device)
    except Exception as error:
        raise_if_lost(target.device, error)
        return f"raised {type(error).__name__}: {first_line(error)}"
    return ""


def _make_out(like: torch.Tensor, layout: str) -> torch.Tensor:
    def fill(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, _poison(like.dtype), dtype=like.dtype, device=like.device)

    return lay_out(fill, tuple(like.shape), layout)


def _expand(like: torch.Tensor) -> torch.Tensor:
    return like.flatten()[:1].clone().view([1] * like.ndim).expand(like.shape) if like.numel() else like


def _overlap(like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose rows begin one element apart."""
    memory = torch.zeros(sum(like.shape) + 1, dtype=like.dtype, device=like.device)
    return memory.as_strided(like.shape, [1] * like.ndim)


def _poison(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return -1234.5
    return True if dtype == torch.bool else 77


# Of calls between NaN and between zeros: no count of calls, and no state that turns with every call, goes with them.
_WITH_ZEROS = (False, True, True, False, True, False, False, True)


def guard_bands(target: Target) -> Iterator[Finding]:
    """Inputs between guard bands: nothing is written there, and NaN in them gives the results that zeros give.

    The inputs stay where they are in memory, so nothing but the bands differs between two calls. Where calls differ
    between equal bands as well, they prove nothing.
    """
    with torch.no_grad():
        for case in target.within_time():
            values, bands = target.inputs_between_guards(case)
            by_filling: dict[bool, list[list[torch.Tensor]]] = {True: [], False: []}
            message = ""
            for count, with_zeros in enumerate(_WITH_ZEROS):
                if count == 2 and are_same(by_filling[False], by_filling[True]):
                    break
                bands.fill(with_zeros)
                if count:
                    fill_from([values[i] for i in target.mutated()], [case.values[i] for i in target.mutated()])
                results = [*target.run(values), *target.written(values)]
                by_filling[with_zeros].append([t.clone() for t in tensors_of(results)])
                if not with_zeros and not bands.are_intact():
                    yield Finding(str(case), _WRITES_AROUND, is_fatal=_WRITES_AROUND)
                    return
            else:
                if all(are_same(one, found[0]) for found in by_filling.values() for one in found[1:]):
                    what = "different values when NaN lies around its inputs than when zeros do"
                    message = f"{what}: it reads outside of them{_tell_strides(target, case)}"
            yield Finding(str(case), message)


def _tell_strides(target: Target, case: Case) -> str:
    """Returns which argument may be read as if it were contiguous; "" where all of them are."""
    named = zip(target.argument_names(case), case.values, strict=False)
    strided = [name for name, v in named if isinstance(v, torch.Tensor) and not v.is_contiguous()]
    return f"; are the strides of {' and '.join(strided)} ignored?" if strided else ""


def outputs_written_of_callable(target: Target) -> Iterator[Finding]:
    """With memory that torch.empty fills with NaN, or the largest integer: nothing of it is left.

    It comes first, so the first call of all is here: it gives what later ones give.
    """
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    for case in target.run_cases():
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # of operators that have no deterministic algorithm
            alone = target.run(target.inputs(case))
            values = target.inputs(case)
            try:
                torch.use_deterministic_algorithms(True, warn_only=True)
                torch.utils.deterministic.fill_uninitialized_memory = True
                outputs = target.run(values)
            finally:
                torch.use_deterministic_algorithms(was[0], warn_only=was[1])
                torch.utils.deterministic.fill_uninitialized_memory = filled
        yield _compare_calls(target, case, alone, outputs)


def _compare_calls(target: Target, case: Case, alone: Sequence[Any], outputs: Sequence[Any]) -> Finding:
    """Compares two calls where they differ; where both are wrong in the same way, other checks say so."""
    for what, first, second in (
        ("in memory full of NaN", alone, outputs),
        ("the first call with it is wrong, the second right", outputs, alone),
    ):
        message, pattern = tell_difference_from(target, case.values, first, second)
        if message:
            return Finding(str(case), f"{what}: {message}", pattern)
    return Finding(str(case))
