"""The text of a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """The text of a kernel: a file, or a string in the declaration (`path` is then None).

    `origin` and `line` say where the text stands, for messages.
    """

    backend: str
    path: Path | None
    inline: str | None
    origin: str
    line: int = 1

    def read(self) -> str:
        """Returns the text as it is now."""
        return self.inline if self.path is None else self.path.read_text()
