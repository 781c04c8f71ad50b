"""Draws how many times faster than each other candidate Opwright is."""

from __future__ import annotations

from statistics import median

from opwright.report.cards import Card
from opwright.report.quantities import plural, round_to
from opwright.report.rows import Heading, Row, draw_rows
from opwright.report.scales import log_scale
from opwright.report.svg import Picture


def draw_speedups(card: Card, name: str) -> Picture | None:
    """Draws the medians over the inputs of each direction and dtype, or returns None when there is no candidate.

    Args:
        name: what the identifiers in the drawing start with.
    """
    groups: dict[str, list[tuple[str, list[float]]]] = {}
    for measurement in card.measurements:
        groups.setdefault(f"{measurement.direction} {measurement.dtype}", [])
    for group, found in groups.items():
        inside = [m for m in card.measurements if f"{m.direction} {m.dtype}" == group]
        for candidate in card.baselines:
            ratios = [r for m in inside if (r := m.speedup_over(candidate)) is not None]
            if ratios:
                found.append((candidate, ratios))
    every = [ratio for found in groups.values() for _, ratios in found for ratio in ratios]
    if not every:
        return None
    x = log_scale([1.0, *every], 0.0, 1.0, margin=1.08, ratio=4)
    rows: list[Row | Heading] = []
    for group, found in groups.items():
        rows.append(Heading(group))
        for candidate, ratios in found:
            middle = median(ratios)
            slower = "" if middle >= 1 else "  slower"
            rows.append(
                Row(
                    f"over {candidate}",
                    1.0,
                    middle,
                    f"{round_to(middle)}x{slower}" + (_between(ratios) if len(ratios) > 1 else ""),
                    style=f"c{min(1 + card.baselines.index(candidate), 5)}",
                    whisker=(min(ratios), max(ratios)) if len(ratios) > 1 else None,
                    is_hollow=middle < 1,
                )
            )
    ticks = [(value, f"{value:g}x") for value in sorted({1.0, *x.ticks(gap=0.07)}) if _is_clear(value, x)]
    svg = draw_rows(
        name,
        f"{card.name}: speed-ups",
        f"{plural(len(card.measurements), 'input')}. {_tell(groups)}",
        rows,
        x,
        ticks,
        "times faster than the other candidate (logarithmic)",
        rule=1.0,
    )
    caption = (
        "Bars: the median over the inputs; lines over them: the least and the largest. Right of 1x Opwright is "
        "faster; outlined bars, left of it, are slower."
    )
    return Picture("Speed-ups", caption, [svg])


def _tell(groups: dict[str, list[tuple[str, list[float]]]]) -> str:
    told = [
        f"{group} over {candidate}: {round_to(median(ratios))}x"
        for group, found in groups.items()
        for candidate, ratios in found
    ]
    return "; ".join(told) + "."


def _between(ratios: list[float]) -> str:
    return f"  ({round_to(min(ratios))}x to {round_to(max(ratios))}x)"


def _is_clear(value: float, x) -> bool:
    """Whether a tick leaves room for that of 1x."""
    return value == 1 or abs(x(value) - x(1.0)) >= 0.05
