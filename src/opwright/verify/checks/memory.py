"""Checks of what calls use up: memory while one runs, and what stays behind after many."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from opwright.contract.sweep import Case, Sweep
from opwright.verify.checks.finding import Finding, Skipped
from opwright.verify.checks.threads_and_streams import Trial, trials
from opwright.verify.devices import gpu_peak, wait_for
from opwright.verify.inputs.budget import is_quick
from opwright.verify.inputs.sweep import share_of
from opwright.verify.inputs.variations import enlarge
from opwright.verify.target import Target
from opwright.verify.tensors import storage_bytes, tensors_of

# --- peak memory -------------------------------------------------------------------------------------------

_MAX_SAMPLES = 3
_MIN_BYTES = 4 * 2**20  # of all outputs: less is lost among the pages of the process
# A factor and a constant for what the peak of a process is uncertain by: free memory that is not given back hides
# some, and libraries keep buffers for products. A callable's reference may be one operator of PyTorch, where a candidate
# that is as right holds the results of each of its steps.
_MULTIPLE, _MULTIPLE_OF_STEPS = 2, 4
_SLACK_BYTES = 4 * 2**20
_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES = -3, 128 * 2**10
_MAX_SECONDS_OF_PART = 0.1
_MAX_THRESHOLD_BYTES = 32 * 2**20  # which a process arrives at by itself when it has freed large blocks


def memory(target: Target) -> Iterator[Finding]:
    """The peak of a call is at most twice what PyTorch needs for the same computation, and its outputs once more.

    For a callable four times that, or four times its inputs.

    On a GPU PyTorch's allocator says it. On the CPU it is the growth of the resident memory of the process: all
    that is touched, in whatever way it was allocated, but not what was allocated and left alone.
    """
    if target.operator is not None and not target.operator.contract.outputs:
        raise Skipped("no outputs: it only mutates")
    on_gpu = target.device.type == "cuda"
    peak_of = gpu_peak if on_gpu else _resident_peak
    if not on_gpu and not _can_measure():
        raise Skipped("this system does not tell the peak of a process's memory")
    case, made = _large_case(target)
    if made < _MIN_BYTES:
        raise Skipped("the reference takes no input with large outputs, or takes long for it")
    with torch.no_grad():
        given = sum(storage_bytes(t).numel() for t in tensors_of(case.values))
        of_reference: list[int] = []
        of_call: list[int] = []
        message = ""
        for _ in range(_MAX_SAMPLES):  # one, if that is within the allowance
            for call, measured in ((target.reference, of_reference), (target.call, of_call)):
                values = target.inputs(case)
                measured.append(peak_of(lambda call=call, values=values: call(values), target.device))
            needed, peak = max(*of_reference, made), statistics.median_low(of_call)
            is_own = target.operator is not None
            most = _MULTIPLE * needed if is_own else _MULTIPLE_OF_STEPS * max(needed, given)
            allowed = most + made + _SLACK_BYTES
            if peak <= allowed:
                break
        else:
            message = (
                f"the peak of a call is {peak / 2**20:.1f} MiB, where {allowed / 2**20:.1f} MiB are allowed: "
                f"PyTorch needs {max(of_reference) / 2**20:.1f} MiB, the outputs are {made / 2**20:.1f} MiB"
            )
    yield Finding(str(case), message)


def _large_case(target: Target) -> tuple[Case | None, int]:
    """Returns a case with large outputs, and their bytes."""

    def size_of(case: Case) -> int:
        return sum(storage_bytes(t).numel() for t in tensors_of(target.reference(target.inputs(case))))

    with torch.no_grad():
        if target.operator is None or target.has_samples:
            sizes = [(case, size_of(case)) for case in target.cases()]
            found, made = max(sizes, key=lambda each: each[1], default=(None, 0))
            if made < _MIN_BYTES:
                found = enlarge(target, _MIN_BYTES)
                made = size_of(found) if found is not None else 0
        else:
            dtype = target.contract.scalar_dtypes[0]
            sweep = target.make_sweep("full")
            sizes, (rows,) = sweep.aligned_sizes()
            options = sweep.option_sets()[0]
            if share_of(sweep, target.reference, target.inputs) < 1 or _is_slow(target, sweep):
                return None, 0
            for doubling in range(5):  # where the outputs are smaller than the inputs
                found = sweep.make("memory", dtype, sizes, (2**doubling * rows,), options)
                if not doubling and not target.accepts(found):
                    return None, 0
                made = size_of(found)
                if made >= _MIN_BYTES:
                    break
        return found, made


def _is_slow(target: Target, sweep: Sweep) -> bool:
    """Returns whether a call of the reference takes long where it has a sixteenth of the elements, or is refused."""
    sizes, batch = target.make_sweep("default").aligned_sizes()
    case = sweep.make("memory", target.contract.scalar_dtypes[0], sizes, batch, sweep.option_sets()[0])
    return not is_quick(target.reference, lambda: target.inputs(case), _MAX_SECONDS_OF_PART)


def _resident_peak(call: Callable[[], Any], device: torch.device) -> int:
    # What was freed goes back to the system, so that using it again shows.
    _libc().mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    _libc().malloc_trim(0)
    held = _free_blocks()
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")  # the peak starts from what is resident now
    before = _status("VmRSS")
    kept = call()
    peak = _status("VmHWM")
    del kept
    for block in held:
        _libc().free(block)
    _libc().mallopt(_M_MMAP_THRESHOLD, _MAX_THRESHOLD_BYTES)
    return max(peak - before, 0)


def _free_blocks() -> list[ctypes.c_void_p]:
    """Allocates, untouched, all that malloc has free in large blocks, so that the next ones come from the system.

    A block that malloc cuts from free memory of its own stays resident when it is freed, and the next may be cut
    elsewhere: three tensors at a time look like five.
    """
    held = []
    size = 2**32
    while size >= _LARGE_BLOCK_BYTES:
        address = _libc().malloc(size)
        if address and not _is_of_system(address):
            held.append(ctypes.c_void_p(address))
            continue
        _libc().free(ctypes.c_void_p(address))
        size //= 2
    return held


def _is_of_system(address: int) -> bool:
    """Returns whether malloc got a block by mmap: a bit of the size that glibc keeps in front of the block."""
    return bool(ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value & 2)


def _status(name: str) -> int:
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")


@cache
def _can_measure() -> bool:
    """Returns whether the peak follows 16 MiB that come and go."""
    try:
        peaks = [_resident_peak(lambda: torch.ones(2**22), torch.device("cpu")) for _ in range(3)]
    except (OSError, AttributeError):
        return False
    return 15 * 2**20 < sorted(peaks)[1] < 24 * 2**20


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    return library


# --- leaks -------------------------------------------------------------------------------------------------

_CALLS = {"default": 200, "full": 750}  # counted in a round
_TIMES_AT_LAST = 4  # as many in the round that decides
_MIN_CALLS = 100  # fewer prove nothing: what is made once may be made in any of them
_ROUNDS = 3
_MAX_SECONDS = 4.0  # for all rounds, and again for the retry
# What a call must leave behind to be a leak, and the calls of a round together, whatever their number.
_BYTES_A_CALL, _MIN_BYTES_LEFT = 16, 4096  # half of the least that malloc gives out
_BLOCKS_A_CALL, _MIN_BLOCKS_LEFT = 0.5, 100


def leaks(target: Target) -> Iterator[Finding]:
    """A thousand calls, forward and with gradient, leave no memory of C++, of Python or of the GPU behind."""
    has_result = False
    for trial in list(trials(target))[:2]:
        message, calls = _left_behind(target, trial)
        if message is not None:
            has_result = True
            yield Finding(f"{trial.label}, {calls} calls", message)
    if not has_result:
        raise Skipped(f"fewer than {_MIN_CALLS} calls fit into {_MAX_SECONDS:g} s")


def _left_behind(target: Target, trial: Trial) -> tuple[str | None, int]:
    """Returns what calls leave behind, None where too few fit into the time, and how many were made.

    Memory that grows once, waits for the collector or fills a cache is not a leak: so there are
    rounds, and before the last one as many calls as in all others. What the reference leaves behind as well is not
    the candidate's, but the process's.
    """
    total = 0

    def run() -> None:
        nonlocal total
        trial.compute(trial.values)
        total += 1

    def run_reference() -> None:
        trial.compute_reference(trial.values)

    def repeat(calls: int, deadline: float, call: Callable[[], None] = run) -> int:
        done = 0
        while done < calls and time.perf_counter() < deadline:
            call()
            done += 1
        return done

    def counted(deadline: float, call: Callable[[], None] = run, times: int = 1) -> str | None:
        gc.collect()
        before = _in_use(target)
        done = repeat(times * _CALLS[target.effort], deadline, call)
        if _grown(target, before, done):
            gc.collect()
        return _grown(target, before, done) if done >= _MIN_CALLS else None

    deadline = time.perf_counter() + _MAX_SECONDS
    repeat(_CALLS[target.effort] // 3, deadline - 0.75 * _MAX_SECONDS)  # what is made once, is made here
    message: str | None = None
    for _ in range(_ROUNDS):
        found = counted(deadline)
        message = message if found is None else found
        if not found:
            break
    if message:
        deadline = time.perf_counter() + _MAX_SECONDS
        repeat(total, deadline - 0.5 * _MAX_SECONDS)
        message = counted(deadline, times=_TIMES_AT_LAST)  # what is left by the calls grows with them
    if message:
        deadline = time.perf_counter() + _MAX_SECONDS
        try:
            repeat(_CALLS[target.effort], deadline - 0.5 * _MAX_SECONDS, run_reference)
        except Exception:  # a reference need not have a gradient where the operator has one of its own
            return message, total
        found = counted(deadline, run_reference, _TIMES_AT_LAST)
        if found:
            raise Skipped(f"in this process {found} when the reference is called, too")
    return message, total


def _grown(target: Target, before: dict[str, int], calls: int) -> str:
    for name, size in _in_use(target).items():
        growth = size - before[name]
        is_python = name == "objects of Python"
        each, least = (_BLOCKS_A_CALL, _MIN_BLOCKS_LEFT) if is_python else (_BYTES_A_CALL, _MIN_BYTES_LEFT)
        if growth > max(calls * each, least):
            return f"{calls} calls leave {growth} {name} behind, {growth / calls:.3g} each"
    return ""


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _in_use(target: Target) -> dict[str, int]:
    wait_for(target.device)  # the driver keeps memory for each launch that waits
    found = {"objects of Python": sys.getallocatedblocks()}
    if hasattr(_libc(), "mallinfo2"):
        _libc().mallinfo2.restype = _Mallinfo
        info = _libc().mallinfo2()
        found["bytes of the C library"] = info.uordblks + info.hblkhd
    if target.device.type == "cuda":
        found["bytes of the GPU"] = torch.cuda.memory_allocated(target.device)
    return found
