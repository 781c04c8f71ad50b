"""The tables that `opwright bench` prints."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opwright.cli.console import print_rows, say
from opwright.records import BaseRecord, BenchRecord, CallRecord, Measurement
from opwright.report.conditions import tell_conditions


def print_bench(record: BenchRecord) -> None:
    """Prints the measurements of a record, one line each, and under which conditions they were made.

    Beside the time: on a CPU that with fresh pages, on a GPU that on a warm cache and the host's. Behind a ratio
    stands the smallest visible difference.
    """
    rivals = [t.candidate for t in record.measurements[0].timings[1:]] if record.measurements else []
    beside = ("warm us", "host us") if record.on_gpu else ("fresh us",)
    rows = [("input", "direction", "us", "noise", *beside, *(f"vs {r}" for r in rivals), "of copy", "memory", "")]
    shared = _shared_options([m.case for m in record.measurements])
    for m in record.measurements:
        ours = m.timings[0]
        others = (ours.warm_us, ours.host_us) if record.on_gpu else (ours.fresh_us,)
        rows.append(
            (
                "".join(part for part in _OPTION.split(m.case) if part.strip() not in shared),
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
    if shared:
        print(f"all inputs: {' '.join(shared)}")
    for each in record.left_out:
        print(f"left out: {each}")
    host = ", ".join(f"{name} {us:.2f} us" for name, us in record.host_us.items())
    if host:
        print(f"host time of a call on one element: {host}")
    conditions = tell_conditions(record)
    if conditions:
        print(f"measured {conditions}")


_OPTION = re.compile(r"( \w+=(?:'[^']*'|\S+))")


def _shared_options(cases: Sequence[str]) -> list[str]:
    """Returns the options that all of some cases have in common; none of one case alone."""
    if len(cases) < 2:
        return []
    first, *others = ([option.strip() for option in _OPTION.findall(case)] for case in cases)
    return [option for option in first if all(option in other for other in others)]


def _ratio(m: Measurement, rival: str) -> str:
    found = next((c for c in m.comparisons if c.candidate == rival), None)
    if found is None:
        return f"{m.speedup_over(rival):.2f}x"
    return f"{found.ratio:.2f}x ±{_percent(found.visible)}"


def _percent(share: float) -> str:
    """Writes a share with two digits, or all before the point: `0.72 %`, `130 %`."""
    return f"{100 * share:.{2 if abs(share) < 0.995 else 0}{'g' if abs(share) < 0.995 else 'f'}} %"


def _memory(m: Measurement) -> str:
    """Returns the peak as a multiple of the results."""
    peak = m.timings[0].peak_bytes
    return f"{peak / m.output_bytes:.2f}x" if peak is not None and m.output_bytes else ""


def print_call(record: CallRecord) -> None:
    """Prints where a call goes, one line for each part."""
    rows = [("part", "us", "±", "share", "obtained as")]
    for part in record.parts:
        share = f"{round(100 * part.us / record.total_us)} %"
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
                f"±{_percent(row.visible)}",
                row.verdict + (" (hint)" if record.is_hint else ""),
            )
        )
    print(f"{record.name} against {record.base}")
    print_rows(rows)
    for missing in record.missing:
        say(f"not in both: {missing}")
    for each in record.left_out:
        say(f"left out: {each}")
    if record.is_hint:
        say(f"This is a hint only: {record.reason}.")
