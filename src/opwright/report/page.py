"""Puts the report's one page together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from opwright import __version__
from opwright.errors import plural
from opwright.quantities import TIME, date, round_to, with_unit
from opwright.records import BenchRecord, Record
from opwright.report.cards import Card, collect_cards
from opwright.report.conditions import tell_conditions, tell_process
from opwright.report.coverage import cover
from opwright.report.pictures import draw_all, slug_of
from opwright.report.ratios import explain_shares, tell_summary
from opwright.report.tables import (
    BASE_HEAD,
    advise_failed,
    advise_refused,
    count_outcomes,
    describe_machine,
    list_base,
    list_checks,
    list_inputs,
    overlook,
    tell_memory,
    warn,
)
from opwright.report.verdict import verdict, verdict_of


def write_report(records: Sequence[Record], path: Path, skipped: Sequence[str] = ()) -> Path:
    """Writes records as one HTML file that needs nothing beside it, and no network.

    Args:
        skipped: records that were skipped, and why: the page says so.

    Returns:
        The path of the file.

    Raises:
        RecordError: there are no records.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(records, skipped), encoding="utf-8")
    return path


def render(records: Sequence[Record], skipped: Sequence[str] = ()) -> str:
    """Returns records as an HTML page.

    Raises:
        RecordError: there are no records.
    """
    cards = collect_cards(records)
    coverage = cover(cards)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("opwright.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        version=__version__,
        verdict=verdict(records),
        skipped=skipped,
        overview=overlook(cards),
        fails=any(card.fails or card.refusal for card in cards),
        machines=_list_machines(records),
        names_places=len({card.place for card in cards}) > 1,
        on_gpu=any(card.on_gpu for card in cards),
        has_noise=any(card.measurements and not card.has_intervals for card in cards),
        # One operator on one device has it all in its own table.
        coverage=coverage if coverage and (len(cards) > 1 or len(coverage.rows) > 2) else None,
        operators=[_show(card, index) for index, card in enumerate(cards, start=1)],
    )


def _list_machines(records: Sequence[Record]) -> list[list[tuple[str, str]]]:
    groups: dict[tuple[str, str], list[Record]] = {}
    # The benchmark's machine first: where records differ, its values are named first.
    for record in sorted(records, key=lambda record: not isinstance(record, BenchRecord)):
        groups.setdefault((record.machine.cpu, record.machine.device), []).append(record)
    return [describe_machine(group) for group in groups.values()]


def _show(card: Card, index: int) -> dict[str, Any]:
    anchor = f"{slug_of(card)}-{index}"
    host_us = card.bench.host_us if card.bench else {}
    return {
        "anchor": anchor,
        "name": card.name,
        "state": card.state,
        "sentence": verdict_of(card),
        "device": card.place,
        "on_gpu": card.on_gpu,
        "provenance": _tell_origin(card),
        "summaries": [tell_summary(summary) for summary in card.summaries],
        "warnings": warn(card),
        "failures": card.verify.failures if card.verify else [],
        "advice": advise_failed(card),
        "refusal": card.refusal,
        "remedy": advise_refused(card),
        "checks": list_checks(card),
        "outcomes": count_outcomes(card),
        "baselines": card.baselines,
        "inputs": list_inputs(card),
        "spread": "95 % CI" if card.has_intervals else "noise",
        "notes": card.bench.notes if card.bench else [],
        "above": explain_shares(card.bench) if card.bench else "",
        "host": [(name, with_unit(time, TIME)) for name, time in host_us.items()],
        "conditions": tell_conditions(card.bench) if card.bench and card.measurements else "",
        "memory": tell_memory(card),
        "cases": f"{card.cases:,}" if card.verify else "",
        "base": card.base,
        "base_head": BASE_HEAD,
        "base_rows": list_base(card),
        "pictures": list(draw_all(card, f"p{index}").values()),
    }


def _tell_origin(card: Card) -> list[str]:
    told = []
    if card.verify:
        verify = card.verify
        backends = ", ".join(verify.backends) or "none"
        took = with_unit(verify.seconds * 1e6, TIME)
        details = "; ".join(filter(None, [f"backends: {backends}", tell_process(verify)]))
        told.append(f"verified {date(verify.created)} in {took} ({details})")
    if card.bench:
        bench = card.bench
        place = f"on {card.place}" if bench.on_gpu else plural(bench.threads, "thread")
        did = "bench stopped" if card.refusal else "measured"
        told.append(
            f"{did} {date(bench.created)} in {with_unit(bench.seconds * 1e6, TIME)} "
            f"({place}, load average {round_to(bench.machine.load)})"
        )
    return told
