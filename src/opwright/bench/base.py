"""Two versions of an operator: what has become faster or slower, and what cannot be told.

Two processes measure in turns, one for each version, and both are started anew several times: where a process
puts its code and data moves its times by more than the noise within it. So each pair of processes gives one
number for an input, the logarithm of the ratio of the fastest samples of both, as whatever interferes only makes a
sample longer; and what counts is how these numbers scatter from pair to pair. Now and then a version has not one
undisturbed sample in a pair, and its number is far off: so the outermost fifth is trimmed, and the smallest visible
difference is the half-width of Yuen's interval of the trimmed mean, wide enough that all inputs of an operator are inside
at once with 99 % (Bonferroni): a false alarm in one run of twenty would be too many for a gate.

A record holds no process that could take turns. There the time of a rival that both records have, the same
PyTorch on the same machine, is the yardstick: the ratios to it are compared, and by how far the yardstick itself
has moved, no difference is visible.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from opwright.bench.comparison import compare, into_blocks, trimmed_interval_of
from opwright.records import BaseRow, BenchRecord, Machine, Measurement
from opwright.records.bench import relative_width

_STRICTER = 5  # than 95 %
FEWEST_PAIRS = 8  # with fewer the interval of the trimmed mean holds less often than it says


def row_of(name: str, pairs: Sequence[tuple[Sequence[float], Sequence[float]]], rows: int) -> BaseRow:
    """Returns what pairs of processes say about one input.

    Args:
        name: "direction case".
        pairs: for each pair of processes the fastest samples of their blocks, of the base and of now.
        rows: how many inputs are judged together.
    """
    logs = [math.log(min(base) / min(now)) for base, now in pairs]
    center, half = trimmed_interval_of(logs, _STRICTER * rows)
    direction, _, case = name.partition(" ")
    base_us = statistics.median(min(base) for base, _ in pairs)
    now_us = statistics.median(min(now) for _, now in pairs)
    return _row(direction, case, base_us, now_us, center, half)


def _row(direction: str, case: str, base_us: float, now_us: float, center: float, half: float) -> BaseRow:
    verdict = "same" if abs(center) <= half else "faster" if center > 0 else "slower"
    visible = relative_width(half)
    return BaseRow(direction, case, base_us, now_us, math.exp(center), visible, verdict)


def rows_of_records(base: BenchRecord, now: BenchRecord) -> tuple[list[BaseRow], list[str]]:
    """Returns what a record says about a new one, and the inputs that only one of them has."""
    before = {(m.direction, m.case): m for m in base.measurements}
    after = {(m.direction, m.case): m for m in now.measurements}
    rows = [_compared(before[key], after[key]) for key in after if key in before]
    return rows, [" ".join(key) for key in sorted(before.keys() ^ after.keys())]


def _compared(base: Measurement, now: Measurement) -> BaseRow:
    base_us, now_us = base.timings[0].median_us, now.timings[0].median_us
    shared = [t.candidate for t in now.timings[1:] if base.time_of(t.candidate)]
    center, half = math.log(base_us / now_us), math.inf
    if shared:
        yardstick = shared[0]
        (one, a), (other, b) = _against(base, yardstick), _against(now, yardstick)
        center = other - one
        drift = math.log(now.time_of(yardstick) / base.time_of(yardstick))
        half = math.hypot(a, b) + abs(drift)
    return _row(now.direction, now.case, base_us, now_us, center, half)


def _against(m: Measurement, yardstick: str) -> tuple[float, float]:
    """Returns how many times faster than the yardstick it was, and how exactly that is known; both as logarithms."""
    found = next((c for c in m.comparisons if c.candidate == yardstick), None)
    if found is None:  # a record of version 1: its samples are those of rounds, in order
        theirs = next(t for t in m.timings if t.candidate == yardstick)
        count = min(len(m.timings[0].samples_us), len(theirs.samples_us))
        blocks = [into_blocks(t.samples_us[:count]) for t in (m.timings[0], theirs)]
        found = compare(yardstick, *blocks)
    return math.log(found.ratio), math.log1p(found.visible)


def reason_for_hint(base: BenchRecord, now: BenchRecord, rows: Sequence[BaseRow]) -> str:
    """Returns why a record proves nothing; "" if it does."""
    differing = [
        f"{name} ({ours} against {theirs})" for name, (theirs, ours) in _facts(base, now).items() if theirs != ours
    ]
    if differing:
        return f"the base was measured elsewhere: {', '.join(differing)}"
    if any(math.isinf(row.visible) for row in rows):
        return "the records have no rival in common that could be the yardstick"
    return ""


def _facts(base: BenchRecord, now: BenchRecord) -> Mapping[str, tuple[object, object]]:
    def of(record: BenchRecord) -> dict[str, object]:
        machine: Machine = record.machine
        device = machine.device if record.on_gpu else ""
        return {
            "CPU": machine.cpu,
            "cores": machine.cores,
            "GPU": device,
            "torch": machine.torch,
            "threads": record.threads,
        }

    before, after = of(base), of(now)
    return {name: (before[name], after[name]) for name in after}
