"""Draws where a call goes: the host's time, part by part."""

from __future__ import annotations

from opwright.quantities import TIME, percent, tick_with_unit, with_unit
from opwright.records import CallPart, CallRecord
from opwright.report.cards import Card
from opwright.report.svg import Heading, Picture, Row, Table, draw_rows, linear, round_ticks


def draw_call(card: Card, name: str) -> Picture | None:
    """Draws the parts of one tiny call one behind the other, or returns None without a record of it."""
    call = card.call
    if call is None or not call.parts or call.total_us <= 0:
        return None
    limit = 1.02 * max(call.total_us, sum(max(part.us, 0.0) for part in call.parts), *call.peers_us.values(), 0.0)
    rows: list[Row | Heading] = []
    at = 0.0
    for part in call.parts:
        end = at + max(part.us, 0.0)
        note = f"{with_unit(part.us, TIME)} ± {with_unit(part.uncertainty_us, TIME, 2)}"
        is_nothing = abs(part.us) <= part.uncertainty_us
        note += ", maybe nothing" if is_nothing else f", {percent(part.us / call.total_us, 2)}"
        rows.append(Row(part.name, at, end, note, is_hollow=is_nothing))
        at = end
    rows.append(Row("the whole call", 0.0, call.total_us, with_unit(call.total_us, TIME), style="c6"))
    rows += [
        Row(f"beside it: {peer}", 0.0, time, with_unit(time, TIME), style="c1") for peer, time in call.peers_us.items()
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
        round_ticks(limit, lambda value: tick_with_unit(value, TIME)),
        "time since the call began",
    )
    largest = max(call.parts, key=lambda part: part.us)
    kernel = _kernel(call)
    caption = f"The largest part of {with_unit(call.total_us, TIME)} is {largest.name}, {percent(largest.us / call.total_us, 2)}"
    caption += f"; the kernel itself takes {with_unit(kernel.us, TIME)}. " if kernel else ". "
    caption += f"Host time of one call on {call.case}, over {call.rounds:,} rounds; each part with the half-width of its 95 % interval."
    if call.device_us is not None:
        caption += f" The kernel itself runs {with_unit(call.device_us, TIME)} behind the host."
    table = Table(
        ["part", "time", "uncertainty", "of the call", "obtained as"],
        [
            [
                part.name,
                with_unit(part.us, TIME),
                with_unit(part.uncertainty_us, TIME, 2),
                percent(part.us / call.total_us),
                part.obtained,
            ]
            for part in call.parts
        ],
    )
    return Picture("Where a call goes", caption, [svg], table=table)


def _kernel(call: CallRecord) -> CallPart | None:
    """Returns the part that computes, where it is told apart and something else."""
    found = next((part for part in call.parts if part.name == "kernel"), None)
    return found if found is not None and found.us > found.uncertainty_us else None
