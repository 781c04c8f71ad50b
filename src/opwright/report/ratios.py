"""Ratios with their confidence intervals and shares, in the words of both `opwright bench` and the report."""

from __future__ import annotations

import math

from opwright.records import BenchRecord, Comparison, Summary
from opwright.records.bench import contains_one

_TITLES = {"compile": "torch.compile"}
NO_DIFFERENCE = "no visible difference"
NO_INTERVAL = "without an interval"


def tell_ratio(ratio: float, visible: float | None) -> str:
    """Returns a ratio with its 95 % confidence interval: `1.41x ±2 %`, or that no difference is visible.

    Args:
        visible: half-width of the interval; None for a ratio without one, `1.41x`.
    """
    if visible is None:
        return f"{ratio:.2f}x"
    if contains_one(ratio, visible):
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


def tell_speed(ratio: float, visible: float | None, candidate: str) -> str:
    """Returns the same as a phrase: `1.41x faster than eager (±2 %)`."""
    title = _TITLES.get(candidate, candidate)
    if visible is not None and contains_one(ratio, visible):
        return f"{NO_DIFFERENCE} from {title}"
    factor, word = (ratio, "faster") if ratio >= 1 else (1 / ratio, "slower")
    return f"{factor:.2f}x {word} than {title} ({NO_INTERVAL if visible is None else tell_interval(visible)})"


def tell_summary(summary: Summary) -> str:
    """Returns a summary as a sentence: `forward: 1.41x faster than eager (±2 %), on 8 inputs: 7 faster, 1 slower`."""
    same = summary.inputs - summary.faster - summary.slower
    counts = {"faster": summary.faster, "slower": summary.slower, NO_DIFFERENCE: same}
    told = "" if summary.visible is None else ": " + tell_counts(counts)
    where = f" (mean of {summary.inputs} inputs{told})" if summary.inputs > 1 else " (1 input)"
    return f"{summary.direction}: {tell_speed(summary.ratio, summary.visible, summary.candidate)}{where}"


def tell_counts(counts: dict[str, int]) -> str:
    """Returns what there is of each: `7 faster, 1 slower`."""
    return ", ".join(f"{count} {word}" for word, count in counts.items() if count)


def tell_share(share: float) -> str:
    """Returns a share of the copy bandwidth: `87 %`."""
    return f"{100 * share:.0f} %"


_MAX_ABOVE_COPY = 2.0  # a kernel is not faster than PyTorch's copy by more


def explain_shares(record: BenchRecord) -> str:
    """Returns why shares of inputs beyond the cache pass 100 %; "" where none does."""
    largest = max((m.roof_share or 0 for m in record.measurements if not m.in_cache), default=0)
    if largest <= 1:
        return ""
    copy_gb_s = record.limits.copy_gb_s if record.limits is not None else record.machine.copy_gb_s
    rate = f" of {copy_gb_s:.4g} GB/s" if copy_gb_s else ""
    told = f"above 100 % of copy: faster than PyTorch's copy{rate} here"
    if largest <= _MAX_ABOVE_COPY:
        return told
    name = record.name.split("::")[-1]
    return f"{told}, or a call moves a part of its arguments alone: `@{name}.cost` declares the bytes"
