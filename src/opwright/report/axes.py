"""Logarithmic axes: numbers to pixels, ticks, labels kept apart, and the grid that all plots share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from opwright.report.svg import element, line, text

Format = Callable[[float], str]
_STEPS = ((1, 2, 5), (1, 3), (1,))


@dataclass(frozen=True)
class LogScale:
    """A logarithmic axis from `low` to `high`, drawn from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Returns the pixel of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def holds(self, value: float) -> bool:
        """Whether a value lies on the axis."""
        return self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)

    def ticks(self, gap: float) -> list[float]:
        """Returns as many round values as fit with so many pixels between them."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        choices = [[s * 10.0**k for k in range(first, last + 1) for s in steps] for steps in _STEPS]
        choices += [[10.0**k for k in range(first, last + 1) if k % stride == 0] for stride in (2, 3, 4, 6)]
        for choice in choices:
            found = [value for value in choice if self.holds(value)]
            pixels = sorted(self(value) for value in found)
            if len(found) > 1 and all(b - a >= gap for a, b in pairwise(pixels)):
                return found
        return [value for value in choices[2] if self.holds(value)][:1]


def log_scale(values: Sequence[float], start: float, end: float, margin: float, ratio: float = 10) -> LogScale:
    """Makes a logarithmic axis around positive values.

    Args:
        margin: factor left free below and above.
        ratio: the least ratio between the ends of the axis.
    """
    low, high = min(values) / margin, max(values) * margin
    short = max(1.0, math.sqrt(ratio * low / high))
    return LogScale(low / short, high * short, start, end)


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Moves positions apart until there is a gap between neighbours, as little as possible.

    They keep their order and, if there is room, stay between `low` and `high`.
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    moved = [min(max(positions[i], low), high) for i in order]
    blocks: list[list[float]] = []  # of touching labels: count, and sum of where each wants the first to be
    for place in moved:
        blocks.append([1, place])
        while len(blocks) > 1 and _start(blocks[-2]) + blocks[-2][0] * gap > _start(blocks[-1]):
            count, total = blocks.pop()
            blocks[-1][1] += total - count * blocks[-1][0] * gap
            blocks[-1][0] += count
    placed = [_start(block) + k * gap for block in blocks for k in range(int(block[0]))]
    for k, floor in enumerate(low + gap * k for k in range(len(placed))):
        placed[k] = max(placed[k], floor)
    for k in range(len(placed)):
        placed[-1 - k] = min(placed[-1 - k], high - gap * k)
    result = [0.0] * len(positions)
    for i, place in zip(order, placed):
        result[i] = place
    return result


def _start(block: Sequence[float]) -> float:
    return block[1] / block[0]


def draw_axes(x: LogScale, y: LogScale, x_title: str, y_title: str, x_format: Format, y_format: Format) -> str:
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
    parts.append(text((x.start + x.end) / 2, y.start + 34, x_title, class_="axis-title", text_anchor="middle"))
    parts.append(text(x.start, y.end - 10, y_title, class_="axis-title", text_anchor="start"))
    return element("g", *parts)
