"""Draws how many times faster than each other candidate Opwright is."""

from __future__ import annotations

from collections.abc import Callable

from opwright.errors import plural
from opwright.records import Summary
from opwright.report.axes import log_scale
from opwright.report.cards import Card
from opwright.report.ratios import NO_DIFFERENCE, tell_ratio, tell_speed
from opwright.report.svg import Heading, Picture, Row, draw_rows


def draw_speedups(card: Card, name: str) -> Picture | None:
    """Draws the summaries of each direction; returns None where there is none, or a single bar without an interval."""
    groups = {d: [s for s in card.summaries if s.direction == d] for d in card.directions}
    every = [s for found in groups.values() for s in found]
    candidates = list(dict.fromkeys(s.candidate for s in every))
    intervals = [interval for s in every if (interval := _interval(s)) is not None]
    if not every or (len(every) == 1 and not intervals):
        return None
    ends = [end for interval in intervals for end in interval]
    x = log_scale([1.0, *(s.ratio for s in every), *ends], 0.0, 1.0, margin=1.08, ratio=4)
    rows: list[Row | Heading] = []
    for direction, found in groups.items():
        rows += [Heading(direction)] if found else []
        rows += [
            Row(
                f"vs {s.candidate}",
                1.0,
                s.ratio,
                tell_ratio(s.ratio, s.visible) + ("  slower" if s.verdict == "slower" else ""),
                style=f"c{min(1 + candidates.index(s.candidate), 5)}",
                whisker=_interval(s),
                is_hollow=s.verdict == "same" or s.ratio < 1,
            )
            for s in found
        ]
    ticks = [(value, f"{value:g}x") for value in sorted({1.0, *x.ticks(gap=0.07)}) if _is_clear(value, x)]
    told = "; ".join(f"{s.direction} {tell_speed(s.ratio, s.visible, s.candidate)}" for s in every)
    svg = draw_rows(
        name,
        f"{card.name}: speed-ups",
        f"{plural(len(card.measurements), 'input')}. {told}.",
        rows,
        x,
        ticks,
        "times faster than the other candidate (logarithmic)",
        rule=1.0,
    )
    caption = "Bars: the geometric mean of the ratios over the inputs of a direction"
    caption += "; lines over them: its 95 % confidence interval." if intervals else ", without an interval."
    if intervals and len(intervals) < len(every):
        caption += " Without a line it is wider than ±100 %."
    outlined = [s for s in every if s.verdict == "same" or s.ratio < 1]
    if outlined:
        words = (
            ("slower", any(s.verdict != "same" for s in outlined)),
            (NO_DIFFERENCE, any(s.verdict == "same" for s in outlined)),
        )
        caption += f" Outlined bars: {' or '.join(word for word, is_so in words if is_so)}."
    return Picture("Speed-ups", caption, [svg])


def _interval(summary: Summary) -> tuple[float, float] | None:
    """Returns the ends of the confidence interval; None without one, or where it is too wide to be drawn."""
    if summary.visible is None or summary.visible > 1:
        return None
    return summary.ratio / (1 + summary.visible), summary.ratio * (1 + summary.visible)


def _is_clear(value: float, x: Callable[[float], float]) -> bool:
    """Whether a tick leaves room for that of 1x."""
    return value == 1 or abs(x(value) - x(1.0)) >= 0.05
