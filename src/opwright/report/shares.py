"""Draws how much of the measured copy bandwidth each input reaches: a bar for each."""

from __future__ import annotations

from collections.abc import Sequence

from opwright.errors import plural
from opwright.quantities import RATE, rate_gb_s, with_unit
from opwright.records import Measurement
from opwright.report.cards import Card
from opwright.report.ratios import explain_shares, tell_share
from opwright.report.svg import Heading, Picture, Row, draw_rows, linear

_LONGEST = 2.0  # bars end here, in shares of the roof; their number is written beside them


def draw_shares(card: Card, name: str) -> Picture | None:
    """Draws the inputs whose operations nobody counted, or returns None when there are fewer than two.

    Bars are shares of the measured copy bandwidth, or rates where it was not measured.
    """
    measured = [m for m in card.measurements if (m.flop or 0) <= 0 and m.bytes_moved > 0]
    if len(measured) < 2:
        return None
    copy_gb_s, baseline = card.machine.copy_gb_s, card.baseline
    ours = [_length(m, m.ours.median_us, copy_gb_s) for m in measured]
    others = [(time := m.time_of(baseline)) and _length(m, time, copy_gb_s) for m in measured]
    before = [length for length in others if length is not None]
    limit = max(*ours, *before)
    if copy_gb_s:
        limit = min(max(1.0, limit), _LONGEST)
        ticks = [(quarter / 4, f"{25 * quarter} %") for quarter in range(5)]
    else:
        ticks = [
            (limit * quarter / 4, with_unit(limit * quarter / 4, RATE) if quarter else "0") for quarter in range(5)
        ]

    def write(lengths: Sequence[float]) -> list[str]:
        return [tell_share(length) if copy_gb_s else with_unit(length, RATE) for length in lengths]

    rows: list[Row | Heading] = []
    for m, length, note, other in zip(measured, ours, write(ours), others):
        heading = Heading(f"{m.direction} {m.dtype}")
        rows += [heading] if heading not in rows else []
        rows.append(Row(m.case, 0.0, length, note, is_hollow=m.in_cache, mark=other))
    told = f"{plural(len(measured), 'input')}. Opwright: {' to '.join(write([min(ours), max(ours)]))}."
    if before:
        told += f" {baseline}: {' to '.join(write([min(before), max(before)]))}."
    title = "Share of the copy bandwidth" if copy_gb_s else "Rate of moving bytes"
    svg = draw_rows(
        name,
        f"{card.name}: {title.lower()}",
        told,
        rows,
        linear(limit),
        ticks,
        "share of the measured copy bandwidth" if copy_gb_s else "bytes moved over time",
        rule=1.0 if copy_gb_s else None,
    )
    caption = f"Bars: Opwright{f'; short lines: {baseline}' if baseline else ''}."
    if any(m.in_cache for m in measured):
        caption += " Outlined bars fit the cache, which is faster than memory."
    if copy_gb_s:
        place = "GPU" if card.on_gpu else "machine"
        caption += f" 100 % is copying at {with_unit(copy_gb_s, RATE)}, as measured on this {place}."
        caption += f" Bars beyond {tell_share(limit)} are cut." if max(ours) > limit else ""
        reason = explain_shares(card.bench) if card.bench else ""
        caption += f" {reason[0].upper()}{reason[1:]}." if reason else ""
    return Picture(title, caption, [svg])


def _length(measurement: Measurement, time_us: float, copy_gb_s: float | None) -> float:
    return rate_gb_s(measurement.bytes_moved, time_us) / (copy_gb_s or 1.0)
