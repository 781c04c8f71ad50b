"""The tables that `opwright bench` prints."""

from __future__ import annotations

from opwright.cli.console import print_rows, say
from opwright.records import BaseRecord, BenchRecord, CallRecord, Measurement


def print_bench(record: BenchRecord) -> None:
    """Prints the measurements of a record, one line each, and under which conditions they were made.

    Beside the time: on a CPU that with fresh pages, on a GPU that on a warm cache and the host's. Behind a ratio
    stands the smallest visible difference.
    """
    rivals = [t.candidate for t in record.measurements[0].timings[1:]] if record.measurements else []
    beside = ("warm us", "host us") if record.on_gpu else ("fresh us",)
    rows = [("input", "direction", "us", "noise", *beside, *(f"vs {r}" for r in rivals), "of copy", "memory", "")]
    for m in record.measurements:
        ours = m.timings[0]
        others = (ours.warm_us, ours.host_us) if record.on_gpu else (ours.fresh_us,)
        rows.append(
            (
                m.case,
                m.direction,
                f"{ours.median_us:.4g}",
                f"{100 * ours.noise:.0f} %",
                *(f"{us:.4g}" if us else "" for us in others),
                *(_ratio(m, r) for r in rivals),
                "" if m.roof_share is None else f"{100 * m.roof_share:.0f} %",
                _memory(m),
                "fits the cache" if m.in_cache else "",
            )
        )
    print_rows(rows)
    host = ", ".join(f"{name} {us:.2f} us" for name, us in record.host_us.items())
    if host:
        print(f"host time of a call on one element: {host}")
    if record.conditions is not None:
        print(_conditions(record))


def _ratio(m: Measurement, rival: str) -> str:
    found = next((c for c in m.comparisons if c.candidate == rival), None)
    if found is None:
        return f"{m.speedup_over(rival):.2f}x"
    return f"{found.ratio:.2f}x ±{100 * found.visible:.2g} %"


def _memory(m: Measurement) -> str:
    """Returns the peak as a multiple of the results."""
    peak = m.timings[0].peak_bytes
    return f"{peak / m.output_bytes:.2f}x" if peak is not None and m.output_bytes else ""


def _conditions(record: BenchRecord) -> str:
    c = record.conditions
    clock = f", {c.clock_mhz_before:.0f} to {c.clock_mhz_after:.0f} MHz" if c.clock_mhz_before else ""
    gpu = f", GPU {c.gpu_clock_mhz_before:.0f} to {c.gpu_clock_mhz_after:.0f} MHz" if c.gpu_clock_mhz_before else ""
    cpus = ", ".join(map(str, c.affinity))
    threads = f"{record.threads} thread" + ("s" if record.threads != 1 else "")
    process = "a process of its own" if c.process == "own" else "the caller's process"
    witness = ", timed from another as well" if c.witnessed else ""
    return (
        f"conditions: {process}{witness}; {threads} on CPUs {cpus}; freed memory "
        f"{'kept' if c.allocator == 'keeps' else 'given back'}; load {c.load_before:.1f} to {c.load_after:.1f}{clock}{gpu}"
    )


def print_call(record: CallRecord) -> None:
    """Prints where a call goes, one line for each part."""
    rows = [("part", "us", "±", "share", "obtained as")]
    for part in record.parts:
        share = f"{100 * part.us / record.total_us:.0f} %"
        rows.append((part.name, f"{part.us:.3f}", f"{part.uncertainty_us:.3f}", share, part.obtained))
    rows.append(("all", f"{record.total_us:.3f}", "", "100 %", record.case))
    print_rows(rows)
    peers = ", ".join(f"{name} {us:.2f} us" for name, us in record.peers_us.items())
    if peers:
        print(f"beside it: {peers}")
    if record.device_us is not None:
        print(f"behind the host, on the device: {record.device_us:.2f} us")


def print_base(record: BaseRecord) -> None:
    """Prints what has become faster and slower."""
    rows = [("input", "direction", "base us", "now us", "ratio", "visible", "verdict")]
    for row in record.rows:
        rows.append(
            (
                row.case,
                row.direction,
                f"{row.base_us:.4g}",
                f"{row.now_us:.4g}",
                f"{row.ratio:.3f}x",
                f"±{100 * row.visible:.2g} %",
                row.verdict + (" (hint)" if record.is_hint else ""),
            )
        )
    print(f"{record.name} against {record.base}")
    print_rows(rows)
    for missing in record.missing:
        say(f"not in both: {missing}")
    if record.is_hint:
        say(f"This is a hint only: {record.reason}.")
