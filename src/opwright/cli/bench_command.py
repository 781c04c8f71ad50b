"""opwright bench"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from opwright.cli.console import print_json, print_rows, progress, say

if TYPE_CHECKING:
    from opwright.records import BenchRecord, VerifyRecord

bench_app = App(name="bench")


@bench_app.default
def bench_operators(
    target: str,
    *,
    against: Annotated[list[str] | None, Parameter(negative="")] = None,
    device: str | None = None,
    seconds: float = 0.25,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Measure how fast the operators of TARGET are. One that does not pass verify is not measured.

    Args:
        target: A module, a file, or either with ::name.
        against: "eager" or "compile"; may be repeated; both by default.
        device: Measure on this device, cpu, cuda or cuda:1. By default on the GPU when there is one and a CUDA
            kernel for it, else on the CPU.
        seconds: How long to measure each candidate on each input.
        out: A folder to write the records into.
        json: Print the records as JSON.
    """
    from opwright.cli.target import find_operators
    from opwright.errors import NotVerifiedError

    records, code = [], 0
    for operator in find_operators(target):
        try:
            found = bench_one(operator, against=against, device=device, seconds=seconds, out=out, quiet=json)
            records.append(found)
        except NotVerifiedError as error:
            say(f"error: {error}")
            code = 1
    if json:
        print_json(records)
    return code


def bench_one(
    operator,
    *,
    against: list[str] | None = None,
    device: str | None = None,
    seconds: float = 0.25,
    out: Path | None = None,
    quiet: bool = False,
    verified: VerifyRecord | None = None,
) -> BenchRecord:
    """Measures one operator, prints the result and writes the record."""
    from opwright.bench.run import bench
    from opwright.records import save

    started = time.perf_counter()
    rivals = against or ["eager", "compile"]
    with progress(f"Measuring {operator.declaration.name}") as line:
        record = bench(
            operator.function,
            rivals,
            device=device,
            seconds=seconds,
            verified=verified,
            on_measurement=lambda m: line.update(f"{m.direction} {m.case}"),
        )
    if out is not None:
        save(record, out / f"{operator.declaration.name}.bench.json")
    if not quiet:
        print_record(record)
    place = f" on {record.machine.device}" if record.on_gpu else ""
    inputs = f"{len(record.measurements)} inputs{place}"
    say(f"Measured {record.name} on {inputs} in {time.perf_counter() - started:.1f} s")
    return record


def print_record(record: BenchRecord) -> None:
    """Prints the measurements of a record, one line each. On a GPU: device time cold and warm, host time."""
    rivals = [t.candidate for t in record.measurements[0].timings[1:]] if record.measurements else []
    beside = ("warm us", "host us") if record.on_gpu else ()
    rows = [("input", "direction", "us", "noise", *beside, *(f"vs {r}" for r in rivals), "of copy", "")]
    for m in record.measurements:
        ours = m.timings[0]
        ratios = [f"{m.speedup_over(r):.2f}x" for r in rivals]
        others = [f"{us:.4g}" if us else "" for us in (ours.warm_us, ours.host_us)] if record.on_gpu else []
        share = "" if m.roof_share is None else f"{100 * m.roof_share:.0f} %"
        rows.append(
            (
                m.case,
                m.direction,
                f"{ours.median_us:.4g}",
                f"{100 * ours.noise:.0f} %",
                *others,
                *ratios,
                share,
                "fits the cache" if m.in_cache else "",
            )
        )
    print_rows(rows)
    host = ", ".join(f"{name} {us:.2f} us" for name, us in record.host_us.items())
    if host:
        print(f"host time of a call on one element: {host}")
