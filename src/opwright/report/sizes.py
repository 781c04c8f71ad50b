"""Draws time against size: a panel for each direction and dtype, a line for each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from opwright.errors import plural
from opwright.quantities import BYTES, COUNT, TIME, tick_with_unit, with_unit
from opwright.records import Measurement, Timing
from opwright.report.axes import draw_axes, log_scale, spread
from opwright.report.cards import Card, elements_of, size_of
from opwright.report.ratios import tell_interval
from opwright.report.svg import Picture, Point, drawing, element, line, marker, path, shorten, text, tooltip

_PAGE_WIDTH = 1120
_GAP = 24
_LABEL_LETTERS, _LETTER = 16, 6.6  # of the names at the right of the lines
_LABEL_GAP = 13
_VISIBLE = 7  # a noise bar shorter than this lies under its point


def draw_sizes(card: Card, name: str) -> Picture | None:
    """Draws time against size, or returns None when no direction and dtype has two sizes."""
    measured = [m for m in card.measurements if m.bytes_moved > 0]
    by_elements = all(elements_of(m) is not None for m in measured)
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for measurement in measured:
        groups.setdefault((measurement.direction, measurement.dtype), []).append(measurement)
    groups = {key: found for key, found in groups.items() if len({size_of(m, by_elements) for m in found}) > 1}
    if not groups:
        return None
    measured = [m for found in groups.values() for m in found]
    columns = min(3, len({dtype for _, dtype in groups}))
    width = (_PAGE_WIDTH - (columns - 1) * _GAP) / columns if columns > 1 else 760
    panels = _Panels(card, measured, by_elements, width, name)
    return Picture(
        title="Time against size",
        caption=_explain(card, panels),
        svg=[panels.draw(i, group) for i, group in enumerate(groups.items())],
        columns=columns,
    )


class _Panels:
    """Panels of one picture, on the same scales so that they can be compared."""

    def __init__(self, card: Card, measured: Sequence[Measurement], by_elements: bool, width: float, name: str) -> None:
        assert card.bench is not None
        self.card, self.by_elements, self.width, self.name = card, by_elements, width, name
        self.height = 290.0 if width < 500 else 320.0
        self.host_us = card.bench.host_us.get(measured[0].timings[0].candidate)
        limits = card.bench.limits
        # The times of a GPU are device times: the host's part is not in them, a launch is.
        self.launch_us = limits.launch_us if limits is not None and card.on_gpu else None
        if self.launch_us:
            self.host_us = None
        self.copy_gb_s = card.bench.machine.copy_gb_s
        # The names of the candidates, in the order in which colours and shapes are given out.
        self.candidates = [measured[0].timings[0].candidate, *card.baselines]
        times = [bound for m in measured for t in m.timings for bound in self._bounds(t)]
        if self.host_us and any(m.direction == "forward" for m in measured):
            times.append(self.host_us)
        if self.launch_us:
            times.append(self.launch_us)
        names = [shorten(name, _LABEL_LETTERS) for name in (*self.candidates, "launch")]
        room = 18 + _LETTER * max(map(len, names))
        self.x = log_scale([size_of(m, by_elements) for m in measured], 58, width - room, 1.25)
        self.y = log_scale(times, self.height - 46, 46, 1.3)

    def draw(self, index: int, group: tuple[tuple[str, str], list[Measurement]]) -> str:
        """Draws the panel of one direction and dtype."""
        (direction, dtype), measured = group
        name = f"{self.name}-{index}"
        units = COUNT if self.by_elements else BYTES
        lines, ends = self._draw_lines(measured)
        bounds, bound_ends = self._draw_bounds(direction, measured)
        clip = element(
            "clipPath",
            element(
                "rect",
                x=self.x.start,
                y=self.y.end,
                width=self.x.end - self.x.start + 6,
                height=self.height - 92,
            ),
            id=f"{name}-clip",
        )
        return drawing(
            name,
            self.width,
            self.height,
            f"{direction} {dtype}: time against size",
            self._describe(measured),
            clip,
            text(self.x.start, 16, f"{direction} {dtype}", class_="panel-title"),
            draw_axes(
                self.x,
                self.y,
                "elements" if self.by_elements else "bytes moved",
                "time per call",
                lambda value: tick_with_unit(value, units),
                lambda value: tick_with_unit(value, TIME),
            ),
            element("g", *bounds, clip_path=f"url(#{name}-clip)"),
            *lines,
            *self._label(ends + bound_ends),
        )

    def _draw_lines(self, measured: Sequence[Measurement]) -> tuple[list[str], list[tuple[str, str, Point]]]:
        drawn, ends = [], []
        for rank, candidate in reversed(list(enumerate(self.candidates))):  # Opwright last, on top
            style = f"c{min(rank, 5)}"
            timed = [(m, t) for m in measured for t in m.timings if t.candidate == candidate]
            if not timed:
                continue
            through = _median_by_size([(size_of(m, self.by_elements), t.median_us) for m, t in timed])
            points = [(self.x(size), self.y(time)) for size, time in through]
            dots = [self._draw_point(m, t, rank) for m, t in timed]
            drawn.append(element("g", path(points, class_="line"), *dots, class_=style))
            ends.append((candidate, style, points[-1]))
        return drawn, ends

    def _draw_point(self, measurement: Measurement, timing: Timing, rank: int) -> str:
        x = self.x(size_of(measurement, self.by_elements))
        low, high = (self.y(bound) for bound in self._bounds(timing))
        told = f"{timing.candidate}: {with_unit(timing.median_us, TIME)} {tell_interval(self.card.spread_of(timing))}"
        bar = line((x, low), (x, high), class_="noise") if low - high > _VISIBLE else ""
        fill = "hollow" if measurement.in_cache else "filled"
        return bar + marker(rank, x, self.y(timing.median_us), tooltip(told), class_=fill)

    def _bounds(self, timing: Timing) -> tuple[float, float]:
        """Returns the ends of the confidence interval of a time, in microseconds; both positive, cut at ±100 %."""
        spread = min(max(self.card.spread_of(timing) or 0.0, 0.0), 1.0)
        return timing.median_us * max(1 - spread, 0.05), timing.median_us * (1 + spread)

    def _draw_bounds(self, direction: str, measured: Sequence[Measurement]) -> tuple[list[str], list]:
        drawn, ends = [], []
        if self.copy_gb_s:
            floor = [(size_of(m, self.by_elements), m.bytes_moved / self.copy_gb_s / 1e3) for m in measured]
            slope = [(self.x(size), self.y(time)) for size, time in _median_by_size(floor)]
            drawn.append(path(slope, class_="bound"))
            if slope[-1][1] <= self.y.start:
                ends.append(("copy", "bound-label", slope[-1]))
        host_us = self.host_us if direction == "forward" else None
        for floor_us, name in ((host_us, "host"), (self.launch_us, "launch")):
            if floor_us:
                at = self.y(floor_us)
                drawn.append(line((self.x.start, at), (self.x.end, at), class_="bound"))
                ends.append((name, "bound-label", (self.x.end, at)))
        return drawn, ends

    def _label(self, ends: Sequence[tuple[str, str, Point]]) -> list[str]:
        places = spread([y for _, _, (_, y) in ends], _LABEL_GAP, self.y.end, self.y.start)
        drawn = []
        for (name, style, (x, y)), place in zip(ends, places):
            left = self.x.end + 12
            drawn.append(path([(x + 5, y), (left - 6, place), (left - 2, place)], class_="leader"))
            drawn.append(text(left, place + 3.5, shorten(name, _LABEL_LETTERS), class_=f"line-label {style}"))
        return drawn

    def _describe(self, measured: Sequence[Measurement]) -> str:
        sizes = [size_of(m, self.by_elements) for m in measured]
        units = COUNT if self.by_elements else BYTES
        noun = " elements" if self.by_elements else ""
        text = f"{plural(len(measured), 'input')} of {with_unit(min(sizes), units)} to {with_unit(max(sizes), units)}{noun}."
        for candidate in self.candidates:
            times = [t for m in measured if (t := m.time_of(candidate)) is not None]
            if times:
                text += f" {candidate}: {with_unit(min(times), TIME)} to {with_unit(max(times), TIME)}."
        return text


def _explain(card: Card, panels: _Panels) -> str:
    time = "device time of a call on a cold cache" if card.on_gpu else "time of a call"
    spread = "the 95 % confidence interval" if card.has_intervals else "the noise"
    text = f"Median {time}, both axes logarithmic; vertical bars are {spread}, where it is larger than the point, cut at ±100 %; hollow points fit the cache."
    if panels.copy_gb_s:
        text += " Dashed, copy: the time that the measured copy bandwidth needs for the bytes of the input."
    if panels.host_us:
        host = f"what a call costs {'the host' if card.on_gpu else 'before any work'}"
        text += f" Dashed, host: {host}, {with_unit(panels.host_us, TIME)}."
    if panels.launch_us:
        text += f" Dashed, launch: the time from one empty kernel to the next, {with_unit(panels.launch_us, TIME)}."
    sizes = [size_of(m, panels.by_elements) for m in card.measurements]
    keys = [(m.direction, m.dtype, size) for m, size in zip(card.measurements, sizes)]
    if len(set(keys)) < len(keys):
        text += " Lines go through the median of inputs of equal size."
    return text


def _median_by_size(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    groups: dict[float, list[float]] = {}
    for size, time in points:
        groups.setdefault(size, []).append(time)
    return [(size, median(times)) for size, times in sorted(groups.items())]
