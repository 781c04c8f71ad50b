"""What surrounds a benchmark: the memory behind a call, load, clocks, CPUs, and the version of the source."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from opwright.records import Conditions
from opwright.verify.devices import gpu_peak


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


@contextlib.contextmanager
def threads_of_torch(threads: int | None) -> Iterator[str]:
    """Fixes how many threads PyTorch computes with; yields a warning if there are fewer than there could be.

    A loop over several threads ends with the last of them. Where other work has a core, that is when the system gives
    it back: a time which says nothing about the loop.

    Args:
        threads: how many; None: as many as PyTorch has, or one if other work has too much of their cores.
    """
    before = torch.get_num_threads()
    warning = ""
    if threads is None and before > 1 and (share := _share_of_cores(before)) < _MIN_SHARE:
        threads = 1
        warning = (
            f"the machine is busy: {before} threads got {share * before:.1f} cores, so everything was timed on one "
            f"thread; `--threads {before}` uses {before}"
        )
    torch.set_num_threads(threads or before)
    try:
        yield warning
    finally:
        torch.set_num_threads(before)


_MIN_SHARE, _SHARE_SECONDS, _SHARE_ELEMENTS = 0.7, 0.2, 2**17


def _share_of_cores(threads: int) -> float:
    """Returns the processor time that threads get while they all compute, in units of the time that passes."""
    x = torch.ones(threads * _SHARE_ELEMENTS)
    torch.sin(x)
    started, spent = time.perf_counter(), time.process_time()
    while time.perf_counter() - started < _SHARE_SECONDS:
        torch.sin(x)
    return (time.process_time() - spent) / (time.perf_counter() - started) / threads


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
        commit = run_git(folder, "rev-parse", "--short=12", "HEAD")
        return commit + ("+" if run_git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def run_git(folder: Path, *arguments: str) -> str:
    """Returns what git prints; raises OSError or SubprocessError where it fails."""
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _PERTURB = -1, -3, -4, -6  # mallopt's numbers
_NEVER = 2**31 - 1
# Where glibc's own thresholds end up once a large block was freed, and its default number of mapped blocks.
_USUAL = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}


def _libc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)


@contextlib.contextmanager
def kept_memory() -> Iterator[str]:
    """Has the allocator keep what is freed for the next call; yields "keeps", or "default" where it cannot be told."""
    mallopt = _libc("mallopt")
    if mallopt is None or not all([mallopt(_TRIM_THRESHOLD, _NEVER), mallopt(_MMAP_MAX, 0), mallopt(_PERTURB, 0)]):
        yield "default"
        return
    try:
        yield "keeps"
    finally:
        for option, value in _USUAL.items():
            mallopt(option, value)
        give_back()


def give_back() -> bool:
    """Gives all free memory back to the system, so that the next outputs are on new pages; False: it cannot be done."""
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)
    return trim is not None


@contextlib.contextmanager
def _silent_kineto() -> Iterator[None]:
    """Keeps PyTorch's profiler from writing to stderr that it starts and stops."""
    name, silent = "KINETO_LOG_LEVEL", "99"
    before = os.environ.get(name)
    os.environ[name] = before or silent
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Returns the most memory of PyTorch's allocator that a call holds at once, beyond what is held before."""
    if device.type == "cuda":
        return gpu_peak(call, device)
    with _silent_kineto(), torch.autograd.profiler.profile(profile_memory=True) as profile:
        kept = call()
    del kept
    # In the order of time; frees are negative. What was held before is only ever freed after the call.
    events = sorted((e for e in profile.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    held = most = 0
    for event in events:
        held += event.nbytes()
        most = max(most, held)
    return most
