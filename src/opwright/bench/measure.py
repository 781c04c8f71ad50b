"""One input, timed by all candidates, and what their results and times must pass to count."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from opwright.bench.allocator import peak_bytes
from opwright.bench.clocks import perf_counter, refuse_replaced
from opwright.bench.costs import cost_of, least_cost, size_of
from opwright.bench.gates import (
    floor_us,
    is_kept,
    refuse_changes,
    refuse_clocks_apart,
    refuse_deferred,
    refuse_file_changes,
    refuse_kept,
    refuse_too_fast,
)
from opwright.bench.inputs import Plan, all_tensors, one_element
from opwright.bench.limits import CpuBench, GpuBench
from opwright.bench.timing import no_garbage_collection
from opwright.bench.workload import Workload, applier
from opwright.dispatch.operator import Operator
from opwright.errors import NotVerifiedError
from opwright.records import Limits, Measurement, Timing
from opwright.spec.dtypes import short_name
from opwright.spec.samples import Case
from opwright.verify.devices import wait_for
from opwright.verify.state import Files, Guard
from opwright.verify.tensors import are_same

_RECHECKED_BLOCK = 3  # beside the last: a call in the middle of the timing
# Calls on values not seen before: rows of about a millisecond.
_FRESH_ROWS, _MOST_FRESH_ROWS, _FRESH_ROW_US, _MOST_FRESH_CALLS = 5, 60, 1000.0, 100
# What takes so long can be timed by itself. Each of its calls in the end has values smaller by a factor that bfloat16 sees.
_LONG_US, _SLOW_US, _SMALLER = 100.0, 50_000.0, 0.99
# Times as long as was asked for, of a second at least: eight blocks, and what is looked at beside them, are ten to
# twenty calls of each.
_LONGEST_CALL = 2.0

Witness = Callable[[float, Callable[[], object]], None]


@dataclass
class Settings:
    """What all measurements of a run have in common.

    Attributes:
        limits: of the machine.
        measure_again: returns them as they are now, where those of before were better.
        on_run: called with who runs next, "" for nobody, and on what.
        files: beside the operator's source, where this process is for nothing else.
        guard: of the calls that are measured now.
    """

    name: str
    operator: Operator | None
    reference: Callable[..., Any] | None
    place: CpuBench | GpuBench
    limits: Limits
    measure_again: Callable[[Limits], Limits]
    seconds: float
    precision: float
    witness: Witness | None
    on_run: Callable[[str, str], object]
    files: Files | None = None
    guard: Guard | None = None

    def __post_init__(self) -> None:
        if self.files is not None:
            self.files.watch(self)

    @property
    def is_running(self) -> bool:
        """Whether calls that are measured run."""
        return self.guard is not None and self.guard.is_running

    @property
    def truth(self) -> Callable[..., Any]:
        """What results are held to."""
        return self.operator.declaration.reference if self.operator else self.reference

    @property
    def is_repeatable(self) -> bool:
        """Whether the same call twice has the same results."""
        operator = self.operator
        return operator is None or not (operator.contract.mutated or operator.declaration.random)


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


class TooSlow(Exception):
    """A call takes so long that as few of them as prove anything take many times the time asked for."""


def measure(
    direction: str, plan: Plan, candidates: Mapping[str, Callable[..., Any]], settings: Settings
) -> Measurement:
    """Times all candidates on one input, Opwright's first.

    Raises:
        NotVerifiedError: the times cannot be true, or the results are not.
        TooSlow: the input is left out.
    """
    operator, place, name = settings.operator, settings.place, settings.name
    fitting_s = _LONGEST_CALL * max(settings.seconds, 1.0) * len(candidates)
    with torch.set_grad_enabled(direction != "forward"):
        case = plan.make(0)
        described = describe_case(case)
        what = f"{direction} {described}"

        def runs(who: str) -> None:
            settings.on_run(who, what)

        runs("")
        work = Workload(direction, case.values, operator)
        calls = {}
        for n, function in candidates.items():
            runs(n)
            if n == "opwright":
                guard = settings.guard = Guard()
                calls[n] = [guard.run(work.bind, function)]
                results = guard.run(calls[n][0])
                refuse_changes(name, described, guard.take())
            else:
                calls[n] = [work.bind(function)]
                calls[n][0]()  # what it compiles, and thereby changes, is no work of the timed calls
            call_s = _seconds_of(calls[n][0], place.device)
            if call_s > fitting_s:
                raise TooSlow(
                    f"{direction} {described}: a call of {n} takes {call_s:.3g} s; "
                    f"`--seconds {math.ceil(call_s / _LONGEST_CALL)}` has time for some of them"
                )
            fitting_s -= call_s
        guard = settings.guard = Guard()
        runs("")
        refuse_deferred(name, results, work.values)
        cost = cost_of(direction, work, operator, results)
        works = [work]
        for number in range(1, place.input_sets(cost.bytes_moved, len(candidates))):
            works.append(Workload(direction, plan.make(number).values, operator))
            for n, function in candidates.items():
                runs(n)
                calls[n].append(works[-1].bind(function))
        runs("opwright")
        before = [call() for call in calls["opwright"]] if settings.is_repeatable else []
        check = _Rechecks(work, calls["opwright"][0], described, settings, guard)
        timed = guard.run(
            place.time,
            calls,
            cost.bytes_moved,
            settings.seconds,
            settings.precision,
            check.before_block,
            runs,
            check.after_block,
        )
        refuse_changes(name, described, guard.take())
        if settings.files is not None:
            refuse_file_changes(name, described, settings.files.take())
        refuse_replaced(name)
        check.at_the_end(timed.timings[0])
        runs("opwright")
        after = [call() for call in calls["opwright"]] if settings.is_repeatable else []
        changed = [(w, now) for w, was, now in zip(works, before, after, strict=False) if not are_same(was, now)]
        if any(w.difference(now, settings.truth) for w, now in changed):
            raise NotVerifiedError(
                name,
                "its results changed while it was timed",
                rows=[("direction", direction), ("input", described)],
                hint="`opwright verify` with `--check determinism`",
            )
        ours = timed.timings[0]
        least = least_cost(operator, cost, results, work.values)
        if ours.median_us < floor_us(least, settings.limits):  # the machine may have been busy when they were measured
            runs("")
            settings.limits = settings.measure_again(settings.limits)
        refuse_too_fast(name, described, ours.median_us, least, settings.limits)
        refuse_clocks_apart(name, described, ours)
        for timing in timed.timings:
            runs(timing.candidate)
            timing.peak_bytes = peak_bytes(calls[timing.candidate][0], place.device)
        if settings.witness is not None:
            said = ours.median_us if ours.warm_us is None else max(ours.warm_us, ours.host_us)
            runs("opwright")
            settings.witness(said, calls["opwright"][0])
        runs("")
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


def _seconds_of(call: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    started = perf_counter()
    call()
    wait_for(device)
    return perf_counter() - started


def describe_case(case: Case) -> str:
    """Returns a case as `f32[512, 4096] f32[4096] approximate='tanh'`."""
    return re.sub(r"(\]) cuda:\d+", r"\1", str(case).removesuffix(f" ({case.label})"))


class _Rechecks:
    """Holds results to the reference while the call is timed, on other values at the same addresses."""

    def __init__(
        self, work: Workload, call: Callable[[], list[Any]], case: str, settings: Settings, guard: Guard
    ) -> None:
        self._work, self._call, self._case, self._settings, self._guard = work, call, case, settings, guard
        self._block = 0

    def before_block(self) -> None:
        """Overwrites the inputs, and at one block looks at what the next call makes of them."""
        self._runs("")
        if not self._settings.is_repeatable:
            return
        self._refuse_other_inputs()
        self._work.refresh()
        self._block += 1
        if self._block == _RECHECKED_BLOCK:
            self._look()

    def after_block(self, results: object) -> None:
        """Holds what a timed call has returned to the same call alone, on the same values."""
        self._guard.look()  # in the end it may have put back what it has changed
        if self._settings.is_repeatable:
            self._refuse_other_inputs()
            self._compare(results)

    def _refuse_other_inputs(self) -> None:
        if not self._work.is_as_given():
            refuse_changes(self._settings.name, self._case, ["its inputs are not what they were before its calls"])

    def at_the_end(self, timing: Timing) -> None:
        """Times calls on values not seen before, looks once more, and leaves the inputs as they were."""
        if self._settings.is_repeatable:
            self._work.refresh()
            said_us = self._settings.place.longest_us(timing)
            refuse_kept(self._settings.name, self._case, *self._fresh_us(said_us))
            if said_us >= _LONG_US:
                refuse_kept(self._settings.name, self._case, *self._rewritten_us())
            self._look()
            self._work.restore()

    def _fresh_us(self, said_us: float) -> tuple[float, float]:
        """Returns the time of a call, each of which has other values than the one before, and that on the same values.

        Rows of both take turns; where the first looks too long, for as long as another process may have been in the way.
        """
        touch, place = self._work.toucher(), self._settings.place
        if touch is None:
            return 0.0, said_us

        def touch_and_call() -> list[Any]:
            touch()
            return self._call()

        repeats = max(1, min(round(_FRESH_ROW_US / said_us), _MOST_FRESH_CALLS))
        touches_us = same_us = together_us = float("inf")
        with no_garbage_collection():
            for row in range(_MOST_FRESH_ROWS):
                self._runs("opwright")
                touches_us = min(touches_us, place.row_us(touch, repeats)[0])
                self._call()  # on what the touches have left
                same_us = min(same_us, place.row_us(self._call, repeats)[0])
                took_us, results = place.row_us(touch_and_call, repeats)
                together_us = min(together_us, took_us)
                self._compare(results)
                found = together_us - touches_us, max(said_us, same_us)
                if row + 1 >= _fewest_rows(said_us) and not is_kept(*found):
                    break
        return found

    def _rewritten_us(self) -> tuple[float, float]:
        """Returns the time of a call when all values are others than before, and when they were only written again.

        What computes again no more than the rows that have changed is found by it.
        """
        fresh_us = same_us = float("inf")
        with no_garbage_collection():
            for row in range(_MOST_FRESH_ROWS):
                self._runs("opwright")
                self._work.scale(1.0)
                same_us = min(same_us, self._settings.place.row_us(self._call, 1)[0])
                self._work.scale(_SMALLER)
                took_us, results = self._settings.place.row_us(self._call, 1)
                fresh_us = min(fresh_us, took_us)
                self._compare(results)
                if row + 1 >= _fewest_rows(same_us) and not is_kept(fresh_us, same_us):
                    break
        return fresh_us, same_us

    def _compare(self, results: object) -> None:
        got = _copied(results)  # at once: what another thread still has to compute is not there yet
        refuse_deferred(self._settings.name, results, self._work.values)
        self._runs("opwright")
        if are_same(got, _copied(self._call())):
            return
        self._runs("")
        found = self._work.difference(got, self._settings.truth)
        if found:  # else only the order of a sum was another one
            raise NotVerifiedError(
                self._settings.name,
                "a timed call has not returned what the same call returns alone",
                rows=[("direction", self._work.direction), ("input", self._case), ("found", found)],
                hint="a call that computes less when it is timed, or later, has no time",
            )

    def _runs(self, who: str) -> None:
        self._settings.on_run(who, f"{self._work.direction} {self._case}")

    def _look(self) -> None:
        self._runs("opwright")
        got = _copied(self._call())
        self._runs("")
        found = self._work.difference(got, self._settings.truth)
        if found:
            raise NotVerifiedError(
                self._settings.name,
                "a timed call did not compute its result from the inputs of that moment",
                rows=[("direction", self._work.direction), ("input", self._case), ("found", found)],
                hint="a result that is kept by the address of its input is wrong when the input is overwritten",
            )


def _fewest_rows(call_us: float) -> int:
    return 1 if call_us > _SLOW_US else _FRESH_ROWS  # where it looks wrong, there are more


def _copied(results: Any) -> list[Any]:
    return [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in results]


def host_times(
    call: Callable[..., Any], baseline: Callable[..., Any], settings: Settings
) -> dict[str, float]:
    """Returns the time of a call on the smallest input there is: what it costs before any work."""
    operator, place = settings.operator, settings.place
    if operator is None:
        return {}
    settings.on_run("opwright", "one element")
    case = one_element(operator, place.device)
    ours, theirs = applier(call, operator), applier(baseline, operator)
    bound = {"opwright": lambda: ours(case.values), "eager": lambda: theirs(case.values)}
    a, b = torch.ones(1, device=place.device), torch.ones(1, device=place.device)
    bound["torch.add"] = lambda: torch.add(a, b)
    with torch.no_grad():
        return place.host_us(bound)
