"""The text of a kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from opwright.errors import CompileError

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


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

    def read_headers(self, text: str) -> list[str | None]:
        """Returns the texts of the headers that a text of this source includes with quotes, and of those within them.

        None stands for headers that do not lie next to what includes them.
        """
        found: list[str | None] = []
        seen: set[Path] = set()
        waiting = [(text, self.path.parent if self.path else Path(self.origin).parent)]
        while waiting:
            text, folder = waiting.pop()
            for path in ((folder / name).resolve() for name in _INCLUDE.findall(text)):
                if path in seen:
                    continue
                seen.add(path)
                found.append(path.read_text(errors="replace") if path.is_file() else None)
                waiting.append((found[-1] or "", path.parent))
        return found

    def with_headers(self, text: str) -> str:
        """Returns a text of this source with those of the headers next to it."""
        return "\n".join([text, *filter(None, self.read_headers(text))])
