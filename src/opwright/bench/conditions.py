"""Under which conditions a benchmark ran: load, clocks, CPUs; and which version of the source."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from opwright.bench.allocator import kept_memory
from opwright.records import Conditions


@contextlib.contextmanager
def conditions_of(device: torch.device, process: str) -> Iterator[Conditions]:
    """Keeps memory with the process, and yields what is there; what changes is filled in at the end."""
    with kept_memory() as allocator:
        found = Conditions(
            process=process,
            affinity=affinity(),
            allocator=allocator,
            load_before=os.getloadavg()[0],
            load_after=0.0,
            clock_mhz_before=clock_mhz(),
            gpu_clock_mhz_before=gpu_clock_mhz(device),
            governor=governor(),
        )
        yield found
        found.load_after = os.getloadavg()[0]
        found.clock_mhz_after, found.gpu_clock_mhz_after = clock_mhz(), gpu_clock_mhz(device)


def affinity() -> list[int]:
    """Returns the CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def clock_mhz() -> float | None:
    """Returns the mean clock of those CPUs, or None where the system does not say."""
    try:
        with open("/proc/cpuinfo") as f:
            found = re.findall(r"^processor\s*:\s*(\d+)$|^cpu MHz\s*:\s*([\d.]+)$", f.read(), re.MULTILINE)
    except OSError:
        return None
    clocks, cpu = {}, -1
    for number, clock in found:
        cpu = int(number) if number else cpu
        if clock:
            clocks[cpu] = float(clock)
    mine = [clocks[cpu] for cpu in affinity() if cpu in clocks]
    return statistics.fmean(mine) if mine else None


def governor() -> str:
    """Returns who chooses the clock of those CPUs: "performance", "powersave"; "" where the system does not say."""
    found = set()
    for cpu in affinity():
        with contextlib.suppress(OSError), open(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor") as f:
            found.add(f.read().strip())
    return ", ".join(sorted(found))


def gpu_clock_mhz(device: torch.device) -> float | None:
    """Returns the clock of a GPU, or None on a CPU and where the driver's library of measurements is not installed."""
    if device.type != "cuda":
        return None
    try:
        return float(torch.cuda.clock_rate(device))
    except (ImportError, RuntimeError, OSError):
        return None


def commit_of(file: str) -> str:
    """Returns the commit that a source is of, with "+" behind it when its repository has changes; "" without one."""
    folder = Path(file).parent
    if not file or not folder.is_dir():
        return ""
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
