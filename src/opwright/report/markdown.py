"""Writes records as Markdown: the verdict, a table, failures; for READMEs and pull requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from opwright.errors import plural
from opwright.quantities import date
from opwright.records import Record
from opwright.report.cards import Card, collect_cards
from opwright.report.export import File
from opwright.report.tables import BASE_HEAD, advise_refused, list_base, overlook, warn
from opwright.report.verdict import verdict

_SIGNS = {
    "fails": "❌ fails",
    "not measured": "❌ not measured",
    "verified": "✅ verified",
    "not verified": "⚠️ not verified",
}


def write_markdown(
    records: Sequence[Record], path: Path, pictures: Sequence[File] = (), skipped: Sequence[str] = ()
) -> Path:
    """Writes records as one Markdown file.

    Args:
        pictures: files to show below; those of several operators are folded.
        skipped: records that were skipped, and why.

    Raises:
        RecordError: there are no records.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    relative = [replace(file, path=Path(os.path.relpath(file.path, path.parent))) for file in pictures]
    path.write_text(render_markdown(records, relative, skipped), encoding="utf-8")
    return path


def render_markdown(records: Sequence[Record], pictures: Sequence[File] = (), skipped: Sequence[str] = ()) -> str:
    """Returns records as Markdown.

    Raises:
        RecordError: there are no records.
    """
    cards = collect_cards(records)
    parts = [f"**{_escape(verdict(records))}**", _table(cards), *_failures(cards)]
    parts += [*_bases(cards), *_warnings(cards)]
    machines = list(dict.fromkeys(_machine(card) for card in cards))
    parts.append("\n".join(f"<sub>{_escape(machine)}</sub>  " for machine in machines))
    parts += [f"<sub>not read: {_escape(reason)}</sub>" for reason in skipped]
    operators = list(dict.fromkeys(file.operator for file in pictures))
    for operator in operators:
        shown = [f"![{_escape(file.told)}](<{file.path.as_posix()}>)" for file in pictures if file.operator == operator]
        if len(operators) > 1:
            shown = [f"<details><summary>Pictures of {escape(operator)}</summary>", *shown, "</details>"]
        parts += shown
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(cards: Sequence[Card]) -> str:
    found = overlook(cards)
    on = [card.place for card in cards]
    head = ["operator", "state", "cases", "direction", *(f"vs {name}" for name in found.rivals), "of copy"]
    rows = [head, ["---", "---", "--:", "---", *("--:" for _ in found.rivals), "--:"]]
    for card, place, of_card in zip(cards, on, found.rows):
        name = f"`{card.name}`" + (f" on {place}" if len(set(on)) > 1 else "")
        first = [name, _SIGNS[card.state], f"{card.cases:,}" if card.verify else ""]
        for direction, ratios, share in of_card:
            rows.append([*first, direction, *ratios, share])
            first = ["", "", ""]
    return _lines(rows)


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)


def _failures(cards: Sequence[Card]) -> list[str]:
    told = []
    for card in cards:
        if card.refusal:
            told.append(_escape(f"{card.name}, bench stopped: {card.refusal}. {advise_refused(card)}"))
        for failure in card.verify.failures if card.verify else []:
            rows = [f"{failure.title} on {failure.input}", *(text for _, text in failure.rows[1:])]
            body = "\n".join(row.replace("```", "'''") for row in rows)
            told.append(
                f"<details><summary>{escape(card.name)}: {escape(failure.title)}</summary>\n\n"
                f"```\n{body}\n```\n</details>"
            )
    return told


def _bases(cards: Sequence[Card]) -> list[str]:
    """Returns a table for each operator that was compared with an earlier version."""
    told = []
    for card in cards:
        base = card.base
        if base is None or not base.rows:
            continue
        title = f"{escape(card.name)} compared with {escape(base.base)}"
        parts = [_lines([BASE_HEAD, ["---", *["--:"] * 4, "---"], *list_base(card)])]
        if base.missing:
            parts.append(_escape(f"Only one of the two has {', '.join(base.missing)}."))
        if base.is_hint:
            parts.append(_escape(f"Only a hint: {base.reason}."))
        body = "\n\n".join(parts)
        told.append(f"<details{' open' if base.slower else ''}><summary>{title}</summary>\n\n{body}\n\n</details>")
    return told


def _warnings(cards: Sequence[Card]) -> list[str]:
    found = [(card, warn(card)) for card in cards]
    return [
        f"<details><summary>{escape(card.name)}: {plural(len(notes), 'warning')}</summary>\n\n"
        + "\n".join(f"- {_escape(note)}" for note in notes)
        + "\n\n</details>"
        for card, notes in found
        if notes
    ]


def _machine(card: Card) -> str:
    timed = card.bench or card.verify
    when = f", {date(timed.created)}" if timed else ""
    return f"{card.place}, PyTorch {card.machine.torch}, {card.machine.system}{when}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _escape(text: str) -> str:
    for sign in "\\<>*_[]`":
        text = text.replace(sign, f"\\{sign}")
    return text
