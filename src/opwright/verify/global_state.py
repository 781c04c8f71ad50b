"""What of a process a candidate must leave as it was.

The settings of PyTorch are read before each call and compared when it returns. A changed one is a finding, and is put
back, so that it does not reach the next case. The rest is compared by the check of global state alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from opwright import _torch


class _Setting(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


_LIBC = ctypes.PyDLL(None)


def _flushes_denormals(smallest: float = 5e-324) -> bool:
    """Whether denormal numbers are taken or written as 0."""
    return smallest * 2.0 == 0.0


def _of_gpu(read: Callable[[], Any]) -> Callable[[], Any]:
    """Returns what reads a setting that there is while a GPU is in use: from the first use until a fault; else None."""

    def read_if_there() -> Any:
        try:
            return read() if torch.cuda.is_initialized() else None
        except RuntimeError:
            return None

    return read_if_there


# In words, and in the names of the functions of torch._C that read and write them; not every torch has all.
_FLAGS = (
    ("mkldnn.enabled", "mkldnn_enabled", "mkldnn_enabled"),
    *(
        (f"cudnn.{name}", f"cudnn_{name}", f"cudnn_{name}")
        for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    ),
    ("cuda.matmul.allow_fp16_accumulation", "cublas_allow_fp16_accumulation", "cublas_allow_fp16_accumulation"),
    *(
        (f"cuda.{name}_sdp_enabled()", f"{name}_sdp_enabled", f"sdp_use_{name}")
        for name in ("flash", "mem_efficient", "math", "cudnn")
    ),
)

_SETTINGS = (
    _Setting("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("torch.get_default_device()", torch.get_default_device, torch.set_default_device),
    _Setting("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads),
    _Setting("torch.is_grad_enabled()", torch.is_grad_enabled, _torch.set_grad_enabled),
    _Setting("torch.is_anomaly_enabled()", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _Setting(
        "torch.use_deterministic_algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    _Setting(
        "torch.get_float32_matmul_precision()", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    *(
        _Setting(f"torch.{read.__name__}({device!r})", partial(read, device), partial(write, device))
        for device in ("cpu", "cuda")
        for read, write in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
    *(
        _Setting(f"torch.backends.{name}", *found)
        for name, getter, setter in _FLAGS
        if (found := _torch.find_flag(getter, setter)) is not None
    ),
    _Setting("torch.set_flush_denormal", _flushes_denormals, torch.set_flush_denormal),
    _Setting("the rounding mode", _LIBC.fegetround, _LIBC.fesetround),
    _Setting("the working directory", os.getcwd, os.chdir),
)
_WATCHED = (
    *_SETTINGS,
    # Of this process alone.
    _Setting("torch.cuda.current_device()", _of_gpu(torch.cuda.current_device), torch.cuda.set_device),
    _Setting("torch.cuda.current_stream()", _of_gpu(torch.cuda.current_stream), torch.cuda.set_stream),
)


def read_settings() -> list[Any]:
    """Returns the settings of this process, for another one."""
    return [setting.read() for setting in _SETTINGS]


def write_settings(values: list[Any]) -> None:
    """Makes settings those of another process."""
    for setting, value in zip(_SETTINGS, values, strict=True):
        if setting.read() != value:
            setting.write(value)


def read_passing_state(device: torch.device) -> dict[str, Any]:
    """Returns what a call must not change: random numbers, environment, threads, whether gradients are on."""
    found = {
        "the state of torch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "the state of Python's random numbers": random.getstate(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the environment": dict(os.environ),  # not C's, where libraries set variables of their own
        "the number of threads": threading.active_count(),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["the state of numpy's random numbers"] = (name, keys.tobytes(), *rest)
    if device.type == "cuda":
        found["the state of the GPU's random numbers"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return found


@dataclass
class CallThreads:
    """How many threads PyTorch has in a call; None: as many as around it."""

    count: int | None = None


@contextlib.contextmanager
def in_threads(count: int | None) -> Iterator[None]:
    """Gives PyTorch so many threads; None: as many as it has."""
    before = torch.get_num_threads()
    if count in (None, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Guard:
    """Compares settings before and after calls of a candidate.

    Attributes:
        changes: what was changed and has been put back, in words.
        mark_inside: called with whether the candidate is running now.
    """

    def __init__(self, mark_inside: Callable[[bool], None] = lambda now: None) -> None:
        self.changes: list[str] = []
        self.mark_inside = mark_inside
        self._owner = os.getpid()

    def wrap(self, call: Callable[..., Any], threads: CallThreads | None = None) -> Callable[..., Any]:
        """Returns a call that notes what it changes, with as many threads as `threads` says at that moment."""

        def call_and_compare(*args: Any) -> Any:
            if torch.compiler.is_compiling():  # a traced call does not run
                return call(*args)
            with in_threads(threads and threads.count):
                return self.run(call, *args)

        return call_and_compare

    def wrap_wait(self, wait: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
        """Returns a wait for what a call has started, in its time."""

        def wait_inside(device: torch.device) -> None:
            self.mark_inside(True)
            try:
                wait(device)
            finally:
                self.mark_inside(False)

        return wait_inside

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of the candidate."""
        before, seed = [setting.read() for setting in _WATCHED], torch.initial_seed()
        self.mark_inside(True)
        try:
            return function(*args)
        finally:
            if os.getpid() != self._owner:  # the candidate has forked: the copy must not run the checks too
                os._exit(0)
            self._compare(before, seed)
            self.mark_inside(False)

    def take(self) -> list[str]:
        """Returns the changes since the last time."""
        taken, self.changes = list(dict.fromkeys(self.changes)), []
        return taken

    def _compare(self, before: list[Any], seed: int) -> None:
        for setting, was in zip(_WATCHED, before, strict=True):
            try:
                now = setting.read()
            except OSError as error:  # the working directory is gone
                now = error.strerror
            if now != was and None not in (now, was):
                setting.write(was)
                self.changes.append(f"{setting.name} was {was} before the call and {now} after it")
        if torch.initial_seed() != seed:  # drawing random numbers is a candidate's right
            now = torch.initial_seed()
            self.changes.append(f"the seed of torch's generator was {seed} before the call and {now} after it")
            torch.manual_seed(seed)
