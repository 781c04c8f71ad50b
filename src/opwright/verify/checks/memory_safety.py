"""Checks of memory: what a call writes, and what it reads outside of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import warnings
from collections.abc import Sequence
from opwright.verify.checks.finding import tell_difference_from
from opwright.spec.fill import LAYOUTS, lay_out
from opwright.spec.memory import overlaps_itself
from opwright.spec.samples import Case
from opwright.verify.checks.finding import Finding, Skipped, agree, first_line, outputs_of_reference
from opwright.verify.checks.numerics import expected_of
from opwright.verify.devices import DeviceLost, is_lost
from opwright.verify.target import Subject
from opwright.verify.tensors import are_same, copy_of, is_same, storage_bytes, tensors_of

_GUARD = 64  # elements on either side of an output
_WRITES_AROUND = "it writes outside of its inputs"
_WRITES_ELSEWHERE = "the kernel writes outside of its output"


def outputs_written(subject: Subject) -> Iterator[Finding]:
    """`out=` tensors filled with garbage, between guard bands: all written, nothing around them, in any layout.

    Outputs that share memory, with themselves or with an argument, are refused or right. This check comes first, because a kernel that writes elsewhere would bring the process down in any other.
    """
    operator = subject.operator
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
            values, bands = subject.guarded_inputs(case)
            random = _random_state(subject.device)
            operator.call_with_out(tuple(values), outs[0] if len(outs) == 1 else tuple(outs))
            subject.wait(subject.device)
            if not bands.are_intact():
                yield Finding(str(case), _WRITES_AROUND, is_fatal=_WRITES_AROUND)
                return
            for out, buffer in zip(outs, buffers, strict=True):
                edges = torch.cat([buffer[:_GUARD], buffer[_GUARD + out.numel() :]])
                if not is_same(edges, torch.full_like(edges, _poison(edges.dtype))):
                    yield Finding(str(case), _WRITES_ELSEWHERE, is_fatal=_WRITES_ELSEWHERE)
                    return
            given = subject.inputs(case)
            if operator.declaration.random:
                _set_random_state(subject.device, random)
            same = agree(subject, subject.run(given), outs, outputs_of_reference, case.values)
            yield Finding(str(case), "" if same else "the out variant gives other values, or leaves some unwritten")
        for case in [] if operator.declaration.random else subject.run_cases():
            for what, message in _laid_out(subject, case):
                is_damage = _WRITES_ELSEWHERE if message == _WRITES_ELSEWHERE else ""
                yield Finding(f"{case}, {what}", message, is_fatal=is_damage)
                if is_damage:
                    return


def _laid_out(subject: Subject, case: Case) -> Iterator[tuple[str, str]]:
    """Yields layouts of `out=` with what is wrong with the call, "" where nothing is."""
    results = [
        tensors_of(case.values)[0].new_empty(0, device=subject.device) if r is None else r
        for r in subject.run(subject.inputs(case))
    ]
    for layout in LAYOUTS:
        if layout == "expanded":
            continue
        outs = [_make_out(result, layout) for result in results]
        around = [copy_of(out) for out in outs]
        message = _call_with(subject, subject.inputs(case), outs)
        if not message and any(
            not is_same(storage_bytes(out), storage_bytes(copy.copy_(out)))
            for out, copy in zip(outs, around, strict=True)
        ):
            message = _WRITES_ELSEWHERE
        yield f"{layout} `out=`", message or _difference(subject, case, outs, results)
    for layout, share in (("expanded", _expand), ("overlapping", _overlap)):
        shared = [share(result) for result in results]
        if any(overlaps_itself(out) for out in shared):
            message = _call_with(subject, subject.inputs(case), shared)
            yield f"{layout} `out=`", "" if message else "it is accepted, although its elements share memory"
    for i, result in enumerate(results):
        for at, value in enumerate(case.values):
            if at in subject.mutated() or not isinstance(value, torch.Tensor) or not value.numel():
                continue
            if value.shape == result.shape and value.dtype == result.dtype:
                yield from _shared_with_argument(subject, case, results, i, at)


def _shared_with_argument(
    subject: Subject, case: Case, results: list[torch.Tensor], i: int, at: int
) -> Iterator[tuple[str, str]]:
    """Yields an output that is an argument, and one that begins one element behind it."""
    for shift, what in ((0, "is"), (1, "overlaps")):
        values, like = subject.inputs(case), results[i]
        buffer = torch.full((like.numel() + 1,), _poison(like.dtype), dtype=like.dtype, device=subject.device)
        argument = buffer[: like.numel()].view(like.shape).copy_(values[at])
        values[at] = argument
        outs = [_make_out(result, "contiguous") for result in results]
        outs[i] = buffer[shift : shift + like.numel()].view(like.shape)
        message = _call_with(subject, values, outs)
        # Refused is right, and so is the result.
        is_right = message or not _difference(subject, case, outs, results)
        output, argument_name = subject.output_names(len(results))[i], subject.argument_names(case)[at]
        yield (
            f"`out=` for {output} {what} {argument_name}",
            "" if is_right else "it is accepted, and the result is wrong",
        )


def _difference(subject: Subject, case: Case, outs: list[torch.Tensor], results: list[torch.Tensor]) -> str:
    """Returns what is wrong with outputs; a kernel may round otherwise where they are laid out otherwise."""
    if are_same(outs, results):
        return ""
    for out, wanted in zip(outs, expected_of(subject, case), strict=False):  # behind the outputs: what is mutated
        message = "" if wanted is None else subject.compare(out, wanted).message
        if message:
            return f"the out variant gives other values: {message}"
    return ""


def _call_with(subject: Subject, values: list[Any], outs: list[torch.Tensor]) -> str:
    """Calls the out variant; returns how it refuses, "" if it does not."""
    try:
        subject.operator.call_with_out(tuple(values), outs[0] if len(outs) == 1 else tuple(outs))
        subject.wait(subject.device)
    except DeviceLost:
        raise
    except Exception as error:
        if is_lost(subject.device):
            raise DeviceLost(str(error)) from error
        return f"raised {type(error).__name__}: {first_line(error)}"
    return ""


def _make_out(like: torch.Tensor, layout: str) -> torch.Tensor:
    """Returns a tensor of garbage in a layout."""

    def fill(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, _poison(like.dtype), dtype=like.dtype, device=like.device)

    return lay_out(fill, tuple(like.shape), layout)


def _expand(like: torch.Tensor) -> torch.Tensor:
    return like.flatten()[:1].clone().view([1] * like.ndim).expand(like.shape) if like.numel() else like


def _overlap(like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose rows begin one element apart."""
    memory = torch.zeros(sum(like.shape) + 1, dtype=like.dtype, device=like.device)
    return memory.as_strided(like.shape, [1] * like.ndim)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def _poison(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return -1234.5
    return True if dtype == torch.bool else 77


# Of calls between NaN and between zeros: no count of calls, and no state that turns with every call, goes with them.
_WITH_ZEROS = (False, True, True, False, True, False, False, True)


def guard_bands(subject: Subject) -> Iterator[Finding]:
    """Inputs between guard bands: nothing is written there, and NaN in them gives the results that zeros give.

    The inputs stay where they are in memory, so nothing but the bands differs between two calls. Where calls differ
    between equal bands as well, they prove nothing.
    """
    with torch.no_grad():
        for _, case in subject.cases():
            values, bands = subject.guarded_inputs(case)
            by_filling: dict[bool, list[list[torch.Tensor]]] = {True: [], False: []}
            message = ""
            for count, with_zeros in enumerate(_WITH_ZEROS):
                if count == 2 and are_same(by_filling[False], by_filling[True]):
                    break
                bands.fill(with_zeros)
                for i in subject.mutated() if count else ():
                    _restore(values[i], case.values[i])
                results = [*subject.run(values), *(values[i] for i in subject.mutated())]
                by_filling[with_zeros].append([t.clone() for t in tensors_of(results)])
                if not with_zeros and not bands.are_intact():
                    yield Finding(str(case), _WRITES_AROUND, is_fatal=_WRITES_AROUND)
                    return
            else:
                if all(are_same(one, found[0]) for found in by_filling.values() for one in found[1:]):
                    message = (
                        "other values when NaN lies around its inputs than when zeros do: it reads outside of them"
                    )
            yield Finding(str(case), message)


def _restore(value: Any, original: Any) -> None:
    for target, source in zip(tensors_of([value]), tensors_of([original]), strict=True):
        if not torch._debug_has_internal_overlap(target):
            target.copy_(source)


def outputs_written_by_callable(subject: Subject) -> Iterator[Finding]:
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
        message, pattern = tell_difference_from(subject, case.values, first, second)
        if message:
            return Finding(str(case), f"{what}: {message}", pattern)
    return Finding(str(case))
