"""Writes SVG as text, everything that comes from a record escaped: elements, and rows of bars under one axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Point = tuple[float, float]

_WIDTH = 1100.0
_RIGHT, _TOP = 900.0, 40.0
_LETTER, _NARROWEST = 6.4, 110.0  # width of a letter of a label; the least that labels take
_ROW, _HEADING = 20.0, 28.0
_LABEL_LETTERS = 52
_NOTE = 46.0  # width of a short note
_SHAPES = ("circle", "square", "triangle", "diamond", "cross", "down")


@dataclass(frozen=True)
class Table:
    """The numbers behind a picture; the first column names the row."""

    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Picture:
    """A drawing of the report.

    Attributes:
        svg: one drawing, or one for each panel; none where it would be a single bar, and the table says it.
        columns: how many panels stand side by side.
        table: the numbers, where no other table of the page has them.
    """

    title: str
    caption: str
    svg: list[str]
    columns: int = 1
    table: Table | None = None


def element(tag: str, *children: str, **attributes: Any) -> str:
    """Writes an element.

    Args:
        children: text that is SVG already.
        attributes: `class_` stands for `class`, `stroke_width` for `stroke-width`; None leaves one out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return f"<{tag}{written}>{''.join(children)}</{tag}>" if children else f"<{tag}{written}/>"


def text(x: float, y: float, content: str, **attributes: Any) -> str:
    """Writes a line of text."""
    return element("text", escape(content, quote=False), x=x, y=y, **attributes)


def line(start: Point, end: Point, **attributes: Any) -> str:
    """Writes a straight line."""
    return element("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], **attributes)


def path(points: Sequence[Point], **attributes: Any) -> str:
    """Writes a line through points."""
    d = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
    return element("path", d=d, fill="none", **attributes)


def tooltip(content: str) -> str:
    """Writes what a pointer shows over an element, to be one of its children."""
    return element("title", escape(content, quote=False))


def marker(shape: int, x: float, y: float, *children: str, size: float = 3.4, **attributes: Any) -> str:
    """Writes a marker; shapes tell candidates apart where colours do not."""
    kind = _SHAPES[shape % len(_SHAPES)]
    if kind == "circle":
        return element("circle", *children, cx=x, cy=y, r=size, **attributes)
    s = size * 1.15
    t = s * 0.36  # half the thickness of a cross
    corners = {
        "square": (
            (-s * 0.85, -s * 0.85),
            (s * 0.85, -s * 0.85),
            (s * 0.85, s * 0.85),
            (-s * 0.85, s * 0.85),
        ),
        "triangle": ((0, -s * 1.1), (s, s * 0.8), (-s, s * 0.8)),
        "diamond": ((0, -s * 1.2), (s * 1.2, 0), (0, s * 1.2), (-s * 1.2, 0)),
        "cross": (
            *((-t, -s), (t, -s), (t, -t), (s, -t), (s, t), (t, t)),
            *((t, s), (-t, s), (-t, t), (-s, t), (-s, -t), (-t, -t)),
        ),
        "down": ((0, s * 1.1), (s, -s * 0.8), (-s, -s * 0.8)),
    }[kind]
    points = " ".join(f"{_number(x + dx)},{_number(y + dy)}" for dx, dy in corners)
    return element("polygon", *children, points=points, **attributes)


def drawing(name: str, width: float, height: float, title: str, description: str, *children: str) -> str:
    """Writes a whole drawing with the title and the description that a screen reader speaks.

    Args:
        name: what its identifiers start with, once in a page.
    """
    return element(
        "svg",
        element("title", escape(title), id=f"{name}-title"),
        element("desc", escape(description), id=f"{name}-desc"),
        *children,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=width,
        height=height,
        role="img",
        aria_labelledby=f"{name}-title",
        aria_describedby=f"{name}-desc",
    )


def _number(value: Any) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Row:
    """One bar.

    Attributes:
        start, end: where it begins and ends, in values of the axis.
        note: what is written beside it.
        style: class of its colour; another mark than the colour tells bars apart where that matters.
        whisker: a range drawn over the bar.
        mark: a value that a short line is drawn at, of another candidate.
        is_hollow: outlined instead of filled.
    """

    label: str
    start: float
    end: float
    note: str
    style: str = "c0"
    whisker: tuple[float, float] | None = None
    is_hollow: bool = False
    mark: float | None = None


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
        ends = [row.start, row.end, *(row.whisker or ()), *([] if row.mark is None else [row.mark])]
        end = max(map(at, ends))
        if rule is not None and at(rule) - _NOTE < end < at(rule):  # it would cross the note
            end = at(rule)
        notes.append(text(end + 8, y + _ROW / 2 + 4, row.note))
        y += _ROW
    if rule is not None:
        drawn.append(line((at(rule), _TOP), (at(rule), height - 4), class_="base"))
    drawn.append(element("g", *labels, text_anchor="end"))
    drawn.append(element("g", *notes, class_="values"))
    return drawing(name, _WIDTH, height, title, description, *drawn)


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
    if row.mark is not None:
        parts.append(line((at(row.mark), y + 1.5), (at(row.mark), y + _ROW - 1.5), class_="rival"))
    return element("g", *parts, class_=row.style)


def shorten(label: str, letters: int = _LABEL_LETTERS) -> str:
    """Returns a label that fits, without its middle: inputs often differ at the end alone. The tooltip has all of it."""
    if len(label) <= letters:
        return label
    end = (letters - 1) * 2 // 5
    return f"{label[: letters - 1 - end]}…{label[len(label) - end :]}"
