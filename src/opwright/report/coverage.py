"""The coverage matrix: which check ran on which operator and device, and how it went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opwright.errors import plural
from opwright.records import Check, VerifyRecord
from opwright.report.cards import Card

_BACKWARD = "backward: "
_SIGNS = {"passed": "✓", "failed": "✗", "skipped": "–", "undecided": "?"}


@dataclass(frozen=True)
class Field:
    """One check of one operator on one device.

    Attributes:
        outcome: "passed", "failed", "skipped", "undecided", or "" where it is not in the record.
        text: what a reader sees: a sign, and for a skipped check the letter of its reason.
        told: the same in words.
    """

    outcome: str
    text: str
    told: str


@dataclass(frozen=True)
class Coverage:
    """The matrix.

    Attributes:
        checks: the columns.
        rows: operator, device, fields.
        reasons: why checks were skipped, by letter.
    """

    checks: list[str]
    rows: list[tuple[str, str, list[Field]]]
    reasons: list[tuple[str, str]]


def cover(cards: Sequence[Card]) -> Coverage | None:
    """Returns the matrix of all operators, or None when none was verified."""
    records = list({id(card.verify): card.verify for card in cards if card.verify is not None}.values())
    if not records:
        return None
    found: dict[tuple[str, str], dict[str, Check]] = {}
    for record in records:
        for check in record.checks:
            is_backward = check.name.startswith(_BACKWARD)
            row = record.name + (", backward" if is_backward else "")
            name = check.name.removeprefix(_BACKWARD)
            found.setdefault((row, _place(record, check, records)), {})[name] = check
    checks = list(dict.fromkeys(name for row in found.values() for name in row))
    reasons = dict.fromkeys(c.reason for row in found.values() for c in row.values() if _is_skipped(c))
    letters = {reason: _letter(i) for i, reason in enumerate(reasons)}
    rows = [
        (name, device, [_field(row.get(check), letters) for check in checks]) for (name, device), row in found.items()
    ]
    return Coverage(checks, rows, [(letter, reason) for reason, letter in letters.items()])


def _place(record: VerifyRecord, check: Check, records: Sequence[VerifyRecord]) -> str:
    device = check.device or "cpu"
    machines = {(r.machine.cpu, r.machine.device) for r in records if r.name == record.name}
    if len(machines) == 1:
        return device
    return f"{device}, {record.machine.cpu if device == 'cpu' else record.machine.device}"


def _is_skipped(check: Check) -> bool:
    return check.outcome == "skipped" and bool(check.reason)


def _letter(index: int) -> str:
    """Returns a, b, ..., z, aa, ab, ..."""
    head = _letter(index // 26 - 1) if index >= 26 else ""
    return head + chr(ord("a") + index % 26)


def _field(check: Check | None, letters: dict[str, str]) -> Field:
    if check is None:
        return Field("", "", "not in the record")
    sign = _SIGNS.get(check.outcome, check.outcome)
    if check.outcome == "skipped":
        letter = letters.get(check.reason, "")
        return Field("skipped", f"{sign} {letter}".rstrip(), f"skipped: {check.reason}".rstrip(": "))
    told = f"{check.outcome}, {plural(check.cases, 'case')}"
    if check.undecided:
        sign = f"{sign} ?" if sign != "?" else sign
        told += f", {len(check.undecided)} undecided"
    return Field(check.outcome, sign, told)
