"""Mutants whose results are wrong everywhere, in some places or for some inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mutant_kinds import (
    Call,
    Kinds,
    find_input_like,
    find_option,
    find_row,
    needs_dtype,
    needs_equal_input,
    needs_interchangeable,
    needs_large,
    needs_negative_zero,
    needs_option,
    needs_output,
    needs_outputs,
    needs_row,
    needs_several,
    needs_two_alike,
    spoil,
    step_ulps,
)

from opwright.verify.checks.gradients import floats_of
from opwright.verify.oracle import to_oracle
from opwright.verify.target import Target
from opwright.verify.tensors import tensors_of, two_alike

RESULTS = Kinds()
_call, _result = RESULTS.call, RESULTS.result


def _where(mask: Any, changed: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, changed, output) if isinstance(mask, torch.Tensor) else changed if mask else output


def _mask(values: Sequence[Any], output: torch.Tensor, condition: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns where a condition on the first floating-point input holds; for other shapes, whether anywhere."""
    first = floats_of(values)[0]
    return condition(first) if first.shape == output.shape else bool(condition(first).any())


_result("zeros")(lambda o, values: torch.zeros_like(o))
_result("no-op: outputs never written", needs_outputs)(lambda o, values: torch.empty_like(o))
_result("an offset within a usual tolerance, 0.009")(lambda o, values: o + 0.009)
_result("off by one part in a thousand")(lambda o, values: o * 1.001)
_result("an approximation good to three digits")(lambda o, values: o * (1 + 5e-4 * torch.cos(7 * o)))
_result("identity", needs_equal_input)(lambda o, values: o if (v := find_input_like(values, o)) is None else v.clone())
_result("right only within [-8, 8]")(lambda o, v: _where(_mask(v, o, lambda x: x.abs() > 8), spoil(o), o))
_result("right only for x >= 0")(lambda o, v: _where(_mask(v, o, lambda x: x < 0), spoil(o), o))
_result("right only below 1e30")(lambda o, v: _where(_mask(v, o, lambda x: x.abs() > 1e30), spoil(o), o))
_result("wrong from 1e4 to 1e25")(
    lambda o, v: _where(_mask(v, o, lambda x: (x.abs() > 1e4) & (x.abs() < 1e25)), spoil(o), o)
)
_result("NaN swallowed")(lambda o, values: torch.where(torch.isnan(o), torch.zeros_like(o), o))
_result("infinities clipped", needs_output("infinite", torch.isinf))(
    lambda o, values: o.clamp(torch.finfo(o.dtype).min, torch.finfo(o.dtype).max)
)
_result("denormal numbers flushed to zero")(
    lambda o, v: torch.where(o.abs() < torch.finfo(o.dtype).smallest_normal, torch.zeros_like(o), o)
)
_result("sign of zero lost", needs_negative_zero)(lambda o, values: o + 0.0)
_result("wrong in bfloat16 only", needs_dtype(torch.bfloat16))(
    lambda o, values: spoil(o) if o.dtype == torch.bfloat16 else o
)
_result("float64 computed in float32", needs_dtype(torch.float64))(lambda o, values: o.float().to(o.dtype))
_result("results of another dtype", needs_outputs)(
    lambda o, values: o.to(torch.float32 if o.dtype == torch.float64 else torch.float64)
)
_result("results on another device", needs_outputs)(lambda o, values: o.to("meta"))
_result("a lazy subclass of Tensor", needs_outputs)(lambda o, values: o.as_subclass(_Lazy))
_result("a workspace of 32 outputs", needs_large, "memory")(
    lambda o, values: o if len(torch.ones(32, *o.shape, dtype=o.dtype)) else o.neg()
)


class _Lazy(torch.Tensor):
    """Could compute its values when they are asked for."""


@_result("one ulp away from zero in every element")
def _one_ulp(output: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    return torch.where(torch.isfinite(output), step_ulps(output, 1), output)


@_call("rounded toward zero")
def _cut(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    exact = target.reference([to_oracle(v) for v in values])

    def cut(output: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        near = wanted.to(output.dtype)
        down = torch.isfinite(near) & (near.double().abs() > wanted.abs())
        return torch.where(down, step_ulps(near, -1), near)

    return [
        cut(o, e) if isinstance(e, torch.Tensor) and e.is_floating_point() else o
        for o, e in zip(call(values), exact, strict=True)
    ]


def _computed_in(dtype: torch.dtype) -> Callable[..., list[Any]]:
    def mutated(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
        def cast(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return [cast(v) for v in value]
            return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        found = target.reference([cast(v) for v in values])
        return [
            f.to(o.dtype) if isinstance(o, torch.Tensor) and isinstance(f, torch.Tensor) else o
            for f, o in zip(found, call(values), strict=True)
        ]

    return mutated


_call("computed in float16", needs_dtype(torch.float16))(_computed_in(torch.float16))
_call("computed in bfloat16", needs_dtype(torch.bfloat16))(_computed_in(torch.bfloat16))


# --- places ------------------------------------------------------------------------------------------------


@_result("last n % 8 elements of a row dropped")
def _tail(output: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    output = output.clone()
    if output.ndim and output.shape[-1] > 8:
        output[..., output.shape[-1] // 8 * 8 :] = 0
    return output


@_result("last row left out")
def _last_row(output: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    output = output.clone()
    if output.ndim and output.shape[0] > 1:
        output[-1] = 0
    return output


@_result("one element in 40 000 wrong", needs_large)
def _one_element(output: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    output = output.clone(memory_format=torch.contiguous_format)
    if output.numel() >= 40_000:
        output.view(-1)[12_345] = spoil(output.view(-1)[12_345])
    return output


@_result("wrong from row 65 536 on", needs_large)
def _many_rows(output: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    output = output.clone(memory_format=torch.contiguous_format)
    rows = output.view(-1, output.shape[-1]) if output.ndim > 1 and output.numel() else output.view(-1)
    rows[65_536:] = 0
    return output


@_result("wrong from element 4 096 of a row on", needs_large)
def _long_row(output: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    output = output.clone()
    if output.ndim:
        output[..., 4096:] = 0
    return output


@_result("entries of the batch depend on each other")
def _mixed(output: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    return output + 1e-3 * output.roll(1, 0) if output.ndim and output.shape[0] > 1 else output


@_call("row of a broadcast input off by one", needs_row)
def _shifted_row(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    values = list(values)
    values[find_row(target)] = values[find_row(target)].roll(1, -1)
    return call(values)


@_call("two inputs exchanged", needs_two_alike)
def _swapped(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    values, pair = list(values), two_alike(values)
    if pair is not None:
        values[pair[0]], values[pair[1]] = values[pair[1]], values[pair[0]]
    return call(values)


@_call("wrong where two arguments are one tensor", needs_interchangeable)
def _one_tensor(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    found = [t.data_ptr() for t in floats_of(values) if t.numel()]
    outputs = call(values)
    if len(found) == len(set(found)):
        return outputs
    return [spoil(o) if isinstance(o, torch.Tensor) and o.is_floating_point() else o for o in outputs]


@_call("an option ignored", needs_option)
def _ignored(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    at = find_option(target)
    fixed = target.cases()[0].values[at]
    return call([fixed if i == at else v for i, v in enumerate(values)])


@_call("wrong shape for an empty input")
def _empty(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    if any(t.numel() == 0 for t in floats_of(values)):
        return [o.new_empty(0, 77) if isinstance(o, torch.Tensor) else o for o in call(values)]
    return call(values)


def _spoil_if(condition: Callable[[list[torch.Tensor]], bool]) -> Callable[[torch.Tensor, Any], torch.Tensor]:
    return lambda o, values: spoil(o) if condition(tensors_of(values)) else o


_result("wrong only for non-contiguous inputs")(_spoil_if(lambda ts: any(not t.is_contiguous() for t in ts)))
_result("wrong only for misaligned inputs")(_spoil_if(lambda ts: any(t.data_ptr() % 16 for t in ts)))
_result("wrong only for large aligned inputs", needs_large)(
    _spoil_if(
        lambda ts: (
            max(t.numel() for t in ts) > 64 * 1024
            and all(t.is_contiguous() and t.data_ptr() % 64 == 0 and all(s % 8 == 0 for s in t.shape) for t in ts)
        )
    )
)
_result("wrong only for inputs of different layouts", needs_several)(
    _spoil_if(lambda ts: len({t.is_contiguous() for t in ts if t.numel() > 1}) > 1)
)


@_call("strides ignored")
def _no_strides(target: Target, call: Call, state: dict[Any, Any], values: Sequence[Any]) -> list[Any]:
    def as_if(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [as_if(v) for v in value]
        if not isinstance(value, torch.Tensor) or value.is_contiguous():
            return value
        last = value.storage_offset() + value.numel()
        if last > value.untyped_storage().nbytes() // value.element_size():
            return value
        return value.as_strided(value.shape, torch.empty(value.shape, device="meta").stride())

    return call([as_if(v) for v in values])
