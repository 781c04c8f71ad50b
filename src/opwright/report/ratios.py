"""Ratios with their confidence intervals, in the words of both `opwright bench` and the report."""

from __future__ import annotations

import math

from opwright.records import Comparison, Summary

_TITLES = {"compile": "torch.compile"}
NO_DIFFERENCE = "no visible difference"


def tell_ratio(ratio: float, visible: float) -> str:
    """Returns a ratio with its 95 % confidence interval: `1.41x ±2 %`, or that no difference is visible."""
    if abs(ratio - 1) <= visible:
        return NO_DIFFERENCE
    return f"{ratio:.2f}x {tell_interval(visible)}"


def tell_comparison(comparison: Comparison) -> str:
    """Returns how many times faster than a candidate Opwright is."""
    return tell_ratio(comparison.ratio, comparison.visible)


def tell_interval(half_width: float | None) -> str:
    """Returns the half-width of a confidence interval: `±2.1 %`."""
    if half_width is None or not math.isfinite(half_width) or half_width > 1:
        return "imprecise"
    return f"±{100 * half_width:.2g} %" if half_width < 0.095 else f"±{100 * half_width:.0f} %"


def tell_speed(ratio: float, visible: float, candidate: str) -> str:
    """Returns the same as a phrase: `1.41x faster than eager (±2 %)`."""
    title = _TITLES.get(candidate, candidate)
    if abs(ratio - 1) <= visible:
        return f"{NO_DIFFERENCE} from {title}"
    factor, word = (ratio, "faster") if ratio > 1 else (1 / ratio, "slower")
    return f"{factor:.2f}x {word} than {title} ({tell_interval(visible)})"


def tell_summary(summary: Summary) -> str:
    """Returns a summary as a sentence: `forward: 1.41x faster than eager (±2 %), on 8 inputs: 7 faster, 1 slower`."""
    same = summary.inputs - summary.faster - summary.slower
    counts = {"faster": summary.faster, "slower": summary.slower, NO_DIFFERENCE: same}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    where = f" (mean of {summary.inputs} inputs: {told})" if summary.inputs > 1 else " (1 input)"
    return f"{summary.direction}: {tell_speed(summary.ratio, summary.visible, summary.candidate)}{where}"
