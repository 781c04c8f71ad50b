"""opwright bench"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from opwright.cli.bench_tables import print_base, print_bench, print_call, table_of, tell_measurement
from opwright.cli.console import Progress, print_json, progress, say
from opwright.cli.help import make_app
from opwright.errors import CheckError, NotVerifiedError, OpwrightError
from opwright.isolation import TIMEOUT_S, Worker, WorkerEnded, rebuild_error
from opwright.records import BaseRecord, BenchRecord, CallRecord, Machine, Measurement, decoded, save_in
from opwright.records.files import make_folder
from opwright.typed_json import decode

INTERRUPTED = 130  # as a shell has it of a program that SIGINT has ended
_FIRST_TABLE_SECONDS = 10.0
bench_app = make_app("bench")
_several = Parameter(negative="")


@bench_app.default
def bench_operators(
    target: str,
    *,
    against: Annotated[list[str] | None, _several] = None,
    axis: Annotated[list[str] | None, _several] = None,
    dtype: Annotated[list[str] | None, _several] = None,
    direction: Annotated[list[str] | None, _several] = None,
    device: str | None = None,
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
    others are measured. Ctrl-C keeps what was measured. Exit code 1: an operator was refused, with --base has become
    slower, or with --strict there are warnings.

    Args:
        target: A module, a file, or either with ::name; or a task of the KernelBench form, as for verify.
        against: "eager" or "compile"; may be repeated. By default eager, and compile on as many inputs as the time allows.
        axis: Sizes of an axis, n=1024,4096 or batch=512,8x128, or values of an argument, approximate=tanh,none,
            where "-" leaves an optional one out; other axes keep theirs; may be repeated.
        dtype: Measure with this dtype, bfloat16 or bf16; may be repeated.
        direction: "forward", "backward" or "step", which is both; may be repeated; forward and backward by default.
        device: Measure on this device, cpu, cuda or cuda:1. By default on the GPU when there is one and a CUDA
            kernel for it, else on the CPU.
        seconds: The time for all measurements of an operator.
        precision: End earlier when all confidence intervals are this narrow: 0.02 is two percent.
        threads: Threads of PyTorch.
        cpus: Run on these CPUs, 0-3 or 0,2, each thread bound to one.
        measure_limits: Measure the limits of the machine again; they are kept in the store.
        call: Show where one tiny call spends its time, instead.
        base: Compare with an earlier version: a commit, a record or a folder of records.
        candidate: Where TARGET is a task: the file or folder with ModelNew, as for verify.
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
    if call and base is not None:
        raise CheckError("bench", "`--call` has no base to be compared with", hint="one of `--call` and `--base`")
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
    }

    def keep(record: BenchRecord | CallRecord | BaseRecord) -> None:
        if out is not None:
            save_in(out, record)

    def show(record: BenchRecord | CallRecord) -> None:
        keep(record)  # at once: others may take long
        if isinstance(record, CallRecord):
            if not json:
                print_call(record)
            say(f"Split a call of {record.name} in {record.seconds:.1f} s")
            return
        if not json and record.measurements:
            print_bench(record, details=details)
        for warning in record.all_warnings:
            say(f"warning: {warning}")
        place = f" on {record.machine.device}" if record.on_gpu else ""
        say(f"Measured {record.name} on {len(record.measurements)} inputs{place} in {record.seconds:.1f} s")

    if base is not None:
        from opwright.cli.bench_base import compare_with_base

        found, code = compare_with_base(request, base, threads)
        for record in found:
            keep(record)
            if not json:
                print_base(record)
    else:
        say(f"Measuring {target}: verify first, then {seconds:g} s for each operator")
        found, code = measure(request, threads, show)
        if strict and not code and any(isinstance(r, BenchRecord) and r.all_warnings for r in found):
            code = 1
    if json:
        print_json(found)
    return code


def start_worker(request: dict[str, Any], threads: int | None, **where: Any) -> Worker:
    """Starts a process that measures.

    Args:
        threads: of PyTorch; by default as many as there are cores for it.
        where: arguments of `Worker`; variables of `env` are added to those that fix the threads.
    """
    fixed = {"PYTHONHASHSEED": "0"}
    if threads is not None:
        fixed |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if request.get("cpus"):
        fixed |= {"OMP_PROC_BIND": "close", "OMP_PLACES": ",".join(f"{{{cpu}}}" for cpu in request["cpus"])}
    env = fixed | where.pop("env", {})
    with _on_cpus(request.get("cpus")):
        return Worker("opwright.bench.worker", request, env=env, timeout_s=request["timeout_s"], **where)


@contextlib.contextmanager
def _on_cpus(cpus: Sequence[int] | None) -> Iterator[None]:
    """Runs on these CPUs: a process that is started then does so from its start, and PyTorch counts them only."""
    if not cpus:
        yield
        return
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def measure(
    request: dict[str, Any],
    threads: int | None,
    on_record: Callable[[BenchRecord | CallRecord], None] = lambda record: None,
) -> tuple[list[Any], int]:
    """Measures the operators of a request; returns their records and the exit code.

    An operator that is refused, or ends the process, is named; its record has what was measured until then, and the
    others are measured in another process. A candidate of `against` that ends the process is skipped.
    """
    records: list[Any] = []
    code, done, skipped = 0, list(request["skip"]), ""
    against = request["against"]
    while True:
        current = _Current(request["target"])
        worker = start_worker({**request, "skip": done, "against": against}, threads)

        def finish(record: BenchRecord | CallRecord, name: str) -> None:
            nonlocal against, skipped
            if isinstance(record, BenchRecord) and skipped:
                record.left_out.append(skipped)
            against, skipped = request["against"], ""
            records.append(record)
            done.append(name)
            on_record(record)

        try:
            with progress("Measuring") as line:
                for event in worker.events():
                    current.take(event, worker, line)
                    if "refused" in event:
                        error = rebuild_error(event["refused"])
                        say(f"error: {error}")
                        code = 1
                        if request["mode"] == "bench":
                            finish(current.partial(error), current.name)
                        else:
                            done.append(current.name)
                    elif "record" in event:
                        line.clear()
                        record = decoded(event["record"])
                        assert isinstance(record, (BenchRecord, CallRecord))
                        finish(record, current.name)
            return records, code
        except KeyboardInterrupt:
            if current.measured:
                record = current.partial()
                record.left_out.append(f"interrupted after {len(current.measured)} of {current.inputs} inputs")
                finish(record, current.name)
            return records, INTERRUPTED
        except WorkerEnded as ended:
            if not current.name:
                raise ended.error(request["target"], CheckError) from None
            error = ended.error(current.name, NotVerifiedError)
            say(f"error: {error}")
            code = 1
            who = ended.running.who
            rivals = ["eager", "compile"] if against is None else against
            if who in rivals:
                against, skipped = [name for name in rivals if name != who], f"{who}: {error.rule}"
                continue
            if request["mode"] == "bench":
                finish(current.partial(error), current.name)
            else:
                done.append(current.name)
        finally:
            worker.close()


class _Current:
    """The operator that is measured now, and what is known of it.

    Attributes:
        name: of the operator; "" before there is one.
        measured: its measurements, by the number of the input.
        inputs: how many there are.
    """

    def __init__(self, target: str) -> None:
        self.name, self.inputs, self.measured = "", 0, {}
        self._machine: dict[str, Any] = {}
        self._record: BenchRecord | None = None
        self._started, self._has_table = time.monotonic(), False
        self._target = target

    def take(self, event: dict[str, Any], worker: Worker, line: Progress) -> None:
        """Notes what the worker has sent, and shows it."""
        if "operator" in event:
            self.name, self._machine, self._record = event["operator"], event["machine"], None
            self.measured, self._started, self._has_table = {}, time.monotonic(), False
        elif "started" in event:
            record, self.inputs = decoded(event["started"]), event["inputs"]
            assert isinstance(record, BenchRecord)
            self._record = record
        elif "measured" in event:
            found = decode(Measurement, event["measured"], "measurement")
            is_first = event["number"] not in self.measured
            self.measured[event["number"]] = found
            if is_first and not line.is_live:
                say(f"  [{len(self.measured)}/{self.inputs}] {tell_measurement(found)}")
        line.update(f"{self.name or self._target}  {worker.running.what}")
        waited = time.monotonic() - self._started
        is_due = len(self.measured) == self.inputs or waited > _FIRST_TABLE_SECONDS
        if self.measured and is_due and not self._has_table:
            self._has_table = True
            line.clear()
            say("\n".join(["First figures, to be refined:", *table_of(self.partial())]))

    def partial(self, error: OpwrightError | None = None) -> BenchRecord:
        """Returns the record with the measurements made so far.

        Args:
            error: why it goes no further; None if it does.
        """
        record = self._record or BenchRecord(
            name=self.name,
            measurements=[],
            host_us={},
            verified=False,
            threads=self._machine["cores"],
            machine=Machine(**self._machine),
            created=time.time(),
            seconds=0.0,
        )
        measurements = [self.measured[number] for number in sorted(self.measured)]
        seconds = time.monotonic() - self._started
        refused, hint = (_one_line(error), error.hint) if error else ("", "")
        return replace(record, measurements=measurements, seconds=seconds, refused=refused, hint=hint)


def _one_line(error: OpwrightError) -> str:
    return f"{error.rule} ({'; '.join(' '.join(row) for row in error.rows)})" if error.rows else error.rule


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
    try:
        return float(text)
    except ValueError:
        return text


def parse_cpus(text: str | None) -> list[int]:
    """Returns the numbers of `0-3` or `0,2`.

    Raises:
        CheckError: these are not numbers of CPUs.
    """
    found: list[int] = []
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise CheckError("--cpus", f"invalid value `{text}`", rows=[("expected", "numbers or ranges, as 0,2-3")])
        found += range(int(first), int(last or first) + 1)
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else found
    if not set(found) <= set(usable):
        raise CheckError(
            "--cpus",
            "names CPUs that this process cannot use",
            rows=[("got", ", ".join(map(str, found))), ("expected", f"some of {', '.join(map(str, usable))}")],
        )
    return found
