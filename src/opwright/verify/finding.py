"""What checks have in common: their findings, and why one does not apply."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from opwright.verify.difference import Difference
from opwright.verify.oracle_process import frames_of
from opwright.verify.subject import Subject


class Skipped(Exception):
    """Raised by a check that does not apply; the text is the reason."""


@dataclass
class Finding:
    """What a check found on one case; `message` is empty when it passes.

    `undecided`: why the oracle cannot say whether it passes; "" if it can.
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
    undecided: str = ""

    def note_worst(self, difference: Difference) -> None:
        """Keeps the error of the element that is nearest to its allowance."""
        if self.worst_ratio is None or difference.worst_ratio > self.worst_ratio:
            self.worst_ulp, self.worst_ratio = difference.worst_ulp, difference.worst_ratio


def need_operator(subject: Subject) -> Any:
    if subject.operator is None:
        raise Skipped("a plain callable, not an operator")
    return subject.operator


def first_line(error: object, lines: int = 1) -> str:
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(text[:lines])[:400] or type(error).__name__


def origin(error: BaseException, subject: Subject) -> str:
    """Returns words to put behind an exception that comes from the reference of an operator; else ""."""
    if subject.operator is None:
        return ""
    code = inspect.unwrap(subject.operator.declaration.reference).__code__
    return ", in its reference" if (code.co_filename, code.co_firstlineno) in frames_of(error) else ""
