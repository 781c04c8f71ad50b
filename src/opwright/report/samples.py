"""Draws all samples: a strip for each input and candidate, a stroke for each sample."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from opwright.errors import plural
from opwright.records import Timing
from opwright.report.cards import Card
from opwright.report.svg import Picture, drawing, element, line, shorten, text, tooltip

_WIDTH, _LEFT, _TOP, _ROW, _HEADING, _GAP = 1100.0, 330.0, 50.0, 15.0, 26.0, 18.0
_SPREADS = (1.25, 1.5, 2.0, 4.0)  # a strip reaches from the median over one of these to the median times it
_LETTERS = 50  # of an input, left of its strips
_HELD = 0.99  # so that this share of the samples lies inside


def draw_samples(card: Card, name: str) -> Picture | None:
    """Draws the samples around their medians, or returns None when no input has two."""
    measured = [m for m in card.measurements if any(len(t.samples_us) > 1 for t in m.timings)]
    if not measured:
        return None
    candidates = [measured[0].timings[0].candidate, *card.baselines]
    width = (_WIDTH - _LEFT - _GAP * len(candidates)) / len(candidates)
    drawn, beyond, y, group = [], 0, _TOP, ""
    reach = _reach([t for m in measured for t in m.timings])
    strips: list[list[str]] = [[] for _ in candidates]
    for rank, candidate in enumerate(candidates):
        left = _left(rank, width)
        drawn.append(text(left + width / 2, 13, candidate, class_=f"line-label c{min(rank, 5)}", text_anchor="middle"))
        for share, label, anchor in (
            (0.0, f"1/{reach:g}", "start"),
            (0.5, "median", "middle"),
            (1.0, f"{reach:g}x", "end"),
        ):
            drawn.append(text(left + share * width, 32, label, class_="tick", text_anchor=anchor))
    for m in measured:
        if group != f"{m.direction} {m.dtype}":
            group = f"{m.direction} {m.dtype}"
            drawn.append(text(8, y + _HEADING - 9, group, class_="panel-title"))
            y += _HEADING
        shown = shorten(m.case, _LETTERS)
        tip = [] if shown == m.case else [tooltip(m.case)]
        drawn.append(element("g", *tip, text(_LEFT - 10, y + 11, shown, class_="case", text_anchor="end")))
        for timing in m.timings:
            rank = candidates.index(timing.candidate)
            strip, outside = _draw_strip(timing, _left(rank, width), y, width, reach)
            strips[rank].append(strip)
            beyond += outside
        y += _ROW
    for rank in range(len(candidates)):
        middle = _left(rank, width) + width / 2
        drawn.insert(0, line((middle, 38), (middle, y + 4), class_="grid"))
    drawn += [element("g", *found, class_=f"c{min(rank, 5)}") for rank, found in enumerate(strips)]
    count = sum(len(t.samples_us) for m in measured for t in m.timings)
    told = f"{plural(count, 'sample')} of {plural(len(measured), 'input')}, each over the median of its strip."
    svg = drawing(name, _WIDTH, y + 8, f"{card.name}: all samples", told, *drawn)
    caption = f"Each of the {plural(count, 'sample')} is a stroke, placed by its ratio to the median of its strip (logarithmic). A narrow strip is a quiet measurement; two bunches are two ways of running."
    if beyond:
        caption += f" {plural(beyond, 'sample')} beyond the ends stand at the ends."
    return Picture("All samples", caption, [svg])


def _left(rank: int, width: float) -> float:
    return _LEFT + _GAP / 2 + rank * (width + _GAP)


def _reach(timings: Sequence[Timing]) -> float:
    """Returns how far the strips reach: as little as holds nearly all samples."""
    far = sorted(
        max(sample / t.median_us, t.median_us / sample) for t in timings for sample in t.samples_us if sample > 0
    )
    needed = far[min(int(_HELD * len(far)), len(far) - 1)] if far else 1.0
    return next((reach for reach in _SPREADS if reach >= needed), _SPREADS[-1])


def _draw_strip(timing: Timing, left: float, y: float, width: float, reach: float) -> tuple[str, int]:
    """Returns one thick line with gaps, a pixel for each sample; and how many lie beyond the ends."""
    places, beyond = set(), 0
    for sample in timing.samples_us:
        share = 0.5 + log(sample / timing.median_us) / log(reach) / 2 if sample > 0 else 0.0
        beyond += not 0 <= share <= 1
        places.add(round(left + max(0.0, min(share, 1.0)) * width))
    end = min(places)
    strokes = f"M{end} {y + 7.5:g}"
    while any(place >= end for place in places):
        start = min(place for place in places if place >= end)
        strokes += f"m{start - end} 0" if start > end else ""
        end = start
        while end in places:
            end += 1
        strokes += f"h{end - start}"
    return element("path", d=strokes, class_="stroke"), beyond
