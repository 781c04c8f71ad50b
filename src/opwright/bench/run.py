"""Measures an operator against what people use without it."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from opwright.bench.inputs import Plan, all_tensors, one_element, plans
from opwright.bench.limits import CpuBench, GpuBench, bench_on
from opwright.dispatch.operator import Operator, operator_of
from opwright.dispatch.reference import caller, outputs_of
from opwright.errors import CheckError, NotVerifiedError
from opwright.records import BenchRecord, Measurement, VerifyRecord
from opwright.spec.cost import Cost, default_cost
from opwright.spec.dtypes import short_name
from opwright.spec.samples import Case
from opwright.verify.devices import device_of, has_cuda, parse_device
from opwright.verify.machine import machine_card
from opwright.verify.run import verify
from opwright.verify.tensors import are_same, copy_of

_VERIFY_FIRST = ("numerics", "outputs written", "gradients", "gradient numerics")
_DTYPES = (torch.float32, torch.bfloat16)

Calls = dict[str, list[Callable[[], object]]]


def bench(
    target: Any,
    against: Sequence[str | Callable[..., Any]] = ("eager", "compile"),
    *,
    reference: Callable[..., Any] | None = None,
    samples: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    dtypes: Sequence[torch.dtype] = _DTYPES,
    directions: Sequence[str] = ("forward", "backward"),
    device: str | torch.device | None = None,
    seconds: float = 0.25,
    verified: VerifyRecord | None = None,
    on_measurement: Callable[[Measurement], None] | None = None,
) -> BenchRecord:
    """Measures how fast an operator is, against PyTorch and others, as a share of what the machine can do.

    On a GPU the times are device times on a cold cache; those on a warm one, and the host's, stand beside.

    Args:
        target: an operator, its `torch.ops` entry, or a callable with `reference` and `samples`.
        against: "eager" (the declared baseline, else the reference), "compile" (the same under
            torch.compile, static shapes), and callables with the same arguments.
        reference: what a callable is checked against and compared with.
        samples: inputs; by default the declared sweep, else sizes that follow from the contract.
        sweep: sizes by axis, for this run: `{"n": [1024, 4096], "batch": [(512,)]}`.
        options: values of choices and numbers, for this run.
        dtypes: dtypes of the floating-point family.
        directions: "forward" (no gradient needed) and "backward" (autograd's, on a kept graph).
        device: "cpu", "cuda", "cuda:1"; by default the GPU when there is one and the operator has a CUDA
            kernel, else the CPU; for a callable where its samples are.
        seconds: how long to measure each candidate on each input.
        verified: a record of `verify` of this target on this kind of device, of all its cases; where it covers less
            than the numerics, and without one, they are checked first.
        on_measurement: called with each measurement when it is there.

    Raises:
        NotVerifiedError: the operator does not pass verify, or its results change while it is timed.
    """
    started = time.time()
    operator = operator_of(target)
    if operator is None and (reference is None or samples is None):
        raise CheckError(
            getattr(target, "__name__", str(target)),
            "a callable is measured against a reference, on samples",
            hint="`opwright.bench(f, reference=g, samples=[(x, y), ...])`",
        )
    where = _device(operator, samples, device)
    is_known = verified is not None and _covers(verified, operator, target, where)
    checked = (
        verified if is_known else verify(target, reference, samples, checks=_VERIFY_FIRST, devices=[where])
    )
    if not checked.passed:
        first = checked.failures[0]
        raise NotVerifiedError(
            checked.name,
            "it does not pass verify, so it is not measured",
            rows=[("check", first.title), ("case", first.case), ("found", first.message)],
            hint=first.repeat or "`opwright.verify(...)` shows all failures",
        )
    place = bench_on(where)
    call = operator.function if operator else target
    baseline = (operator._baseline or operator.declaration.reference) if operator else reference
    measurements: list[Measurement] = []
    with place.current():
        machine = machine_card(place.device)
        machine.copy_gb_s, machine.compute_gflops = place.copy_gb_s(), place.compute_gflops()
        planned = plans(operator, samples, sweep, options, dtypes, place.device)
        for direction, plan in itertools.product(directions, planned):
            if direction == "backward" and not _has_gradient(operator, plan):
                continue
            # A fresh compile for every input: torch.compile with static shapes is the stronger rival.
            torch._dynamo.reset()
            rivals = _candidates(call, baseline, against)
            found = _measure(direction, plan, rivals, operator, place, machine.copy_gb_s, seconds)
            measurements.append(found)
            if on_measurement is not None:
                on_measurement(found)
        host_us = _host_times(call, baseline, operator, place) if planned else {}
    return BenchRecord(
        name=checked.name,
        measurements=measurements,
        host_us=host_us,
        verified=True,
        threads=torch.get_num_threads(),
        machine=machine,
        created=started,
        seconds=time.time() - started,
        device=str(where),
    )


def _covers(record: VerifyRecord, operator: Operator | None, target: Any, where: torch.device) -> bool:
    """Returns whether a record says that this target is right there: not another one, not some check or case of it."""
    name = operator.declaration.qualified_name if operator else getattr(target, "__name__", type(target).__name__)
    ran = {c.name for c in record.checks if _type_of(c.device) == where.type}
    return record.name == name and not record.only and ran.issuperset(_VERIFY_FIRST)


def _type_of(device: str) -> str:
    return torch.device(device or "cpu").type


def _device(operator: Operator | None, samples: Any, named: str | torch.device | None) -> torch.device:
    if named is not None:
        return parse_device(named)
    if operator is None:
        given = plans(None, samples, None, None, (), torch.device("cpu"))
        return device_of([t for plan in given for t in all_tensors(plan.make(0).values)])
    return torch.device("cuda" if torch.cuda.is_available() and has_cuda(operator) else "cpu")


# --- candidates ----------------------------------------------------------------------------------------------


def _candidates(
    call: Callable[..., Any], baseline: Callable[..., Any], against: Sequence[str | Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {"opwright": call}
    for rival in against:
        if rival == "eager":
            found["eager"] = baseline
        elif rival == "compile":
            found["compile"] = torch.compile(baseline, dynamic=False)
        elif callable(rival):
            found[getattr(rival, "__name__", "peer")] = rival
        else:
            raise CheckError("bench", f"there is no rival {rival!r}", hint='"eager", "compile" or a callable')
    return found


def _bind(
    function: Callable[..., Any], case: Case, operator: Operator | None, direction: str
) -> Callable[[], object]:
    """Returns the call to be timed, without arguments."""
    apply = _applier(function, operator)
    if direction == "forward":
        return lambda: apply(case.values)
    values = [_with_gradient(v) for v in case.values]
    inputs = [t for t in all_tensors(values) if t.requires_grad]
    outputs = [o for o in _as_list(apply(values)) if o.is_floating_point() and o.requires_grad]
    seeds = [torch.randn_like(o) for o in outputs]

    def backward() -> object:
        return torch.autograd.grad(outputs, inputs, seeds, retain_graph=True)

    return backward


def _applier(function: Callable[..., Any], operator: Operator | None) -> Callable[[Sequence[Any]], Any]:
    if operator is not None:
        return caller(operator.contract, function)
    return lambda values: function(*values[0], **values[1])


def _as_list(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _with_gradient(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # With its strides and its offset, or a slice would be measured as a whole tensor.
        return copy_of(value).requires_grad_(value.is_floating_point())
    return type(value)(_with_gradient(v) for v in value) if isinstance(value, (list, tuple)) else value


def _has_gradient(operator: Operator | None, plan: Plan) -> bool:
    if operator is None:
        return any(t.is_floating_point() for t in all_tensors(plan.make(0).values))
    contract = operator.contract
    return (
        not contract.mutated
        and any(p.is_differentiable for p in contract.parameters)
        and any(o.type.family.is_floating and not o.is_constant for o in contract.outputs)
    )


# --- measurements ----------------------------------------------------------------------------------------------


def _measure(
    direction: str,
    plan: Plan,
    candidates: Mapping[str, Callable[..., Any]],
    operator: Operator | None,
    place: CpuBench | GpuBench,
    copy_rate: float,
    seconds: float,
) -> Measurement:
    with torch.set_grad_enabled(direction == "backward"):
        case = plan.make(0)
        calls: Calls = {n: [_bind(f, case, operator, direction)] for n, f in candidates.items()}
        cost = _cost(direction, case, operator, calls["opwright"][0])
        for number in range(1, place.input_sets(cost.bytes_moved, len(candidates))):
            another = plan.make(number)
            for name, function in candidates.items():
                calls[name].append(_bind(function, another, operator, direction))
        is_repeatable = operator is None or not (operator.contract.mutated or operator.declaration.random)
        before = [_as_list(call()) for call in calls["opwright"]] if is_repeatable else []
        timings, copy_us = place.time(calls, cost.bytes_moved, seconds)
        after = [_as_list(call()) for call in calls["opwright"]] if is_repeatable else []
    floats = [t.dtype for t in all_tensors(case.values) if t.is_floating_point()]
    described = re.sub(r"(\]) cuda:\d+", r"\1", str(case).removesuffix(f" ({case.label})"))
    if not are_same(before, after):
        raise NotVerifiedError(
            operator.declaration.name if operator else "bench",
            "its results changed while it was timed",
            rows=[("direction", direction), ("input", described)],
            hint="`opwright verify` with `--check determinism`",
        )
    rate = cost.bytes_moved / timings[0].median_us / 1e3  # GB/s
    return Measurement(
        direction=direction,
        case=described,
        axes=plan.axes,
        dtype=short_name(floats[0]) if floats else "",
        bytes_moved=cost.bytes_moved,
        flop=cost.flop,
        timings=timings,
        roof_share=rate / copy_rate,
        in_cache=cost.bytes_moved <= place.cache_bytes(),
        copy_us=copy_us,
    )


def _cost(direction: str, case: Case, operator: Operator | None, call: Callable[[], object]) -> Cost:
    outputs = [o for o in _as_list(call()) if isinstance(o, torch.Tensor)]
    if operator is None:
        return Cost(sum(_size(t) for t in [*all_tensors(case.values), *outputs]))
    if direction == "forward":
        return operator.cost_of(case.values, outputs)
    backward = operator.backward_operator
    result = outputs_of(operator.contract, _applier(operator.function, operator)(case.values))
    if backward is None:
        return Cost(
            default_cost(operator.contract, case.values, outputs).bytes_moved + sum(_size(o) for o in result)
        )
    known = {p.name: v for p, v in zip(operator.contract.parameters, case.values, strict=True)}
    known |= {f"grad_{o.name}": r for o, r in zip(operator.contract.outputs, result, strict=True)}
    known |= {
        o.name: r for o, r in zip(operator.contract.outputs, result, strict=True) if o.name not in known
    }
    return backward.cost_of([known[p.name] for p in backward.contract.parameters], outputs)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _host_times(
    call: Callable[..., Any],
    baseline: Callable[..., Any],
    operator: Operator | None,
    place: CpuBench | GpuBench,
) -> dict[str, float]:
    """Returns the time of a call on the smallest input there is: what it costs before any work."""
    if operator is None:
        return {}
    case = one_element(operator, place.device)
    candidates = {"opwright": call, "eager": baseline}
    bound = {name: _bind(function, case, operator, "forward") for name, function in candidates.items()}
    a, b = torch.ones(1, device=place.device), torch.ones(1, device=place.device)
    bound["torch.add"] = lambda: torch.add(a, b)
    with torch.no_grad():
        return place.host_us(bound)
