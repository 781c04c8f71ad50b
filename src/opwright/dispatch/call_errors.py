"""What is raised in place of an error from below: the rule of the contract that a call broke."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from opwright.contract.contract import ContractError
from opwright.contract.dtypes import describe
from opwright.dispatch.arguments import Arguments
from opwright.dispatch.device_errors import device_error
from opwright.dispatch.frames import is_of_the_library
from opwright.dispatch.reference import Reference, tensors_in
from opwright.errors import KernelError, OpwrightError, OutOfBoundsError

_INDEX_ERROR = "IndexError: "  # what the text of `opwright::check_index` starts with


class CallErrors:
    """Explains the errors of one operator's calls."""

    def __init__(self, name: str, arguments: Arguments, reference: Reference) -> None:
        self._name, self._arguments, self._reference = name, arguments, reference
        self._kept = threading.local()

    def keep(self, error: Exception) -> None:
        """Keeps an error of the reference for this thread: C code in between keeps only that there was one."""
        self._kept.error = error

    def explain(self, error: Exception, values: Sequence[Any]) -> Exception:
        """Returns the error to raise in place of one from below: the broken rule of the contract, if any."""
        if isinstance(error, OpwrightError):
            return error.with_traceback(_without_the_library(error.__traceback__))
        try:
            self._arguments.bind(values)
        except ContractError as broken:
            return broken
        text = str(error).split("\n")[0]
        kept = getattr(self._kept, "error", None)
        if kept is not None and "the reference failed" in text:
            self._kept.error = None
            return kept
        prefix = f"{self._name}: "
        found = device_error(self._name, text.removeprefix(prefix), list(tensors_in(values)))
        if found is not None:
            return found
        if text.startswith(prefix):
            given = [(name, describe(v)) for name, v in zip(self._arguments.names, values, strict=True)]
            said = text.removeprefix(prefix)
            is_index_error = said.startswith(_INDEX_ERROR) or self._reference.has_index_out_of_bounds(values)
            raised = OutOfBoundsError if is_index_error else KernelError
            return raised(self._name, said.removeprefix(_INDEX_ERROR), rows=given)
        return error


def _without_the_library(trace: TracebackType | None) -> TracebackType | None:
    """Returns the frames of a traceback that are in the author's own code: how a build fails is in its message."""
    kept = None
    for each in reversed([each for each in _walk(trace) if not is_of_the_library(each.tb_frame)]):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def _walk(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
