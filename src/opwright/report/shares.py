"""Draws how much of the measured copy bandwidth each input reaches: a bar for each."""

from __future__ import annotations

from collections.abc import Sequence

from opwright.errors import plural
from opwright.quantities import RATE, rate_gb_s, with_unit
from opwright.records import Measurement
from opwright.report.cards import Card
from opwright.report.ratios import explain_shares, tell_share
from opwright.report.svg import Picture, drawing, element, line, shorten, text, tooltip

_WIDTH, _LEFT, _RIGHT, _TOP = 1100.0, 346.0, 1020.0, 40.0
_ROW, _HEADING = 19.0, 27.0
_LONGEST = 2.0  # bars end here, in shares of the roof; their number is written beside them
_LETTERS = 50
_VALUE = 46.0  # width of a number beside a bar


def draw_shares(card: Card, name: str) -> Picture | None:
    """Draws the inputs whose operations nobody counted, or returns None when there are fewer than two."""
    measured = [m for m in card.measurements if (m.flop or 0) <= 0 and m.bytes_moved > 0]
    if len(measured) < 2:
        return None
    strip = _Strip(card, measured)
    title = "Share of the copy bandwidth" if strip.copy_gb_s else "Rate of moving bytes"
    svg = drawing(name, _WIDTH, strip.height, f"{card.name}: {title.lower()}", strip.describe(), *strip.draw())
    return Picture(title, strip.explain(), [svg])


class _Strip:
    """Bars in shares of the measured copy bandwidth, or in GB/s where it was not measured."""

    def __init__(self, card: Card, measured: Sequence[Measurement]) -> None:
        self.measured, self.baseline = measured, card.baseline
        self.copy_gb_s = card.machine.copy_gb_s
        self.reason = explain_shares(card.bench) if card.bench else ""
        self.place = "GPU" if card.on_gpu else "machine"
        longest = max(length for m in measured for length in self._lengths(m) if length is not None)
        self.limit = min(max(1.0, longest), _LONGEST) if self.copy_gb_s else longest
        groups = len({(m.direction, m.dtype) for m in measured})
        self.height = _TOP + groups * _HEADING + len(measured) * _ROW + 12

    def draw(self) -> list[str]:
        """Draws scale, headings and bars."""
        drawn, values = [self._draw_scale()], []
        y, group = _TOP, None
        for measurement in self.measured:
            if group != (measurement.direction, measurement.dtype):
                group = (measurement.direction, measurement.dtype)
                drawn.append(text(8, y + _HEADING - 8, f"{group[0]} {group[1]}", class_="panel-title"))
                y += _HEADING
            drawn.append(self._draw_bar(measurement, y))
            values.append(self._write_value(measurement, y))
            y += _ROW
        if self.copy_gb_s:
            drawn.append(line((self._x(1), _TOP), (self._x(1), self.height - 8), class_="roof"))
        return drawn + values

    def describe(self) -> str:
        """Tells a screen reader what the bars show."""
        lengths = [self._lengths(m)[0] for m in self.measured]
        told = f"{plural(len(lengths), 'input')}. Opwright: {self._write(min(lengths))} to {self._write(max(lengths))}."
        before = [length for m in self.measured if (length := self._lengths(m)[1]) is not None]
        if before:
            told += f" {self.baseline}: {self._write(min(before))} to {self._write(max(before))}."
        return told

    def explain(self) -> str:
        """Tells a reader what the bars show."""
        lines = f"; short lines: {self.baseline}" if self.baseline else ""
        told = f"Bars: Opwright{lines}."
        if any(m.in_cache for m in self.measured):
            told += " Outlined bars fit the cache, which is faster than memory."
        if self.copy_gb_s:
            told += f" 100 % is copying at {with_unit(self.copy_gb_s, RATE)}, as measured on this {self.place}."
            if any((self._lengths(m)[0]) > self.limit for m in self.measured):
                told += f" Bars beyond {tell_share(self.limit)} are cut."
            if self.reason:
                told += f" {self.reason[0].upper()}{self.reason[1:]}."
        return told

    def _lengths(self, measurement: Measurement) -> tuple[float, float | None]:
        """Returns the lengths of Opwright's bar and of the baseline's."""
        unit = self.copy_gb_s or 1.0
        before = measurement.time_of(self.baseline)
        ours = rate_gb_s(measurement.bytes_moved, measurement.timings[0].median_us) / unit
        return ours, rate_gb_s(measurement.bytes_moved, before) / unit if before else None

    def _x(self, length: float) -> float:
        return _LEFT + min(length, self.limit) / self.limit * (_RIGHT - _LEFT)

    def _write(self, length: float) -> str:
        return tell_share(length) if self.copy_gb_s else with_unit(length, RATE)

    def _draw_scale(self) -> str:
        parts = []
        for quarter in range(5):
            at = _LEFT + (_RIGHT - _LEFT) * quarter / 4
            if self.copy_gb_s:
                at = self._x(quarter / 4)
                label = f"{25 * quarter} %"
            else:
                label = with_unit(self.limit * quarter / 4, RATE) if quarter else "0"
            parts.append(line((at, _TOP), (at, self.height - 8), class_="grid"))
            parts.append(text(at, _TOP - 8, label, class_="tick", text_anchor="middle"))
        title = "share of the measured copy bandwidth" if self.copy_gb_s else "bytes moved over time"
        parts.append(text(_LEFT, 13, title, class_="axis-title"))
        return element("g", *parts)

    def _draw_bar(self, measurement: Measurement, y: float) -> str:
        ours, before = self._lengths(measurement)
        end, middle = self._x(ours), y + _ROW / 2
        parts = [tooltip(f"{measurement.direction} {measurement.case}: {self._write(ours)}")]
        case = shorten(measurement.case, _LETTERS)
        parts.append(text(_LEFT - 10, middle + 4, case, class_="case", text_anchor="end"))
        parts.append(
            element(
                "rect",
                x=_LEFT,
                y=y + 3.5,
                width=max(end - _LEFT, 1.0),
                height=_ROW - 7,
                class_="bar hollow" if measurement.in_cache else "bar filled",
            )
        )
        if before is not None:
            at = self._x(before)
            parts.append(line((at, y + 1.5), (at, y + _ROW - 1.5), class_="rival"))
        return element("g", *parts, class_="c0")

    def _write_value(self, measurement: Measurement, y: float) -> str:
        ours, before = self._lengths(measurement)
        end = max(self._x(ours), self._x(before or 0))
        roof = self._x(1) if self.copy_gb_s else 0.0
        if roof - _VALUE < end < roof:  # the line of the roof would cross the number
            end = roof
        beside = end + 7
        return text(beside, y + _ROW / 2 + 4, self._write(ours), class_="value")
