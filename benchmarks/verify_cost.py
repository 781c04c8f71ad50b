"""What `opwright verify` costs: a process for the checks, settings compared at a call, a quick run of an operator.

    python benchmarks/verify_cost.py [RUNS]

Ratios within a run can be compared; the machine card and the load are in the result. Two minutes.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from summary import Figure, update, write_raw

import opwright
from opwright.isolation import Start, Worker, fork
from opwright.machine import machine_card
from opwright.records import builtins_of
from opwright.verify.global_state import Guard
from opwright.verify.request import Request
from opwright.verify.runner import Work, start_anew

COMMAND = [
    sys.executable,
    "-c",
    "from opwright.cli import main; main()",
    "verify",
    "opwright_ops.bias_gelu",
    "--quick",
    "--device",
    "cpu",
]
SAMPLES = [(torch.randn(17, 33),), (torch.randn(4, 1001),)]


def spread(values: list[float], digits: int = 2) -> dict[str, float]:
    """Returns median, least and most."""
    return {
        name: round(of(values), digits) for name, of in (("median", statistics.median), ("least", min), ("most", max))
    }


def seconds_of(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def cpu_seconds() -> float:
    """Returns the CPU time of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def run_worker(start: Start) -> None:
    worker = Worker(start)
    assert not [event for event in worker.events() if "running" not in event]


def processes(runs: int) -> dict[str, Any]:
    """From the start of a process to its end, without a check."""
    request = Request(torch.nn.functional.gelu, torch.nn.functional.gelu, SAMPLES, "default", False)
    anew = start_anew(Work(request), [])
    return {
        "fork_ms": spread([1e3 * seconds_of(lambda: run_worker(fork(lambda channel: None))) for _ in range(4 * runs)]),
        "anew_ms": spread([1e3 * seconds_of(lambda: run_worker(anew)) for _ in range(runs)]),
    }


def guard(runs: int, calls: int = 2000) -> dict[str, float]:
    """Calls of a candidate that does nothing, with its settings compared before and after."""
    guarded = Guard().wrap(lambda values: values)

    def repeat() -> None:
        for _ in range(calls):
            guarded([])

    return spread([1e6 * seconds_of(repeat) / calls for _ in range(4 * runs)])


def callable_apart(runs: int) -> dict[str, Any]:
    """CPU time of `verify` for a callable, with a process of its own and without."""
    found: dict[str, list[float]] = {"apart": [], "in_process": []}
    cases = 0
    for _ in range(runs):
        for name in found:
            before = cpu_seconds()
            record = opwright.verify(
                torch.nn.functional.gelu,
                reference=torch.nn.functional.gelu,
                samples=SAMPLES,
                checks=["numerics"],
                isolated=name == "apart",
            )
            found[name].append(cpu_seconds() - before)
            assert record.passed
            cases = sum(check.cases for check in record.checks)
    return {"cases": cases} | {f"{name}_cpu_s": spread(values) for name, values in found.items()}


def quick(runs: int) -> dict[str, Any]:
    """The whole command, with a process for each group of checks and with one thread, which gives one process."""
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(runs):
        for name, threads in (("side_by_side", {}), ("one_thread", {"OMP_NUM_THREADS": "1"})):
            before = cpu_seconds()
            wall = seconds_of(
                lambda threads=threads: subprocess.run(
                    COMMAND, env={**os.environ, **threads}, check=True, capture_output=True
                )
            )
            row = found.setdefault(name, {"wall_s": [], "cpu_s": []})
            row["wall_s"].append(wall)
            row["cpu_s"].append(cpu_seconds() - before)
    return {name: {what: spread(values) for what, values in row.items()} for name, row in found.items()}


def figures(result: dict[str, Any]) -> list[Figure]:
    process, callable_, command = result["process"], result["callable"], result["bias_gelu quick"]
    case = f"verify of a callable, {callable_['cases']} cases, CPU time"
    rows = {
        "process: a fork, from its start to its end": (process["fork_ms"], "ms"),
        "process: one that starts anew, from its start to its end": (process["anew_ms"], "ms"),
        "settings compared around a call": (result["guard_us_per_call"], "us"),
        f"{case}, apart": (callable_["apart_cpu_s"], "s"),
        f"{case}, in process": (callable_["in_process_cpu_s"], "s"),
    }
    for name, title in (("side_by_side", "side by side"), ("one_thread", "one process with one thread")):
        rows[f"verify of bias_gelu --quick, {title}"] = (command[name]["wall_s"], "s")
        rows[f"verify of bias_gelu --quick, {title}, CPU time"] = (command[name]["cpu_s"], "s")
    return [Figure(name, row["median"], unit, row["least"], row["most"]) for name, (row, unit) in rows.items()]


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    subprocess.run(COMMAND, check=True, capture_output=True)  # the kernel is built
    result = {
        "machine": builtins_of(machine_card()),
        "runs": runs,
        "process": processes(runs),
        "guard_us_per_call": guard(runs),
        "callable": callable_apart(runs),
        "bias_gelu quick": quick(runs),
        "load": os.getloadavg()[0],
    }
    write_raw("verify_cost", result)
    update(__file__, figures(result), result["machine"])
    print(json.dumps({name: value for name, value in result.items() if name != "machine"}, indent=1))


if __name__ == "__main__":
    main()
