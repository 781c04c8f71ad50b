"""Draws the share of the roof as a heat map: sizes across, directions and dtypes down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from opwright.records import Measurement
from opwright.report.cards import Card, elements_of, size_of
from opwright.report.quantities import BYTES, COUNT, percent, plural, with_unit
from opwright.report.rows import label_width
from opwright.report.svg import Picture, drawing, element, text, tooltip

_WIDTH, _ROW, _TOP = 1100.0, 26.0, 42.0
STRONGEST = 0.62  # opacity of a full cell: text stays readable on it


@dataclass(frozen=True)
class Cell:
    """One field of a map.

    Attributes:
        strength: from 0, no colour, to 1.
        tip: what a pointer shows, if anything.
        is_hollow: drawn with a dashed outline.
        is_bad: drawn with a strong outline; its text says why.
    """

    text: str
    strength: float
    tip: str = ""
    is_hollow: bool = False
    is_bad: bool = False


def draw_heat(card: Card, name: str) -> Picture | None:
    """Draws the shares of the measured copy bandwidth, or returns None when there are fewer than two.

    Args:
        name: what the identifiers in the drawing start with.
    """
    measured = [m for m in card.measurements if m.roof_share is not None]
    by_elements = all(elements_of(m) is not None for m in measured)
    rows = list(dict.fromkeys(f"{m.direction} {m.dtype}" for m in measured))
    units = COUNT if by_elements else BYTES
    # Sizes that are written alike are one column.
    sizes = sorted({_size(m, by_elements) for m in measured})
    columns = list(dict.fromkeys(with_unit(size, units) for size in sizes))
    if len(rows) * len(columns) < 2:
        return None
    found: dict[tuple[int, int], list[Measurement]] = {}
    for m in measured:
        column = with_unit(_size(m, by_elements), units)
        found.setdefault((rows.index(f"{m.direction} {m.dtype}"), columns.index(column)), []).append(m)
    cells = {at: _cell(inside) for at, inside in found.items()}
    shares = [m.roof_share for m in measured if m.roof_share is not None]
    told = f"{plural(len(measured), 'input')}, {percent(min(shares))} to {percent(max(shares))} of the copy bandwidth."
    svg = draw_map(name, f"{card.name}: share of the roof", told, rows, columns, cells, "elements" if by_elements else "bytes moved", label_width(rows))
    several = " Of several inputs of one size a cell gives the median." if any(len(f) > 1 for f in found.values()) else ""
    caption = f"Share of the copy bandwidth measured on this {'GPU' if card.on_gpu else 'machine'}; dashed cells fit the cache.{several}"
    return Picture("Share of the roof", caption, [svg])


def draw_map(
    name: str,
    title: str,
    description: str,
    rows: Sequence[str],
    columns: Sequence[str],
    cells: dict[tuple[int, int], Cell],
    axis_title: str,
    left: float,
    widest: float = 120.0,
) -> str:
    """Draws a map of cells; where there is no cell, nothing is known.

    Args:
        name: what the identifiers in the drawing start with.
        cells: by row and column.
        left: room for the labels of the rows.
        widest: the most that a cell is wide.
    """
    width = min((_WIDTH - left - 8) / len(columns), widest)
    middles = [left + (i + 0.5) * width for i in range(len(columns))]
    tops = [_TOP + j * _ROW for j in range(len(rows))]
    heads = [text(x, _TOP - 8, column) for x, column in zip(middles, columns)]
    labels = [text(left - 10, y + _ROW / 2 + 4, row) for y, row in zip(tops, rows)]
    fields = [_draw_cell(cell, middles[i] - width / 2, tops[j], width) for (j, i), cell in cells.items()]
    drawn = [
        text(left, 13, axis_title, class_="axis-title"),
        element("g", *heads, class_="tick", text_anchor="middle"),
        element("g", *labels, text_anchor="end"),
        element("g", *fields, class_="cells"),
    ]
    used = left + len(columns) * width + 8
    height = _TOP + len(rows) * _ROW + 6
    return drawing(name, max(used, 520.0), height, title, description, *drawn)


def _draw_cell(cell: Cell, x: float, y: float, width: float) -> str:
    opacity = f"{STRONGEST * max(0.0, min(cell.strength, 1.0)):.2f}"
    across = round(width - 3, 1)
    outline = f"M{round(x + 1.5, 1):g} {y + 1.5:g}h{across:g}v{_ROW - 3:g}h{-across:g}z"
    kind = "bad" if cell.is_bad else "dashed" if cell.is_hollow else None
    field = element("path", d=outline, class_=kind, fill_opacity=opacity.lstrip("0"))
    written = text(x + width / 2, y + _ROW / 2 + 4, cell.text)
    return element("g", tooltip(cell.tip), field, written) if cell.tip else field + written


def _cell(inside: Sequence[Measurement]) -> Cell:
    share = median(m.roof_share for m in inside if m.roof_share is not None)
    return Cell(percent(share), share, is_hollow=all(m.in_cache for m in inside))


def _size(measurement: Measurement, by_elements: bool) -> float:
    return size_of(measurement) if by_elements else measurement.bytes_moved
