"""The settings of PyTorch and of the process, which a candidate must leave as they were.

They are read before each call and compared when it returns. A changed one is a finding, and is put back, so that it
does not reach the next case.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

# --- settings --------------------------------------------------------------------------------------------


class _Setting(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


_stack_of_functions = torch.overrides._get_current_function_mode_stack
_push_function_mode, _pop_function_mode = torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack
_len_operator_modes, _pop_operator_mode = torch._C._len_torch_dispatch_stack, _python_dispatch._pop_mode
_top_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_pop_saved_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _flushes_denormals() -> bool:
    return 5e-324 * 1.0 == 0.0


def _write_deterministic(value: tuple[bool, bool], write: Any = torch.use_deterministic_algorithms) -> None:
    write(value[0], warn_only=value[1])


def _cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _run_on(cpus: list[int]) -> None:
    if cpus:
        os.sched_setaffinity(0, cpus)


def _write_priority(value: int) -> None:
    with contextlib.suppress(PermissionError):  # a higher one only an administrator may have
        os.setpriority(os.PRIO_PROCESS, 0, value)


def _function_modes() -> list[Any]:
    return [mode for mode in _stack_of_functions() if not isinstance(mode, DeviceContext)]


def _leave_function_modes(count: int) -> None:
    """Ends the modes that were entered last, but for the default device, which is one of them."""
    kept = []
    while len(_function_modes()) > count:
        mode = _pop_function_mode()
        kept += [mode] if isinstance(mode, DeviceContext) else []
    for mode in reversed(kept):
        _push_function_mode(mode)


def _leave_operator_modes(count: int) -> None:
    while _len_operator_modes() > count:
        _pop_operator_mode()


def _has_saved_hooks() -> bool:
    return _top_saved_hooks(False) is not None


def _write_saved_hooks(value: bool) -> None:
    while not value and _has_saved_hooks():
        _pop_saved_hooks()


def _autocast(device: str) -> tuple[_Setting, _Setting]:
    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    enable, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
    return (
        _Setting(f"torch.is_autocast_enabled({device!r})", lambda: is_enabled(device), lambda on: enable(device, on)),
        _Setting(
            f"torch.get_autocast_dtype({device!r})", lambda: dtype(device), lambda value: set_dtype(device, value)
        ),
    )


def _of_gpu(read: Callable[[], Any]) -> Callable[[], Any]:
    """Returns what reads a setting that there is while a GPU is in use: from the first use until a fault; else None."""
    is_initialized = torch.cuda.is_initialized

    def read_if_there() -> Any:
        try:
            return read() if is_initialized() else None
        except RuntimeError:
            return None

    return read_if_there


# In words, and in the names of the functions of torch._C that read and write them; not every torch has all.
_FLAGS = (
    ("torch.backends.mkldnn.enabled", "mkldnn_enabled", "mkldnn_enabled"),
    ("torch.backends.cudnn.enabled", "cudnn_enabled", "cudnn_enabled"),
    ("torch.backends.cudnn.benchmark", "cudnn_benchmark", "cudnn_benchmark"),
    ("torch.backends.cudnn.deterministic", "cudnn_deterministic", "cudnn_deterministic"),
    ("torch.backends.cudnn.allow_tf32", "cudnn_allow_tf32", "cudnn_allow_tf32"),
    (
        "torch.backends.cuda.matmul.allow_fp16_accumulation",
        "cublas_allow_fp16_accumulation",
        "cublas_allow_fp16_accumulation",
    ),
    ("torch.backends.cuda.flash_sdp_enabled()", "flash_sdp_enabled", "sdp_use_flash"),
    ("torch.backends.cuda.mem_efficient_sdp_enabled()", "mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    ("torch.backends.cuda.math_sdp_enabled()", "math_sdp_enabled", "sdp_use_math"),
    ("torch.backends.cuda.cudnn_sdp_enabled()", "cudnn_sdp_enabled", "sdp_use_cudnn"),
)

_SETTINGS = (
    _Setting("torch.get_default_dtype()", torch.get_default_dtype, torch.set_default_dtype),
    _Setting("torch.get_default_device()", torch.get_default_device, torch.set_default_device),
    _Setting("torch.get_num_threads()", torch.get_num_threads, torch.set_num_threads),
    _Setting("torch.is_grad_enabled()", torch.is_grad_enabled, torch._C._set_grad_enabled),
    _Setting("torch.is_anomaly_enabled()", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    _Setting("torch.use_deterministic_algorithms", _deterministic, _write_deterministic),
    _Setting(
        "torch.get_float32_matmul_precision()",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    *_autocast("cpu"),
    *_autocast("cuda"),
    *(
        _Setting(name, getattr(torch._C, f"_get_{getter}"), getattr(torch._C, f"_set_{setter}"))
        for name, getter, setter in _FLAGS
        if hasattr(torch._C, f"_get_{getter}") and hasattr(torch._C, f"_set_{setter}")
    ),
    _Setting("torch.set_flush_denormal", _flushes_denormals, torch.set_flush_denormal),
    _Setting("the working directory", os.getcwd, os.chdir),
    _Setting("the CPUs of the process", _cpus, _run_on),
    _Setting("the priority of the process", lambda: os.getpriority(os.PRIO_PROCESS, 0), _write_priority),
    # After the default device, which is a mode of functions too.
    _Setting("the number of active modes of functions", lambda: len(_function_modes()), _leave_function_modes),
    _Setting("the number of active modes of operators", _len_operator_modes, _leave_operator_modes),
    _Setting("whether saved tensors have hooks", _has_saved_hooks, _write_saved_hooks),
)


# Of this process alone.
_GPU_SETTINGS = (
    _Setting("torch.cuda.current_device()", _of_gpu(torch.cuda.current_device), torch.cuda.set_device),
    _Setting("torch.cuda.current_stream()", _of_gpu(torch.cuda.current_stream), torch.cuda.set_stream),
)
_WATCHED = _SETTINGS + _GPU_SETTINGS


def read_settings() -> list[Any]:
    """Returns the settings of this process, for another one."""
    return [setting.read() for setting in _SETTINGS]


def write_settings(values: list[Any]) -> None:
    """Makes settings those of another process."""
    for setting, value in zip(_SETTINGS, values, strict=True):
        if setting.read() != value:
            setting.write(value)


class Guard:
    """Compares settings before and after calls of a candidate.

    Attributes:
        changes: what was changed and has been put back, in words.
        is_inside: called with whether the candidate is running now.
    """

    def __init__(self, is_inside: Callable[[bool], None] = lambda _: None) -> None:
        self.changes: list[str] = []
        self.is_inside = is_inside
        self._owner = os.getpid()

    def wrap(self, call: Callable[[Sequence[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
        """Returns a call that notes what it changes."""

        def guarded(values: Sequence[Any]) -> Any:
            if torch.compiler.is_compiling():  # a traced call does not run
                return call(values)
            return self.run(call, values)

        return guarded

    def inside(self, wait: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
        """Returns a wait for what a call has started, in its time."""

        def waiting(device: torch.device) -> None:
            self.is_inside(True)
            try:
                wait(device)
            finally:
                self.is_inside(False)

        return waiting

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of the candidate."""
        before, seed = [setting.read() for setting in _WATCHED], torch.initial_seed()
        self.is_inside(True)
        try:
            return function(*args)
        finally:
            if os.getpid() != self._owner:  # the candidate has forked: the copy must not run the checks too
                os._exit(0)
            self._compare(before, seed)
            self.is_inside(False)

    def take(self) -> list[str]:
        """Returns the changes since the last time."""
        taken, self.changes = list(dict.fromkeys(self.changes)), []
        return taken

    def _compare(self, before: list[Any], seed: int) -> None:
        for setting, was in zip(_WATCHED, before, strict=True):
            now = _read(setting)
            if now != was and None not in (now, was):
                setting.write(was)
                self.changes.append(f"{setting.name} was {was} before the call and {now} after it")
        if torch.initial_seed() != seed:  # drawing random numbers is a candidate's right
            now = torch.initial_seed()
            self.changes.append(f"the seed of torch's generator was {seed} before the call and {now} after it")
            torch.manual_seed(seed)


def _read(setting: _Setting) -> Any:
    try:
        return setting.read()
    except OSError as error:  # the working directory is gone
        return error.strerror


def passing_state(device: torch.device) -> dict[str, Any]:
    """Returns what others may change, but not a call: random numbers, environment, threads, whether gradients are on."""
    found = {
        "the state of torch's random numbers": torch.get_rng_state().numpy().tobytes(),
        "the state of Python's random numbers": random.getstate(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the environment": dict(os.environ),
        "the number of threads": threading.active_count(),
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["the state of numpy's random numbers"] = (name, keys.tobytes(), *rest)
    if device.type == "cuda":
        found["the state of the GPU's random numbers"] = torch.cuda.get_rng_state(device).numpy().tobytes()
    return found
