"""opwright bench"""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from opwright.bench import worker
from opwright.bench.devices import is_one_of_several_ranks, measure_as_rank, measure_on
from opwright.bench.worker import RIVALS
from opwright.cli.bench_tables import print_base, print_bench, print_call, table_of, tell_measurement
from opwright.cli.console import Progress, print_json, say
from opwright.cli.help import make_app
from opwright.cli.overview import TARGET
from opwright.errors import CheckError, plural
from opwright.isolation import TIMEOUT_S
from opwright.records import BaseRecord, BenchRecord, CallRecord, save_in
from opwright.records.files import make_folder

_FIRST_TABLE_SECONDS = 10.0
bench_app = make_app("bench")
_several = Parameter(negative="")


@bench_app.default
def bench_operators(
    target: Annotated[str, Parameter(help=f"{TARGET} Or a task, as for verify.")],
    *,
    against: Annotated[list[str] | None, _several] = None,
    axis: Annotated[list[str] | None, _several] = None,
    dtype: Annotated[list[str] | None, _several] = None,
    direction: Annotated[list[str] | None, _several] = None,
    device: str | None = None,
    devices: str | None = None,
    seconds: float = 8.0,
    precision: float = 0.02,
    threads: int | None = None,
    cpus: str | None = None,
    measure_limits: Annotated[bool, _several] = False,
    call: Annotated[bool, _several] = False,
    base: str | None = None,
    candidate: Path | None = None,
    details: Annotated[bool, _several] = False,
    strict: Annotated[bool, _several] = False,
    timeout: float = TIMEOUT_S,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Measure how fast the operators of TARGET are. One that does not pass verify is not measured.

    Measuring runs in a process of its own: an operator that crashes it, hangs, or takes all memory is named, and the
    others are measured. Ctrl-C keeps what was measured.

    Exit code 1: an operator is wrong, crashed or does not compile, with --base has become slower, or with --strict
    there are warnings; 5: with --base, there is nothing that both versions have.

    Args:
        against: Compare with this alone, "eager" or "compile"; may be repeated, for both. By default eager, and compile
            on as many inputs as the time allows.
        axis: Sizes of an axis, n=1024,4096, of *batch, batch=512,8x128, or values of an argument,
            approximate=tanh,none, where "-" leaves an optional one out; other axes keep theirs; may be repeated.
        dtype: Measure with this dtype, bfloat16 or bf16; may be repeated.
        direction: "forward", "backward" or "step", which is both; may be repeated; forward and backward by default.
        device: Measure on this device, cpu, cuda or cuda:1. By default on the GPU when there is one and a CUDA
            kernel for it, else on the CPU.
        devices: Distribute the inputs round-robin over these GPUs, such as 0,1 or 0-3, with one process each, and merge
            the records. Not under torchrun, where each rank uses its own GPU.
        seconds: The time to measure an operator; with several devices, on each device.
        precision: End earlier when all confidence intervals are this narrow: 0.02 is two percent.
        threads: Threads of PyTorch; by default one for each core, or one in all if the machine is busy.
        cpus: Run on these CPUs, 0-3 or 0,2, each thread bound to one.
        measure_limits: Measure the limits of the machine again; they are kept in the store.
        call: Show where one tiny call spends its time, instead.
        base: Compare with an earlier version: a commit, a record or a folder of records.
        candidate: Only for a task: the file with ModelNew, or a folder of such files, as for verify.
        details: Show more columns: the fastest sample, cold pages, the host's time, memory.
        strict: End with exit code 1 if there are warnings.
        timeout: How many seconds one call may take.
        out: A folder to write the records into.
        json: Print the records as JSON.
    """
    if threads is not None and threads < 1:
        raise CheckError("--threads", "must be a positive number", rows=[("got", str(threads))])
    for flag, value in (("seconds", seconds), ("precision", precision), ("timeout", timeout)):
        if not math.isfinite(value) or value < 0 or (flag == "timeout" and not value):
            least = "above 0" if flag == "timeout" else "from 0"
            raise CheckError(f"--{flag}", f"must be a finite number, {least}", rows=[("got", f"{value:g}")])
    for name in against or []:
        if name not in RIVALS:
            raise CheckError("--against", f"unknown value `{name}`", rows=[("expected", f"one of {', '.join(RIVALS)}")])
    if call and base is not None:
        raise CheckError("bench", "`--call` has no base to be compared with", hint="leave one of them out")
    for flag, value in (("--against", against), ("--axis", axis), ("--dtype", dtype), ("--direction", direction)):
        if call and value:
            rule = f"`--call` measures a call on one element, so `{flag}` has no effect"
            raise CheckError("bench", rule, hint=f"leave `{flag}` out")
    several, is_rank = parse_devices(devices), is_one_of_several_ranks()
    if (several or is_rank) and (call or base is not None):
        flag, hint = "--call" if call else "--base", "leave `--devices` out" if several else "run it without torchrun"
        raise CheckError("bench", f"`{flag}` measures on one device", hint=hint)
    if several and device is not None:
        raise CheckError("bench", "`--device` and `--devices` cannot both be given", hint="leave `--device` out")
    if is_rank and (several or ":" in (device or "")):
        rule = "under torchrun each rank measures on its own GPU"
        raise CheckError("bench", rule, hint="leave `--devices` out, or use `--device cuda`")
    if out is not None:
        make_folder(out)  # now, and not when all is measured
    request = {
        "target": target,
        "candidate": str(candidate) if candidate is not None else "",
        "skip": [],
        "against": against or None,
        "sweep": dict(map(parse_axis, axis or [])),
        "dtypes": dtype or [],
        "directions": direction,
        "device": device,
        "seconds": seconds,
        "precision": precision,
        "measure_limits": measure_limits,
        "cpus": parse_cpus(cpus),
        "mode": "call" if call else "bench",
        "timeout_s": timeout,
        "part": [0, 1],
        "env": {},
    }

    shown = _Shown(target, out, details=details, json=json)
    if base is not None:
        from opwright.bench.versions import compare_with_base

        found, code = compare_with_base(request, base, threads, shown)
        shown.clear()
        for record in found:
            shown.keep(record)
            if not json:
                print_base(record)
    else:
        if not call:
            shown.opening = f"Measuring {target}: verify first, then {seconds:g} s for each operator"
        if several:
            found, code = measure_on(request, several, threads, shown)
        elif is_rank:
            found, code = measure_as_rank(request, threads, shown)
        else:
            found, code = worker.measure(request, threads, shown)
        if strict and not code and any(isinstance(r, BenchRecord) and r.all_warnings for r in found):
            code = 1
    if code == worker.INTERRUPTED:
        say("Interrupted")
    if json and (found or not is_rank):  # the first rank has the records of all
        print_json(found)
    return code


class _Shown(worker.Watcher):
    """Shows how a run goes, and keeps its records.

    Attributes:
        opening: what is said when there is something to measure: the target is found, and so is the device.
    """

    opening = ""

    def __init__(self, target: str, out: Path | None, *, details: bool, json: bool) -> None:
        self._target, self._out, self._details, self._json = target, out, details, json
        self._line = Progress("Measuring")
        self._operator, self._told, self._has_table = "", {}, False

    def clear(self) -> None:
        self._line.clear()

    def say(self, text: str) -> None:
        self.clear()
        say(text)

    def keep(self, record: BenchRecord | CallRecord | BaseRecord) -> None:
        if self._out is not None:
            save_in(self._out, record)

    def watch(self, current: worker.Current, what: str) -> None:
        if current.name and self.opening:
            self.say(self.opening)
            self.opening = ""
        if current.name != self._operator:
            self._operator, self._told, self._has_table = current.name, {}, False
        is_refined = False
        for number, measurement in current.measured.items():
            is_refined |= number in self._told and self._told[number] is not measurement
            if number not in self._told and not self._line.is_live:
                say(f"  [{len(self._told) + 1}/{current.inputs}] {tell_measurement(measurement)}")
            self._told[number] = measurement
        self._line.update(f"{current.name or self._target}  {what}")
        is_due = is_refined or time.monotonic() - current.started > _FIRST_TABLE_SECONDS
        # Where there is no live line, each input has had a line of its own.
        if self._line.is_live and self._told and is_due and not self._has_table:
            self._has_table = True
            self.say("\n".join(["First figures, to be refined:", *table_of(current.partial())]))

    def watch_pair(self, operator: str, number: int) -> None:
        self._line.update(f"{operator}  pair {number} of processes")

    def finish(self, record: BenchRecord | CallRecord) -> None:
        self._line.clear()
        self.keep(record)  # at once: others may take long
        if isinstance(record, CallRecord):
            if not self._json:
                print_call(record)
            say(f"Split a call of {record.name} in {record.seconds:.1f} s")
            return
        if not self._json and record.measurements:
            print_bench(record, details=self._details)
        for warning in record.all_warnings:
            say(f"warning: {warning}")
        if not record.measurements:  # why has been said
            return
        count = len({m.device for m in record.measurements if m.device})
        on = f"{count} devices, {record.machine.device or record.machine.cpu}" if count > 1 else record.machine.device
        place = f" on {on}" if record.on_gpu or count > 1 else ""
        tell = say if self._json else print
        tell(f"Measured {record.name} on {plural(len(record.measurements), 'input')}{place} in {record.seconds:.1f} s")


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Returns the name and the values of `n=1024,4096`.

    Raises:
        CheckError: there is no name or no value.
    """
    name, _, values = text.partition("=")
    if not name or not values:
        raise CheckError("--axis", f"invalid value `{text}`", rows=[("expected", "a name and sizes, as n=1024,4096")])
    return name, [_parse_value(value) for value in values.split(",")]


def _parse_value(text: str) -> Any:
    if text == "-":
        return None
    if text in ("true", "false"):
        return text == "true"
    parts = text.split("x")
    if all(part.isdigit() for part in parts):
        sizes = tuple(map(int, parts))
        return sizes[0] if len(sizes) == 1 else sizes
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def parse_devices(text: str | None) -> list[str]:
    """Returns the names of the GPUs of `0,1`, `0-3` or `cuda:0,cuda:1`.

    Raises:
        CheckError: these are not numbers of devices, or one is there twice.
    """
    if text is None:
        return []
    numbers = _parse_numbers("--devices", text.replace("cuda:", ""))
    if len(set(numbers)) < len(numbers):
        raise CheckError("--devices", "names a device twice", rows=[("got", text)])
    return [f"cuda:{number}" for number in numbers]


def _parse_numbers(flag: str, text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise CheckError(flag, f"invalid value `{text}`", rows=[("expected", "numbers or ranges, as 0,2-3")])
        found += range(int(first), int(last) + 1)
    return found


def parse_cpus(text: str | None) -> list[int]:
    """Returns the numbers of `0-3` or `0,2`.

    Raises:
        CheckError: these are not numbers of CPUs.
    """
    if text is None:
        return []
    found = _parse_numbers("--cpus", text)
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else found
    if not set(found) <= set(usable):
        raise CheckError(
            "--cpus",
            "names CPUs that this process cannot use",
            rows=[("got", ", ".join(map(str, found))), ("expected", f"some of {', '.join(map(str, usable))}")],
        )
    return found
