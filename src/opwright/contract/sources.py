"""The text of a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from opwright.errors import CompileError


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
        """Returns the text as it is now.

        Raises:
            CompileError: it is not in UTF-8.
        """
        if self.path is None:
            return self.inline or ""
        try:
            return self.path.read_text("utf-8")
        except UnicodeDecodeError as error:
            data = error.object
            raise CompileError(
                self.origin,
                "this source is not in UTF-8",
                rows=[("line", str(data.count(b"\n", 0, error.start) + 1)), ("byte", hex(data[error.start]))],
                hint="save it in UTF-8; `iconv -f latin1 -t utf-8 OLD > NEW` translates Latin-1",
            ) from None
