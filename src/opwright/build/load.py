"""Loads built libraries into the process, and swaps one for another."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from opwright.build.compile import load_error
from opwright.build.store import Entry
from opwright.errors import LoadError


@dataclass
class Library:
    """A library that is loaded.

    Its kernels for a backend are the registered ones between `register` and `unregister`.
    """

    entry: Entry
    handle: ctypes.CDLL

    @property
    def contents(self) -> str:
        """The digest of the glue that it was made from."""
        return (ctypes.c_char * 64).in_dll(self.handle, "opwright_contents").value.decode()

    def register(self, backend: str) -> None:
        """Makes its kernels for a backend the ones that the dispatcher calls.

        Raises:
            LoadError: the dispatcher refuses them.
        """
        if self.handle.opwright_register(backend.encode()) != 0:
            raise LoadError(self.entry.record.operators[0], f"the dispatcher refuses its {backend} kernels")

    def unregister(self, backend: str) -> None:
        """Takes its kernels back. The library itself stays: a call may still be running in it."""
        self.handle.opwright_unregister(backend.encode())

    def limit_chunks(self, steps: int) -> None:
        """Lets chunks of `parallel_for` have at most so many steps; 0: as many as suit the threads."""
        self.handle.opwright_set_chunk_steps(ctypes.c_int64(steps))


def load(entry: Entry) -> Library:
    """Loads a library whose digest the store has just checked.

    Raises:
        LoadError: the system's loader refuses it.
    """
    try:
        handle = ctypes.CDLL(str(entry.library))
    except OSError as error:
        raise load_error(entry, str(error)) from None
    if hasattr(handle, "opwright_triton_setup"):
        from opwright.triton.host import attach

        attach(handle, entry.record.operators[0])
    return Library(entry, handle)
