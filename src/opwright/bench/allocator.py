"""Memory behind a call: kept for the next one, taken fresh from the system, counted.

glibc gives large blocks back to the system and takes them anew for every call, or does not, by thresholds
that it moves as it goes. A call that writes to new pages waits for the system to clear them, and two
candidates that compute the same can differ by a factor of two by nothing but the order of their turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _PERTURB = -1, -3, -4, -6  # mallopt's numbers
_NEVER = 2**31 - 1
# Where glibc's own thresholds end up once a large block was freed, and its default number of mapped blocks.
_USUAL = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}


def _libc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None)


def keep_memory() -> bool:
    """Has the allocator keep what is freed, whatever a candidate has told it; False: it cannot be told."""
    mallopt = _libc("mallopt")
    return mallopt is not None and all([mallopt(_TRIM_THRESHOLD, _NEVER), mallopt(_MMAP_MAX, 0), mallopt(_PERTURB, 0)])


@contextlib.contextmanager
def kept_memory() -> Iterator[str]:
    """Has the allocator keep what is freed for the next call; yields "keeps", or "default" where it cannot be told."""
    if not keep_memory():
        yield "default"
        return
    try:
        yield "keeps"
    finally:
        mallopt = _libc("mallopt")
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
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = call()
        torch.cuda.synchronize(device)
        del kept
        return torch.cuda.max_memory_allocated(device) - before
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
