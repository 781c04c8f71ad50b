"""Draws how the times of an operator have changed from benchmark to benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opwright.errors import plural
from opwright.quantities import TIME, date, tick_with_unit, with_unit
from opwright.records import BenchRecord
from opwright.records.bench import relative_width
from opwright.report.axes import log_scale, spread
from opwright.report.cards import Card
from opwright.report.ratios import tell_interval, tell_ratio
from opwright.report.svg import Picture, Table, drawing, element, line, marker, path, text

_WIDTH, _HEIGHT = 1100.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 940.0, 30.0, 250.0
_MOST_LABELS, _MOST_MARKS = 12, 60

_Key = tuple[str, str, str]


def draw_history(card: Card, name: str) -> Picture | None:
    """Draws the mean time of the inputs that all benchmarks share, or returns None for fewer than two."""
    records = list(card.history)
    shared = _shared(records)
    if not has_history(card):
        return None
    groups: dict[str, list[_Key]] = {}
    for key in shared:
        groups.setdefault(f"{key[0]} {key[1]}", []).append(key)
    times = {group: [_mean(record, keys) for record in records] for group, keys in groups.items()}
    spreads = {group: [_spread(record, keys) for record in records] for group, keys in groups.items()}
    y = log_scale([t for found in times.values() for t in found], _BOTTOM, _TOP, 1.15, ratio=2)
    places = [_LEFT + 20 + i * (_RIGHT - _LEFT - 40) / (len(records) - 1) for i in range(len(records))]
    labels = [_label(record) for record in records]
    drawn = [text(_LEFT, 14, "mean time per call (logarithmic)", class_="axis-title")]
    for value in y.ticks(gap=24):
        drawn.append(line((_LEFT, y(value)), (_RIGHT, y(value)), class_="grid"))
        drawn.append(text(_LEFT - 7, y(value) + 3.5, tick_with_unit(value, TIME), class_="tick", text_anchor="end"))
    step = math.ceil(len(records) / _MOST_LABELS)
    for i, (at, label) in enumerate(zip(places, labels)):
        before_last = len(records) - 1 - i
        if before_last == 0 or (i % step == 0 and before_last >= step):
            drawn.append(text(at, _BOTTOM + 20, label, class_="tick", text_anchor="middle"))
    ends = spread([y(found[-1]) for found in times.values()], 13, _TOP, _BOTTOM)
    for rank, ((group, found), end) in enumerate(zip(times.items(), ends)):
        style = f"c{(0, 2, 3, 4, 5, 6)[rank % 6]}"
        points = [(at, y(time)) for at, time in zip(places, found)]
        marked = points if len(points) <= _MOST_MARKS else points[-1:]
        marks = [marker(rank, px, py, class_="filled") for px, py in marked]
        drawn.append(element("g", path(points, class_="line"), *marks, class_=style))
        drawn.append(text(_RIGHT + 8, end + 3.5, group, class_=f"line-label {style}"))
    changes = [f"{group} {_change(found, spreads[group])}" for group, found in times.items()]
    told = f"{plural(len(records), 'benchmark')}. The first over the last: {', '.join(changes)}."
    svg = drawing(name, _WIDTH, _HEIGHT, f"{card.name}: history", told, *drawn)
    caption = f"Geometric mean of Opwright's time over the {plural(len(shared), 'input')} that all {len(records)} benchmarks on this machine share, the oldest first."
    table = Table(
        ["benchmark", "made", *times],
        [
            [label, date(r.created), *(_write(found[i], spreads[group][i]) for group, found in times.items())]
            for i, (label, r) in enumerate(zip(labels, records))
        ],
    )
    return Picture("History", caption, [svg], table=table)


def has_history(card: Card) -> bool:
    """Whether there are several benchmarks, and an input that all of them have."""
    return len(card.history) > 1 and bool(_shared(card.history))


def _shared(records: Sequence[BenchRecord]) -> list[_Key]:
    keys = [list(_keys(record)) for record in records]
    return [key for key in keys[0] if all(key in other for other in keys[1:])] if keys else []


def _keys(record: BenchRecord) -> dict[_Key, float]:
    """Returns Opwright's time for each input."""
    return {
        (m.direction, m.dtype, m.case): m.timings[0].median_us
        for m in record.measurements
        if m.timings and m.timings[0].median_us > 0
    }


def _mean(record: BenchRecord, keys: Sequence[_Key]) -> float:
    times = _keys(record)
    return math.exp(sum(math.log(times[key]) for key in keys) / len(keys))


def _spread(record: BenchRecord, keys: Sequence[_Key]) -> float | None:
    """Returns the relative half-width of the confidence interval of the mean; None where the record has no intervals."""
    found = {(m.direction, m.dtype, m.case): m.ours.interval for m in record.measurements if m.timings}
    intervals = [found[key] for key in keys]
    if None in intervals:
        return None
    return relative_width(math.hypot(*(math.log1p(i) for i in intervals if i is not None)) / len(keys))


def _change(times: Sequence[float], spreads: Sequence[float | None]) -> str:
    first, last = spreads[0], spreads[-1]
    both = None if first is None or last is None else relative_width(math.hypot(math.log1p(first), math.log1p(last)))
    return tell_ratio(times[0] / times[-1], both)


def _write(time: float, spread: float | None) -> str:
    return with_unit(time, TIME) + ("" if spread is None else f" {tell_interval(spread)}")


def _label(record: BenchRecord) -> str:
    return (
        f"{record.commit[:7]}{'+' if record.commit.endswith('+') else ''}"
        if record.commit
        else date(record.created)[:10]
    )
