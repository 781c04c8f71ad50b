"""Measures an operator against what people use without it."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

from opwright import _torch
from opwright.bench.environment import commit_of, conditions_of, threads_of_torch
from opwright.bench.measure import Input, Settings, TooLarge, TooSlow, host_times, pair_with_directions
from opwright.bench.roofline import bench_on, limits_of, measure_limits_again
from opwright.bench.workload import MAX_ELEMENTS, all_tensors, most_elements, plans
from opwright.dispatch.operator import Operator, operator_of
from opwright.errors import CheckError, NotVerifiedError, plural
from opwright.machine import machine_card
from opwright.records import BenchRecord, Measurement, VerifyRecord
from opwright.records.bench import DIRECTIONS
from opwright.verify.api import verify
from opwright.verify.callables import name_of
from opwright.verify.devices import CPU, device_of, gpus_of, is_gpu, parse_device
from opwright.verify.request import list_samples
from opwright.verify.runner import BUILDING
from opwright.verify.tasks import Task
from opwright.verify.tensors import count_elements

_VERIFY_FIRST = ("numerics", "outputs written", "fresh data", "global state", "gradients", "gradient numerics")
_MAX_VERIFIED_ELEMENTS = 2**20  # of the samples of an operator
SECONDS, PRECISION = 8.0, 0.02
# The first visit to all inputs takes this share of the time, the others refine it.
_FIRST_SHARE, _MIN_VISIT_SECONDS, _MAX_VISIT_SECONDS = 0.4, 0.02, 1.0
# What torch.compile takes for an input: importing its compiler, which the first one waits for, and compiling.
_FIRST_COMPILE_SECONDS, _COMPILE_SECONDS = 10.0, 2.0
_WIDE, _BUSY_WIDE = 0.2, 0.1  # confidence intervals that are worth a warning
# A load for each core that is not of this run alone: verifying and measuring keep all cores busy as well.
_BUSY_LOAD = 1.5


def bench(
    target: Any,
    against: Sequence[str | Callable[..., Any]] | None = None,
    *,
    reference: Callable[..., Any] | None = None,
    samples: Iterable[Any] | Callable[[], Iterable[Any]] | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    directions: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    seconds: float = SECONDS,
    precision: float = PRECISION,
    threads: int | None = None,
    verified: VerifyRecord | None = None,
    measure_limits: bool = False,
    on_start: Callable[[BenchRecord, int], object] = lambda record, inputs: None,
    on_measurement: Callable[[int, Measurement], object] = lambda number, measurement: None,
    on_run: Callable[[str, str], object] = lambda who, what: None,
    timeout_s: float = 120.0,
    too_large: Mapping[str, str] | None = None,
    part: tuple[int, int] = (0, 1),
) -> BenchRecord:
    """Measures how fast an operator is, against PyTorch and others, as a share of what the machine can do.

    On a CPU the times are those of calls on the same input again and again, a warm cache; on a GPU device times with a
    cold cache. `opwright bench` measures in a process of its own.

    Doubts (a busy machine, a time that is too short to be true, clocks that differ) are `warnings` of the record; they
    throw no measurement away.

    Args:
        target: an operator, its `torch.ops` entry, a callable with `reference` and `samples`, or a `Task`.
        against: "eager" (the declared baseline, else the reference), "compile" (the same under
            torch.compile, static shapes), and callables with the same arguments. By default eager, and compile
            on as many inputs, the largest first, as the time allows.
        reference: what a callable is checked against and compared with.
        samples: inputs; by default the declared sweep, else sizes that follow from the contract.
        sweep: sizes by axis, for this run: `{"n": [1024, 4096], "batch": [(512,)]}`; other axes keep theirs.
        options: values of choices and numbers, for this run.
        dtypes: of the operator's family of dtypes; by default float32 and bfloat16, or its first if it has neither.
        directions: "forward" (no gradient needed), "backward" (autograd's, on a kept graph), "step" (both);
            by default forward, and backward where there is a gradient.
        device: "cpu", "cuda", "cuda:1"; by default the GPU when there is one and the operator has a CUDA
            kernel, else the CPU; for a callable where its samples are.
        seconds: the time for all measurements of the operator. Each input is measured at least once; one whose calls
            take longer than this is skipped, and the record says so.
        precision: measuring ends earlier when all confidence intervals are this narrow; 0.02 is two percent.
        threads: of PyTorch; by default as many as it has, or one if other work has too much of their cores.
        verified: a record of `verify` of this target on this kind of device, of all its cases; where it covers less
            than the numerics, and without one, they are checked first.
        measure_limits: measure the limits of the machine again, though they are kept in the store.
        on_start: called with the record before the first measurement, and the number of inputs.
        on_measurement: called with the number of an input and what was measured on it so far.
        on_run: called with the candidate that runs next, "" for none, and on what.
        timeout_s: how many seconds one call may take while it is verified.
        too_large: inputs to be skipped, as another process needed too much memory for them, by what it is called with
            in `on_run`, and how much that was.
        part: `(i, n)` measures only every n-th input, from the i-th: the share of one of n devices. `BenchRecord.merge`
            puts their records together.

    Raises:
        NotVerifiedError: the operator does not pass verify, a timed call returned a wrong result, or no input fits in
            memory.
        CheckError: what was asked cannot be measured: no samples, no gradient, samples on two devices.
    """
    started = time.time()
    task = target if isinstance(target, Task) else None
    if task is not None:
        target, reference, samples = task.make(parse_device(device or CPU))
        samples = samples[:1]  # the others have the same sizes
    operator = operator_of(target)
    name = task.name if task else operator.declaration.name if operator else name_of(target)
    if operator is None and (reference is None or samples is None):
        raise CheckError(
            name,
            "a callable is measured against a reference, on samples",
            hint="`opwright.bench(f, reference=g, samples=[(x, y), ...])`",
        )
    samples = list_samples(samples)
    if samples is not None and not samples:
        raise CheckError(name, "there are no samples to measure it on", hint="`samples=[(x, y), ...]`")
    for option, flag, values in (("sweep", "--axis", sweep), ("dtypes", "--dtype", dtypes)):
        if samples is None or not values:
            continue
        rule, hint = f"`{option}` has no effect beside `samples`", f"omit `{option}`, or omit `samples`"
        if task:
            rule, hint = f"a task has inputs of its own, so `{flag}` has no effect", "return others from `get_inputs`"
        raise CheckError(name, rule, rows=[("got", ", ".join(map(str, values)))], hint=hint)
    for direction in directions or ():
        if direction not in DIRECTIONS:
            raise CheckError("bench", f"there is no direction {direction!r}", rows=[("there", ", ".join(DIRECTIONS))])
    where = choose_device(name, operator, samples, device)
    place = bench_on(where)
    # An axis that is not there is said at once.
    baseline = (operator._baseline or operator.declaration.reference) if operator else reference
    most = MAX_ELEMENTS
    if operator is not None and samples is None and not (sweep or operator._sweep):
        on_run("", "choosing sizes of the inputs")
        most = most_elements(operator, baseline, place.device)
    planned = plans(operator, samples, sweep, options, dtypes, place.device, most)
    on_run("", "verify")
    checked = refuse_unverified(target, reference, samples, where, verified, timeout_s)
    call = operator.function if operator else target
    truth = operator.declaration.reference if operator else reference
    code = getattr(target, "__code__", None)
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    process = "own" if getattr(main, "name", "") == "opwright.bench.worker" else "caller"
    threads = threads or (torch.get_num_threads() if is_gpu(where) else None)
    with threads_of_torch(threads) as busy, place.current(), conditions_of(where, process) as conditions:
        machine = machine_card(place.device)
        on_run("", "the limits of the machine")
        limits = limits_of(place, machine, again=measure_limits)
        machine.copy_gb_s, machine.compute_gflops = limits.copy_gb_s, limits.gemm_gflops.get("f32")
        settings = Settings(name, operator, truth, place, limits, seconds, precision, on_run, too_large or {})
        inputs = [
            Input(direction, plan, settings) for direction, plan in pair_with_directions(planned, directions, operator)
        ][part[0] :: part[1]]
        record = BenchRecord(
            name=task.name if task else checked.name,
            measurements=[],
            host_us={},
            verified=checked.passed,
            threads=torch.get_num_threads(),
            machine=machine,
            created=started,
            seconds=0.0,
            device=str(where),
            conditions=conditions,
            limits=limits,
            commit=commit_of(operator.declaration.file if operator else getattr(code, "co_filename", "")),
        )
        on_start(record, len(inputs))
        run = _Run(list(enumerate(inputs)), call, baseline, against, settings, on_measurement)
        run.measure_all()
        smaller = memory_hint(task or target, has_samples=samples is not None)
        if run.too_large and not any(i.visits for i in inputs):
            raise NotVerifiedError(name, run.too_large[0][1], hint=smaller)
        measured = [i for i in inputs if i.visits]
        if any(m.warnings or (not m.in_cache and (m.roof_share or 0) > 1) for m in (i.measurement() for i in measured)):
            on_run("", "the limits of the machine")
            record.limits = settings.limits = measure_limits_again(place, machine, settings.limits)
            machine.copy_gb_s, machine.compute_gflops = record.limits.copy_gb_s, record.limits.gemm_gflops.get("f32")
        record.measurements = [i.measurement() for i in measured]
        record.left_out = run.tell_left_out(smaller)
        if planned:
            record.host_us = host_times(call, baseline, settings)
    if operator is not None and any(m.direction != "forward" for m in record.measurements):
        remark = operator.gradient.describe()
        record.notes = [f"backward: {remark}"] if operator.backward_operator is None else []
    pairs = zip(measured, record.measurements, strict=True)
    if most < MAX_ELEMENTS:
        largest = max(plan.axes["elements"] for plan in planned)
        record.notes.append(
            f"inputs have at most {largest:,} elements, since eager is slow; `--axis` chooses other sizes"
        )
    record.notes += dict.fromkeys(each.tell_unknown_bytes() for each, m in pairs if m.roof_share is None)
    record.warnings = [*([busy] if busy else []), *_warn(record)]
    if not checked.passed:
        reasons = "; ".join(dict.fromkeys(check.note for check in checked.checks))
        record.warnings.append(f"its results were not compared with the reference: {reasons}")
    record.seconds = time.time() - started
    return record


@dataclass
class _Run:
    """Visits inputs until all is known well enough, or the time is over."""

    _inputs: list[tuple[int, Input]]
    _call: Callable[..., Any]
    _baseline: Callable[..., Any]
    _against: Sequence[str | Callable[..., Any]] | None
    _settings: Settings
    _on_measurement: Callable[[int, Measurement], object]
    too_large: list[tuple[Input, str]] = field(default_factory=list)
    _left_out: list[str] = field(default_factory=list)
    _compiled: set[int] = field(default_factory=set)  # inputs on which it was timed where there was time for it

    def measure_all(self) -> None:
        self._until = perf_counter() + self._settings.seconds
        share = _FIRST_SHARE * self._settings.seconds / max(len(self._inputs), 1)
        for number, each in self._inputs:
            self._visit(number, each, max(share, _MIN_VISIT_SECONDS))
        if self._against is None:
            self._try_compile()
        self._refine()

    def tell_left_out(self, smaller: str) -> list[str]:
        """Returns what was not measured, and why; `smaller` says how to get smaller inputs."""
        told = [f"{why}; {smaller}" for _, why in self.too_large]
        return [*told, *self._left_out]

    def _is_known_to_be_too_large(self, each: Input) -> bool:
        """Whether an input that is not larger did not fit; a backward needs more memory than its forward."""
        return not each.visits and any(
            each.plan.bytes >= other.plan.bytes and other.direction in ("forward", each.direction)
            for other, _ in self.too_large
        )

    def _visit(self, number: int, each: Input, seconds: float) -> None:
        if self._is_known_to_be_too_large(each):
            self.too_large.append((each, f"{each.name}: it does not fit in memory"))
            return
        against = ["eager"] if self._against is None else list(self._against)
        against += ["compile"] if number in self._compiled else []
        if "compile" in against:
            # A fresh compile for every input: torch.compile with static shapes is the stronger rival.
            _torch.reset_dynamo()
        try:
            each.visit(_candidates(self._call, self._baseline, against), seconds)
        except TooSlow as slow:
            self._left_out.append(str(slow))
            return
        except NotImplementedError as error:  # PyTorch has no derivative of some operators
            if each.direction == "forward":
                raise
            why = f"{each.direction}: {error}"
            self._left_out += [] if why in self._left_out else [why]
            return
        except TooLarge as large:
            if number in self._compiled:
                self._compiled.remove(number)
                self._left_out.append(f"compile: {large}")
            elif not each.visits:
                self.too_large.append((each, str(large)))
            return
        self._on_measurement(number, each.measurement())

    def _try_compile(self) -> None:
        """Times torch.compile too, on the largest inputs first, each direction and dtype in turn."""
        expected_s = _COMPILE_SECONDS if _torch.is_inductor_imported() else _FIRST_COMPILE_SECONDS
        wanted = _largest_first([(number, each) for number, each in self._inputs if each.visits])
        for number, each in wanted:
            started = perf_counter()
            if self._until - started < expected_s:
                break
            self._compiled.add(number)
            self._visit(number, each, _MIN_VISIT_SECONDS)
            expected_s = perf_counter() - started
        if len(self._compiled) < len(wanted):
            count = len(self._compiled)
            done = f"timed on {count} of {plural(len(wanted), 'input')}" if count else "not timed"
            self._left_out.append(
                f"compile: {done} within {self._settings.seconds:g} s; "
                "`--against eager --against compile` times it on all"
            )

    def _refine(self) -> None:
        while True:
            widths = [(i.measurement().precision, n, i) for n, i in self._inputs if i.visits]
            wide = sorted((w for w in widths if w[0] > self._settings.precision), key=lambda w: -w[0])
            left = self._until - perf_counter()
            if not wide or left < _MIN_VISIT_SECONDS:
                return
            seconds = min(max(left / len(wide) / 2, _MIN_VISIT_SECONDS), _MAX_VISIT_SECONDS)
            for _, number, each in wide:
                if perf_counter() > self._until:
                    return
                self._visit(number, each, seconds)


def _largest_first(inputs: Sequence[tuple[int, Input]]) -> list[tuple[int, Input]]:
    groups: dict[tuple[str, str], list[tuple[int, Input]]] = {}
    for number, each in inputs:
        groups.setdefault((each.direction, each.dtype), []).append((number, each))
    ordered = [sorted(group, key=lambda pair: -pair[1].elements) for group in groups.values()]
    return [pair for rank in itertools.zip_longest(*ordered) for pair in rank if pair is not None]


def _warn(record: BenchRecord) -> list[str]:
    """Returns what makes the times of all inputs doubtful."""
    widths = [m.precision for m in record.measurements]
    c = record.conditions
    if not widths or c is None:
        return []
    cpus = len(c.affinity) or os.cpu_count() or 1
    load = max(c.load_before, c.load_after)
    if load > _BUSY_LOAD * cpus and max(widths) > _BUSY_WIDE:
        widest = max(widths)
        reach = f"reach ±{100 * widest:.0f} %" if widest <= 1 else "are wider than ±100 %"
        return [f"the machine is busy (load {load:.1f} on {cpus} cores): confidence intervals {reach}"]
    wide = sum(width > _WIDE for width in widths)
    if wide:
        return [
            f"times vary: on {wide} of {plural(len(widths), 'input')} confidence intervals are wider than "
            f"±{100 * _WIDE:.0f} %; `--seconds 60` measures longer"
        ]
    return []


# --- what was asked -------------------------------------------------------------------------------------------


def memory_hint(target: Any, *, has_samples: bool) -> str:
    """Returns how to get inputs that need less memory; where inputs are given, `--axis` has no effect on them."""
    if isinstance(target, Task):
        return "return smaller tensors from `get_inputs`"
    return "pass smaller samples" if has_samples else "`--axis` chooses smaller sizes, as `--axis n=256,1024`"


def refuse_unverified(
    target: Any,
    reference: Any,
    samples: Any,
    where: torch.device,
    verified: VerifyRecord | None,
    timeout_s: float = 120.0,
) -> VerifyRecord:
    """Raises NotVerifiedError if the numerics are wrong on a device; returns the record of the checks.

    An operator is verified on inputs of its own where the samples are large: the oracle would take minutes for them.
    The results of timed calls are compared on all samples.
    """
    check = partial(
        verify,
        target,
        reference,
        checks=_VERIFY_FIRST,
        devices=[where],
        timeout_s=timeout_s,
        isolated=not is_gpu(where),
    )
    is_large = operator_of(target) is not None and count_elements(samples or ()) > _MAX_VERIFIED_ELEMENTS
    if verified is not None and _covers(verified, target, where):
        checked = verified
    elif not is_large:
        checked = check(samples=samples)
    else:
        try:
            checked = check()
        except CheckError:  # its reference takes none of these
            checked = check(samples=samples)
    if checked.failures:
        first = checked.failures[0]
        hint = f"`{first.repeat}`" if first.repeat else "`opwright.verify(...)` shows all failures"
        raise NotVerifiedError(
            checked.name,
            "it does not pass verify, so it is not measured",
            rows=[("check", first.title), ("case", first.input), ("found", first.message)],
            hint="" if first.input == BUILDING else hint,  # the compiler's message says what to correct
        )
    return checked


def _covers(record: VerifyRecord, target: Any, where: torch.device) -> bool:
    """Returns whether a record says that this target is right there: not another one, not some check or case of it."""
    operator = operator_of(target)
    name = operator.declaration.qualified_name if operator else name_of(target)
    ran = {c.name for c in record.checks if torch.device(c.device or "cpu").type == where.type}
    return record.name == name and not record.only and ran.issuperset(_VERIFY_FIRST)


def choose_device(
    name: str, operator: Operator | None, samples: list[Any] | None, named: str | torch.device | None
) -> torch.device:
    """Returns where is measured.

    Raises:
        CheckError: there is no such device, or the samples are on several.
    """
    tensors = all_tensors(samples)
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
    if operator is not None and not any(is_gpu(t.device) for t in tensors):
        return next(iter(gpus_of(operator)), CPU)
    return device_of(tensors)


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
