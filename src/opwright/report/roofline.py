"""Draws the roofline: how near each input comes to what the machine can do, before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opwright.errors import plural
from opwright.quantities import COMPUTE, RATE, rate_gflop_s, round_to, with_unit
from opwright.records import Machine, Measurement
from opwright.report.axes import LogScale, draw_axes, log_scale, spread
from opwright.report.cards import Card
from opwright.report.svg import Picture, Point, drawing, element, line, marker, path, text, tooltip

_WIDTH, _HEIGHT = 1100.0, 460.0
_LEFT, _RIGHT, _BOTTOM = 66.0, 1084.0, _HEIGHT - 46
_LETTER = 6.6  # width of a letter of a label, on the generous side
_APART = 9.0  # pixels between two inputs
_STYLES = ("c0", "c2", "c3", "c4", "c5", "c6")  # c1, grey, is the baseline's
_MOST = 32  # inputs: more would have to stand so far from their intensity that they cross the roofs


def draw_roofline(card: Card, name: str) -> Picture | None:
    """Draws the inputs whose operations are known, or returns None when there are fewer than two."""
    every = [m for m in card.measurements if m.flop and m.flop > 0 and m.bytes_moved > 0]
    if len(every) < 2:
        return None
    measured = every if len(every) <= _MOST else _largest(every)
    machine = card.machine
    groups = list(dict.fromkeys(f"{m.direction} {m.dtype}" for m in measured))
    baseline = card.baseline
    legend, rows = _draw_legend(groups, baseline)
    x = _intensity_scale(measured, machine)
    y = _rate_scale(measured, machine, baseline, top=34.0 + 20 * rows)
    true_places = [x(intensity(m)) for m in measured]
    places = spread(true_places, _APART, x.start + 8, x.end - 8)
    is_moved = any(abs(place - true) > _APART / 2 for place, true in zip(places, true_places))
    svg = drawing(
        name,
        _WIDTH,
        _HEIGHT,
        f"{card.name}: roofline",
        _describe(measured, machine, baseline),
        draw_axes(
            x,
            y,
            "arithmetic intensity (FLOP/byte)",
            "GFLOP/s",
            lambda value: f"{value:.3g}",
            lambda value: f"{value:,.3g}" if value < 1e3 else f"{value:,.0f}",
        ),
        *_draw_roofs(machine, x, y),
        *(_draw_move(m, baseline, at, y, groups.index(f"{m.direction} {m.dtype}")) for m, at in zip(measured, places)),
        legend,
    )
    caption = _explain(machine, baseline, is_moved)
    if len(measured) < len(every):
        caption += f" Of {len(every)} inputs, the largest of each direction, dtype and intensity."
    return Picture("Roofline", caption, [svg])


def _largest(measured: Sequence[Measurement]) -> list[Measurement]:
    """Returns of the inputs of one direction, dtype and nearly the same intensity the largest."""
    kept: dict[tuple[str, str, str], Measurement] = {}
    for m in measured:
        key = m.direction, m.dtype, f"{intensity(m):.1e}"
        if key not in kept or m.bytes_moved > kept[key].bytes_moved:
            kept[key] = m
    return list(kept.values())


def intensity(measurement: Measurement) -> float:
    """Returns the operations for each byte that has to be moved."""
    return (measurement.flop or 0) / measurement.bytes_moved


def _rates(measurement: Measurement, baseline: str) -> tuple[float, float | None]:
    """Returns the rates of Opwright and of the baseline, in GFLOP/s."""
    flop = measurement.flop or 0
    before = measurement.time_of(baseline)
    after = rate_gflop_s(flop, measurement.timings[0].median_us)
    return after, rate_gflop_s(flop, before) if before else None


def _intensity_scale(measured: Sequence[Measurement], machine: Machine) -> LogScale:
    values = [intensity(m) for m in measured]
    if machine.copy_gb_s and machine.compute_gflops:
        ridge = machine.compute_gflops / machine.copy_gb_s
        # Beyond the ridge the roof is flat and carries a name: leave it room.
        values += [ridge, 1.6 * max(ridge, *values)]
    return log_scale(values, _LEFT, _RIGHT, margin=2, ratio=100)


def _rate_scale(measured: Sequence[Measurement], machine: Machine, baseline: str, top: float) -> LogScale:
    values = [rate for m in measured for rate in _rates(m, baseline) if rate]
    if machine.compute_gflops:
        values.append(machine.compute_gflops)
    elif machine.copy_gb_s:
        values.append(machine.copy_gb_s * max(intensity(m) for m in measured))
    return log_scale(values, _BOTTOM, top, margin=1.7)


def _draw_legend(groups: Sequence[str], baseline: str) -> tuple[str, int]:
    """Returns what each mark stands for, and how many rows that takes."""
    drawn, left, row = [], _LEFT, 0
    for i, group in enumerate([baseline, *groups]):
        if not group:
            continue
        width = 30 + len(group) * _LETTER
        if left + width > _RIGHT:
            left, row = _LEFT, row + 1
        y = 12.0 + 20 * row
        if i == 0:
            drawn.append(line((left, y), (left + 8, y), class_="tail"))
        else:
            mark = marker(_shape(i - 1), left + 4, y, class_="filled")
            drawn.append(element("g", mark, class_=_style(i - 1)))
        drawn.append(text(left + 14, y + 4, group))
        left += width
    return element("g", *drawn), row + 1


def _style(group: int) -> str:
    return _STYLES[group % len(_STYLES)]


def _shape(group: int) -> int:
    return group + group // len(_STYLES)


def _draw_roofs(machine: Machine, x: LogScale, y: LogScale) -> list[str]:
    drawn = []
    copy, compute = machine.copy_gb_s, machine.compute_gflops
    if copy:
        ceiling = min(y.high, compute or y.high)
        start = (max(x.low, y.low / copy), max(x.low * copy, y.low))
        end = (min(x.high, ceiling / copy), min(x.high * copy, ceiling))
        if start[0] < end[0]:
            ends = [(x(start[0]), y(start[1])), (x(end[0]), y(end[1]))]
            drawn.append(path(ends, class_="roof"))
            drawn.append(_label_slope(ends, f"copy bandwidth {with_unit(copy, RATE)}"))
    if compute:
        ridge = max(x.low, compute / copy) if copy else x.low
        if ridge < x.high:
            drawn.append(path([(x(ridge), y(compute)), (x.end, y(compute))], class_="roof"))
            label = f"float32 matrix product {with_unit(compute, COMPUTE)}"
            drawn.append(text(x.end, y(compute) - 8, label, class_="roof-label", text_anchor="end"))
    return drawn


def _label_slope(ends: Sequence[Point], label: str) -> str:
    (x0, y0), (x1, y1) = ends
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    return text(
        0,
        -8,
        label,
        class_="roof-label",
        transform=f"translate({x0:.1f} {y0:.1f}) rotate({angle:.2f}) translate(8 0)",
    )


def _draw_move(measurement: Measurement, baseline: str, at: float, y: LogScale, group: int) -> str:
    after, before = _rates(measurement, baseline)
    parts = [tooltip(_tell(measurement, baseline))]
    if before is not None:
        tail, head = y(before), y(after)
        parts.append(line((at - 3.2, tail), (at + 3.2, tail), class_="tail"))
        if abs(head - tail) > 4:
            parts.append(line((at, tail), (at, head), class_="move"))
        if abs(head - tail) > 14:
            tip = head + (5 if head < tail else -5)
            back = tip + (6 if head < tail else -6)
            corners = f"{at:.1f},{tip:.1f} {at - 3:.1f},{back:.1f} {at + 3:.1f},{back:.1f}"
            parts.append(element("polygon", points=corners, class_="tip"))
    parts.append(marker(_shape(group), at, y(after), class_="hollow" if measurement.in_cache else "filled"))
    return element("g", *parts, class_=_style(group))


def _tell(measurement: Measurement, baseline: str) -> str:
    after, before = _rates(measurement, baseline)
    told = f"{measurement.direction} {measurement.case}: {with_unit(after, COMPUTE)}"
    if before is not None:
        told += f", {baseline} {with_unit(before, COMPUTE)}"
    return f"{told}, at {round_to(intensity(measurement))} FLOP/byte"


def _describe(measured: Sequence[Measurement], machine: Machine, baseline: str) -> str:
    after = [_rates(m, baseline)[0] for m in measured]
    before = [rate for m in measured if (rate := _rates(m, baseline)[1]) is not None]
    told = f"{plural(len(measured), 'input')}. Opwright: {with_unit(min(after), COMPUTE)} to {with_unit(max(after), COMPUTE)}."
    if before:
        told += f" {baseline}: {with_unit(min(before), COMPUTE)} to {with_unit(max(before), COMPUTE)}."
    if machine.copy_gb_s:
        told += f" Roof of memory: {with_unit(machine.copy_gb_s, RATE)}."
    if machine.compute_gflops:
        told += f" Roof of compute: {with_unit(machine.compute_gflops, COMPUTE)}."
    return told


def _explain(machine: Machine, baseline: str, is_moved: bool) -> str:
    told = f"Each arrow leads from {baseline} (grey bar) to Opwright (mark)" if baseline else "Each mark is Opwright"
    told += " on one input; hollow marks fit the cache."
    if not machine.copy_gb_s and not machine.compute_gflops:
        told += " The roofs of this machine were not measured."
    elif not machine.copy_gb_s or not machine.compute_gflops:
        told += f" The {'compute' if machine.copy_gb_s else 'memory'} roof of this machine was not measured."
    if is_moved:
        told += " Inputs of nearly equal intensity stand side by side."
    return told
