"""All pictures of a card, in the order of the page."""

from __future__ import annotations

import re

from opwright.report.builds import draw_kernels, draw_timeline
from opwright.report.calls import draw_call
from opwright.report.cards import Card
from opwright.report.heat import draw_errors, draw_heat
from opwright.report.history import draw_history
from opwright.report.roofline import draw_roofline
from opwright.report.samples import draw_samples
from opwright.report.shares import draw_shares
from opwright.report.sizes import draw_sizes
from opwright.report.speedups import draw_speedups
from opwright.report.svg import Picture

_LONGEST_SLUG = 100
_KINDS = {
    "speed-ups": draw_speedups,
    "roofline": draw_roofline,
    "shares": draw_shares,
    "heat": draw_heat,
    "sizes": draw_sizes,
    "samples": draw_samples,
    "errors": draw_errors,
    "call": draw_call,
    "history": draw_history,
    "build": draw_timeline,
    "registers": draw_kernels,
}


def draw_all(card: Card, name: str) -> dict[str, Picture]:
    """Returns the pictures that the records of a card give, by kind.

    Args:
        name: what the identifiers in the drawings start with.
    """
    drawn = {kind: draw(card, f"{name}-{kind}") for kind, draw in _KINDS.items()}
    return {kind: picture for kind, picture in drawn.items() if picture is not None}


def slug_of(card: Card) -> str:
    """Returns the name of an operator as files and anchors have it; not of one operator alone."""
    return re.sub(r"[^a-z0-9]+", "-", card.name.lower())[:_LONGEST_SLUG].strip("-") or "operator"
