"""A line at the terminal for a first call that takes long."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

_QUIET_SECONDS = 1.0


@contextlib.contextmanager
def announced(text: str, after_seconds: float = _QUIET_SECONDS) -> Iterator[None]:
    """Prints a line to stderr if the block takes longer; in CI and without a terminal it prints nothing."""
    stream = sys.stderr
    if stream is None or not stream.isatty() or os.environ.get("CI"):
        yield
        return

    def say() -> None:
        stream.write(f"opwright: {text}\n")
        stream.flush()

    timer = threading.Timer(after_seconds, say)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
