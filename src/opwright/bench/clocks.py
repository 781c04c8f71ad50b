"""The clocks that a benchmark trusts, and whether someone has put others in their place.

They come from a copy of the built-in module `time` that nobody else holds, so that a candidate which
replaces `time.perf_counter` changes nothing here, whenever it did so; and it is found out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import types
from importlib.machinery import BuiltinImporter
from pathlib import Path

import torch

from opwright.bench import judges
from opwright.errors import NotVerifiedError

_spec = BuiltinImporter.find_spec("time")
_own = importlib.util.module_from_spec(_spec) if _spec else time
perf_counter = _own.perf_counter
thread_time = _own.thread_time

_PYTHONS = ("perf_counter", "perf_counter_ns", "thread_time", "monotonic", "time", "process_time")
_TORCHS = ("Event.elapsed_time", "Event.record", "Event.query", "Event.synchronize", "synchronize", "current_stream")
_TORCH_ROOT = str(Path(torch.__file__).parent) + os.sep


def replaced() -> list[str]:
    """Returns the names of the functions of timing that are not those of Python and PyTorch any more."""
    found = []
    for name in _PYTHONS:
        function = getattr(time, name)
        is_python = isinstance(function, types.BuiltinFunctionType) and function.__name__ == name
        if not is_python or getattr(function.__self__, "__name__", "") != "time":
            found.append(f"time.{name}")
    for name in _TORCHS:
        function = torch.cuda
        for part in name.split("."):
            function = getattr(function, part, None)
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCH_ROOT) or not _is_torchs(function):
            found.append(f"torch.cuda.{name}")
    return found


def _is_torchs(function: types.FunctionType) -> bool:
    """Whether a function belongs to the module that it names: code can be made under any file name."""
    module = sys.modules.get(function.__module__)
    return module is not None and function.__globals__ is vars(module)


def refuse_replaced(subject: str) -> None:
    """Raises NotVerifiedError if functions that time or judge were replaced."""
    found = replaced() + judges.replaced()
    if found:
        raise NotVerifiedError(
            subject,
            "functions that time and judge were replaced, so no time is to be trusted",
            rows=[("replaced", ", ".join(found))],
            hint="measure in a process that leaves them alone: `opwright bench TARGET`",
        )
