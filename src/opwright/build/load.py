"""Loads built libraries into the process, and swaps one for another."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from opwright.build.compile import load_error
from opwright.build.store import Entry
from opwright.errors import LoadError


@dataclass
class Library:
    """A library that is loaded; its kernels are the registered ones between `register` and `unregister`."""

    entry: Entry
    handle: ctypes.CDLL

    def register(self) -> None:
        """Makes its kernels the ones that the dispatcher calls.

        Raises:
            LoadError: the dispatcher refuses them.
        """
        if self.handle.opwright_register() != 0:
            raise LoadError(self.entry.record.operators[0], "the dispatcher refuses its kernels")

    def unregister(self) -> None:
        """Takes its kernels back. The library itself stays: a call may still be running in it."""
        self.handle.opwright_unregister()


def load(entry: Entry) -> Library:
    """Loads a library whose digest the store has just checked.

    Raises:
        LoadError: the system's loader refuses it.
    """
    try:
        return Library(entry, ctypes.CDLL(str(entry.library)))
    except OSError as error:
        raise load_error(entry, str(error)) from None
