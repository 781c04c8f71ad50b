"""Lines at the terminal for what takes long; in CI and without a terminal there are none."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

_QUIET_SECONDS = 1.0


def announce(text: str) -> None:
    """Prints a line to stderr."""
    if _is_watched():
        sys.stderr.write(f"opwright: {text}\n")
        sys.stderr.flush()


@contextlib.contextmanager
def announced(text: str, after_seconds: float = _QUIET_SECONDS) -> Iterator[None]:
    """Prints a line to stderr if the block takes longer."""
    if not _is_watched():
        yield
        return
    timer = threading.Timer(after_seconds, announce, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_watched() -> bool:
    return sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("CI")
