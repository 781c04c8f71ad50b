"""One input, timed by all candidates, and what makes its times doubtful."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from opwright.bench.environment import peak_bytes
from opwright.bench.roofline import CpuBench, GpuBench
from opwright.bench.timers import Timed, join
from opwright.bench.workload import Plan, Workload, all_tensors, applier, as_list, one_element, size_of
from opwright.contract.cost import Cost, default_cost
from opwright.contract.dtypes import short_name
from opwright.contract.sweep import Case, without_names
from opwright.dispatch.operator import Operator
from opwright.dispatch.reference import outputs_of
from opwright.errors import NotVerifiedError
from opwright.isolation import free_memory
from opwright.quantities import COMPUTE, RATE, TIME, with_unit
from opwright.records import Limits, Measurement, Timing
from opwright.records.bench import DIRECTIONS
from opwright.verify.devices import is_gpu, wait_for
from opwright.verify.tensors import are_same

_MIN_CALL_LIMIT_SECONDS = 1.0  # the longest call that is measured however short `seconds` is
_TENSORS_OF_A_VISIT = 2  # of each argument and result, at least: those of the case, and copies to be written
_CHANGED_BLOCK = 1  # before it the inputs get other values, and its first result is compared
# How much faster than what was measured a kernel may be. PyTorch's copy of a core's cache does not reach what loads
# alone would, and its matrix products are not always the best there are.
_BANDWIDTH_FACTOR, _COMPUTE_FACTOR = 4.0, 2.0
# The contract counts every byte of a mutated argument, but a call may write only a few rows of a large cache. If more
# than this share of the bytes is unchanged after a call, no share of the copy bandwidth is given. The limit is lower
# for calls that would be faster than a copy.
_MAX_UNCHANGED, _MAX_UNCHANGED_ABOVE_COPY = 7 / 8, 1 / 8
# The clocks of a GPU's events, of graphs and of the host may differ by launches, and by this factor.
_CLOCK_FACTOR, _LAUNCHES_US = 2.0, 30.0


@dataclass
class Settings:
    """What all measurements of a run have in common.

    Attributes:
        limits: of the machine.
        on_run: called with the candidate that runs next, "" for none, and on what.
        too_large: the names of inputs that took too much memory before, and how much that was.
    """

    name: str
    operator: Operator | None
    reference: Callable[..., Any]
    place: CpuBench | GpuBench
    limits: Limits
    seconds: float
    precision: float
    on_run: Callable[[str, str], object]
    too_large: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_repeatable(self) -> bool:
        """Whether the same call twice has the same results."""
        operator = self.operator
        return operator is None or not (operator.contract.mutated or operator.declaration.random)


class TooSlow(Exception):
    """A call takes longer than there is time for all of them; the text says which."""


class TooLarge(Exception):
    """An input does not fit in memory; the text says which."""


class Input:
    """One direction of one input, and what was measured on it so far.

    Attributes:
        name: "forward f32[512, 4096] approximate='tanh'".
        dtype: of its floating-point tensors.
        visits: what each time of timing has given.
    """

    def __init__(self, direction: str, plan: Plan, settings: Settings) -> None:
        self.direction, self.plan, self._settings = direction, plan, settings
        # `visit` sets these: a large input takes time to make.
        self.case = self.named_case = self.dtype = ""
        self.name = f"{direction} on {self.elements:,} elements"
        self.visits: list[Timed] = []
        self._peaks: dict[str, int | None] = {}
        self._cost = Cost(0)
        self._least, self._output_bytes = Cost(0), 0
        self._unchanged: dict[str, int] = {}

    @property
    def elements(self) -> int:
        """The elements of its largest tensor."""
        return self.plan.axes["elements"]

    def visit(self, candidates: Mapping[str, Callable[..., Any]], seconds: float) -> None:
        """Times all candidates, Opwright's first, for so long.

        Raises:
            NotVerifiedError: a timed call returned a wrong result.
            TooSlow: a call takes longer than all of them may.
            TooLarge: there is not enough memory.
        """
        settings = self._settings
        # On a GPU the allocator is asked: what it keeps of earlier inputs is free for this one.
        if not is_gpu(settings.place.device) and _TENSORS_OF_A_VISIT * self.plan.bytes > free_memory():
            raise TooLarge(f"{self.name}: it does not fit in memory")
        try:
            self._visit(candidates, seconds)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            return
        raise TooLarge(f"{self.name}: it does not fit in memory")  # here the tensors of the visit are freed

    def _visit(self, candidates: Mapping[str, Callable[..., Any]], seconds: float) -> None:
        settings = self._settings
        place, operator = settings.place, settings.operator
        with torch.set_grad_enabled(self.direction != "forward"):
            settings.on_run("", f"making the input: {self.name}")
            case = self.plan.make(0)
            self.named_case = describe_case(case)
            self.case = without_names(self.named_case)
            self.name = f"{self.direction} {self.named_case}"
            if self.name in settings.too_large:
                raise TooLarge(f"{self.name}: it {settings.too_large[self.name]}")
            floats = [t.dtype for t in all_tensors(case.values) if t.is_floating_point()]
            self.dtype = short_name(floats[0]) if floats else ""
            work = Workload(self.direction, case.values, operator)
            if not settings.is_repeatable:
                work.keep()
            calls = {}
            for name, function in candidates.items():
                settings.on_run(name, f"timing {self.name}")
                calls[name] = [work.bind(function)]
                self._call_first(name, calls[name][0])
            settings.on_run("", self.name)
            if not self.visits:
                results = calls["opwright"][0]()
                self._cost = cost_of(self.direction, work, operator, results)
                self._least = least_cost(operator, self._cost, results, work.values)
                if operator is not None and operator._cost is None:
                    self._unchanged = work.count_unchanged_bytes()
                self._output_bytes = sum(size_of(t) for t in results if isinstance(t, torch.Tensor))
            for number in range(1, place.input_sets(self._cost.bytes_moved, len(candidates))):
                other = Workload(self.direction, self.plan.make(number).values, operator)
                for name, function in candidates.items():
                    calls[name].append(other.bind(function))
            kept: dict[str, Any] = {}

            def before_block(number: int) -> None:
                settings.on_run("opwright", f"timing {self.name}")
                if not settings.is_repeatable:
                    work.restore()
                elif number == _CHANGED_BLOCK and not self.visits:
                    work.refresh()

            def on_result(number: int, results: object) -> None:
                if number >= _CHANGED_BLOCK and settings.is_repeatable and not self.visits:
                    kept["the first" if number == _CHANGED_BLOCK else "the last"] = results

            timed = place.time(
                calls,
                self._cost.bytes_moved,
                seconds,
                settings.precision,
                before_block=before_block,
                on_result=on_result,
            )
            settings.on_run("", self.name)
            self._refuse_wrong(work, list(kept.values()))
            for name, bound in calls.items():
                if name not in self._peaks:
                    self._peaks[name] = peak_bytes(bound[0], place.device)
            self.visits.append(timed)

    def _call_first(self, name: str, call: Callable[[], object]) -> None:
        device = self._settings.place.device
        wait_for(device)
        started = perf_counter()
        call()  # compiles, builds and loads
        wait_for(device)
        call_limit_s = max(self._settings.seconds, _MIN_CALL_LIMIT_SECONDS)
        if perf_counter() - started < call_limit_s:
            return
        started = perf_counter()
        call()
        wait_for(device)
        took_s = perf_counter() - started
        if took_s > call_limit_s:
            raise TooSlow(
                f"{self.name}: a call of {name} takes {with_unit(1e6 * took_s, TIME)}; "
                f"`--seconds {math.ceil(took_s)}` measures it"
            )

    def _refuse_wrong(self, work: Workload, several: list[list[Any]]) -> None:
        """Raises NotVerifiedError if one of several results, all of the inputs as they are now, is wrong."""
        for results in several:
            if results is not several[0] and are_same(results, several[0]):
                continue
            found = work.difference(results, self._settings.reference)
            if found:
                raise NotVerifiedError(
                    self._settings.name,
                    "a timed call returned a wrong result",
                    rows=[("direction", self.direction), ("input", self.named_case), ("found", found)],
                    hint="the inputs got new values at the same addresses: a result kept from an earlier call is wrong",
                )

    def measurement(self) -> Measurement:
        """Returns what was measured so far."""
        place, limits = self._settings.place, self._settings.limits
        timed = join(self.visits)
        for timing in timed.timings:
            timing.peak_bytes = self._peaks.get(timing.candidate)
        ours = timed.timings[0]
        in_cache = self._cost.bytes_moved <= place.cache_bytes()
        return Measurement(
            direction=self.direction,
            case=self.case,
            axes=self.plan.axes,
            dtype=self.dtype,
            bytes_moved=self._cost.bytes_moved,
            flop=self._cost.flop,
            timings=timed.timings,
            roof_share=self._share_of_copy(ours, in_cache),
            in_cache=in_cache,
            copy_us=timed.copy_us,
            comparisons=timed.comparisons,
            output_bytes=self._output_bytes,
            floor_us=_floor(self._least, limits)[0],
            stopped=timed.stopped,
            warnings=[*self._warn_of_floor(ours), *_warn_of_clocks(ours)],
            named_case=self.named_case,
        )

    def _share_of_copy(self, ours: Timing, in_cache: bool) -> float | None:
        """Returns what a measurement has as `roof_share`."""
        moved = self._cost.bytes_moved
        share = moved / ours.median_us / 1e3 / self._settings.limits.copy_gb_s
        most = _MAX_UNCHANGED_ABOVE_COPY if share > 1 and not in_cache else _MAX_UNCHANGED
        unchanged = 2 * sum(self._unchanged.values())  # the contract counts them as read and as written
        return None if unchanged > most * moved else share

    def tell_unknown_bytes(self) -> str:
        """Returns why a measurement has no `roof_share`."""
        names = " and ".join(f"`{name}`" for name, count in self._unchanged.items() if count)
        return (
            f"of copy: not known, since a call leaves elements of {names} as they are; "
            f"`@{self._settings.operator.declaration.name}.cost` declares the bytes that it moves"
        )

    def _warn_of_floor(self, ours: Timing) -> list[str]:
        floor_us, reason = _floor(self._least, self._settings.limits)
        if ours.median_us >= floor_us:
            return []
        return [
            f"{with_unit(ours.median_us, TIME)} is less than the {with_unit(floor_us, TIME)} that {reason} take: "
            "the call may keep results from earlier calls, or its `@name.cost` is too high"
        ]


def _floor(cost: Cost, limits: Limits) -> tuple[float, str]:
    """Returns the least time that the limits of a machine allow for such a cost, and what takes it."""
    rate = _BANDWIDTH_FACTOR * max(limits.cache_gb_s, limits.copy_gb_s)
    bytes_us = cost.bytes_moved / rate / 1e3
    flops = _COMPUTE_FACTOR * max(limits.gemm_gflops.values(), default=float("inf"))
    flop_us = (cost.flop or 0) / flops / 1e3
    if bytes_us >= flop_us:
        limit = f"{with_unit(rate, RATE)} ({_BANDWIDTH_FACTOR:g} times the measured cache)"
        return bytes_us, f"{cost.bytes_moved} bytes at {limit}"
    limit = f"{with_unit(flops, COMPUTE)} ({_COMPUTE_FACTOR:g} times the measured matrix product)"
    return flop_us, f"{cost.flop} FLOP at {limit}"


def _warn_of_clocks(timing: Timing) -> list[str]:
    """Returns a warning if the clocks that timed a call on a GPU differ.

    Events see the stream that they are on. The host's clock, with a wait for the whole device, sees every
    stream; a replayed graph has no host in it.
    """
    if timing.warm_us is None or timing.host_us is None:
        return []
    events = max(timing.warm_us, timing.host_us)
    return [
        f"timed by events it takes {with_unit(events, TIME)}, {name} {with_unit(other, TIME)}: work on a stream other "
        "than `torch.cuda.current_stream()` is missing in the first, or another process uses the GPU (`nvidia-smi`)"
        for name, other in (("by the host's clock", timing.wall_us), ("as a graph", timing.graph_us))
        if other is not None and other > _CLOCK_FACTOR * events + _LAUNCHES_US
    ]


def pair_with_directions(
    planned: Sequence[Plan], directions: Sequence[str] | None, operator: Operator | None
) -> list[tuple[str, Plan]]:
    """Returns each direction with each plan; by default forward, and backward where there is a gradient."""
    return [
        (direction, plan)
        for direction, plan in itertools.product(directions or DIRECTIONS[:2], planned)
        if direction == "forward" or directions is not None or _has_gradient(operator, plan)
    ]


def _has_gradient(operator: Operator | None, plan: Plan) -> bool:
    if operator is None:
        return any(t.is_floating_point() for t in all_tensors(plan.make(0).values))
    contract = operator.contract
    return (
        not contract.mutated
        and any(p.is_differentiable for p in contract.parameters)
        and any(o.type.family.has_floats and not o.is_constant for o in contract.outputs)
    )


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an allocation has failed: PyTorch has a class for it on a GPU, and a text on the CPU."""
    is_named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    texts = "you tried to allocate", "out of memory for scratch space"
    return is_named or any(text in str(error) for text in texts)


def describe_case(case: Case) -> str:
    """Returns a case as `x=f32[512, 4096] bias=f32[4096] approximate='tanh'`."""
    return re.sub(r"(\]) cuda:\d+", r"\1", str(case).removesuffix(f" ({case.label})"))


def host_times(call: Callable[..., Any], baseline: Callable[..., Any], settings: Settings) -> dict[str, float]:
    """Returns the time of a call on the smallest input that the reference takes: what it costs before any work."""
    operator, place = settings.operator, settings.place
    if operator is None:
        return {}
    settings.on_run("opwright", "one element")
    case = one_element(operator, place.device)
    if case is None:
        return {}
    ours, theirs = applier(call, operator), applier(baseline, operator)
    bound = {"opwright": lambda: ours(case.values), "eager": lambda: theirs(case.values)}
    a, b = torch.ones(1, device=place.device), torch.ones(1, device=place.device)
    bound["torch.add"] = lambda: torch.add(a, b)
    with torch.no_grad():
        return place.host_us(bound)


def cost_of(direction: str, work: Workload, operator: Operator | None, results: Sequence[Any]) -> Cost:
    """Returns what a call moves and computes: as declared, else as the contract says, else all its tensors."""
    outputs = [o for o in results if isinstance(o, torch.Tensor)]
    if operator is None:
        return Cost(sum(size_of(t) for t in [*all_tensors(work.values), *outputs]))
    if direction == "forward":
        return operator.cost_of(work.values, outputs)
    with torch.no_grad():
        forward = outputs_of(operator.contract, applier(operator.function, operator)(work.values))
    gradients = outputs[-len(outputs) + len(as_list(forward)) :] if direction == "step" else outputs
    backward = _backward_cost(work, operator, forward, gradients)
    if direction == "backward":
        return backward
    first = operator.cost_of(work.values, forward)
    flop = None if first.flop is None or backward.flop is None else first.flop + backward.flop
    return Cost(first.bytes_moved + backward.bytes_moved, flop)


def _backward_cost(
    work: Workload, operator: Operator, forward: Sequence[Any], gradients: Sequence[torch.Tensor]
) -> Cost:
    backward, contract = operator.backward_operator, operator.contract
    if backward is None:
        moved = default_cost(contract, work.values, gradients).bytes_moved
        return Cost(moved + sum(size_of(o) for o in forward))
    known = {p.name: v for p, v in zip(contract.parameters, work.values, strict=True)}
    known |= {f"grad_{o.name}": r for o, r in zip(contract.outputs, forward, strict=True)}
    known |= {o.name: r for o, r in zip(contract.outputs, forward, strict=True) if o.name not in known}
    return backward.cost_of([known[p.name] for p in backward.contract.parameters], gradients)


def least_cost(operator: Operator | None, cost: Cost, results: Sequence[Any], values: Sequence[Any]) -> Cost:
    """Returns what a call cannot do without: the declared cost, else writing the results that are not views.

    Which inputs are read in full is not known without a declaration: an index chooses.
    """
    if operator is not None and operator._cost is not None:
        return cost
    given = {t.untyped_storage().data_ptr() for t in all_tensors(values)}
    own = {t.untyped_storage().data_ptr(): t for t in results if isinstance(t, torch.Tensor)}
    return Cost(sum(size_of(t) for address, t in own.items() if address not in given))
