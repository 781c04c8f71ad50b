"""Draws the axes that all plots share: hairline grid, ticks, titles with units."""

from __future__ import annotations

from collections.abc import Callable

from opwright.report.scales import LogScale
from opwright.report.svg import element, line, text

Format = Callable[[float], str]


def draw_axes(
    x: LogScale, y: LogScale, x_title: str, y_title: str, x_format: Format, y_format: Format
) -> str:
    """Draws two logarithmic axes; `y` runs from the bottom (its start) to the top."""
    parts = []
    for value in x.ticks(gap=46):
        at = x(value)
        parts.append(line((at, y.start), (at, y.end), class_="grid"))
        parts.append(text(at, y.start + 16, x_format(value), class_="tick", text_anchor="middle"))
    for value in y.ticks(gap=24):
        at = y(value)
        parts.append(line((x.start, at), (x.end, at), class_="grid"))
        parts.append(text(x.start - 7, at + 3.5, y_format(value), class_="tick", text_anchor="end"))
    parts.append(line((x.start, y.start), (x.end, y.start), class_="axis"))
    parts.append(
        text((x.start + x.end) / 2, y.start + 34, x_title, class_="axis-title", text_anchor="middle")
    )
    parts.append(text(x.start, y.end - 10, y_title, class_="axis-title", text_anchor="start"))
    return element("g", *parts)
