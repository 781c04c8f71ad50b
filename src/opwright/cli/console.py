"""What the commands print: data to stdout, progress to stderr, plain where nobody watches."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opwright.errors import align

_QUIET_SECONDS = 0.3


def print_rows(rows: Sequence[tuple[str, ...]]) -> None:
    """Prints aligned columns to stdout."""
    if rows:
        print("\n".join(align(rows)))


def print_json(value: Any) -> None:
    """Prints a record or plain data as JSON to stdout."""
    from opwright.records import encodable

    print(json.dumps(encodable(value), indent=2))


def say(text: str) -> None:
    """Prints a line for the person at the terminal, to stderr, behind what is on stdout already."""
    print(end="", flush=True)
    print(text, file=sys.stderr, flush=True)


class Progress:
    """One live line for what is running; nothing where there is no terminal."""

    def __init__(self, title: str, stream: Any = None) -> None:
        self.stream = stream or sys.stderr
        self.title, self.started, self.shown = title, time.monotonic(), False
        self.is_live = self.stream.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"

    def update(self, text: str) -> None:
        """Shows what is running now."""
        if self.is_live and time.monotonic() - self.started > _QUIET_SECONDS:
            self.shown = True
            self.stream.write(f"\r\033[K{f'{self.title}  {text}'[: self._width() - 1]}")
            self.stream.flush()

    def _width(self) -> int:
        """Returns the columns of the terminal: what is cleared later is a single line of it."""
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def clear(self) -> None:
        """Removes the line."""
        if self.shown:
            self.stream.write("\r\033[K")
            self.stream.flush()


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """Yields a line of progress that is gone afterwards."""
    line = Progress(title)
    line.update("")
    try:
        yield line
    finally:
        line.clear()
