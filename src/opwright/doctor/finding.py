"""What `opwright doctor` says about one thing: a state, what was found, the command that mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from opwright.errors import OpwrightError


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        state: "ok"; "none": absent, and only some need it; "warn": it fails in the cases that `detail`
            says; "missing": absent and needed; "wrong": there, and it fails.
        hint: how to mend it, with the command in backticks; "" only where nothing is to be mended.
    """

    subject: str
    state: str
    detail: str
    hint: str = ""


def gather(checks: Iterable[tuple[str, Callable[[], Finding | list[Finding]]]]) -> list[Finding]:
    """Runs checks, each under its subject; one that fails itself is a finding too, never an error."""
    found: list[Finding] = []
    for subject, check in checks:
        try:
            said = check()
            found += [said] if isinstance(said, Finding) else said
        except OpwrightError as error:
            got = ", ".join(row[-1] for row in error.rows)
            found.append(Finding(subject, "wrong", f"{error.subject}: {error.rule}: {got}".rstrip(": "), error.hint))
        except Exception as error:
            detail = f"cannot be found out: {type(error).__name__}: {error}"
            found.append(Finding(subject, "warn", detail, "`python -m pip check`"))
    return found
