"""Gives the mutants of `tests/power/mutants.py` to public harnesses, each with its own inputs and tolerances.

    python benchmarks/harnesses.py --kernelbench PATH --backendbench PATH --robust-kbench PATH --gpu-mode PATH

The paths are checkouts of those projects; a harness without its path is skipped, and the result says so.
KernelBench needs `requests` and `pydantic`, PyTorch's OpInfo needs `expecttest`. The outcomes go to
results/harnesses.csv, the reasons of the harnesses to results/raw. The tables of docs/guides/harnesses.md are made from
the former; `--page` makes them again without a run. It takes about an hour on one core.

harness_runs.py has how each harness is given a mutant, and which part of it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness_candidates import UNCHANGED, Problem, candidates_of, problems
from harness_runs import HARNESSES, Harness
from mutants import try_mutants
from summary import RESULTS, ROOT, Figure, update, write_raw

from opwright.machine import machine_card
from opwright.records import builtins_of

RESULT = RESULTS / "harnesses.csv"
PAGE = Path(__file__).parents[1] / "docs/guides/harnesses.md"
TIME_LIMIT_S = 120
OPWRIGHT, NOT_LOOKED_AT = "opwright", "not looked at"


def in_a_process(judge: Callable[[], str]) -> str:
    """Returns what a judge says in a process of its own, for some mutants end theirs or spoil it."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            torch.set_num_threads(1)  # the threads of OpenMP do not survive a fork
            torch.manual_seed(0)
            try:
                said = judge()
            except BaseException as error:  # also a candidate's sys.exit()
                said = f"raised {type(error).__name__}: {error}"
        sender.send(said)

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        said = receiver.recv() if receiver.poll(TIME_LIMIT_S) else f"no answer within {TIME_LIMIT_S} s"
    except EOFError:
        said = "the process ended"
    process.kill()
    process.join()
    return said


def by_opwright(problem: Problem) -> dict[str, dict[str, str]]:
    """Returns what `tests/power/mutants.py` finds: of a kind of gradient, in its column of gradients."""
    own, found = problem.name, {}
    for mutant in try_mutants(problem.operator):
        if mutant.operator == own or mutant.kind.startswith("gradient:"):
            outcome = {"survived": "passes", "passed": "passes", "none": "none", "failed": "killed"}
            found[mutant.kind] = {
                "outcome": outcome.get(mutant.outcome, "killed"),
                "reason": f"{mutant.check}: {mutant.reason}" if mutant.check else mutant.reason,
            }
    return found


def judged(problem: Problem, harness: Harness, place: Path | None, known: dict[str, Any]) -> dict[str, Any]:
    """Returns what a harness says of each kind, or under "skipped" why it says nothing; `known` stays as it is."""
    judge = harness.prepare(problem, place)
    if isinstance(judge, str):
        return {"skipped": judge}
    found = {}
    for name, why_not, make in candidates_of(problem):
        if name in known:
            found[name] = known[name]
        elif why_not:
            found[name] = {"outcome": "none", "reason": why_not}
        elif name.startswith("gradient:") and not harness.sees_gradients:
            found[name] = {"outcome": NOT_LOOKED_AT, "reason": "it calls the forward only"}
        else:
            said = in_a_process(lambda make=make: judge(make()))
            found[name] = {"outcome": "killed" if said else "passes", "reason": _brief(said)}
    return found


def _brief(said: str) -> str:
    said = re.sub(r'File "[^"]+"', 'File "..."', " ".join(said.split())).replace(str(ROOT), ".")
    return re.sub(r"0x[0-9a-f]+", "0x...", said if len(said) < 200 else said[:197] + "...")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for harness in HARNESSES:
        if harness.flag:
            parser.add_argument(harness.flag, type=Path, metavar="PATH", help=f"a checkout of {harness.name}")
    parser.add_argument("--page", action="store_true", help="write the tables of the page, run nothing")
    names = [OPWRIGHT, *(h.name for h in HARNESSES)]
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="NAME", help="run these, keep the results of others"
    )
    parser.add_argument("--missing", action="store_true", help="judge only mutants that were not there before")
    args = parser.parse_args(argv)
    if args.page:
        write_page()
        return
    torch.set_num_threads(1)
    result = read() if (args.only or args.missing) and RESULT.exists() else {"versions": {}, "operators": {}}
    result["machine"] = builtins_of(machine_card())
    for harness in chosen(args):
        result["versions"][harness.name] = harness.version(harness.place(args))
    for problem in problems():
        found = result["operators"].setdefault(problem.name, {})
        if not args.only or OPWRIGHT in args.only:
            found[OPWRIGHT] = by_opwright(problem)
        for harness in chosen(args):
            started = time.perf_counter()
            known = found.get(harness.name, {}) if args.missing else {}
            found[harness.name] = judged(problem, harness, harness.place(args), known)
            tried = [row["outcome"] for row in found[harness.name].values() if isinstance(row, dict)]
            print(
                f"{problem.name}: {harness.name}: {tried.count('killed')} killed, "
                f"{time.perf_counter() - started:.0f} s",
                flush=True,
            )
        result["operators"][problem.name] = {name: found[name] for name in names if name in found}
        write_raw("harnesses", result)  # after each: the run is long
        write(result)
    update(__file__, figures(result), result["machine"])
    write_page()


def chosen(args: argparse.Namespace) -> list[Harness]:
    return [harness for harness in HARNESSES if not args.only or harness.name in args.only]


# --- the page -----------------------------------------------------------------------------------------------


def write(result: dict[str, Any]) -> None:
    """Writes versions and outcomes as a table: a column for each harness, a row for each mutant of an operator."""
    names = list(dict.fromkeys(name for found in result["operators"].values() for name in found))
    with RESULT.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["operator", "mutant", *names])
        table.writerow(["", "# version", *(result["versions"].get(name, "") for name in names)])
        for operator, found in result["operators"].items():
            for name, why_not in ((n, rows["skipped"]) for n, rows in found.items() if "skipped" in rows):
                table.writerow([operator, "# skipped", *(why_not if each == name else "" for each in names)])
            for kind in found[OPWRIGHT]:
                table.writerow([operator, kind, *(_cell(found.get(name, {}), kind) for name in names)])


def _cell(rows: dict[str, Any], kind: str) -> str:
    return rows[kind]["outcome"] if kind in rows else ""


def read() -> dict[str, Any]:
    """Returns the versions and outcomes that `write` has written; the reasons are not among them."""
    with RESULT.open(newline="") as file:
        first, *rows = csv.DictReader(file)
    names = list(first)[2:]
    result: dict[str, Any] = {"versions": {name: first[name] for name in names if first[name]}, "operators": {}}
    for row in rows:
        found = result["operators"].setdefault(row["operator"], {name: {} for name in names})
        for name in (name for name in names if row[name]):
            found[name][row["mutant"].removeprefix("# ")] = (
                row[name] if row["mutant"] == "# skipped" else {"outcome": row[name]}
            )
    for found in result["operators"].values():
        for name in (name for name in names if not found[name]):
            del found[name]
    return result


def figures(result: dict[str, Any]) -> list[Figure]:
    """A row for each harness: the mutants that it kills, of those that it is given."""
    found = []
    for name in next(iter(result["operators"].values())):
        parts = {}
        for operator, harnesses in result["operators"].items():
            outcomes = outcomes_of(harnesses.get(name, {"skipped": "not run"}))
            tried = [o for kind, o in outcomes.items() if kind != UNCHANGED and o in ("killed", "passes")]
            if tried:
                parts[operator] = (tried.count("killed"), len(tried))
        killed, tried = (sum(numbers) for numbers in zip(*parts.values(), strict=True)) if parts else (0, 0)
        each = "; ".join(f"{operator} {good} of {of}" for operator, (good, of) in parts.items())
        found.append(Figure(f"mutants killed by {name}", killed, f"mutants of {tried}", beside=each))
    return found


def totals(result: dict[str, Any]) -> str:
    """Returns the table of how many mutants each harness kills, of those that it is given."""
    operators = result["operators"]
    lines = [
        "| harness | " + " | ".join(f"`{name}`" for name in operators) + " | the operators themselves |",
        "| --- |" + " --- |" * (len(operators) + 1),
    ]
    for name in next(iter(operators.values())):
        cells, accused = [], []
        for operator, found in operators.items():
            outcomes = outcomes_of(found.get(name, {"skipped": "not run"}))
            if outcomes.pop(UNCHANGED, "") == "killed":
                accused.append(f"rejects `{operator}`")
            tried = [outcome for outcome in outcomes.values() if outcome in ("killed", "passes")]
            cells.append(f"{tried.count('killed')} of {len(tried)}" if tried else "–")
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(accused) or 'pass'} |")
    return "\n".join(lines)


def outcomes_of(found: dict[str, Any]) -> dict[str, str]:
    """Returns the outcome of each kind, none where the harness was skipped."""
    return {} if "skipped" in found else {kind: row["outcome"] for kind, row in found.items()}


def kinds(result: dict[str, Any], operator: str) -> str:
    """Returns the table of kinds and harnesses for one operator."""
    found = {name: outcomes_of(rows) for name, rows in result["operators"][operator].items()}
    found = {name: outcomes for name, outcomes in found.items() if outcomes}
    lines = ["| mutant | " + " | ".join(found) + " |", "| --- |" + " --- |" * len(found)]
    shown = {"killed": "killed", "passes": "**passes**", NOT_LOOKED_AT: "·", "none": "–"}
    for kind in found[OPWRIGHT]:
        cells = [shown[outcomes[kind]] for outcomes in found.values()]
        if kind == UNCHANGED:
            cells = [{"**passes**": "passes", "killed": "**rejected**"}[cell] for cell in cells]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def alone(result: dict[str, Any]) -> str:
    """Returns the kinds that no public harness kills on any of the operators, as a list."""
    others = [
        outcomes_of(rows)
        for found in result["operators"].values()
        for name, rows in found.items()
        if not name.startswith(OPWRIGHT)
    ]
    tried = dict.fromkeys(kind for outcomes in others for kind, outcome in outcomes.items() if outcome == "passes")
    left = [k for k in tried if k != UNCHANGED and all(outcomes.get(k) != "killed" for outcomes in others)]
    return "\n".join(f"- {kind}" for kind in left)


def versions(result: dict[str, Any]) -> str:
    return "\n".join(
        ["| harness | version |", "| --- | --- |", *(f"| {n} | {v} |" for n, v in result["versions"].items())]
    )


def page(text: str, result: dict[str, Any]) -> str:
    """Returns the page with the tables of a result."""
    parts = {
        "totals": totals(result),
        "alone": alone(result),
        "kinds": kinds(result, next(iter(result["operators"]))),
        "versions": versions(result),
    }
    for name, table in parts.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    return text


def write_page() -> None:
    PAGE.write_text(page(PAGE.read_text(), read()))


if __name__ == "__main__":
    main(sys.argv[1:])
