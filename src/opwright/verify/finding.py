"""What checks have in common: their findings, and why one does not apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from opwright.verify.subject import Subject


class Skipped(Exception):
    """Raised by a check that does not apply; the text is the reason."""


@dataclass
class Finding:
    """What a check found on one case; `message` is empty when it passes.

    `is_fatal`: further calls may crash the process, so no other check runs; the text says why. `has_ended`: it is
    this process alone that can make no further calls; another one can.
    """

    case: str
    message: str = ""
    pattern: str = ""
    worst_ulp: float | None = None
    worst_ratio: float | None = None
    is_fatal: str = ""
    has_ended: bool = False


def need_operator(subject: Subject) -> Any:
    if subject.operator is None:
        raise Skipped("a plain callable, not an operator")
    return subject.operator


def first_line(error: object, lines: int = 1) -> str:
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(text[:lines])[:400] or type(error).__name__
