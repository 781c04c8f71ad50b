"""Measures an operator against what people use without it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from opwright.bench import judges
from opwright.bench.clocks import refuse_replaced
from opwright.bench.conditions import commit_of, conditions_of
from opwright.bench.inputs import all_tensors, plans
from opwright.bench.limits import bench_on
from opwright.bench.machine_limits import best_of, limits_of
from opwright.bench.measure import Settings, TooSlow, Witness, has_gradient, host_times, measure
from opwright.bench.workload import DIRECTIONS
from opwright.dispatch.operator import operator_of
from opwright.errors import CheckError, NotVerifiedError
from opwright.records import BenchRecord, Limits, Measurement, VerifyRecord
from opwright.verify.devices import device_of, has_cuda, parse_device
from opwright.verify.machine import machine_card
from opwright.verify.run import verify
from opwright.verify.state import Files

_VERIFY_FIRST = ("numerics", "outputs written", "fresh data", "global state", "gradients", "gradient numerics")
DTYPES = (torch.float32, torch.bfloat16)
PRECISION = 0.02


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
    on_run: Callable[[str, str], object] = lambda who, what: None,
    timeout_s: float = 120.0,
) -> BenchRecord:
    """Measures how fast an operator is, against PyTorch and others, as a share of what the machine can do.

    On a GPU the times are device times on a cold cache; those on a warm one, and the host's, stand beside.
    A candidate in this process could reach for the clocks: what is replaced is found out as far as that can be seen
    from inside, and the record says "caller" as its `conditions.process`. `opwright bench` measures in a process of its
    own, and times it from outside as well.

    Args:
        target: an operator, its `torch.ops` entry, or a callable with `reference` and `samples`.
        against: "eager" (the declared baseline, else the reference), "compile" (the same under
            torch.compile, static shapes), and callables with the same arguments.
        reference: what a callable is checked against and compared with.
        samples: inputs; by default the declared sweep, else sizes that follow from the contract.
        sweep: sizes by axis, for this run: `{"n": [1024, 4096], "batch": [(512,)]}`; other axes keep theirs.
        options: values of choices and numbers, for this run.
        dtypes: dtypes of the floating-point family.
        directions: "forward" (no gradient needed), "backward" (autograd's, on a kept graph), "step" (both);
            by default forward, and backward where there is a gradient.
        device: "cpu", "cuda", "cuda:1"; by default the GPU when there is one and the operator has a CUDA
            kernel, else the CPU; for a callable where its samples are.
        seconds: the longest to measure each candidate on each input. Where calls take more than twice as
            long, and than two seconds, the input is left out, and the record says so.
        precision: the smallest visible difference at which measuring ends earlier; 0.02 is two percent.
        verified: a record of `verify` of this target on this kind of device, of all its cases; where it covers less
            than the numerics, and without one, they are checked first.
        measure_limits: measure the limits of the machine again, though they are kept in the store.
        witness: called with what a call is said to take and a function that makes such calls, for a
            process that has clocks of its own.
        on_measurement: called with each measurement when it is there.
        on_run: called with who runs next, "" where it is none of the candidates, and on what: for a process
            that ends this one when a call does not come back.
        timeout_s: how many seconds one call may take while it is verified.

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
    if witness is None:
        judges.remember()  # the process of `opwright bench` has done so before there was a target
    refuse_replaced(name)
    place = bench_on(where)
    planned = plans(operator, samples, sweep, options, dtypes, place.device)  # what is not there is said at once
    on_run("", "verify")
    checked = refuse_unverified(target, reference, samples, where, verified, timeout_s)
    call = operator.function if operator else target
    baseline = (operator._baseline or operator.declaration.reference) if operator else reference
    truth = operator.declaration.reference if operator else reference
    judges.remember_rivals({"the baseline": baseline, "the reference": truth})
    measurements: list[Measurement] = []
    left_out: list[str] = []
    with place.current(), conditions_of(where, "caller" if witness is None else "own") as conditions:
        machine = machine_card(place.device)
        on_run("", "the limits of the machine")
        limits = limits_of(place, machine, again=measure_limits)

        def measure_again(known: Limits) -> Limits:
            return best_of(known, limits_of(place, machine, again=True))

        # A process of its own is watched for as long as it lives, another one is not ours to be watched.
        files = None if witness is None else Files(_folder_of(operator, target))
        settings = Settings(
            name, operator, reference, place, limits, measure_again, seconds, precision, witness, on_run, files
        )
        for direction, plan in itertools.product(directions or DIRECTIONS[:2], planned):
            if direction != "forward" and directions is None and not has_gradient(operator, plan):
                continue
            # A fresh compile for every input: torch.compile with static shapes is the stronger rival.
            torch._dynamo.reset()
            try:
                found = measure(direction, plan, _candidates(call, baseline, against), settings)
            except TooSlow as slow:
                left_out.append(str(slow))
                continue
            measurements.append(found)
            if on_measurement is not None:
                on_measurement(found)
        host_us = host_times(call, baseline, settings) if planned else {}
        refuse_replaced(name)
        limits = settings.limits
        machine.copy_gb_s, machine.compute_gflops = limits.copy_gb_s, limits.gemm_gflops.get("f32")
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
        commit=commit_of(_file_of(operator, target)),
        left_out=left_out,
    )


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
    target: Any,
    reference: Any,
    samples: Any,
    where: torch.device,
    verified: VerifyRecord | None,
    timeout_s: float = 120.0,
) -> VerifyRecord:
    """Raises NotVerifiedError if the numerics are wrong on a device; returns the record that says that they are not."""
    if verified is not None and _covers(verified, target, where):
        checked = verified
    else:
        how = {
            "checks": _VERIFY_FIRST, "devices": [where], "timeout_s": timeout_s, "isolated": where.type == "cpu",
        }  # fmt: skip
        checked = verify(target, reference, samples, **how)
    if not checked.passed and not checked.failures:
        raise NotVerifiedError(
            checked.name,
            "no check of its results applies, so it is not measured",
            rows=[(check.title, check.note) for check in checked.checks],
        )
    if not checked.passed:
        first = checked.failures[0]
        raise NotVerifiedError(
            checked.name,
            "it does not pass verify, so it is not measured",
            rows=[("check", first.title), ("case", first.case), ("found", first.message)],
            hint=f"`{first.repeat}`" if first.repeat else "`opwright.verify(...)` shows all failures",
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


def _file_of(operator: Operator | None, target: Any) -> str:
    return operator.declaration.file if operator else getattr(getattr(target, "__code__", None), "co_filename", "")


def _folder_of(operator: Operator | None, target: Any) -> Path | None:
    folder = Path(_file_of(operator, target)).absolute().parent
    return folder if folder.is_dir() else None


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
