"""opwright bench"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from opwright.cli.bench_tables import print_base, print_bench, print_call
from opwright.cli.console import print_json, progress, say
from opwright.cli.measuring import TIMEOUT_S, Window, Worker, WorkerEnded, rebuilt
from opwright.errors import CheckError, NotVerifiedError
from opwright.records import BaseRecord, BenchRecord, CallRecord, Machine, decoded, save_in
from opwright.records.files import make_folder

bench_app = App(name="bench")
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
    seconds: float = 1.0,
    precision: float = 0.02,
    threads: int | None = None,
    cpus: str | None = None,
    measure_limits: Annotated[bool, _several] = False,
    call: Annotated[bool, _several] = False,
    base: str | None = None,
    timeout: float = TIMEOUT_S,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Measure how fast the operators of TARGET are. One that does not pass verify is not measured.

    Measuring runs in a process of its own: an operator that crashes it, hangs, or takes all memory is named, and the
    others are measured. Exit code 1: an operator was refused, or with --base has become slower.

    Args:
        target: A module, a file, or either with ::name.
        against: "eager" or "compile"; may be repeated; both by default.
        axis: Sizes of an axis, n=1024,4096 or batch=512,8x128, or values of an argument, approximate=tanh,none,
            where "-" leaves an optional one out; other axes keep theirs; may be repeated.
        dtype: Measure with this dtype, bfloat16 or bf16; may be repeated.
        direction: "forward", "backward" or "step", which is both; may be repeated; forward and backward by default.
        device: Measure on this device, cpu, cuda or cuda:1. By default on the GPU when there is one and a CUDA
            kernel for it, else on the CPU.
        seconds: The longest to measure each candidate on each input.
        precision: End earlier when differences of this size are visible: 0.02 is two percent.
        threads: Threads of PyTorch.
        cpus: Run on these CPUs, 0-3 or 0,2, each thread bound to one.
        measure_limits: Measure the limits of the machine again; they are kept in the store.
        call: Show where one tiny call spends its time, instead.
        base: Compare with an earlier version: a commit, a record or a folder of records.
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
        "skip": [],
        "against": against or ["eager", "compile"],
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

    if base is not None:
        from opwright.cli.base import compare_with_base

        found, code = compare_with_base(request, base, threads)
    else:
        # Each is kept as soon as it is there: others may take long.
        found, code = measure(request, threads, quiet=json, on_record=keep)
    for record in found:
        if isinstance(record, BaseRecord):
            keep(record)
            if not json:
                print_base(record)
    if json:
        print_json(found)
    return code


def measure(
    request: dict[str, Any],
    threads: int | None,
    *,
    quiet: bool = False,
    on_record: Callable[[BenchRecord | CallRecord], None] = lambda record: None,
) -> tuple[list[Any], int]:
    """Measures the operators of a request; returns their records and the exit code.

    An operator that is refused, or ends the process, is named and has a record that says so, and the others are
    measured in another process. A rival that ends the process is left out.
    """
    records: list[Any] = []
    code, done, trouble = 0, list(request["skip"]), ""
    against = request["against"]
    while True:
        worker = Worker({**request, "skip": done, "against": against}, threads=threads)
        current, machine, started = "", {}, time.time()
        window = Window(worker)
        try:
            with progress("Measuring") as line:
                for answer in worker.answers():
                    window.see(answer)
                    line.update(f"{current} {worker.last}")
                    if "operator" in answer:
                        current, machine, started = answer["operator"], answer["machine"], time.time()
                    elif "refused" in answer:
                        refusal = rebuilt(answer["refused"])
                        raise NotVerifiedError(
                            refusal.subject, refusal.rule, rows=refusal.rows, body=refusal.body, hint=refusal.hint
                        )
                    elif "record" in answer:
                        record = decoded(answer["record"])
                        if isinstance(record, BenchRecord):
                            window.agree(record)
                            record.refused = trouble
                        records.append(record)
                        done.append(current)
                        against, trouble = request["against"], ""
                        line.clear()
                        _report(record, time.time() - started, quiet)
                        on_record(record)
            return records, code
        except (NotVerifiedError, WorkerEnded) as error:
            rival = error.who if isinstance(error, WorkerEnded) else ""
            if isinstance(error, WorkerEnded):
                error = error.error(current or request["target"])
            if not current:
                raise CheckError(request["target"], error.rule, rows=error.rows) from None
            say(f"error: {error}")
            code = 1
            if rival in against:
                against, trouble = [name for name in against if name != rival], error.rule
                continue
            if request["mode"] == "bench":
                records.append(_refused(current, error, request, machine, started))
                on_record(records[-1])
            done.append(current)
            against, trouble = request["against"], ""
        finally:
            worker.close()


def _refused(
    name: str, error: NotVerifiedError, request: dict[str, Any], machine: dict[str, Any], started: float
) -> BenchRecord:
    """Returns the record of an operator without times."""
    return BenchRecord(
        name=name,
        measurements=[],
        host_us={},
        verified=False,
        threads=machine["cores"],
        machine=Machine(**machine),
        created=started,
        seconds=time.time() - started,
        device=request["device"] or "cpu",
        refused=f"{error.rule} ({'; '.join(' '.join(row) for row in error.rows)})" if error.rows else error.rule,
    )


def _report(record: BenchRecord | CallRecord, seconds: float, quiet: bool) -> None:
    if isinstance(record, CallRecord):
        if not quiet:
            print_call(record)
        say(f"Split a call of {record.name} in {seconds:.1f} s")
        return
    if not quiet:
        print_bench(record)
    place = f" on {record.machine.device}" if record.on_gpu else ""
    say(f"Measured {record.name} on {len(record.measurements)} inputs{place} in {seconds:.1f} s")


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Returns the name and the values of `n=1024,4096`.

    Raises:
        CheckError: there is no name or no value.
    """
    name, _, values = text.partition("=")
    if not name or not values:
        raise CheckError(text, "this is no axis with sizes", hint="`--axis n=1024,4096 --axis batch=512,8x128`")
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
        CheckError: these are no CPUs.
    """
    found: list[int] = []
    for part in filter(None, (text or "").split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise CheckError(str(text), "these are no numbers of CPUs", hint="`--cpus 0-3` or `--cpus 0,2`")
        found += range(int(first), int(last or first) + 1)
    return found
