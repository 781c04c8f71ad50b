"""Finds a JIT function in a kernel file, beneath its decorators."""

from __future__ import annotations

import inspect
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from .errors import WorkerError, first_paragraph
from .sources import KernelFile, import_kernel_file

_OLDEST = (3, 5)
_KEYWORD_ONLY_SINCE = (3, 9)


@dataclass
class Kernel:
    """A JIT function, with its `@triton.autotune` and `@triton.heuristics` from the outermost inwards."""

    file: str  # as the request names it
    function: str
    kernel_file: KernelFile
    jit: Any
    autotuner: Any = None
    heuristics: list[Any] = field(default_factory=list)

    @property
    def line(self) -> int:
        """The line of its `def`."""
        lines = self.jit.raw_src
        first = next((i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "def\t"))), 0)
        return self.jit.starting_line_number + first

    def error(self, kind: str, message: str, line: int | None = None) -> WorkerError:
        """Returns an error at a line of the kernel's file, or at its `def`."""
        return self.kernel_file.error(kind, f"`{self.function}`: {message}", None, line or self.line)


def require_triton() -> tuple[int, ...]:
    """Imports Triton and returns its version's first two numbers.

    Raises:
        WorkerError: It is missing, too old, or set to interpret kernels.
    """
    if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y"):
        raise WorkerError(
            "interpreted",
            f"TRITON_INTERPRET={os.environ['TRITON_INTERPRET']} is set: kernels are interpreted and none can be compiled. "
            "`unset TRITON_INTERPRET`.",
        )
    try:
        import triton
    except Exception as error:
        raise WorkerError(
            "no-triton",
            f"`{sys.executable}` cannot import Triton: {first_paragraph(error)}. "
            f"`{sys.executable} -m pip install triton`, or name the Python of an environment that has it.",
        ) from error
    version = getattr(triton, "__version__", None)
    if version is None:
        raise WorkerError("no-triton", f"`{sys.executable}` finds no Triton but {list(triton.__path__)}.")
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < _OLDEST:
        raise WorkerError("no-triton", f"Triton {version} of `{sys.executable}` is too old: expected 3.5 or later.")
    return numbers


def find_kernel(file: str, function: str) -> Kernel:
    """Returns a kernel, its file imported afresh if it has changed.

    Raises:
        WorkerError: The file fails, or has no JIT function of that name.
    """
    version = require_triton()
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    kernel_file = import_kernel_file(file)
    found: Any = kernel_file.module
    for part in function.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise _missing(kernel_file, function)
    kernel = Kernel(file, function, kernel_file, found)
    while isinstance(kernel.jit, Autotuner | Heuristics):
        if isinstance(kernel.jit, Heuristics):
            kernel.heuristics.append(kernel.jit)
        elif kernel.autotuner is None:
            kernel.autotuner = kernel.jit
        else:
            raise kernel_file.error("function", f"`{function}` has two `@triton.autotune`, expected one.", None, None)
        kernel.jit = kernel.jit.fn
    if not isinstance(kernel.jit, JITFunction):
        raise _no_kernel(kernel_file, function, kernel.jit)
    if kernel.jit.is_gluon():
        raise kernel.error("function", "is a Gluon kernel; only `@triton.jit` can be launched from C++.")
    starred = [p.name for p in kernel.jit.signature.parameters.values() if p.kind is inspect.Parameter.VAR_POSITIONAL]
    if starred:
        raise kernel.error("function", f"takes `*{starred[0]}`; its number of parameters must be fixed. Pass a tuple.")
    by_name = [p.name for p in kernel.jit.signature.parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    if by_name and version < _KEYWORD_ONLY_SINCE:
        raise kernel.error("function", f"`{by_name[0]}` may only be passed by name, which needs Triton 3.9 or later.")
    return kernel


def _missing(kernel_file: KernelFile, function: str) -> WorkerError:
    from triton.runtime.jit import KernelInterface

    has = [name for name, value in vars(kernel_file.module).items() if isinstance(value, KernelInterface)]
    listed = ", ".join(f"`{name}`" for name in has) or "none"
    return kernel_file.error(
        "function", f"`{kernel_file.path}` has no `{function}`; its kernels: {listed}.", None, None
    )


def _no_kernel(kernel_file: KernelFile, function: str, found: Any) -> WorkerError:
    name = type(found).__name__
    if name == "InterpretedFunction":
        return WorkerError(
            "interpreted",
            f"`{function}` was imported while TRITON_INTERPRET was set, so it cannot be compiled. Restart without it.",
            file=kernel_file.path,
        )
    code = getattr(found, "__code__", None)
    line = code.co_firstlineno if code is not None and code.co_filename == kernel_file.path else None
    message = f"`{function}` is a {name}, expected a function under `@triton.jit`"
    return kernel_file.error("function", f"{message}, `@triton.autotune` or `@triton.heuristics`.", None, line)
