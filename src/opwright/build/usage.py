"""What a build took: its commands in time, and the registers of its GPU kernels, read from the log of ptxas."""

from __future__ import annotations

import re
from collections.abc import Mapping

from opwright.build.demangle import demangle
from opwright.records import BuildStep, KernelUse

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores")
_USED = re.compile(r"Used (\d+) registers(?:.*?(\d+)(?:\+\d+)? bytes smem)?")


def kernels_in(log: str) -> list[KernelUse]:
    """Returns the kernels that `ptxas -v` reports in a build's log, by architecture and name.

    A function that kernels call has properties in the log too, but no line of registers: it is not a kernel.
    """
    found: dict[tuple[str, str], KernelUse] = {}
    entry: tuple[str, str] | None = None
    stack, spilled = 0, 0
    for line in log.splitlines():
        if start := _ENTRY.search(line):
            entry, stack, spilled = (start[2], readable(start[1])), 0, 0
        elif properties := _STACK.search(line):
            stack, spilled = int(properties[1]), int(properties[2])
        elif (used := _USED.search(line)) and entry:
            found[entry] = KernelUse(entry[1], entry[0], int(used[1]), spilled, stack, int(used[2] or 0))
            entry = None
    return [found[at] for at in sorted(found)]


def readable(symbol: str) -> str:
    """Returns `add_kernel<double>` for `_Z10add_kernelIdEvPT_PKS0_l`."""
    name = demangle(symbol).replace("(anonymous namespace)::", "").replace("opwright::", "").removeprefix("void ")
    depth = 0
    for i, sign in enumerate(name):
        depth += (sign == "<") - (sign == ">")
        if sign == "(" and depth == 0 and i:
            return name[:i]
    return name


def steps_of(starts: Mapping[str, float], seconds: Mapping[str, float]) -> list[BuildStep]:
    """Returns the commands of a build in the order in which they began."""
    return sorted(
        (BuildStep(name, start, seconds[name]) for name, start in starts.items() if name in seconds),
        key=lambda step: step.start,
    )
