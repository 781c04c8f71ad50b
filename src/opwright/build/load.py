"""Loads built libraries into the process, and swaps one for another."""

from __future__ import annotations

import ctypes
from pathlib import Path

from opwright.build.store import Entry
from opwright.errors import LoadError


class Library:
    """A library that is loaded, for the rest of the process: a call may still be running in it.

    Its kernels for a backend are the current ones from `register` until `unregister`, or another's `register`.
    """

    def __init__(self, entry: Entry, handle: ctypes.PyDLL) -> None:
        self.entry, self.handle = entry, handle

    def register(self, backend: str) -> None:
        """Makes its kernels for a backend the ones that the dispatcher calls.

        Raises:
            LoadError: the dispatcher refuses them.
        """
        if self.handle.opwright_register(backend.encode()) != 0:
            raise LoadError(self.entry.record.operators[0], f"the dispatcher refuses its {backend} kernels")

    def unregister(self, backend: str) -> None:
        """Takes its kernels back where they are still the current ones: Python runs the next call."""
        self.handle.opwright_unregister(backend.encode())

    def limit_chunks(self, steps: int) -> None:
        """Lets chunks of `parallel_for` have at most so many steps; 0: as many as suit the threads."""
        self.handle.opwright_set_chunk_steps(ctypes.c_int64(steps))


# `Process` of glue.h.
_process = (ctypes.c_uint64 * 2)()
_handles: list[ctypes.PyDLL] = []


def open_library(path: Path) -> ctypes.PyDLL:
    """Opens a library of operators, which shares its registrations with those that were opened before.

    Its functions keep the GIL. PyTorch's dispatcher may be called while `register` adds the first kernels of an
    operator, but not in the middle of it; while one thread has the GIL, no other one starts a call from Python.

    Raises:
        OSError: the system's loader refuses it.
    """
    handle = ctypes.PyDLL(str(path))
    if hasattr(handle, "opwright_share"):  # else a wheel by an older Opwright
        handle.opwright_share(_process)
        _handles.append(handle)
    return handle


def retire(namespace: str, name: str) -> None:
    """Takes back what libraries registered under the public name of an operator, before its schema goes."""
    if _handles:
        _handles[0].opwright_retire(namespace.encode(), name.encode())


def load(entry: Entry) -> Library:
    """Loads a library whose digest the store has just checked.

    Raises:
        LoadError: the system's loader refuses it.
    """
    try:
        handle = open_library(entry.library)
    except OSError as error:
        from opwright.build.compile import load_error  # not for a library that loads: it takes long to import

        raise load_error(entry, str(error)) from None
    if hasattr(handle, "opwright_triton_setup"):
        from opwright.triton.host import attach

        attach(handle, entry.record.operators[0])
    return Library(entry, handle)
