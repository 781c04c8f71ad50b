"""Triton's compile errors, at the author's line."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from .errors import WorkerError, author_place, first_paragraph, line_of
from .kernel import Kernel


def compile_error(kernel: Kernel, error: Exception) -> WorkerError:
    """Returns the error of a compile that failed, at the innermost line that is in a file of the author."""
    from triton.compiler.errors import CompilationError

    if isinstance(error, WorkerError):
        return error
    message, path, line = first_paragraph(error), None, None
    functions = {jit.src: jit for jit in _functions(kernel)}
    for link in _chain(error):
        if not isinstance(link, CompilationError):
            message = first_paragraph(link)
            continue
        if link.error_message:
            message = link.error_message.strip().split("\n\n")[0]
        jit, number = functions.get(link.src), getattr(link.node, "lineno", None)
        if jit is not None and number is not None:
            file = jit.fn.__code__.co_filename
            if kernel.kernel_file.is_authors(file):
                path, line = file, _def_line(jit) + number - 1
    if path is None:
        path, line = author_place(error, kernel.kernel_file.is_authors)
    if path is None:
        path, line = kernel.kernel_file.path, kernel.line
    source = line_of(kernel.kernel_file.text(path), line)
    return WorkerError(
        "compile", f"`{kernel.function}` does not compile: {message}", file=path, line=line, source=source
    )


def _chain(error: BaseException) -> Iterator[Any]:
    """Yields an error and what it was raised from, outermost first: a call comes before the line that it reached."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _def_line(jit: Any) -> int:
    lines = enumerate(jit.raw_src)
    return jit.starting_line_number + next((i for i, line in lines if line.lstrip().startswith("def")), 0)


def _functions(kernel: Kernel) -> Iterator[Any]:
    """Yields every JIT function that a kernel's names and those of its author's modules lead to."""
    from triton.runtime.jit import JITCallable, KernelInterface

    seen: set[int] = set()
    waiting: list[Any] = [kernel.jit, kernel.kernel_file.module]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, JITCallable):
            yield found
            waiting += found.__globals__.values()
        elif isinstance(found, ModuleType) and kernel.kernel_file.is_authors(getattr(found, "__file__", None) or ""):
            waiting += vars(found).values()
        elif isinstance(found, KernelInterface):
            waiting.append(found.fn)  # beneath a decorator
