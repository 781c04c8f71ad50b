"""Draws where a call goes: the host's time, part by part."""

from __future__ import annotations

from opwright.report.cards import Card
from opwright.report.quantities import TIME, percent, with_unit
from opwright.report.rows import Heading, Row, draw_rows, linear, quarters
from opwright.report.svg import Picture, Table


def draw_call(card: Card, name: str) -> Picture | None:
    """Draws the parts of one tiny call one behind the other, or returns None without a record of it.

    Args:
        name: what the identifiers in the drawing start with.
    """
    call = card.call
    if call is None or not call.parts or call.total_us <= 0:
        return None
    limit = 1.02 * max(call.total_us, sum(max(part.us, 0.0) for part in call.parts), *call.peers_us.values(), 0.0)
    rows: list[Row | Heading] = []
    at = 0.0
    for part in call.parts:
        end = at + max(part.us, 0.0)
        note = f"{with_unit(part.us, TIME)} ± {with_unit(part.uncertainty_us, TIME)}"
        if abs(part.us) <= part.uncertainty_us:
            note += ", maybe nothing"
        rows.append(Row(part.name, at, end, note, is_hollow=abs(part.us) <= part.uncertainty_us))
        at = end
    rows.append(Row("the whole call", 0.0, call.total_us, with_unit(call.total_us, TIME), style="c6"))
    rows += [
        Row(f"beside it: {peer}", 0.0, time, with_unit(time, TIME), style="c1")
        for peer, time in call.peers_us.items()
    ]
    told = f"{with_unit(call.total_us, TIME)} for a call of {call.case}. " + ", ".join(
        f"{part.name} {with_unit(part.us, TIME)}" for part in call.parts
    )
    svg = draw_rows(
        name,
        f"{card.name}: where a call goes",
        told + ".",
        rows,
        linear(limit),
        quarters(limit, lambda value: with_unit(value, TIME)),
        "time since the call began",
    )
    caption = f"Host time of one call on {call.case}, over {call.rounds:,} rounds; each part with the half-width of its 95 % interval."
    if call.device_us is not None:
        caption += f" The kernel itself runs {with_unit(call.device_us, TIME)} behind the host."
    table = Table(
        ["part", "time", "uncertainty", "of the call", "obtained as"],
        [
            [
                part.name,
                with_unit(part.us, TIME),
                with_unit(part.uncertainty_us, TIME),
                percent(part.us / call.total_us),
                part.obtained,
            ]
            for part in call.parts
        ],
    )
    return Picture("Where a call goes", caption, [svg], table=table)
