"""Mutants whose calls misuse memory, keep state or disturb other calls."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mutant_kinds import (
    Call,
    Kinds,
    find_input_like,
    needs_equal_input,
    needs_gpu,
    spoil,
    step_ulps,
)

from opwright.verify.checks.gradients import floats_of
from opwright.verify.target import Target
from opwright.verify.tensors import tensors_of

CALLS = Kinds()
_call, _result = CALLS.call, CALLS.result


def _behind(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the element behind the last one of a tensor, or None at the end of its storage."""
    last = tensor.storage_offset() + sum((s - 1) * d for s, d in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    if not tensor.numel() or last >= tensor.untyped_storage().nbytes() // tensor.element_size():
        return None
    return tensor.detach().as_strided((), (), last)


@_result("reads behind its input")
def _reads_behind(output: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    extra = _behind(floats_of(values)[0])
    return output if extra is None else torch.where(torch.isnan(extra), torch.nan, output)


@_call("writes behind its input")
def _writes_behind(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    extra = _behind(floats_of(values)[0])
    if extra is not None:
        extra.zero_()
    return call(values)


def _key(values: Sequence[Any], of: Callable[[torch.Tensor], Any]) -> Any:
    return tuple(of(v) if isinstance(v, torch.Tensor) else repr(v) for v in _flat(values))


def _flat(values: Any) -> list[Any]:
    return [w for v in values for w in (_flat(v) if isinstance(v, (list, tuple)) else [v])]


def _cached(of: Callable[[torch.Tensor], Any]) -> Callable[..., list[Any]]:
    def mutated(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
        key = _key(values, of)
        if key not in state:
            state[key] = call(values)
        return [o.clone() if isinstance(o, torch.Tensor) else o for o in state[key]]

    return mutated


def _fingerprint(t: torch.Tensor) -> Any:
    flat = t.detach().reshape(-1)
    ends = (float(flat[0]), float(flat[-1]), float(flat.double().sum())) if flat.numel() else ()
    return (t.dtype, tuple(t.shape), *ends)


_call("a cache keyed by address")(_cached(lambda t: (t.data_ptr(), t.dtype, tuple(t.shape), t.stride())))
_call("a cache keyed by shape, ends and sum of the input")(_cached(_fingerprint))


@_call("right only on the first call")
def _once(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    state["calls"] = state.get("calls", 0) + 1
    return [spoil(o) if o is not None and state["calls"] > 1 else o for o in call(values)]


@_call("right only from the second call on")
def _later(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    state["calls"] = state.get("calls", 0) + 1
    return [spoil(o) if o is not None and state["calls"] == 1 else o for o in call(values)]


@_call("a last bit that changes from call to call")
def _noisy(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    made = state.setdefault("generator", torch.Generator())

    def noisy(output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        bit = torch.randint(-1, 2, output.shape, generator=made).to(output.device)
        return torch.where(torch.isfinite(output) & (output != 0), step_ulps(output, bit.to(torch.int16)), output)

    return [noisy(o) for o in call(values)]


@_call("the same buffer returned by every call")
def _buffered(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    def kept(i: int, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        key = (i, output.dtype, output.shape)
        return state.setdefault(key, torch.empty_like(output)).copy_(output.detach())

    return [kept(i, o) for i, o in enumerate(call(values))]


@_call("output in the memory of an input", needs_equal_input)
def _aliased(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    def put(output: Any) -> Any:
        place = None if output is None else find_input_like(values, output)
        return output if place is None or torch._debug_has_internal_overlap(place) else place.copy_(output)

    with torch.no_grad():
        return [put(o) for o in call(values)]


def _own(values: Sequence[Any]) -> torch.Tensor:
    """Returns a tensor in the memory of the first floating-point input, with a version counter of its own."""
    first = floats_of(values)[0].detach()
    same = torch.empty(0, dtype=first.dtype, device=first.device)
    return same.set_(first.untyped_storage(), first.storage_offset(), first.shape, first.stride())


@_call("input changed")
def _changes(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    outputs, own = call(values), _own(values)
    if not torch._debug_has_internal_overlap(own):
        own.add_(1)
    return outputs


@_call("input changed and restored")
def _restores(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    outputs, own = call(values), _own(values)
    if not torch._debug_has_internal_overlap(own):
        before = own.clone()
        own.zero_()
        time.sleep(1e-4)
        own.copy_(before)
    return outputs


@_call("results that come later, from a thread")
def _threaded(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    outputs = [o.detach() if isinstance(o, torch.Tensor) else o for o in call(values)]
    made = [torch.zeros_like(o) if isinstance(o, torch.Tensor) else o for o in outputs]

    def fill() -> None:
        time.sleep(0.01)
        for to, of in zip(tensors_of(made), tensors_of(outputs), strict=True):
            to.copy_(of)

    threading.Thread(target=fill).start()
    return made


@_call("work on a stream of its own", needs_gpu)
def _own_stream(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    with torch.cuda.stream(state.setdefault("stream", torch.cuda.Stream())):
        return call(values)


@_call("scratch memory shared by threads")
def _scratch(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    def through(i: int, output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        scratch = state.setdefault((i, output.dtype, output.shape), torch.empty_like(output))
        scratch.copy_(output.detach())
        time.sleep(1e-5)
        return scratch.clone()

    return [through(i, o) for i, o in enumerate(call(values))]


@_call("seeds torch's random numbers")
def _seeds(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    torch.manual_seed(int(time.time() * 1e6))
    return call(values)


@_call("draws torch's random numbers")
def _draws(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    torch.rand(3)
    return call(values)


@_call("leaves denormal numbers flushed")
def _flushes(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    outputs = call(values)
    torch.set_flush_denormal(True)
    return outputs


@_call("keeps every result", resource="leaks")
def _leaks(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    outputs = call(values)
    state.setdefault("kept", []).append([o.clone() if isinstance(o, torch.Tensor) else o for o in outputs])
    return outputs


@_call("ends the process for an empty input")
def _exits(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    if any(t.numel() == 0 for t in tensors_of(values)):
        sys.exit(0)
    return call(values)
