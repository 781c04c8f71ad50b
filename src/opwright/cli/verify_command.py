"""opwright verify"""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from opwright.cli.console import print_json, print_rows, progress, say
from opwright.cli.help import make_app
from opwright.cli.overview import TARGET
from opwright.errors import CheckError, plural

if TYPE_CHECKING:
    from opwright.records import VerifyRecord

_TASK = (
    "Or a task, as the benchmark KernelBench has them: a file that defines Model, get_inputs and get_init_inputs, "
    "or a folder of tasks."
)
verify_app = make_app("verify")


@verify_app.default
def verify_operators(
    target: Annotated[str, Parameter(help=f"{TARGET} {_TASK}")],
    *,
    check: Annotated[list[str] | None, Parameter(negative="")] = None,
    only: str = "",
    quick: Annotated[bool, Parameter(negative="")] = False,
    full: Annotated[bool, Parameter(negative="")] = False,
    device: Annotated[list[str] | None, Parameter(negative="")] = None,
    out: Path | None = None,
    wheel: Path | None = None,
    level: str = "",
    candidate: Path | None = None,
    expand: Annotated[bool, Parameter(negative="--no-expand")] = True,
    in_process: Annotated[bool, Parameter(negative="")] = False,
    timeout: float = 120.0,
    json: bool = False,
) -> int:
    """Check whether the operators of TARGET are right.

    Exit code 1: a check failed, or a kernel does not compile; 5: nothing failed, but no case of some operator was
    decided.

    Args:
        check: Run only this check; may be repeated. The checks: outputs written, determinism, numerics, fresh data,
            boundaries, guard bands, global state, independence, refusals, gradients, second gradients, gradient
            numerics, gradient subsets, gradient layouts, repeated backward, vmap, autocast, copy, opcheck, compile,
            export, sharding, side stream, other device, graph, chunks, threads, memory, leaks.
        only: Run only cases whose description contains this text.
        quick: Has no effect, and is kept for scripts that pass it: the default is as quick.
        full: The same checks on more inputs: minutes for an operator.
        device: Run on this device, cpu, cuda or cuda:1; may be repeated. By default on the CPU, and on the
            GPU when there is one and a CUDA kernel for it.
        out: A folder to write the records into.
        wheel: Check the kernels in this wheel, made from TARGET, in place of those that are built here.
        level: Use the wheel's CPU kernels for this level, such as v2. By default the best for this machine.
        candidate: Only for a task: the file that defines ModelNew; for a folder of tasks, a folder of such files with
            the names of the tasks. By default the task's own file, or gelu_new.py for gelu.py.
        expand: Only for a task: make more inputs from its own, with other values and layouts.
        in_process: Run the checks in this process, for a debugger. A crash then ends the command.
        timeout: How many seconds one call of the candidate may take.
        json: Print the records as JSON.
    """
    # Processes side by side have more threads than there are cores. One that waits for others is to sleep, where by
    # default it spins for milliseconds. What PyTorch computes with reads this once, when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from opwright.records.files import make_folder
    from opwright.target import find_operators
    from opwright.verify.runner import try_out
    from opwright.verify.tasks import find_tasks

    if not math.isfinite(timeout) or timeout <= 0:
        raise CheckError("--timeout", "must be a finite number, above 0", rows=[("got", f"{timeout:g}")])
    if level and wheel is None:
        raise CheckError("--level", "`--level` chooses among the kernels of a wheel", hint="`--wheel FILE`")
    how = {"quick": quick, "full": full, "isolated": not in_process, "timeout_s": timeout}
    tasks = find_tasks(target, candidate)
    if tasks:
        if out is not None:
            make_folder(out)  # now, and not when all is verified
        how["expand"] = expand
        records = [
            verify_one(task, task.name, check=check, only=only, device=device, out=out, quiet=json, **how)
            for task in tasks
        ]
        return _end(records, json)
    if not in_process and (trouble := try_out(lambda: find_operators(target), timeout)):
        say(f"FAILED to import `{target}`: it {trouble}")
        return 1
    operators = find_operators(target)
    if out is not None:
        make_folder(out)
    if wheel is not None:
        from opwright.package.trial import use_wheel

        use_wheel(wheel, operators, level)
    records = [
        verify_one(
            operator.function,
            operator.declaration.name,
            check=check,
            only=only,
            device=device,
            out=out,
            quiet=json,
            **how,
        )
        for operator in operators
    ]
    return _end(records, json)


def _end(records: list[VerifyRecord], json: bool) -> int:
    if json:
        print_json(records)
    if all(r.passed for r in records):
        return 0
    return 1 if any(r.failures for r in records) else 5


def verify_one(
    target,
    name: str,
    *,
    check: list[str] | None = None,
    only: str = "",
    device: list[str] | None = None,
    out: Path | None = None,
    quiet: bool = False,
    **how,
) -> VerifyRecord:
    """Verifies one operator or task, prints the result and writes the record."""
    from opwright.records import save_in
    from opwright.verify.api import verify

    started = time.perf_counter()
    with progress(f"Verifying {name}") as line:
        record = verify(
            target,
            checks=check,
            only=only,
            devices=device,
            on_check=lambda c: line.update(c.title),
            **how,
        )
    if out is not None:
        save_in(out, record)
    if not quiet:
        print_record(record)
    cases = sum(c.cases for c in record.checks) - record.undecided
    undecided = f" and {record.undecided} undecided" if record.undecided else ""
    unproven = "Undecided:" if undecided else "Nothing ran for"
    word = "Verified" if record.passed else "Failed" if record.failures else unproven
    ran = " and ".join(record.backends) or "nothing ran to its end"
    if record.in_process and how.get("isolated", True):
        say(f"note: it ran in this process, so a crash would have ended it: {record.in_process}")
    if only and not cases and not undecided:
        say(f'hint: no description of a case, such as "f32[7, 2] (transposed)", contains {only!r}')
    seconds = time.perf_counter() - started
    tell = say if quiet else print
    tell(f"{word} {record.name} ({ran}) on {plural(cases, 'case')}{undecided} in {seconds:.1f} s: {record.outcomes}")
    return record


def print_record(record: VerifyRecord) -> None:
    """Prints the checks of a record, its first failure and which others there are, else an undecided case of each."""
    if not record.ended_early:
        rows = [("check", "outcome", "cases", "worst error", "")]
        rows += [(c.title, c.outcome, str(c.cases) if c.cases else "", c.worst, c.note) for c in record.checks]
        print_rows(rows)
    for note in record.notes:
        print(f"\nnote: {note}")
    undecided = [c for c in record.checks if c.undecided]
    if record.failures:
        _print_first_failure(record)
        if undecided:
            names = ", ".join(c.title for c in undecided)
            print(f"\nUndecided on some cases, not shown beside a failure: {names}")
        return
    for c in undecided:
        first, *others = c.undecided
        more = f" (and {plural(len(others), 'more case')})" if others else ""
        print(f"\nUNDECIDED {c.title}")
        print_rows([("  case", first.input), ("  found", first.reason + more)])


def _print_first_failure(record: VerifyRecord) -> None:
    failure, *others = record.failures
    print(f"\nFAILED {failure.title}")
    print_rows([(f"  {name}", text) for name, text in failure.rows])
    if others:
        names = ", ".join(dict.fromkeys(other.title for other in others))
        print(f"\nAlso failed, perhaps for the same reason: {names}\n`--check NAME` shows one of them")
