"""Writes records as Markdown: the verdict, a table, failures; for READMEs and pull requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from opwright.records import Record
from opwright.report.cards import Card, collect_cards
from opwright.report.quantities import date, percent, round_to
from opwright.report.verdict import verdict

_SIGNS = {"fails": "❌ fails", "refused": "❌ refused", "verified": "✅ verified", "not verified": "⚠️ not verified"}


def write_markdown(records: Sequence[Record], path: Path, pictures: Sequence[Path] = ()) -> Path:
    """Writes records as one Markdown file.

    Args:
        pictures: files to show below, by paths from the file's folder.

    Raises:
        RecordError: there are no records.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_markdown(records, [Path(os.path.relpath(p, path.parent)) for p in pictures]))
    return path


def render_markdown(records: Sequence[Record], pictures: Sequence[Path] = ()) -> str:
    """Returns records as Markdown.

    Raises:
        RecordError: there are no records.
    """
    cards = collect_cards(records)
    parts = [f"**{_escape(verdict(records))}**", _table(cards), *_failures(cards)]
    machines = list(dict.fromkeys(_machine(card) for card in cards))
    parts.append("\n".join(f"<sub>{_escape(machine)}</sub>  " for machine in machines))
    parts += [f"![{_escape(path.stem)}](<{path.as_posix()}>)" for path in pictures]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(cards: Sequence[Card]) -> str:
    rivals = list(dict.fromkeys(name for card in cards for name in card.baselines))
    on = [card.place for card in cards]
    head = ["operator", "state", "cases", *(f"over {name}" for name in rivals), "of the copy bandwidth"]
    rows = [head, ["---", "---", "--:", *("--:" for _ in rivals), "--:"]]
    for card, place in zip(cards, on):
        outside, _ = card.roof_shares()
        # A wrong kernel has no speed.
        speedups = ["" if card.fails else _times(card.median_speedup_over(name)) for name in rivals]
        share = percent(median(outside)) if outside and not card.fails else ""
        name = f"`{card.name}`" + (f" on {place}" if len(set(on)) > 1 else "")
        rows.append([name, _SIGNS[card.state], f"{card.cases:,}" if card.verify else "", *speedups, share])
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows)


def _failures(cards: Sequence[Card]) -> list[str]:
    told = []
    for card in cards:
        for failure in card.verify.failures if card.verify else []:
            rows = [f"{failure.title} on {failure.case}", failure.message, failure.pattern, failure.repeat]
            body = "\n".join(row.replace("```", "'''") for row in rows if row)
            told.append(f"<details><summary>{_escape(card.name)}: {_escape(failure.title)}</summary>\n\n```\n{body}\n```\n</details>")
    return told


def _machine(card: Card) -> str:
    timed = card.bench or card.verify
    when = f", {date(timed.created)}" if timed else ""
    return f"{card.place}, PyTorch {card.machine.torch}, {card.machine.system}{when}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{round_to(ratio)}x"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _escape(text: str) -> str:
    for sign in "\\<>*_[]`":
        text = text.replace(sign, f"\\{sign}")
    return text
