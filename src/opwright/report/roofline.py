"""Draws the roofline: how near each input comes to what the machine can do, before and after."""

from __future__ import annotations

from collections.abc import Sequence

from opwright.records import Machine, Measurement
from opwright.report.axes import draw_axes
from opwright.report.cards import Card, size_of
from opwright.report.quantities import COMPUTE, RATE, plural, rate_gflop_s, round_to, with_unit
from opwright.report.scales import LogScale, log_scale
from opwright.report.svg import Picture, Point, drawing, element, line, marker, path, text, tooltip
from opwright.report.vega import specify_roofline

_WIDTH, _HEIGHT = 900.0, 440.0
_LEFT, _RIGHT, _BOTTOM = 66.0, 884.0, _HEIGHT - 46
_LETTER = 6.4  # width of a letter of a label, on the generous side
_STEP = 9.0  # between inputs of one intensity
_TOGETHER = 3.0  # intensities closer than this many pixels count as one
_BASELINE = "eager"


def draw_roofline(card: Card, name: str) -> Picture | None:
    """Draws the inputs whose operations are known, or returns None when there are none.

    Args:
        name: what the identifiers in the drawing start with.
    """
    measured = [m for m in card.measurements if m.flop and m.bytes_moved > 0]
    if not measured:
        return None
    machine = card.machine
    x = _intensity_scale(measured, machine)
    clusters = _cluster(measured, x)
    labels, rows = _label_clusters(clusters)
    y = _rate_scale(measured, machine, x, top=44.0 + 15 * rows)
    places = [(m, at) for cluster in clusters for m, at in _place(cluster, clusters)]
    svg = drawing(
        name,
        _WIDTH,
        _HEIGHT,
        f"{card.name}: roofline",
        _describe(measured, machine),
        draw_axes(
            x,
            y,
            "arithmetic intensity (FLOP/byte)",
            "GFLOP/s",
            lambda value: f"{value:.3g}",
            lambda value: f"{value:,.3g}" if value < 1e4 else f"{value:,.0f}",
        ),
        *_draw_roofs(machine, x, y),
        *_draw_leaders(clusters, labels, y, places),
        *(_draw_move(m, at, y) for m, at in places),
    )
    return Picture("Roofline", _explain(measured, machine, clusters), [svg], specify_roofline(card, measured))


def intensity(measurement: Measurement) -> float:
    """Returns the operations for each byte that has to be moved."""
    return (measurement.flop or 0) / measurement.bytes_moved


def _rates(measurement: Measurement) -> tuple[float, float | None]:
    """Returns the rates of Opwright and of the baseline, in GFLOP/s."""
    flop = measurement.flop or 0
    before = measurement.time_of(_BASELINE)
    return rate_gflop_s(flop, measurement.timings[0].median_us), rate_gflop_s(flop, before) if before else None


def _intensity_scale(measured: Sequence[Measurement], machine: Machine) -> LogScale:
    values = [intensity(m) for m in measured]
    if machine.copy_gb_s and machine.compute_gflops:
        ridge = machine.compute_gflops / machine.copy_gb_s
        values.append(ridge)
        # Beyond the ridge the roof is flat and carries a name; leave it room.
        if ridge > max(values) / 3:
            values.append(ridge * 3)
    return log_scale(values, _LEFT, _RIGHT, margin=2, ratio=30)


def _rate_scale(measured: Sequence[Measurement], machine: Machine, x: LogScale, top: float) -> LogScale:
    values = [rate for m in measured for rate in _rates(m) if rate]
    if machine.compute_gflops:
        values.append(machine.compute_gflops)
    if machine.copy_gb_s:
        values.append(machine.copy_gb_s * min(x.high / 2, max(intensity(m) for m in measured)))
    if machine.copy_gb_s and machine.compute_gflops:
        values = [min(v, 4 * machine.compute_gflops) if v > 4 * machine.compute_gflops else v for v in values]
    return log_scale(values, _BOTTOM, top, margin=1.7)


def _cluster(measured: Sequence[Measurement], x: LogScale) -> list[tuple[float, list[Measurement]]]:
    """Returns the inputs by place on the axis, those of (nearly) one intensity together."""
    clusters: list[tuple[float, list[Measurement]]] = []
    for measurement in sorted(measured, key=intensity):
        at = x(intensity(measurement))
        if clusters and at - clusters[-1][0] < _TOGETHER:
            clusters[-1][1].append(measurement)
        else:
            clusters.append((at, [measurement]))
    return clusters


def _place(cluster: tuple[float, list[Measurement]], clusters: Sequence[tuple[float, list]]) -> list:
    """Returns the inputs of a cluster side by side, with their places on the axis."""
    centre, members = cluster
    # Named by direction and dtype, then small to large: the order in which the label reads.
    members = sorted(members, key=lambda m: (m.direction != "forward", m.dtype, size_of(m)))
    room = min([abs(centre - other) for other, _ in clusters if other != centre], default=160.0) * 0.8
    step = min(_STEP, room / max(1, len(members) - 1))
    return [(m, centre + (i - (len(members) - 1) / 2) * step) for i, m in enumerate(members)]


def _label_clusters(clusters: Sequence[tuple[float, list[Measurement]]]) -> tuple[list[tuple[str, float, int]], int]:
    """Returns a label, its place and its row for each cluster, and how many rows they take."""
    labels: list[tuple[str, float, int]] = []
    free: list[float] = []  # where each row is free from
    for centre, members in clusters:
        names = " · ".join(sorted({f"{m.direction} {m.dtype}" for m in members}, key=lambda n: n[0] != "f"))
        half = len(names) * _LETTER / 2
        at = min(max(centre, _LEFT + half), _RIGHT - half)
        row = next((i for i, start in enumerate(free) if at - half >= start), len(free))
        free[row : row + 1] = [at + half + 10]
        labels.append((names, at, row))
    return labels, len(free)


def _draw_leaders(clusters: Sequence, labels: Sequence, y: LogScale, places: Sequence) -> list[str]:
    drawn = []
    for (centre, members), (names, at, row) in zip(clusters, labels):
        base = y.end - 10 - 15 * row
        highest = min(y(rate) for m in members for rate in _rates(m) if rate)
        drawn.append(path([(at, base + 4), (centre, y.end), (centre, highest - 8)], class_="leader"))
        drawn.append(text(at, base, names, class_="point-label", text_anchor="middle"))
    return drawn


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
    import math

    (x0, y0), (x1, y1) = ends
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    return text(
        0,
        -8,
        label,
        class_="roof-label",
        transform=f"translate({x0:.1f} {y0:.1f}) rotate({angle:.2f}) translate(8 0)",
    )


def _draw_move(measurement: Measurement, at: float, y: LogScale) -> str:
    after, before = _rates(measurement)
    parts = [tooltip(_tell(measurement))]
    if before is not None:
        tail, head = y(before), y(after)
        parts.append(line((at - 3.2, tail), (at + 3.2, tail), class_="tail"))
        if abs(head - tail) > 4:
            parts.append(line((at, tail), (at, head), class_="move"))
        if abs(head - tail) > 14:
            tip = head + (5 if head < tail else -5)
            back = tip + (6 if head < tail else -6)
            parts.append(element("polygon", points=f"{at:.1f},{tip:.1f} {at - 3:.1f},{back:.1f} {at + 3:.1f},{back:.1f}"))
    parts.append(marker(0, at, y(after), class_="hollow" if measurement.in_cache else "filled"))
    return element("g", *parts, class_="c0")


def _tell(measurement: Measurement) -> str:
    after, before = _rates(measurement)
    told = f"{measurement.direction} {measurement.case}: {with_unit(after, COMPUTE)}"
    if before is not None:
        told += f", {_BASELINE} {with_unit(before, COMPUTE)}"
    return f"{told}, at {round_to(intensity(measurement))} FLOP/byte"


def _describe(measured: Sequence[Measurement], machine: Machine) -> str:
    after = [_rates(m)[0] for m in measured]
    before = [rate for m in measured if (rate := _rates(m)[1]) is not None]
    told = f"{plural(len(measured), 'input')}. Opwright: {with_unit(min(after), COMPUTE)} to {with_unit(max(after), COMPUTE)}."
    if before:
        told += f" {_BASELINE}: {with_unit(min(before), COMPUTE)} to {with_unit(max(before), COMPUTE)}."
    if machine.copy_gb_s:
        told += f" Roof of memory: {with_unit(machine.copy_gb_s, RATE)}."
    if machine.compute_gflops:
        told += f" Roof of compute: {with_unit(machine.compute_gflops, COMPUTE)}."
    return told


def _explain(measured: Sequence[Measurement], machine: Machine, clusters: Sequence) -> str:
    told = f"Each arrow leads from {_BASELINE} (bar) to Opwright (point) on one input; hollow points fit the cache."
    if not machine.copy_gb_s and not machine.compute_gflops:
        told += " The roofs of this machine were not measured."
    elif not machine.copy_gb_s or not machine.compute_gflops:
        told += f" The {'compute' if machine.copy_gb_s else 'memory'} roof of this machine was not measured."
    if any(len(members) > 1 for _, members in clusters):
        told += " Inputs of equal intensity stand side by side, small to large."
    return told
