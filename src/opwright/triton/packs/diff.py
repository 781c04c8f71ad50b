"""What two packs have that is not the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..worker.packfile import Entry

_PLACE = ("file", "function", "arch", "key", "triton", "gpu")
_UNSAID = {*_PLACE, "blob", "sha256"}


@dataclass(frozen=True)
class Difference:
    """One row that only one pack has, or that is not the same in both.

    Attributes:
        kind: added, removed or changed.
        what: kernel, description or tuned.
        place: Its file, function, architecture, key, Triton version and GPU, as far as it has them.
        changes: The fields that differ, as `num_warps 4 -> 8`; `cubin` for the machine code.
    """

    kind: str
    what: str
    place: dict[str, Any]
    changes: tuple[str, ...] = ()


def differences(before: list[Entry], after: list[Entry]) -> list[Difference]:
    """Returns what was added, removed and changed, in the order of files, functions and keys."""
    a, b = _by_place(before), _by_place(after)
    found = []
    for place in sorted(a.keys() | b.keys(), key=_order):
        named = {name: value for name, value in zip(_PLACE, place[1:]) if value is not None}
        if place not in a or place not in b:
            found.append(Difference("removed" if place in a else "added", place[0], named))
        elif changes := _changes(a[place], b[place]):
            found.append(Difference("changed", place[0], named, changes))
    return found


def kind_of(record: dict[str, Any]) -> str:
    """Returns what a record is: kernel, description or tuned."""
    return "kernel" if "key" in record else "tuned" if "arch" in record else "description"


def _order(place: tuple[Any, ...]) -> tuple[Any, ...]:
    kind, file, function, arch, *others = place
    return file, function, kind, arch or 0, *(other or "" for other in others)


def _by_place(entries: list[Entry]) -> dict[tuple[Any, ...], dict[str, Any]]:
    found = {}
    for entry in entries:
        record, kind = entry.record, kind_of(entry.record)
        # A pack has one description of a function, of whichever Triton.
        fields = _PLACE if kind != "description" else ("file", "function", None, None, None, None)
        found[(kind, *(record.get(name) if name else None for name in fields))] = record
    return found


def _changes(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    names = sorted((before.keys() | after.keys()) - _UNSAID)
    if kind_of(before) == "description":
        names = sorted([*names, "triton"])
    changed = ["cubin"] if before.get("sha256") != after.get("sha256") else []
    for name in names:
        old, new = before.get(name), after.get(name)
        if old != new:
            is_short = all(isinstance(value, (int, str, type(None))) for value in (old, new))
            is_short = is_short and name != "source_key"
            changed.append(f"{name} {old} -> {new}" if is_short else name)
    return tuple(changed)
