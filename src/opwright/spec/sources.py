"""The kernels of a declaration: the files next to it, or those that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from opwright.errors import KernelFileError

KERNEL_FILES = {"cpu": "cpu.cpp", "cuda": "cuda.cu", "triton": "triton.py"}


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


def find_sources(subject: str, file: str, kernels: Mapping[str, str | Path | None]) -> dict[str, Source]:
    """Returns the sources of the kernels that a declaration in `file` names, or that lie next to it.

    Raises:
        KernelFileError: one that is named does not exist.
    """
    folder = Path(file).parent
    found: dict[str, Source] = {}
    for backend, given in kernels.items():
        if isinstance(given, str) and "\n" in given:
            line = _line_of(given, file)
            found[backend] = Source(backend, None, given, file if line else f"<{backend} of {subject}>", line or 1)
            continue
        path = folder / (given or KERNEL_FILES[backend])
        if path.is_file():
            kind = "triton" if path.suffix == ".py" else backend
            found[backend] = Source(kind, path.resolve(), None, str(path))
        elif given is not None:
            raise KernelFileError(
                subject,
                f"the {backend} kernel does not exist",
                rows=[("expected", str(path))],
                hint="the path is relative to the declaring file; a source itself has a newline",
            )
    # Both run on GPUs: the one that the declaration names, else cuda.cu.
    if "triton" in found and ("cuda" not in found or (kernels.get("triton") and not kernels.get("cuda"))):
        found["cuda"] = found["triton"]
    return found


def _line_of(text: str, file: str) -> int | None:
    """Returns the line of `file` on which an inline source starts, if it stands there literally."""
    try:
        at = Path(file).read_text().find(text)
        return Path(file).read_text()[:at].count("\n") + 1 if at >= 0 else None
    except (OSError, UnicodeDecodeError):
        return None
