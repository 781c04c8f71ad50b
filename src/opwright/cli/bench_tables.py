"""The tables that `opwright bench` prints."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence

from opwright.cli.console import print_rows, say
from opwright.errors import align
from opwright.quantities import round_to
from opwright.records import BaseRecord, BenchRecord, CallRecord, Measurement
from opwright.report.conditions import tell_conditions
from opwright.report.ratios import explain_shares, tell_comparison, tell_interval, tell_share, tell_summary


def print_bench(record: BenchRecord, *, details: bool = False) -> None:
    """Prints the summary of a record, its measurements, one line each, and under which conditions they were made."""
    for summary in record.summarize():
        print(tell_summary(summary))
    print("\n".join(table_of(record, details=details)))
    for note in record.notes:
        print(note)
    for each in record.left_out:
        print(f"skipped: {each}")
    host = ", ".join(f"{name} {us:.2f} us" for name, us in record.host_us.items())
    if host:
        print(f"host time of the smallest call: {host}")
    conditions = tell_conditions(record)
    if conditions:
        print(f"measured {conditions}")


def table_of(record: BenchRecord, *, details: bool = False) -> list[str]:
    """Returns the lines of the table of measurements, with the names of tensors if the lines are then not too long.

    Args:
        details: with all that was measured beside the time: the fastest sample, on a CPU a call with fresh pages, on a
            GPU a call with a warm cache and the host's time, and memory as a multiple of that of the results.
    """
    lines = _table_of(record, details, [m.input for m in record.measurements])
    if max(map(len, lines)) > shutil.get_terminal_size((_WIDTH, 0)).columns:
        lines = _table_of(record, details, [m.case for m in record.measurements])
    return lines


def _table_of(record: BenchRecord, details: bool, inputs: Sequence[str]) -> list[str]:
    rivals = list(dict.fromkeys(t.candidate for m in record.measurements for t in m.timings[1:]))
    beside = ("fastest us", *(("warm us", "host us") if record.on_gpu else ("fresh pages us",)), "memory")
    state = "cold" if record.on_gpu else "warm"
    rows = [
        (
            "input",
            "direction",
            f"us ({state})",
            "95 % CI",
            *(f"vs {r}" for r in rivals),
            "of copy",
            *(beside if details else ()),
        )
    ]
    shared = _shared_options(inputs)
    for m, described in zip(record.measurements, inputs, strict=True):
        ours = m.ours
        others = (ours.warm_us, ours.host_us) if record.on_gpu else (ours.fresh_us,)
        more = (round_to(ours.min_us, 4), *(round_to(us, 4) if us else "" for us in others), _memory(m))
        rows.append(
            (
                "".join(part for part in _OPTION.split(described) if part.strip() not in shared),
                m.direction,
                round_to(ours.median_us, 4),
                tell_interval(ours.interval),
                *(tell_comparison(c) if (c := m.comparison_with(r)) else "" for r in rivals),
                "in cache" if m.in_cache else "" if m.roof_share is None else tell_share(m.roof_share),
                *(more if details else ()),
            )
        )
    lines = align(rows)
    if shared:
        lines.append(f"all inputs: {' '.join(shared)}")
    if reason := explain_shares(record):
        lines.append(reason)
    return lines


def tell_measurement(m: Measurement) -> str:
    """Returns a measurement as a line."""
    ratios = "".join(f", {tell_comparison(c)} against {c.candidate}" for c in m.comparisons)
    return f"{m.direction} {m.input}: {round_to(m.ours.median_us, 4)} us{ratios}"


_WIDTH = 120  # of lines, where there is no terminal
_OPTION = re.compile(r"( \w+=(?:'[^']*'|(?!\w+\[)\S+))")  # not a tensor with its name


def _shared_options(cases: Sequence[str]) -> list[str]:
    """Returns the options that all of some cases have in common; none of one case alone."""
    if len(cases) < 2:
        return []
    first, *others = ([option.strip() for option in _OPTION.findall(case)] for case in cases)
    return [option for option in first if all(option in other for other in others)]


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
    rows.append(("all", f"{record.total_us:.3f}", "", "100 %", record.input))
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
                row.input,
                row.direction,
                round_to(row.base_us, 4),
                round_to(row.now_us, 4),
                f"{row.ratio:.3f}x",
                tell_interval(row.visible),
                row.verdict + (" (hint)" if record.is_hint else ""),
            )
        )
    print(f"{record.name} against {record.base}")
    print_rows(rows)
    for missing in record.missing:
        say(f"not in both: {missing}")
    for each in record.left_out:
        say(f"skipped: {each}")
    if record.is_hint:
        say(f"This is a hint only: {record.reason}.")
