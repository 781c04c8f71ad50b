"""Draws how far results are from the float64 oracle: kinds of input down, dtypes across."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from opwright.records import CaseError, Check
from opwright.report.cards import Card
from opwright.report.heat import Cell, draw_map
from opwright.report.quantities import plural, round_to
from opwright.report.rows import label_width, shorten
from opwright.report.svg import Picture, Table

_MOST_KINDS = 6  # of one check: those nearest to their allowance
_LABEL_LETTERS = 38
_DTYPES = ("f32", "f64", "f16", "bf16")


def draw_errors(card: Card, name: str) -> Picture | None:
    """Draws the largest errors in ulp, or returns None when no check compared numbers.

    Records that keep the error of each case are drawn by kind of input and dtype, others by check.

    Args:
        name: what the identifiers in the drawing start with.
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

    def draw(self, name: str, left: float) -> str:
        cells = {
            (self.kinds.index(kind), self.dtypes.index(dtype)): _cell(*errors)
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
    cells = {(i, 0): _cell(check.worst_ulp, check.worst_ratio or 0.0) for i, check in enumerate(checks)}
    told = f"Largest errors of {plural(len(checks), 'check')}, over all inputs and dtypes."
    names = [check.title for check in checks]
    return draw_map(name, f"{card.name}: largest errors", told, names, ["all dtypes"], cells, "by check", label_width(names))


def _cell(ulp: float | None, ratio: float) -> Cell:
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
