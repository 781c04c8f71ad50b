"""Draws how far results are from the float64 oracle: kinds of input down, dtypes across."""

from __future__ import annotations

import re
from collections.abc import Sequence

from opwright.records import CaseError, Check
from opwright.report.cards import Card
from opwright.report.heat import Cell, draw_map
from opwright.report.quantities import plural, round_to
from opwright.report.svg import Picture, Table

_MOST_ROWS = 24  # of one check: those nearest to their allowance


def draw_errors(card: Card, name: str) -> Picture | None:
    """Draws the largest errors in ulp, or returns None when no check compared numbers.

    Records that keep the error of each case are drawn by kind of input and dtype, others by check.

    Args:
        name: what the identifiers in the drawing start with.
    """
    checks = card.verify.checks if card.verify else []
    detailed = [check for check in checks if check.errors]
    if detailed:
        panels = [_draw_cases(check, f"{name}-{i}") for i, check in enumerate(detailed)]
        svgs, table = [svg for svg, _ in panels], [row for _, rows in panels for row in rows]
        head = ["check", "input", "dtype", "cases", "worst error", "error / allowance"]
    else:
        compared = [check for check in checks if check.worst_ratio is not None]
        if not compared:
            return None
        svgs, table, head = [_draw_checks(card, compared, name)], [], []
    caption = (
        "Largest error in units in the last place, and below it what share of the allowance that is (which differs from element "
        "to element): the stronger the colour, the nearer; outlined and marked ✗ where it is beyond."
    ).replace(", and below it what share of the allowance that is", "; colour is the share of the allowance")
    return Picture("Error map", caption, svgs, table=Table(head, table) if table else None)


def _draw_cases(check: Check, name: str) -> tuple[str, list[list[str]]]:
    groups: dict[tuple[str, str], list[CaseError]] = {}
    for error in check.errors:
        groups.setdefault((_kind(error.case), _dtype(error.case)), []).append(error)
    worst = {at: max(inside, key=lambda e: e.ratio) for at, inside in groups.items()}
    kinds = list(dict.fromkeys(kind for kind, _ in groups))
    dtypes = list(dict.fromkeys(dtype for _, dtype in groups))
    nearest = sorted(kinds, key=lambda kind: -max(e.ratio for (k, _), e in worst.items() if k == kind))
    shown = [kind for kind in kinds if kind in nearest[:_MOST_ROWS]]
    cells = {
        (shown.index(kind), dtypes.index(dtype)): _cell(max(e.ulp for e in groups[kind, dtype]), error.ratio, error.case)
        for (kind, dtype), error in worst.items()
        if kind in shown
    }
    left = f" {len(kinds) - len(shown)} kinds of input further from it are left out." if len(shown) < len(kinds) else ""
    told = f"{plural(len(check.errors), 'case')}; nearest to its allowance: {nearest[0]}.{left}"
    title = f"{check.title}: largest error in ulp"
    svg = draw_map(name, title, told, shown, dtypes, cells, f"{check.title}: ulp, by dtype{left}", 250.0)
    rows = [
        [check.title, kind, dtype, str(len(inside)), f"{round_to(max(e.ulp for e in inside))} ulp", round_to(worst[kind, dtype].ratio)]
        for (kind, dtype), inside in groups.items()
    ]
    return svg, rows


def _draw_checks(card: Card, checks: Sequence[Check], name: str) -> str:
    cells = {
        (i, 0): _cell(check.worst_ulp, check.worst_ratio or 0.0, check.title) for i, check in enumerate(checks)
    }
    told = f"Largest errors of {plural(len(checks), 'check')}, over all inputs and dtypes."
    names = [check.title for check in checks]
    return draw_map(name, f"{card.name}: largest errors", told, names, ["all dtypes"], cells, "largest error, by check", 250.0)


def _cell(ulp: float | None, ratio: float, about: str) -> Cell:
    size = "" if ulp is None else f"{round_to(ulp)} ulp" if ulp < 1e5 else f"{ulp:.0e} ulp"
    is_bad = ratio > 1
    written = f"✗ {size}" if is_bad else size or f"{round_to(ratio)} of 1"
    return Cell(written, ratio, f"{about}: {size or 'error'}, {round_to(ratio)} of the allowance", is_bad=is_bad)


def _kind(case: str) -> str:
    """Returns the label of a case; of a sample, that is `sample`."""
    found = re.search(r"\(([^()]*)\)$", case)
    label = found[1] if found else case
    return re.sub(r"^sample \d+$", "sample", label)


def _dtype(case: str) -> str:
    found = re.match(r"(\w+)\[", case)
    return found[1] if found else "all"
