"""Measures an operator against what people use without it."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opwright.bench.allocator import peak_bytes
from opwright.bench.clocks import refuse_replaced
from opwright.bench.conditions import commit_of, conditions_of
from opwright.bench.costs import cost_of, least_cost, size_of
from opwright.bench.gates import floor_us, refuse_clocks_apart, refuse_deferred, refuse_too_fast
from opwright.bench.inputs import Plan, all_tensors, one_element, plans
from opwright.bench.limits import CpuBench, GpuBench, bench_on
from opwright.bench.machine_limits import limits_of
from opwright.bench.workload import DIRECTIONS, Workload, applier
from opwright.dispatch.operator import Operator, operator_of
from opwright.errors import CheckError, NotVerifiedError
from opwright.records import BenchRecord, Limits, Measurement, VerifyRecord
from opwright.spec.dtypes import short_name
from opwright.spec.samples import Case
from opwright.verify.devices import device_of, has_cuda, parse_device
from opwright.verify.machine import machine_card
from opwright.verify.run import verify
from opwright.verify.tensors import are_same

_VERIFY_FIRST = ("numerics", "outputs written", "gradients", "gradient numerics")
DTYPES = (torch.float32, torch.bfloat16)
PRECISION = 0.02
_RECHECKED_BLOCK = 3  # beside the last: a call in the middle of the timing

Witness = Callable[[float, Callable[[], object]], None]


def bench(
    target: Any,
    against: Sequence[str | Callable[..., Any]] = ("eager", "compile"),
    *,
    reference: Callable[..., Any] | None = None,
    samples: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    directions: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    seconds: float = 1.0,
    precision: float = PRECISION,
    verified: VerifyRecord | None = None,
    measure_limits: bool = False,
    witness: Witness | None = None,
    on_measurement: Callable[[Measurement], None] | None = None,
) -> BenchRecord:
    """Measures how fast an operator is, against PyTorch and others, as a share of what the machine can do.

    On a GPU the times are device times on a cold cache; those on a warm one, and the host's, stand beside.
    A candidate in this process could reach for the clocks: what is replaced is found out as far as that can be seen
    from inside. `opwright bench` measures in a process of its own, and times it from outside as well.

    Args:
        target: an operator, its `torch.ops` entry, or a callable with `reference` and `samples`.
        against: "eager" (the declared baseline, else the reference), "compile" (the same under
            torch.compile, static shapes), and callables with the same arguments.
        reference: what a callable is checked against and compared with.
        samples: inputs; by default the declared sweep, else sizes that follow from the contract.
        sweep: sizes by axis, for this run: `{"n": [1024, 4096], "batch": [(512,)]}`.
        options: values of choices and numbers, for this run.
        dtypes: dtypes of the floating-point family.
        directions: "forward" (no gradient needed), "backward" (autograd's, on a kept graph), "step" (both);
            by default forward, and backward where there is a gradient.
        device: "cpu", "cuda", "cuda:1"; by default the GPU when there is one and the operator has a CUDA
            kernel, else the CPU; for a callable where its samples are.
        seconds: the longest to measure each candidate on each input.
        precision: the smallest visible difference at which measuring ends earlier; 0.02 is two percent.
        verified: a record of `verify` of this target on this kind of device, of all its cases; where it covers less
            than the numerics, and without one, they are checked first.
        measure_limits: measure the limits of the machine again, though they are kept in the store.
        witness: called with what a call is said to take and a function that makes such calls, for a
            process that has clocks of its own.
        on_measurement: called with each measurement when it is there.

    Raises:
        NotVerifiedError: the operator does not pass verify, its results do not hold while it is timed, or
            its times cannot be true.
        CheckError: what was asked cannot be measured: no samples, no gradient, samples on two devices.
    """
    started = time.time()
    operator = operator_of(target)
    name = operator.declaration.name if operator else getattr(target, "__name__", type(target).__name__)
    if operator is None and (reference is None or samples is None):
        raise CheckError(
            name,
            "a callable is measured against a reference, on samples",
            hint="`opwright.bench(f, reference=g, samples=[(x, y), ...])`",
        )
    samples = _listed(name, samples)
    _check_directions(directions)
    where = choose_device(name, operator, samples, device)
    refuse_replaced(name)
    place = bench_on(where)
    planned = plans(operator, samples, sweep, options, dtypes, place.device)  # what is not there is said at once
    checked = refuse_unverified(target, reference, samples, where, verified)
    call = operator.function if operator else target
    baseline = (operator._baseline or operator.declaration.reference) if operator else reference
    measurements: list[Measurement] = []
    with place.current(), conditions_of(where, "caller" if witness is None else "own") as conditions:
        machine = machine_card(place.device)
        limits = limits_of(place, machine, again=measure_limits)
        machine.copy_gb_s, machine.compute_gflops = limits.copy_gb_s, limits.gemm_gflops.get("f32")
        settings = _Settings(name, operator, reference, place, limits, seconds, precision, witness)
        for direction, plan in itertools.product(directions or DIRECTIONS[:2], planned):
            if direction != "forward" and directions is None and not has_gradient(operator, plan):
                continue
            # A fresh compile for every input: torch.compile with static shapes is the stronger rival.
            torch._dynamo.reset()
            found = _measure(direction, plan, _candidates(call, baseline, against), settings)
            measurements.append(found)
            if on_measurement is not None:
                on_measurement(found)
        host_us = _host_times(call, baseline, operator, place) if planned else {}
        refuse_replaced(name)
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
        conditions=conditions,
        limits=limits,
        commit=commit_of(operator.declaration.file if operator else _file_of(target)),
    )


@dataclass
class _Settings:
    """What all measurements of a run have in common."""

    name: str
    operator: Operator | None
    reference: Callable[..., Any] | None
    place: CpuBench | GpuBench
    limits: Limits
    seconds: float
    precision: float
    witness: Witness | None

    @property
    def truth(self) -> Callable[..., Any]:
        """What results are held to."""
        return self.operator.declaration.reference if self.operator else self.reference

    @property
    def is_repeatable(self) -> bool:
        """Whether the same call twice has the same results."""
        operator = self.operator
        return operator is None or not (operator.contract.mutated or operator.declaration.random)


# --- what was asked -------------------------------------------------------------------------------------------


def _listed(name: str, samples: Any) -> list[Any] | None:
    """Returns the samples as a list: an iterator would be empty when it is asked again."""
    if samples is None:
        return None
    found = list(samples() if callable(samples) else samples)
    if not found:
        raise CheckError(name, "there are no samples to measure it on", hint="`samples=[(x, y), ...]`")
    return found


def _check_directions(directions: Sequence[str] | None) -> None:
    for direction in directions or ():
        if direction not in DIRECTIONS:
            raise CheckError(
                "bench", f"there is no direction {direction!r}", rows=[("there", ", ".join(DIRECTIONS))]
            )


def refuse_unverified(
    target: Any, reference: Any, samples: Any, where: torch.device, verified: VerifyRecord | None
) -> VerifyRecord:
    """Raises NotVerifiedError if the numerics are wrong on a device; returns the record that says that they are not."""
    checked = (
        verified if verified is not None and _covers(verified, target, where) else verify(target, reference, samples, checks=_VERIFY_FIRST, devices=[where])
    )
    if not checked.passed:
        first = checked.failures[0]
        raise NotVerifiedError(
            checked.name,
            "it does not pass verify, so it is not measured",
            rows=[("check", first.title), ("case", first.case), ("found", first.message)],
            hint=first.repeat or "`opwright.verify(...)` shows all failures",
        )
    return checked


def _covers(record: VerifyRecord, target: Any, where: torch.device) -> bool:
    """Returns whether a record says that this target is right there: not another one, not some check or case of it."""
    operator = operator_of(target)
    name = operator.declaration.qualified_name if operator else getattr(target, "__name__", type(target).__name__)
    ran = {c.name for c in record.checks if torch.device(c.device or "cpu").type == where.type}
    return record.name == name and not record.only and ran.issuperset(_VERIFY_FIRST)


def choose_device(
    name: str, operator: Operator | None, samples: list[Any] | None, named: str | torch.device | None
) -> torch.device:
    """Returns where is measured.

    Raises:
        CheckError: there is no such device, or the samples are on several.
    """
    if operator is not None and samples is None:
        if named is not None:
            return parse_device(named)
        return torch.device("cuda" if torch.cuda.is_available() and has_cuda(operator) else "cpu")
    tensors = [t for sample in samples for t in all_tensors(_flat(sample))]
    devices = sorted({str(t.device) for t in tensors if t.ndim})
    if len(devices) > 1:
        raise CheckError(
            name,
            "its samples are on more than one device",
            rows=[("devices", ", ".join(devices))],
            hint='measure one device at a time: `[(x.to("cuda"), y.to("cuda"))]`',
        )
    if named is not None:
        return parse_device(named)
    if operator is not None and not any(t.is_cuda for t in tensors):
        return torch.device("cuda" if torch.cuda.is_available() and has_cuda(operator) else "cpu")
    return device_of(tensors)


def _flat(value: Any) -> Iterator[Any]:
    """Yields what is in lists, tuples and dictionaries, however deep."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _file_of(target: Any) -> str:
    return getattr(getattr(target, "__code__", None), "co_filename", "")


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


def has_gradient(operator: Operator | None, plan: Plan) -> bool:
    """Returns whether there is a backward to measure."""
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
    direction: str, plan: Plan, candidates: Mapping[str, Callable[..., Any]], settings: _Settings
) -> Measurement:
    operator, place, name = settings.operator, settings.place, settings.name
    with torch.set_grad_enabled(direction != "forward"):
        case = plan.make(0)
        described = describe_case(case)
        work = Workload(direction, case.values, operator)
        calls = {n: [work.bind(f)] for n, f in candidates.items()}
        results = calls["opwright"][0]()
        refuse_deferred(name, results, work.values)
        cost = cost_of(direction, work, operator, results)
        for number in range(1, place.input_sets(cost.bytes_moved, len(candidates))):
            another = Workload(direction, plan.make(number).values, operator)
            for n, function in candidates.items():
                calls[n].append(another.bind(function))
        before = [call() for call in calls["opwright"]] if settings.is_repeatable else []
        check = _Rechecks(work, calls["opwright"][0], described, settings)
        timed = place.time(calls, cost.bytes_moved, settings.seconds, settings.precision, check.before_block)
        check.at_the_end()
        after = [call() for call in calls["opwright"]] if settings.is_repeatable else []
        if not are_same(before, after):
            raise NotVerifiedError(
                name,
                "its results changed while it was timed",
                rows=[("direction", direction), ("input", described)],
                hint="`opwright verify` with `--check determinism`",
            )
        ours = timed.timings[0]
        least = least_cost(operator, cost, results, work.values)
        refuse_too_fast(name, described, ours.median_us, least, settings.limits)
        refuse_clocks_apart(name, described, ours)
        for timing in timed.timings:
            timing.peak_bytes = peak_bytes(calls[timing.candidate][0], place.device)
        if settings.witness is not None:
            said = ours.median_us if ours.warm_us is None else max(ours.warm_us, ours.host_us)
            settings.witness(said, calls["opwright"][0])
    floats = [t.dtype for t in all_tensors(case.values) if t.is_floating_point()]
    rate = cost.bytes_moved / ours.median_us / 1e3  # GB/s
    return Measurement(
        direction=direction,
        case=described,
        axes=plan.axes,
        dtype=short_name(floats[0]) if floats else "",
        bytes_moved=cost.bytes_moved,
        flop=cost.flop,
        timings=timed.timings,
        roof_share=rate / settings.limits.copy_gb_s,
        in_cache=cost.bytes_moved <= place.cache_bytes(),
        copy_us=timed.copy_us,
        comparisons=timed.comparisons,
        output_bytes=sum(size_of(t) for t in results if isinstance(t, torch.Tensor)),
        floor_us=floor_us(least, settings.limits),
        stopped=timed.stopped,
    )


def describe_case(case: Case) -> str:
    """Returns a case as `f32[512, 4096] f32[4096] approximate='tanh'`."""
    return re.sub(r"(\]) cuda:\d+", r"\1", str(case).removesuffix(f" ({case.label})"))


class _Rechecks:
    """Holds results to the reference while the call is timed, on other values at the same addresses."""

    def __init__(
        self, work: Workload, call: Callable[[], list[Any]], case: str, settings: _Settings
    ) -> None:
        self._work, self._call, self._case, self._settings = work, call, case, settings
        self._block = 0

    def before_block(self) -> None:
        """Overwrites the inputs, and at one block looks at what the next call makes of them."""
        if not self._settings.is_repeatable:
            return
        self._work.refresh()
        self._block += 1
        if self._block == _RECHECKED_BLOCK:
            self._look()

    def at_the_end(self) -> None:
        """Does both once more, and leaves the inputs as they were."""
        if self._settings.is_repeatable:
            self._work.refresh()
            self._look()
            self._work.restore()

    def _look(self) -> None:
        # Copied at once: what another thread still has to compute is not there yet.
        got = [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in self._call()]
        found = self._work.difference(got, self._settings.truth)
        if found:
            raise NotVerifiedError(
                self._settings.name,
                "a timed call did not compute its result from the inputs of that moment",
                rows=[("direction", self._work.direction), ("input", self._case), ("found", found)],
                hint="a result that is kept by the address of its input is wrong when the input is overwritten",
            )


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
    ours, theirs = applier(call, operator), applier(baseline, operator)
    bound = {"opwright": lambda: ours(case.values), "eager": lambda: theirs(case.values)}
    a, b = torch.ones(1, device=place.device), torch.ones(1, device=place.device)
    bound["torch.add"] = lambda: torch.add(a, b)
    with torch.no_grad():
        return place.host_us(bound)
