"""opwright doctor"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from opwright.cli.console import print_json, print_rows
from opwright.cli.help import make_app
from opwright.doctor.finding import Finding

doctor_app = make_app("doctor")


@doctor_app.default
def doctor(file: Path | None = None, /, *, json: bool = False) -> int:
    """Say what is there, what is missing, and how to get it; of FILE.so, why it cannot be imported.

    Exit code 2: something is missing or wrong on this machine, or there is no FILE; 1: something is wrong with FILE.

    Args:
        file: A shared library: what it was built for, what of it is missing here, and what to do.
        json: Print JSON.
    """
    return _library(file, json) if file else _machine(json)


def _machine(json: bool) -> int:
    from opwright.doctor.environment import examine_extensions, examine_machine

    parts = {"operators": examine_machine(), "extensions": examine_extensions()}
    if json:
        print_json([{**asdict(finding), "part": part} for part, found in parts.items() for finding in found])
    else:
        _print(parts["operators"])
        print("\nextensions (torch/extension.h, pybind11), not operators")
        _print(parts["extensions"])
    found = [finding for part in parts.values() for finding in part]
    return 2 if any(finding.state in ("missing", "wrong") for finding in found) else 0


def _library(file: Path, json: bool) -> int:
    from opwright.doctor.library import examine

    report = examine(file)
    if json:
        print_json({**report.facts, "findings": [asdict(finding) for finding in report.findings]})
    else:
        _print(report.findings)
    states = {finding.state for finding in report.findings}
    return 2 if "missing" in states else int("wrong" in states)


def _print(found: list[Finding]) -> None:
    """Prints what was found, then how to mend what is not as it should be."""
    print_rows([(finding.subject, finding.state, finding.detail) for finding in found])
    subjects: dict[str, list[str]] = {}
    for finding in found:
        if finding.state != "ok" and finding.subject not in subjects.setdefault(finding.hint, []):
            subjects[finding.hint].append(finding.subject)
    for hint, named in subjects.items():
        print(f"hint: {', '.join(named)}: {hint}")
