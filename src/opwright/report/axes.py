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
    columns, levels = x.ticks(gap=46), y.ticks(gap=24)
    # One path for all lines of the grid, one group for the ticks of an axis: pages of many plots stay small.
    grid = "".join(f"M{x(v):.1f} {y.start:.1f}V{y.end:.1f}" for v in columns)
    grid += "".join(f"M{x.start:.1f} {y(v):.1f}H{x.end:.1f}" for v in levels)
    parts = [element("path", d=grid, class_="grid")]
    below = [text(x(v), y.start + 16, x_format(v)) for v in columns]
    beside = [text(x.start - 7, y(v) + 3.5, y_format(v)) for v in levels]
    parts.append(element("g", *below, class_="tick", text_anchor="middle"))
    parts.append(element("g", *beside, class_="tick", text_anchor="end"))
    parts.append(line((x.start, y.start), (x.end, y.start), class_="axis"))
    parts.append(
        text((x.start + x.end) / 2, y.start + 34, x_title, class_="axis-title", text_anchor="middle")
    )
    parts.append(text(x.start, y.end - 10, y_title, class_="axis-title", text_anchor="start"))
    return element("g", *parts)
