"""Measures an operator against what people use without it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from opwright.bench.limits import compute_gflops, copy_gb_s, last_level_cache_bytes
from opwright.bench.timing import time_interleaved
from opwright.dispatch.operator import Operator, operator_of
from opwright.dispatch.reference import caller, outputs_of, tensors_in
from opwright.errors import CheckError, NotVerifiedError
from opwright.records import BenchRecord, Measurement, VerifyRecord
from opwright.spec.cost import Cost, default_cost
from opwright.spec.dtypes import short_name
from opwright.spec.samples import Case, Sweep, declared_cases, split_sample
from opwright.verify.machine import machine_card
from opwright.verify.run import verify

_VERIFY_FIRST = ("numerics", "outputs written", "gradients", "gradient numerics")
_DTYPES = (torch.float32, torch.bfloat16)


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
    seconds: float = 0.25,
    verified: VerifyRecord | None = None,
    on_measurement: Callable[[Measurement], None] | None = None,
) -> BenchRecord:
    """Measures how fast an operator is, against PyTorch and others, as a share of what the machine can do.

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
        seconds: how long to measure each candidate on each input.
        verified: a record of `verify`; without one the numerics are checked first.
        on_measurement: called with each measurement when it is there.

    Raises:
        NotVerifiedError: the operator does not pass verify.
    """
    started = time.time()
    operator = operator_of(target)
    if operator is None and (reference is None or samples is None):
        raise CheckError(
            getattr(target, "__name__", str(target)),
            "a callable is measured against a reference, on samples",
            hint="`opwright.bench(f, reference=g, samples=[(x, y), ...])`",
        )
    checked = verified or verify(target, reference, samples, checks=_VERIFY_FIRST)
    if not checked.passed:
        first = checked.failures[0]
        raise NotVerifiedError(
            checked.name,
            "it does not pass verify, so it is not measured",
            rows=[("check", first.check), ("case", first.case), ("found", first.message)],
            hint=first.repeat or "`opwright.verify(...)` shows all failures",
        )
    machine = machine_card()
    machine.copy_gb_s, machine.compute_gflops = copy_gb_s(), compute_gflops()
    call = operator.function if operator else target
    baseline = (operator._baseline or operator.declaration.reference) if operator else reference
    cases = list(_cases(operator, samples, sweep, options, dtypes))
    measurements: list[Measurement] = []
    for direction, (case, axes) in itertools.product(directions, cases):
        if direction == "backward" and not _has_gradient(operator, case):
            continue
        # A fresh compile for every input: torch.compile with static shapes is the stronger rival.
        torch._dynamo.reset()
        candidates = {
            name: _bind(function, case, operator, direction)
            for name, function in _candidates(call, baseline, against).items()
        }
        found = _measure(direction, case, axes, candidates, operator, machine.copy_gb_s, seconds)
        measurements.append(found)
        if on_measurement is not None:
            on_measurement(found)
    return BenchRecord(
        name=checked.name,
        measurements=measurements,
        host_us=_host_times(call, baseline, operator, cases),
        verified=True,
        threads=torch.get_num_threads(),
        machine=machine,
        created=started,
        seconds=time.time() - started,
    )


# --- inputs ------------------------------------------------------------------------------------------------


def _cases(
    operator: Operator | None,
    samples: Any,
    sweep: Mapping[str, Sequence[Any]] | None,
    options: Mapping[str, Any] | None,
    dtypes: Sequence[torch.dtype],
) -> Iterator[tuple[Case, dict[str, Any]]]:
    if operator is None:
        given = samples() if callable(samples) else samples
        for i, sample in enumerate(given):
            args, kwargs = split_sample(sample)
            case = Case(f"sample {i}", (args, kwargs), kwargs)
            yield case, {"elements": _elements(case)}
        return
    contract = operator.contract
    if samples is not None:
        for case in declared_cases(contract, samples):
            yield case, {"elements": _elements(case)}
        return
    maker = Sweep(contract)
    family = contract.scalar_family
    wanted = [d for d in dtypes if family is None or d in family.dtypes] or [None]
    axes = dict(sweep or operator._sweep or _default_sweep(maker))
    shapes = axes.pop("batch", [(256,)] if maker.variadics else [()])
    names = list(axes)
    chosen = {**maker.option_sets()[0], **(options or {})}
    for dtype in wanted:
        for batch in shapes:
            for sizes in itertools.product(*axes.values()):
                bound = maker.base_sizes() | dict(zip(names, sizes, strict=True))
                shape = (batch,) if isinstance(batch, int) else tuple(batch)
                case = maker.make("bench", dtype, bound, shape, chosen)
                yield case, {"elements": _elements(case), **dict(zip(names, sizes, strict=True)), **chosen}


def _default_sweep(maker: Sweep) -> dict[str, list[Any]]:
    free = [name for name in maker.names if name not in maker._int_sizes()]
    if maker.variadics and not free:
        return {"batch": [(4096,), (65536,), (1 << 20,), (1 << 23,)]}
    if maker.variadics:
        return {"batch": [(4,), (64,), (512,), (4096,)], **{name: [1024] for name in free}}
    return {name: [256, 1024] if i == 0 else [1024] for i, name in enumerate(free)}


def _elements(case: Case) -> int:
    return max((t.numel() for t in _tensors(case.values)), default=0)


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    found = list(tensors_in(values))
    return found + [t for v in values if isinstance(v, dict) for t in tensors_in(list(v.values()))]


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
    inputs = [t for t in _tensors(values) if t.requires_grad]
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
        return value.detach().clone().requires_grad_(value.is_floating_point())
    return type(value)(_with_gradient(v) for v in value) if isinstance(value, (list, tuple)) else value


def _has_gradient(operator: Operator | None, case: Case) -> bool:
    if operator is None:
        return any(t.is_floating_point() for t in _tensors(case.values))
    contract = operator.contract
    return (
        not contract.mutated
        and any(p.is_differentiable for p in contract.parameters)
        and any(o.type.family.is_floating for o in contract.outputs)
    )


# --- measurements ----------------------------------------------------------------------------------------------


def _measure(
    direction: str,
    case: Case,
    axes: dict[str, Any],
    candidates: Mapping[str, Callable[[], object]],
    operator: Operator | None,
    copy_rate: float,
    seconds: float,
) -> Measurement:
    with torch.set_grad_enabled(direction == "backward"):
        cost = _cost(direction, case, operator, candidates)
        timings = time_interleaved(candidates, seconds)
    floats = [t.dtype for t in _tensors(case.values) if t.is_floating_point()]
    rate = cost.bytes_moved / timings[0].median_us / 1e3  # GB/s
    return Measurement(
        direction=direction,
        case=str(case).removesuffix(f" ({case.label})"),
        axes=axes,
        dtype=short_name(floats[0]) if floats else "",
        bytes_moved=cost.bytes_moved,
        flop=cost.flop,
        timings=timings,
        roof_share=rate / copy_rate,
        in_cache=cost.bytes_moved <= last_level_cache_bytes(),
    )


def _cost(
    direction: str, case: Case, operator: Operator | None, candidates: Mapping[str, Callable[[], object]]
) -> Cost:
    outputs = [o for o in _as_list(candidates["opwright"]()) if isinstance(o, torch.Tensor)]
    if operator is None:
        return Cost(sum(t.numel() * t.element_size() for t in [*_tensors(case.values), *outputs]))
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
    call: Callable[..., Any], baseline: Callable[..., Any], operator: Operator | None, cases: Sequence[Any]
) -> dict[str, float]:
    """Returns the time of a call on the smallest input there is: what it costs before any work."""
    if operator is None or not cases:
        return {}
    maker = Sweep(operator.contract)
    ints = maker._int_sizes()
    ones = {name: size if name in ints else 1 for name, size in maker.base_sizes().items()}
    family = operator.contract.scalar_family
    dtype = None if family is None else torch.float32 if torch.float32 in family.dtypes else family.dtypes[0]
    case = maker.make("one element", dtype, ones, (1,), maker.option_sets()[0])
    candidates = {"opwright": call, "eager": baseline}
    bound = {name: _bind(function, case, operator, "forward") for name, function in candidates.items()}
    a, b = torch.ones(1), torch.ones(1)
    bound["torch.add"] = lambda: torch.add(a, b)
    with torch.no_grad():
        return {t.candidate: t.min_us for t in time_interleaved(bound, 0.1)}
