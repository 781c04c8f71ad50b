"""The one error of the worker, and where in the author's file another error came from."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any


class WorkerError(Exception):
    """A request cannot be fulfilled, and the reason is the author's or the requester's.

    `kind` is one of: `request` (not as the protocol says), `no-triton`, `interpreted` (TRITON_INTERPRET is set), `import`
    (the kernel's file fails), `function` (missing, or nothing that can be compiled), `stale` (a module that the host
    imported has changed since), `argument` (a class that the parameter cannot have), `option`, `compile`
    (Triton or ptxas refused), `contract` (the cubin takes other parameters than derived), `output`, `internal`.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        source: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.file = file
        self.line = line
        self.source = source

    def as_reply(self) -> dict[str, Any]:
        """Returns the `error` of a reply."""
        return {
            "kind": self.kind,
            "message": self.message,
            "file": self.file,
            "line": self.line,
            "source": self.source,
        }


def line_of(text: str | None, line: int | None) -> str | None:
    """Returns a line of a file's text, without the spaces around it."""
    lines = (text or "").splitlines()
    return lines[line - 1].strip() if line and 0 < line <= len(lines) else None


def author_place(error: BaseException, is_authors: Callable[[str], bool]) -> tuple[str | None, int | None]:
    """Returns file and line of the innermost frame in an author's file, or of the syntax error there."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_authors(f.filename)]
    return (frames[-1].filename, frames[-1].lineno) if frames else (None, None)


def first_paragraph(error: BaseException) -> str:
    """Returns what an error says, down to its first empty line, with its type where that tells more."""
    text = str(error).strip().split("\n\n")[0]
    name = type(error).__name__
    return text if text and isinstance(error, (WorkerError, AssertionError)) else f"{name}: {text}" if text else name
