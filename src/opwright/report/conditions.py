"""Writes under which conditions an operator was measured and verified."""

from __future__ import annotations

from collections.abc import Sequence

from opwright.errors import plural
from opwright.quantities import round_to
from opwright.records import BenchRecord, VerifyRecord


def tell_conditions(bench: BenchRecord) -> str:
    """Returns process, threads, memory, load and clocks in one sentence; "" for a record that does not know them."""
    c = bench.conditions
    if c is None:
        return ""
    process = "in a process of its own" if c.process == "own" else "in the process of its caller"
    told = [
        process,
        f"{plural(bench.threads, 'thread')} on {'CPU' if len(c.affinity) == 1 else 'CPUs'} {_ranges(c.affinity)}",
        "freed memory kept for the next call" if c.allocator == "keeps" else "freed memory the allocator's way",
        f"load {_change(c.load_before, c.load_after)}",
    ]
    if c.clock_mhz_before:
        by = f" ({c.governor})" if c.governor else ""
        told.append(f"clock {_change(c.clock_mhz_before, c.clock_mhz_after)} MHz{by}")
    if c.gpu_clock_mhz_before:
        told.append(f"clock of the GPU {_change(c.gpu_clock_mhz_before, c.gpu_clock_mhz_after)} MHz")
    return "; ".join(told)


def tell_process(verify: VerifyRecord) -> str:
    """Returns why the checks had no process of their own; "" when they had."""
    return f"in the process of its caller: {verify.in_process}" if verify.in_process else ""


def is_busy(bench: BenchRecord) -> tuple[float, int] | None:
    """Returns the load before measuring and the CPUs there were, where others were at work on them; else None."""
    c = bench.conditions
    load, cpus = bench.machine.load, bench.machine.cores
    if c is not None:
        load, cpus = c.load_before, len(c.affinity) or cpus
    return (load, cpus) if load > cpus else None


def _change(before: float, after: float | None) -> str:
    first = round_to(before)
    return first if after is None or round_to(after) == first else f"{first} to {round_to(after)}"


def _ranges(numbers: Sequence[int]) -> str:
    """Writes `0-3, 8`."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)
