"""Checks of memory: what a call writes, and what it reads outside of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opwright.verify.finding import Finding, Skipped, need_operator
from opwright.verify.subject import Subject
from opwright.verify.tensors import are_same, copy_of, is_same, tensors_of

_GUARD = 64  # elements on either side of an output
_WRITES_AROUND = "it writes outside of its inputs"
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
            values, are_intact = subject.guarded_inputs(case)
            random = _random_state(subject.device)
            operator.call_with_out(tuple(values), outs[0] if len(outs) == 1 else tuple(outs))
            subject.wait(subject.device)
            if not are_intact():
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
            same = are_same(subject.run(given), outs)
            yield Finding(
                str(case), "" if same else "the out variant gives other values, or leaves some unwritten"
            )


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


def guard_bands(subject: Subject) -> Iterator[Finding]:
    """Inputs between guard bands of NaN: nothing written there, and the results those of other surroundings."""
    mutated = subject.mutated()
    with torch.no_grad():
        for _, case in subject.cases():
            values, are_intact = subject.guarded_inputs(case)
            got = [*subject.run(values), *(values[i] for i in mutated)]
            if not are_intact():
                yield Finding(str(case), _WRITES_AROUND, is_fatal=_WRITES_AROUND)
                return
            values = subject.inputs(case)
            plain = [*subject.run(values), *(values[i] for i in mutated)]
            same = are_same(got, plain)
            yield Finding(
                str(case), "" if same else "other values when NaN lies around its inputs: it reads outside of them"
            )
