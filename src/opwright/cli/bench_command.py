"""opwright bench"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from opwright.cli.bench_tables import print_base, print_bench, print_call
from opwright.cli.console import print_json, progress, say
from opwright.cli.measuring import Window, Worker, rebuilt
from opwright.errors import CheckError, NotVerifiedError
from opwright.records import BaseRecord, BenchRecord, CallRecord, decoded, save

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
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Measure how fast the operators of TARGET are. One that does not pass verify is not measured.

    Measuring runs in a process of its own. Exit code 1: an operator was refused, or with --base has become slower.

    Args:
        target: A module, a file, or either with ::name.
        against: "eager" or "compile"; may be repeated; both by default.
        axis: Sizes of an axis, n=1024,4096 or batch=512,8x128, or values of an argument, approximate=tanh,none;
            - leaves an optional one out; may be repeated.
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
        out: A folder to write the records into.
        json: Print the records as JSON.
    """
    if threads is not None and threads < 1:
        raise CheckError("--threads", "must be a positive number", rows=[("got", str(threads))])
    if call and base is not None:
        raise CheckError("bench", "`--call` has no base to be compared with", hint="one of `--call` and `--base`")
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
    }
    if base is not None:
        from opwright.cli.base import compare_with_base

        found, code = compare_with_base(request, base, threads)
    else:
        found, code = measure(request, threads, quiet=json)
    for record in found:
        if out is not None:
            kind = {BenchRecord: "bench", CallRecord: "call", BaseRecord: "base"}[type(record)]
            save(record, out / f"{record.name.rpartition('::')[2]}.{kind}.json")
        if isinstance(record, BaseRecord) and not json:
            print_base(record)
    if json:
        print_json(found)
    return code


def measure(
    request: dict[str, Any], threads: int | None, *, quiet: bool = False
) -> tuple[list[Any], int]:
    """Measures the operators of a request; returns their records and the exit code.

    An operator that ends the process is named, and the others are measured in another one.
    """
    records: list[Any] = []
    code, done = 0, list(request["skip"])
    while True:
        worker, current = Worker({**request, "skip": done}, threads=threads), ""
        window = Window(worker)
        started = time.perf_counter()
        try:
            with progress("Measuring") as line:
                for answer in worker.answers():
                    window.see(answer)
                    line.update(f"{current} {worker.last}")
                    if "operator" in answer:
                        current, started = answer["operator"], time.perf_counter()
                    elif "refused" in answer:
                        raise rebuilt(answer["refused"])
                    elif "record" in answer:
                        record = decoded(answer["record"])
                        if isinstance(record, BenchRecord):
                            window.agree(record)
                        records.append(record)
                        done.append(current)
                        line.clear()
                        _report(record, time.perf_counter() - started, quiet)
            return records, code
        except NotVerifiedError as error:
            worker.close()
            if not current:
                raise CheckError(request["target"], error.rule, rows=error.rows) from None
            say(f"error: {error}")
            code = 1
            done.append(current)


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
