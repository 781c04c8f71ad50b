"""Draws rows of bars under one axis: a label at the left, a bar, and its number beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opwright.report.svg import drawing, element, line, text, tooltip

WIDTH = 1100.0
_RIGHT, _TOP = 900.0, 40.0
_LETTER, _NARROWEST = 6.4, 110.0  # width of a letter of a label; the least that labels take
_ROW, _HEADING = 20.0, 28.0
_LABEL_LETTERS = 52


@dataclass(frozen=True)
class Row:
    """One bar.

    Attributes:
        start, end: where it begins and ends, in values of the axis.
        note: what is written beside it.
        style: class of its colour; another mark than the colour tells bars apart where that matters.
        whisker: a range drawn over the bar.
        is_hollow: outlined instead of filled.
    """

    label: str
    start: float
    end: float
    note: str
    style: str = "c0"
    whisker: tuple[float, float] | None = None
    is_hollow: bool = False


@dataclass(frozen=True)
class Heading:
    """A line above the rows that follow."""

    text: str


def draw_rows(
    name: str,
    title: str,
    description: str,
    rows: Sequence[Row | Heading],
    x: Callable[[float], float],
    ticks: Sequence[tuple[float, str]],
    axis_title: str,
    rule: float | None = None,
) -> str:
    """Draws rows of bars.

    Args:
        name: what the identifiers in the drawing start with.
        x: where on the axis a value lies, from 0 to 1.
        ticks: values of the axis and how they are written.
        rule: a value to draw a strong line at.
    """
    left = label_width([row.label for row in rows if isinstance(row, Row)])

    def at(value: float) -> float:
        return left + x(value) * (_RIGHT - left)

    height = _TOP + sum(_HEADING if isinstance(row, Heading) else _ROW for row in rows) + 8
    drawn = [text(left, 13, axis_title, class_="axis-title")]
    for value, label in ticks:
        drawn.append(line((at(value), _TOP), (at(value), height - 4), class_="grid"))
        drawn.append(text(at(value), _TOP - 8, label, class_="tick", text_anchor="middle"))
    y, labels, notes = _TOP, [], []
    for row in rows:
        if isinstance(row, Heading):
            drawn.append(text(8, y + _HEADING - 9, row.text, class_="panel-title"))
            y += _HEADING
            continue
        labels.append(text(left - 10, y + _ROW / 2 + 4, shorten(row.label)))
        drawn.append(_draw_bar(row, y, at))
        ends = [at(row.start), at(row.end), *(at(value) for value in row.whisker or ())]
        notes.append(text(max(ends) + 8, y + _ROW / 2 + 4, row.note))
        y += _ROW
    if rule is not None:
        drawn.append(line((at(rule), _TOP), (at(rule), height - 4), class_="base"))
    drawn.append(element("g", *labels, text_anchor="end"))
    drawn.append(element("g", *notes, class_="values"))
    return drawing(name, WIDTH, height, title, description, *drawn)


def label_width(labels: Sequence[str], letters: int = _LABEL_LETTERS) -> float:
    """Returns the room that labels need, shortened to so many letters."""
    longest = max((len(shorten(label, letters)) for label in labels), default=0)
    return max(20 + _LETTER * longest, _NARROWEST)


def linear(limit: float) -> Callable[[float], float]:
    """Returns an axis from 0 to a limit."""
    return lambda value: min(value / limit, 1.0)


def round_ticks(limit: float, write: Callable[[float], str]) -> list[tuple[float, str]]:
    """Returns four to eight ticks at round values from 0 to a limit."""
    power = 10.0 ** math.floor(math.log10(limit))
    step = next(step * power for step in (1.0, 0.5, 0.2, 0.1) if limit / (step * power) >= 3)
    return [(i * step, write(i * step) if i else "0") for i in range(int(limit / step) + 1)]


def _draw_bar(row: Row, y: float, at: Callable[[float], float]) -> str:
    left, right = sorted((at(row.start), at(row.end)))
    middle = y + _ROW / 2
    width = round(max(right - left, 1.0), 1)
    bar = f"M{round(left, 1):g} {y + 4:g}h{width:g}v{_ROW - 8:g}h{-width:g}z"
    parts = [] if shorten(row.label) == row.label else [tooltip(f"{row.label}: {row.note}")]
    parts.append(element("path", d=bar, class_="hollow" if row.is_hollow else "filled"))
    if row.whisker is not None:
        low, high = (at(value) for value in row.whisker)
        ends = f"M{low:.1f} {middle - 3:g}v6m0-3H{high:.1f}m0-3v6"
        parts.append(element("path", d=ends, class_="whisker"))
    return element("g", *parts, class_=row.style)


def shorten(label: str, letters: int = _LABEL_LETTERS) -> str:
    """Returns a label that fits, without its middle: inputs often differ at the end alone. The tooltip has all of it."""
    if len(label) <= letters:
        return label
    end = (letters - 1) * 2 // 5
    return f"{label[: letters - 1 - end]}…{label[len(label) - end :]}"
