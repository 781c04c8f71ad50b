"""Writes SVG elements as text, everything that comes from a record escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

Point = tuple[float, float]

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
        svg: one drawing, or one for each panel.
        spec: the same data as a Vega-Lite specification, where there is one.
        columns: how many panels stand side by side.
        table: the numbers, where no other table of the page has them.
    """

    title: str
    caption: str
    svg: list[str]
    spec: dict[str, Any] | None = None
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
