"""Tests the power of verify's checks: makes operators wrong in many ways and names the check that sees it.

    python tests/power/mutants.py opwright_ops                      # the table of all its operators: minutes
    python tests/power/mutants.py ./op.py::swish --only "a cache"   # only kinds whose name contains this text
    python tests/power/mutants.py opwright_ops --publish            # what `make power` does

Each mutant is verified with the inputs of the default, on the CPU. The operator itself, unchanged, comes first and
must pass. `--publish` writes benchmarks/results/mutants.csv, the summary of the benchmarks and, from the former, the
tables of docs/reference/mutants.md; without a TARGET it writes only the tables. The exit code is 1 if a mutant survives or
a right operator fails, and 5 if no mutant was tried.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mutant_kinds import Kind
from wrong_calls import CALLS
from wrong_gradients import GRADIENTS
from wrong_results import RESULTS

from opwright.cli.console import print_rows, progress, say
from opwright.errors import CheckError, OpwrightError
from opwright.machine import machine_card
from opwright.target import find_operators
from opwright.verify.checks import CHECKS
from opwright.verify.checks.finding import Skipped
from opwright.verify.global_state import Guard
from opwright.verify.target import Target, make_target

# A mutant is a function in Python, so the checks that call the operator through PyTorch's dispatcher do not reach it.
# The cheap ones come first, since a mutant ends at the first check that fails.
_CALL_CHECKS = (
    "numerics", "global state", "guard bands", "fresh data", "determinism", "independence", "threads", "memory", "leaks"
)  # fmt: skip
_GRADIENT_CHECKS = (
    "gradient numerics", "gradient layouts", "gradient subsets", "repeated backward", "second gradients"
)  # fmt: skip
UNCHANGED = "unchanged"
_RIGHT = Kind(UNCHANGED, lambda target: target.call)
# A mutant that cannot be called proves nothing.
_BROKEN = re.compile(r"\braised (?!SystemExit)")

_ROOT = Path(__file__).parents[2]
RESULT = _ROOT / "benchmarks/results/mutants.csv"
PAGE = _ROOT / "docs/reference/mutants.md"
_MACHINE = "cpu", "cores", "torch"
_BEGIN, _END = "<!-- mutants: begin -->\n", "<!-- mutants: end -->\n"
_SHOWN = "bias_gelu", "d_sigmoid"  # the operators whose mutants the guide lists one by one


@dataclass
class Mutant:
    """An operator made wrong in one way, and the check that saw it.

    Attributes:
        kind: how it is wrong; "unchanged" is the operator itself.
        operator: the operator that was changed, or its backward.
        outcome: "killed" or "survived"; "none" if the operator has no such mutant; "passed" or "failed" for the
            operator itself.
        check: the check that failed.
        reason: what the check found; for "none", why there is no such mutant; else which checks were skipped, and why.
    """

    kind: str
    operator: str
    outcome: str
    check: str = ""
    reason: str = ""


def try_mutants(
    target: Any, *, only: Sequence[str] = (), on_trial: Callable[[Mutant], None] = lambda mutant: None
) -> list[Mutant]:
    """Verifies every mutant of an operator and of its backward.

    Args:
        only: tries only kinds whose name contains one of these texts.
        on_trial: called with each mutant after its trial.

    Raises:
        CheckError: the target is not an operator, or draws random numbers.
    """
    made = replace(make_target(target, None, None), memo={})
    operator = made.operator
    if operator is None:
        raise CheckError(made.name, "mutants need the contract of an operator")
    if operator.declaration.random:
        raise CheckError(made.name, "it draws random numbers, so a wrong result cannot be told from a right one")
    name, own = operator.declaration.name, operator.backward_operator
    columns = [(name, made, [*RESULTS, *CALLS], _CALL_CHECKS)]
    if own is not None:
        backward = replace(make_target(own.function, None, None), memo={})
        columns.append((own.declaration.name, backward, [*RESULTS, *CALLS], _CALL_CHECKS))
    columns.append((own.declaration.name if own else f"{name}_backward", made, GRADIENTS, _GRADIENT_CHECKS))
    found = []
    for column, each, kinds, checks in columns:
        chosen = [kind for kind in kinds if not only or any(text in kind.name for text in only)]
        for kind in (_RIGHT, *chosen):
            found.append(_try(column, each, kind, checks))
            on_trial(found[-1])
    return found


def _try(column: str, target: Target, kind: Kind, checks: Sequence[str]) -> Mutant:
    reason = kind.needs(target)
    if reason:
        return Mutant(kind.name, column, "none", reason=reason)
    if kind is not _RIGHT:
        checks = [name for name in checks if name not in ("memory", "leaks") or name == kind.resource]
    guard = Guard()
    mutated = replace(target, _cases=target.cases())
    mutated.call = guard.wrap(kind.make(target), mutated.threads)
    check, message = _find_failure(mutated, checks, guard)
    if kind is _RIGHT:
        outcome = "failed" if check else "passed"
    else:
        outcome = "killed" if check and not _BROKEN.search(message) else "survived"
    return Mutant(kind.name, column, outcome, check, message)


def _find_failure(target: Target, checks: Sequence[str], guard: Guard) -> tuple[str, str]:
    """Returns the first check that fails and its finding, or "" and which checks were skipped."""
    skipped = []
    for name in checks:
        try:
            for finding in CHECKS[name](target):
                found = [finding.message] if finding.message else guard.take()
                if found:
                    return name, f"{finding.case}: {'; '.join(found)}"
        except Skipped as reason:
            skipped.append(f"{name} was skipped: {reason}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a mutant may call sys.exit()
            return name, f"{target.current}: raised {type(error).__name__}: {error}"
    return "", "; ".join(skipped)


# --- the result and the tables -----------------------------------------------------------------------------

# Operator or backward, kind, and one cell: "numerics" (the check that killed it), "passes", "SURVIVED", "FAILED" or
# "- no option" (why there is no such mutant).
Cells = dict[str, dict[str, str]]


def list_cells(mutants: Sequence[Mutant]) -> Cells:
    """Returns the table of one operator, one column for it and one for its backward."""
    cells: Cells = {}
    for mutant in mutants:
        column = cells.setdefault(mutant.operator, {})
        if column.get(mutant.kind, "passes") == "passes":  # a backward is tried unchanged as a call and as a gradient
            column[mutant.kind] = {
                "passed": "passes",
                "failed": "FAILED",
                "killed": mutant.check,
                "survived": "SURVIVED",
                "none": f"- {mutant.reason}",
            }[mutant.outcome]
    return cells


def make_rows(cells: Cells) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns a row for each kind of mutant, below a heading, and the notes to which its dashes point."""
    notes: dict[str, str] = {}

    def number(cell: str) -> str:
        if not cell.startswith("- "):
            return cell
        return f"- {notes.setdefault(cell[2:], str(len(notes) + 1))}"

    kinds = dict.fromkeys(kind for column in cells.values() for kind in column)
    rows = [(kind, *(number(column.get(kind, "-")) for column in cells.values())) for kind in kinds]
    return [("mutant", *cells), *rows], [f"- {number}: {reason}" for reason, number in notes.items()]


def count(column: dict[str, str]) -> tuple[int, int, list[str]]:
    """Returns how many mutants were killed, how many were tried, and the kinds that survived."""
    tried = {kind: cell for kind, cell in column.items() if kind != UNCHANGED and not cell.startswith("- ")}
    survived = [kind for kind, cell in tried.items() if cell == "SURVIVED"]
    return len(tried) - len(survived), len(tried), survived


def write_result(result: dict[str, Any], path: Path) -> None:
    """Writes a result as a table: a column for each operator and each backward, a row for each kind of mutant."""
    columns = [(name, column, entry) for name, entry in result.items() for column in entry["mutants"]]
    cells = {column: entry["mutants"][column] for _, column, entry in columns}
    kinds = dict.fromkeys(kind for column in cells.values() for kind in column)
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["mutant", *cells])
        table.writerow(["# operator", *(name for name, _, _ in columns)])
        table.writerows([f"# {key}", *(entry[key] for _, _, entry in columns)] for key in ("date", "seconds"))
        table.writerows([f"# {key}", *(entry["machine"][key] for _, _, entry in columns)] for key in _MACHINE)
        table.writerows([kind, *(column.get(kind, "") for column in cells.values())] for kind in kinds)


def read_result(path: Path) -> dict[str, Any]:
    """Returns each operator's date, seconds, machine and cells from what `write_result` has written."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    about = {row.pop("mutant").removeprefix("# "): row for row in rows[: 3 + len(_MACHINE)]}
    result: dict[str, Any] = {}
    for column, name in about["operator"].items():
        machine = {key: about[key][column] for key in _MACHINE}
        entry = {"date": about["date"][column], "seconds": float(about["seconds"][column]), "machine": machine}
        mutants = result.setdefault(name, {**entry, "mutants": {}})["mutants"]
        mutants[column] = {row["mutant"]: row[column] for row in rows[3 + len(_MACHINE) :] if row[column]}
    return result


def update_summary(result: dict[str, Any]) -> None:
    """Writes the rows of these operators into the summary of the benchmarks."""
    sys.path.append(str(_ROOT / "benchmarks"))
    import summary

    for name, entry in result.items():
        counts = {column: count(kinds)[:2] for column, kinds in entry["mutants"].items()}
        killed, tried = (sum(numbers) for numbers in zip(*counts.values(), strict=True))
        parts = [f"{column} {good} of {of}" for column, (good, of) in counts.items()] + [f"{entry['seconds']:.0f} s"]
        figures = [summary.Figure("mutants killed", killed, f"mutants of {tried}", beside="; ".join(parts))]
        summary.update(__file__, figures, entry["machine"], group=name, date=entry["date"])


def make_page(text: str, result: dict[str, Any]) -> str:
    """Returns the guide with the tables of a result."""
    lines = ["| operator | killed, forward | killed, backward | unchanged | date | measured on |", "|" + " --- |" * 6]
    survivors = []
    for name, entry in result.items():
        killed = []
        for column, kinds in entry["mutants"].items():
            good, tried, survived = count(kinds)
            killed.append(f"{good} of {tried}" if tried else "-")
            if survived:
                survivors.append(f"- `{column}`: {'; '.join(survived)}")
        unchanged = dict.fromkeys(kinds[UNCHANGED] for kinds in entry["mutants"].values())
        m = entry["machine"]
        place = f"{m['cpu']}, {m['cores']} threads, PyTorch {m['torch']}, {entry['seconds']:.0f} s"
        cells = [f"`{name}`", *killed, ", ".join(unchanged), entry["date"], place]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Survivors:", "", *survivors] if survivors else ["", "No mutant survives."]
    rows, notes = make_rows({column: kinds for name in _SHOWN for column, kinds in result[name]["mutants"].items()})
    heading, *rest = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", heading, "|" + " --- |" * len(rows[0]), *rest, "", "Dashes with a number:", "", *notes]
    head, _, tail = text.partition(_BEGIN)
    made = "\n".join(lines)
    return f"{head}{_BEGIN}\n{made}\n\n{_END}{tail.partition(_END)[2]}"


def print_table(mutants: Sequence[Mutant]) -> None:
    """Prints which check killed each mutant, then the survivors and what failed of right operators."""
    rows, notes = make_rows(list_cells(mutants))
    print_rows(rows)
    if notes:
        print("\n" + "\n".join(notes))
    survivors = [m for m in mutants if m.outcome == "survived"]
    for mutant in (*survivors, *(m for m in mutants if m.outcome == "failed")):
        print(f"\n{mutant.outcome.upper()} {mutant.operator}: {mutant.kind}")
        print_rows([row for row in (("  check", mutant.check), ("  found", mutant.reason)) if row[1]])
    if survivors:
        print("\nhint: no check sees a survivor; if its operator declares samples, add samples that show it")


def main(argv: Sequence[str] | None = None) -> int:
    """Tries the mutants of the operators of a TARGET and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="a module, a file, or either with ::name")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="try only kinds with this text")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the result as CSV; keeps other operators' results"
    )
    parser.add_argument("--publish", action="store_true", help="write the result and the tables of this project")
    args = parser.parse_args(argv)
    if args.only and args.publish:
        parser.error("`--publish` needs every kind of mutant; remove `--only`")
    if args.target is None and not args.publish:
        parser.error("missing TARGET, for example `opwright_ops`")
    out = RESULT if args.publish else args.out
    mutants: list[Mutant] = []
    tried: list[str] = []
    for operator in find_operators(args.target) if args.target else []:
        if operator.declaration.random:
            say(f"Skipped {operator.declaration.name}: it draws random numbers")
            continue
        mutants += _try_operator(operator, args.only, out)
        tried.append(operator.declaration.name)
    if args.publish:
        result = read_result(RESULT)
        PAGE.write_text(make_page(PAGE.read_text(), result))
        update_summary({name: result[name] for name in tried})
    if args.target is None:
        return 0
    print_table(mutants)
    outcomes = {mutant.outcome for mutant in mutants}
    if outcomes & {"survived", "failed"}:
        return 1
    return 0 if "killed" in outcomes else 5


def _try_operator(operator: Any, only: Sequence[str], out: Path | None) -> list[Mutant]:
    """Tries the mutants of one operator, says how many were killed, and writes the result."""
    name, started = operator.declaration.name, time.time()
    if "cuda" in operator.declaration.sources:
        changed = "CPU kernel" if "cpu" in operator.declaration.sources else "reference"
        say(f"note: mutants of {name} change its {changed} and run on the CPU; its CUDA kernel is not tested")
    with progress(f"Trying mutants of {name}") as line:
        mutants = try_mutants(operator.function, only=only, on_trial=lambda m: line.update(f"{m.operator}: {m.kind}"))
    seconds, cells = time.time() - started, list_cells(mutants)
    killed, tried = (sum(numbers) for numbers in zip(*(count(column)[:2] for column in cells.values()), strict=True))
    say(f"Killed {killed} of {tried} mutants of {name} in {seconds:.1f} s")
    if out is not None:
        card, date = machine_card(), time.strftime("%Y-%m-%d", time.gmtime(started))
        machine = {key: getattr(card, key) for key in _MACHINE}
        known = read_result(out) if out.exists() else {}
        known[name] = {"date": date, "seconds": round(seconds, 1), "machine": machine, "mutants": cells}
        write_result(dict(sorted(known.items())), out)
    return mutants


if __name__ == "__main__":
    try:
        sys.exit(main())
    except OpwrightError as error:
        say(f"error: {error}")
        sys.exit(2)
