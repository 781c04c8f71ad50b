"""Draws heat maps: the share of the roof by size, and how far results are from the float64 oracle by kind of input."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from opwright.errors import plural
from opwright.quantities import BYTES, COUNT, round_to, with_unit
from opwright.records import CaseError, Check, Measurement
from opwright.report.cards import Card, elements_of, size_of
from opwright.report.ratios import explain_shares, tell_share
from opwright.report.svg import Picture, Table, drawing, element, label_width, shorten, text, tooltip

_WIDTH, _ROW, _TOP = 1100.0, 26.0, 42.0
STRONGEST = 0.62  # opacity of a full cell: text stays readable on it
_MOST_KINDS = 6  # of one check: those nearest to their allowance
_LABEL_LETTERS = 38
_DTYPES = ("f32", "f64", "f16", "bf16")


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
    """Draws the shares of the measured copy bandwidth, or returns None when there are fewer than two."""
    measured = [m for m in card.measurements if m.roof_share is not None]
    by_elements = all(elements_of(m) is not None for m in measured)
    rows = list(dict.fromkeys(f"{m.direction} {m.dtype}" for m in measured))
    units = COUNT if by_elements else BYTES
    # Sizes that are written alike are one column.
    sizes = sorted({size_of(m, by_elements) for m in measured})
    columns = list(dict.fromkeys(with_unit(size, units) for size in sizes))
    found: dict[tuple[int, int], list[Measurement]] = {}
    for m in measured:
        column = with_unit(size_of(m, by_elements), units)
        found.setdefault((rows.index(f"{m.direction} {m.dtype}"), columns.index(column)), []).append(m)
    if len(found) < 2:
        return None
    cells = {at: _share_cell(inside) for at, inside in found.items()}
    shares = [m.roof_share for m in measured if m.roof_share is not None]
    told = f"{plural(len(measured), 'input')}, {tell_share(min(shares))} to {tell_share(max(shares))} of the copy bandwidth."
    svg = draw_map(
        name,
        f"{card.name}: share of the roof",
        told,
        rows,
        columns,
        cells,
        "elements" if by_elements else "bytes moved",
        label_width(rows),
    )
    several = (
        " Of several inputs of one size a cell gives the median." if any(len(f) > 1 for f in found.values()) else ""
    )
    caption = f"Share of the copy bandwidth measured on this {'GPU' if card.on_gpu else 'machine'}.{several}"
    if any(m.in_cache for m in measured):
        caption += " Dashed cells fit the cache, which is faster than memory."
    reason = explain_shares(card.bench) if card.bench else ""
    caption += f" {reason[0].upper()}{reason[1:]}." if reason else ""
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


def _share_cell(inside: Sequence[Measurement]) -> Cell:
    share = median(m.roof_share for m in inside if m.roof_share is not None)
    return Cell(tell_share(share), share, is_hollow=all(m.in_cache for m in inside))


def draw_errors(card: Card, name: str) -> Picture | None:
    """Draws the largest errors in ulp, or returns None when that is a single number, or none.

    Records that keep the error of each case are drawn by kind of input and dtype, others by check.
    """
    checks = [c for c in (card.verify.checks if card.verify else []) if c.worst_ratio is not None or c.errors]
    if not checks:
        return None
    caption = (
        "Largest error in ulp, units in the last place. Colour is the error over what is allowed, which differs from "
        "element to element: full at the allowance; beyond it a cell is outlined and marked ✗, and ∞ where a NaN or infinity is "
        "too many or too few."
    )
    detailed = [_Map(check) for check in checks if check.errors]
    if (sum(found.size for found in detailed) if detailed else len(checks)) < 2:
        return None
    if not detailed:
        return Picture("Error map", caption, [_draw_checks(card, checks, name)])
    dtypes = sorted({dtype for found in detailed for dtype in found.dtypes}, key=_rank)
    rows = [row for found in detailed for row in found.rows(dtypes)]
    table = Table(["check", "input", *(f"{dtype}: ulp, error / allowance" for dtype in dtypes)], rows)
    left = label_width([kind for found in detailed for kind in found.kinds], _LABEL_LETTERS)
    svgs = [found.draw(f"{name}-{i}", left) for i, found in enumerate(detailed)]
    if any(found.left_out for found in detailed):
        caption += f" Of each check the {_MOST_KINDS} kinds of input that come nearest to their allowance are shown."
    return Picture("Error map", caption, svgs, columns=min(2, len(svgs)), table=table)


class _Map:
    """The errors of one check, by kind of input and dtype."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.found: dict[tuple[str, str], tuple[float, float]] = {}  # the largest ulp, the largest ratio
        for error in check.errors:
            at = _kind(error), _dtype(error)
            ulp, ratio = self.found.get(at, (0.0, 0.0))
            worst = math.inf if error.ratio is None else error.ratio
            self.found[at] = max(ulp, error.ulp or 0.0), max(ratio, worst)
        self.dtypes = sorted({dtype for _, dtype in self.found}, key=_rank)
        nearest: dict[str, float] = {}
        for (kind, _), (_, ratio) in self.found.items():
            nearest[kind] = max(ratio, nearest.get(kind, 0.0))
        self.kinds = sorted(nearest, key=lambda kind: -nearest[kind])[:_MOST_KINDS]
        self.left_out = len(nearest) - len(self.kinds)
        self.size = len(self.found)

    def draw(self, name: str, left: float) -> str:
        cells = {
            (self.kinds.index(kind), self.dtypes.index(dtype)): _error_cell(*errors)
            for (kind, dtype), errors in self.found.items()
            if kind in self.kinds
        }
        title = f"{self.check.title}: largest error in ulp"
        told = f"{plural(len(self.check.errors), 'case')}; nearest to its allowance: {self.kinds[0]}."
        labels = [shorten(kind, _LABEL_LETTERS) for kind in self.kinds]
        return draw_map(name, title, told, labels, self.dtypes, cells, f"{self.check.title}, by dtype", left, 70.0)

    def rows(self, dtypes: Sequence[str]) -> list[list[str]]:
        return [
            [self.check.title, kind, *(self._write(self.found.get((kind, dtype))) for dtype in dtypes)]
            for kind in self.kinds
        ]

    def _write(self, errors: tuple[float, float] | None) -> str:
        if errors is None:
            return ""
        ulp, ratio = errors
        return "infinite" if math.isinf(ratio) else f"{round_to(ulp)}, {round_to(ratio)}"


def _draw_checks(card: Card, checks: Sequence[Check], name: str) -> str:
    cells = {(i, 0): _error_cell(check.worst_ulp, check.worst_ratio or 0.0) for i, check in enumerate(checks)}
    told = f"Largest errors of {plural(len(checks), 'check')}, over all inputs and dtypes."
    names = [check.title for check in checks]
    return draw_map(
        name, f"{card.name}: largest errors", told, names, ["all dtypes"], cells, "by check", label_width(names)
    )


def _error_cell(ulp: float | None, ratio: float) -> Cell:
    size = f"{round_to(ratio)} of 1" if ulp is None else round_to(ulp) if ulp < 1e6 else f"{ulp:.0e}"
    if math.isinf(ratio):
        size = "∞"
    is_bad = ratio > 1
    return Cell(f"✗ {size}" if is_bad else size, ratio, is_bad=is_bad)


def _kind(error: CaseError) -> str:
    """Returns the label of a case, or what is special behind it; of a sample, that is `sample`."""
    found = re.search(r"\(([^()]*)\)(?:, ([^()]+))?$", error.case)
    return re.sub(r"^sample \d+$", "sample", (found[2] or found[1]) if found else error.case)


def _rank(dtype: str) -> tuple[int, str]:
    """Returns where a dtype stands: the usual ones first, always in the same order."""
    return (_DTYPES.index(dtype) if dtype in _DTYPES else len(_DTYPES)), dtype


def _dtype(error: CaseError) -> str:
    found = re.match(r"(\w+)\[", error.case)
    return found[1] if found else "all"
