"""opwright verify --mutants"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from opwright.cli.console import print_json, print_rows, progress, say

if TYPE_CHECKING:
    from opwright.records import Mutant, MutantsRecord

_HINTS = {
    "survived": "no input of the checks shows it: give the operator samples that do, with `@{}.samples`",
    "accused": "the operator itself fails this check: mend that first, `opwright verify` says more of it",
}
_OUTCOMES = {"survived": "SURVIVED", "accused": "ACCUSED", "passed": "passes"}


def verify_mutants(operators: list, *, only: str = "", out: Path | None = None, json: bool = False) -> int:
    """Tries all mutants of these operators and prints which check killed each. Exit code 1 when one survived."""
    from opwright.records import save_in
    from opwright.verify.mutants import try_mutants

    records = []
    for operator in operators:
        name = operator.declaration.name
        started = time.perf_counter()
        if operator.declaration.random:
            say(f"Skipped {name}: it draws random numbers")
            continue
        if "cuda" in operator.declaration.sources:
            tried = "CPU kernel" if "cpu" in operator.declaration.sources else "reference"
            say(f"note: mutants of {name} are made of its {tried} and tried on the CPU; its CUDA kernel takes no part")
        with progress(f"Trying mutants of {name}") as line:
            record = try_mutants(
                operator.function, only=only, on_trial=lambda m, line=line: line.update(f"{m.operator}: {m.kind}")
            )
        records.append(record)
        if out is not None:
            save_in(out, record)
        killed = sum(m.outcome == "killed" for m in record.mutants)
        tried = killed + sum(m.outcome == "survived" for m in record.mutants)
        say(f"Killed {killed} of {tried} mutants of {name} in {time.perf_counter() - started:.1f} s")
    if json:
        print_json(records)
    else:
        print_table(records)
    if any(record.survivors for record in records):
        return 1
    return 0 if any(m.outcome == "killed" for record in records for m in record.mutants) else 5


def print_table(records: list[MutantsRecord]) -> None:
    """Prints a row for each kind of mutant, a column for each operator: the check that killed it."""
    mutants = [m for record in records for m in record.mutants]
    operators = list(dict.fromkeys(m.operator for m in mutants))
    found: dict[tuple[str, str], Mutant] = {}
    for m in mutants:
        key = (m.kind, m.operator)
        if key not in found or found[key].outcome == "passed":  # a backward is tried as a call and as a gradient
            found[key] = m
    notes: dict[str, str] = {}
    rows = [("mutant", *operators)]
    for kind in dict.fromkeys(m.kind for m in mutants):
        cells = [_cell(found.get((kind, operator)), notes) for operator in operators]
        rows.append((kind, *cells))
    print_rows(rows)
    if notes:
        print()
        print_rows([(f"- {number}", reason) for reason, number in notes.items()])
    for m in (m for record in records for m in record.survivors):
        print(f"\n{_OUTCOMES[m.outcome]} {m.operator}: {m.kind}")
        if m.reason:
            print_rows([("  check", m.check), ("  found", m.reason)])
        print_rows([("  hint", _HINTS[m.outcome].format(m.operator))])


def _cell(mutant: Mutant | None, notes: dict[str, str]) -> str:
    if mutant is None:
        return "-"
    if mutant.outcome == "none":
        return f"- {notes.setdefault(mutant.reason, str(len(notes) + 1))}"
    return mutant.check if mutant.outcome == "killed" else _OUTCOMES[mutant.outcome]
