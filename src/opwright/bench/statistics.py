"""What paired samples say about two candidates: a ratio, and the smallest difference that would show.

Candidates are timed in turns, so whatever else the machine does disturbs neighbouring samples alike, and their ratio
varies less than either. But such a disturbance lasts longer than a round: ratios that follow each other are not
independent, and a formula for independent samples would give too narrow an interval. So rounds are grouped into blocks,
each block gives one number, the median of its logarithmic ratios, and only these numbers count: the ratio
is their mean, the smallest visible difference the half-width of Student's 95 % confidence interval of that mean.
The same version measured twice stays below it in 19 of 20 runs.

Where other work has the cores all the time, all rounds of a candidate with several threads may take a hundred times as
long. Such work only adds time: the interval is widened to the ratio of the fastest samples where that is far off.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import lru_cache

from opwright.records import BaseRow, BenchRecord, Comparison, Measurement
from opwright.records.bench import relative_width

MIN_BLOCKS = 8  # Student's factor is 2.4 with eight, 4.3 with three
CONFIDENCE = 0.95
TRIMMED = 0.2  # the usual share
_FAR_OFF = math.log(2.0)  # from the ratio of the fastest samples


def compare(candidate: str, ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Comparison:
    """Compares the samples of a candidate with Opwright's, both in blocks of paired rounds."""
    ratios = [
        statistics.median(math.log(b / a) for a, b in zip(*block, strict=True))
        for block in zip(ours, theirs, strict=True)
    ]
    center, half = interval_of(ratios)
    apart = abs(center - math.log(min(map(min, theirs)) / min(map(min, ours))))
    if apart > _FAR_OFF:
        half = max(half, apart)
    return Comparison(candidate, math.exp(center), relative_width(half), len(ratios))


def compare_all(blocks: Sequence[Mapping[str, Sequence[float]]]) -> list[Comparison]:
    """Compares the first candidate of blocks with each other one, in the blocks where both were timed."""
    first, *others = dict.fromkeys(name for block in blocks for name in block)
    found = []
    for name in others:
        shared = [block for block in blocks if name in block]
        found.append(compare(name, [block[first] for block in shared], [block[name] for block in shared]))
    return found


def interval_of_blocks(blocks: Sequence[Sequence[float]]) -> float:
    """Returns the relative half-width of the 95 % confidence interval of a time; inf for fewer than two blocks."""
    _, half = interval_of([math.log(statistics.median(block)) for block in blocks])
    return relative_width(half)


def interval_of(numbers: Sequence[float], rows: int = 1, trimmed: float = 0.0) -> tuple[float, float]:
    """Returns the mean of independent numbers and the half-width of its 95 % interval; inf for fewer than two.

    Trimmed, it is Yuen's interval: where now and then a number is far off, it costs little, while an untrimmed mean's
    interval would be as wide as that one is far off.

    Args:
        rows: how many such intervals are read together: all of them hold at once with 95 % (Bonferroni).
        trimmed: the share of the numbers that is cut off at either end.
    """
    count = len(numbers)
    beyond = int(trimmed * count)
    ordered = sorted(numbers)
    center = statistics.fmean(ordered[beyond : count - beyond])
    if count < 2:
        return center, math.inf
    low, high = ordered[beyond], ordered[count - 1 - beyond]
    squares = (count - 1) * statistics.variance([min(max(number, low), high) for number in ordered])
    kept = count - 2 * beyond
    return center, student(kept - 1, 1 - (1 - CONFIDENCE) / rows) * math.sqrt(squares / (kept * (kept - 1)))


def into_blocks(samples: Sequence[float], count: int = MIN_BLOCKS) -> list[list[float]]:
    """Cuts samples that were taken one after the other into stretches of about equal length."""
    count = max(min(count, len(samples) // 2), 1)
    edges = [round(i * len(samples) / count) for i in range(count + 1)]
    return [list(samples[a:b]) for a, b in itertools.pairwise(edges)]


@lru_cache
def student(freedom: int, confidence: float) -> float:
    """Returns t so that Student's variable of so many degrees of freedom is within -t and t that often."""
    low, high = 0.0, 1e6
    while high - low > 1e-9 * high + 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(freedom, middle) < confidence else (low, middle)
    return high


def _within(freedom: int, t: float) -> float:
    # With t = sqrt(freedom) * tan(angle) the density becomes a power of the cosine, on a finite interval.
    factor = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    end, steps = math.atan(t / math.sqrt(freedom)), 400
    values = [math.cos(end * i / steps) ** (freedom - 1) for i in range(steps + 1)]
    simpson = values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
    return 2 * factor * simpson * end / steps / 3


_STRICTER = 5  # than 95 %
MIN_PAIRS = 8  # with fewer the interval of the trimmed mean holds less often than it says


def row_of(
    name: str, pairs: Sequence[tuple[Sequence[float], Sequence[float]]], rows: int, named_case: str = ""
) -> BaseRow:
    """Returns what pairs of processes say about one input.

    Args:
        name: "direction case".
        pairs: for each pair of processes the fastest samples of their blocks, of the base and of now.
        rows: how many inputs are compared together.
        named_case: the case with the names of tensors.
    """
    logs = [math.log(min(base) / min(now)) for base, now in pairs]
    center, half = interval_of(logs, _STRICTER * rows, TRIMMED)
    direction, _, case = name.partition(" ")
    base_us = statistics.median(min(base) for base, _ in pairs)
    now_us = statistics.median(min(now) for _, now in pairs)
    return _row(direction, case, named_case, base_us, now_us, center, half)


def _row(
    direction: str, case: str, named_case: str, base_us: float, now_us: float, center: float, half: float
) -> BaseRow:
    verdict = "same" if abs(center) <= half else "faster" if center > 0 else "slower"
    visible = relative_width(half)
    return BaseRow(direction, case, base_us, now_us, math.exp(center), visible, verdict, named_case)


def rows_of_records(base: BenchRecord, now: BenchRecord) -> tuple[list[BaseRow], list[str]]:
    """Returns what a record says about a new one, and the inputs that only one of them has."""
    before = {(m.direction, m.case): m for m in base.measurements}
    after = {(m.direction, m.case): m for m in now.measurements}
    rows = [_compare_measurements(before[key], after[key]) for key in after if key in before]
    return rows, [" ".join(key) for key in sorted(before.keys() ^ after.keys())]


def _compare_measurements(base: Measurement, now: Measurement) -> BaseRow:
    base_us, now_us = base.timings[0].median_us, now.timings[0].median_us
    shared = [t.candidate for t in now.timings[1:] if base.time_of(t.candidate)]
    center, half = math.log(base_us / now_us), math.inf
    if shared:
        yardstick = shared[0]
        (one, a), (other, b) = _against(base, yardstick), _against(now, yardstick)
        center = other - one
        drift = math.log(now.time_of(yardstick) / base.time_of(yardstick))
        half = math.hypot(a, b) + abs(drift)
    return _row(now.direction, now.case, now.named_case, base_us, now_us, center, half)


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
    pairs = zip(_facts(base).items(), _facts(now).values(), strict=True)
    differing = [f"{name} ({ours} against {theirs})" for (name, theirs), ours in pairs if theirs != ours]
    if differing:
        return f"the base was measured elsewhere: {', '.join(differing)}"
    if any(math.isinf(row.visible) for row in rows):
        return "the records have no rival in common that could be the yardstick"
    return ""


def _facts(record: BenchRecord) -> dict[str, object]:
    machine = record.machine
    return {
        "CPU": machine.cpu,
        "cores": machine.cores,
        "GPU": machine.device if record.on_gpu else "",
        "torch": machine.torch,
        "threads": record.threads,
    }
