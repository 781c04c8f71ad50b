"""What verify writes down: checks and failures."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from opwright.errors import plural
from opwright.records.case import OnCase
from opwright.records.machine import VERSION, Machine

_MAX_RATIO = 1000
_MAX_ULP = 1000.0  # 1e3 ulp of float16 is the number itself, and three of seven digits of float32


@dataclass
class CaseError:
    """How far one case is from the oracle.

    Attributes:
        case: the input, as in a Failure; its label in parentheses comes last.
        ulp, ratio: as in a Check; a ratio of None is infinite: a NaN or infinity too many or too few.
    """

    case: str
    ulp: float | None
    ratio: float | None


@dataclass
class Undecided(OnCase):
    """A case in which the oracle may be off by more than the result is.

    Attributes:
        case: the input, as in a Failure.
        reason: which elements differ, by how much, and why the oracle cannot tell which is right.
        named_case: as in a Failure.
    """

    case: str
    reason: str
    named_case: str = ""


@dataclass
class Check:
    """One kind of check, over all its cases.

    Attributes:
        name: "numerics", "gradcheck", "opcheck", "compile", ...
        outcome: "passed", "failed", "skipped", or "undecided" where the oracle could decide no case.
        cases: how many inputs were tried.
        reason: why it was skipped, or why only some of its cases were tried.
        worst_ratio: largest error over allowance; up to 1 passes.
        worst_ulp: error of the element nearest to its allowance, in units in the last place of the output's dtype.
        seconds: how long it took.
        device: "cpu", "cuda" or "cuda:1"; "" in records of before there was a choice: the CPU.
        errors: of each case, where the check compares numbers; empty where nobody kept them.
        undecided: the cases that neither passed nor failed.
    """

    name: str
    outcome: str
    cases: int = 0
    reason: str = ""
    worst_ulp: float | None = None
    worst_ratio: float | None = None
    seconds: float = 0.0
    device: str = ""
    errors: list[CaseError] = field(default_factory=list)
    undecided: list[Undecided] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The name, with the device in front where that is not the CPU."""
        return _titled(self.name, self.device)

    @property
    def worst(self) -> str:
        """The largest error: `0.31 of the allowance (1.2 ulp)`; "" where no numbers were compared."""
        # JSON has no infinity: a record that was read has None in its place.
        if self.worst_ratio == math.inf or any(error.ratio is None for error in self.errors):
            return "infinite"
        if self.worst_ratio is None:
            return ""
        ulp = f" ({self.worst_ulp:.2g} ulp)" if self.has_ulp else ""
        if self.worst_ratio > _MAX_RATIO:
            return f"more than {_MAX_RATIO:,} times the allowance"
        size = f"{self.worst_ratio:.2f} of" if self.worst_ratio < 10 else f"{self.worst_ratio:,.0f} times"
        return f"{size} the allowance{ulp}"

    @property
    def has_ulp(self) -> bool:
        """Whether the error in ulp means something: not where cancellation leaves no digit, nor for denormal numbers."""
        return self.worst_ulp is not None and (0 < self.worst_ulp < _MAX_ULP or self.worst_ratio == 0)

    @property
    def note(self) -> str:
        """Why it was skipped, or only some of its cases were tried, or how many are undecided: `2 cases undecided`."""
        count = len(self.undecided)
        return "; ".join(filter(None, [f"{plural(count, 'case')} undecided" if count else "", self.reason]))

    @property
    def explanation(self) -> str:
        """The note, with the reason of the first undecided case."""
        return ": ".join([self.note, *(case.reason for case in self.undecided[:1])])


@dataclass
class Failure(OnCase):
    """One failed case, the smallest of its kind.

    Attributes:
        check: the name of the check.
        case: the input, as `f32[7, 13] sliced, approximate='tanh'`.
        message: what is wrong, with the worst element and error against allowance.
        pattern: what the wrong elements have in common, if anything.
        repeat: a command that repeats the case.
        device: as in the check.
        named_case: the case with the names of the tensors, as `x=f32[7, 13] sliced`; "" in older records.
        numbers: the numbers of a small case, as `x = [0.5], eps = 1e-05`; "" of a large one, and in older records.
    """

    check: str
    case: str
    message: str
    pattern: str = ""
    repeat: str = ""
    device: str = ""
    named_case: str = ""
    numbers: str = ""

    @property
    def title(self) -> str:
        """The name of the check, with the device in front where that is not the CPU."""
        return _titled(self.check, self.device)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What there is to say of it, each with its name."""
        rows = [
            ("case", self.input),
            ("inputs", self.numbers),
            ("found", self.message),
            ("pattern", self.pattern),
            ("repeat", self.repeat),
        ]
        return [(name, text) for name, text in rows if text]


def _titled(name: str, device: str) -> str:
    return name if device in ("", "cpu") else f"{device}: {name}"


@dataclass
class VerifyRecord:
    """The result of verifying one operator or callable.

    Attributes:
        backends: what ran: "cpu", "cuda", "reference" (on one of the devices at least), or "callable".
        effort: "default" or "full".
        only: the text that the cases were chosen by; "" for all of them.
        in_process: why the candidate ran in the process of its caller, where a crash would have ended both;
            "" when it had a process of its own.
        notes: what the operator is declared to be (`deterministic=False`, a precision), and what its author should
            declare, such as the range of an argument for which the reference gives NaN.
    """

    name: str
    checks: list[Check]
    failures: list[Failure]
    backends: list[str]
    machine: Machine
    created: float
    seconds: float
    version: int = VERSION
    effort: str = "default"
    only: str = ""
    in_process: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def undecided(self) -> int:
        """How many cases neither passed nor failed, since the oracle could not decide them."""
        return sum(len(check.undecided) for check in self.checks)

    @property
    def outcomes(self) -> str:
        """How many checks had each outcome: `23 of 26 checks passed; 3 skipped: it mutates its arguments`."""
        count = Counter(check.outcome for check in self.checks)
        parts = [f"{count['passed']} of {plural(len(self.checks), 'check')} passed"]
        parts += [f"{count[outcome]} {outcome}" for outcome in ("failed", "undecided") if count[outcome]]
        reasons = Counter(check.reason for check in self.checks if check.outcome == "skipped")
        return "; ".join([*parts, *(f"{number} skipped: {reason}" for reason, number in reasons.most_common())])

    @property
    def ended_early(self) -> bool:
        """Whether one check has failed, and for that reason no other could run: a kernel does not compile, say."""
        others = [check for check in self.checks if check.outcome != "failed"]
        return (
            len(others) == len(self.checks) - 1 > 0
            and {check.outcome for check in others} == {"skipped"}
            and (len({check.reason for check in others}) == 1)
        )

    @property
    def passed(self) -> bool:
        """Whether no check has failed, and at least one has passed."""
        return not self.failures and any(check.outcome == "passed" for check in self.checks)
