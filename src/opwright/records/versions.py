"""An operator beside an earlier version of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from opwright.records.case import OnCase
from opwright.records.machine import NULL_IS_INFINITE, VERSION, Machine


@dataclass
class BaseRow(OnCase):
    """One input, measured with two versions of an operator.

    Attributes:
        direction, case: as in a Measurement.
        base_us, now_us: interleaved: of the fastest sample of each process, the median; of records: the medians.
        ratio: base over now: above 1, it has become faster.
        visible: smallest visible difference of the ratio from 1, at 99 % for all rows together; from records, at 95 % for each. None is infinite:
            nothing to tell one by.
        verdict: "faster", "same" or "slower".
        named_case: as in a Measurement.
    """

    direction: str
    case: str
    base_us: float
    now_us: float
    ratio: float
    visible: float = field(metadata=NULL_IS_INFINITE)
    verdict: str
    named_case: str = ""


@dataclass
class BaseRecord:
    """An operator as it is, compared with an earlier version of it.

    Attributes:
        base: what it was compared with: a commit, or the file of a record.
        method: "interleaved" (both versions measured in turns) or "record".
        is_hint: the base was measured on another machine or in another way, so the verdicts prove nothing.
        reason: why it is only a hint.
        rows: one for each input that both have.
        missing: inputs that only one of them has.
        left_out: inputs on which a call takes too long to be compared in the time asked for, and how long.
    """

    name: str
    base: str
    method: str
    rows: list[BaseRow]
    machine: Machine
    created: float
    seconds: float
    version: int = VERSION
    device: str = "cpu"
    is_hint: bool = False
    reason: str = ""
    missing: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def slower(self) -> list[BaseRow]:
        """The rows that have become slower; none where the base is only a hint."""
        return [] if self.is_hint else [row for row in self.rows if row.verdict == "slower"]
