"""Draws all samples: a strip for each input and candidate, a stroke for each sample."""

from __future__ import annotations

from math import log

from opwright.records import Timing
from opwright.report.cards import Card
from opwright.report.quantities import TIME, percent, plural, with_unit
from opwright.report.rows import shorten
from opwright.report.svg import Picture, drawing, element, line, text, tooltip

_WIDTH, _LEFT, _TOP, _ROW, _HEADING, _GAP = 1100.0, 300.0, 50.0, 15.0, 26.0, 18.0
_SPREAD = 1.5  # a strip reaches from median / 1.5 to median * 1.5


def draw_samples(card: Card, name: str) -> Picture | None:
    """Draws the samples around their medians, or returns None when no input has two.

    Args:
        name: what the identifiers in the drawing start with.
    """
    measured = [m for m in card.measurements if any(len(t.samples_us) > 1 for t in m.timings)]
    if not measured:
        return None
    candidates = [measured[0].timings[0].candidate, *card.baselines]
    width = (_WIDTH - _LEFT - _GAP * len(candidates)) / len(candidates)
    drawn, beyond, y, group = [], 0, _TOP, ""
    for rank, candidate in enumerate(candidates):
        left = _left(rank, width)
        drawn.append(text(left + width / 2, 13, candidate, class_=f"line-label c{min(rank, 5)}", text_anchor="middle"))
        for share, label in ((0.0, f"÷{_SPREAD:g}"), (0.5, "median"), (1.0, f"×{_SPREAD:g}")):
            drawn.append(text(left + share * width, 32, label, class_="tick", text_anchor="middle"))
    for m in measured:
        if group != f"{m.direction} {m.dtype}":
            group = f"{m.direction} {m.dtype}"
            drawn.append(text(8, y + _HEADING - 9, group, class_="panel-title"))
            y += _HEADING
        drawn.append(element("g", tooltip(m.case), text(_LEFT - 10, y + 11, shorten(m.case), class_="case", text_anchor="end")))
        for timing in m.timings:
            rank = candidates.index(timing.candidate)
            strip, outside = _draw_strip(timing, _left(rank, width), y, width)
            drawn.append(element("g", *strip, class_=f"c{min(rank, 5)}"))
            beyond += outside
        y += _ROW
    for rank in range(len(candidates)):
        middle = _left(rank, width) + width / 2
        drawn.insert(0, line((middle, 38), (middle, y + 4), class_="grid"))
    count = sum(len(t.samples_us) for m in measured for t in m.timings)
    told = f"{plural(count, 'sample')} of {plural(len(measured), 'input')}, each over the median of its strip."
    svg = drawing(name, _WIDTH, y + 8, f"{card.name}: all samples", told, *drawn)
    caption = f"A stroke for each of the {plural(count, 'sample')}, over the median of its strip, logarithmic. A narrow strip is a quiet measurement; two bunches are two ways of running."
    if beyond:
        caption += f" {plural(beyond, 'sample')} beyond the ends stand at the ends."
    return Picture("All samples", caption, [svg])


def _left(rank: int, width: float) -> float:
    return _LEFT + _GAP / 2 + rank * (width + _GAP)


def _draw_strip(timing: Timing, left: float, y: float, width: float) -> tuple[list[str], int]:
    """Returns one path for all strokes, those of one pixel once; and how many lie beyond the ends."""
    places, beyond = set(), 0
    for sample in timing.samples_us:
        share = 0.5 + log(sample / timing.median_us) / log(_SPREAD) / 2 if sample > 0 else 0.0
        beyond += not 0 <= share <= 1
        places.add(round(left + max(0.0, min(share, 1.0)) * width))
    strokes = "".join(f"M{place} {y + 3:g}v9" for place in sorted(places))
    told = f"{timing.candidate}: {plural(len(timing.samples_us), 'sample')}, median {with_unit(timing.median_us, TIME)} ± {percent(timing.noise, 2)}"
    return [element("path", tooltip(told), d=strokes, class_="stroke")], beyond
