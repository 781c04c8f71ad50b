"""Which of PyTorch's headers a source needs, and whether they can be there before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from opwright.backends.toolchain import NATIVE

EXTENSION = NATIVE / "extension"  # lighter headers of PyTorch's names, found before PyTorch's own
WHOLE = "-DOPWRIGHT_WHOLE_TORCH"

# What a source can have in front of it, by name of a file in native/extension/prefix:
#   code      torch/extension.h without Python
#   module    torch/extension.h
#   bindings  what generated bindings need
KINDS = ("code", "module", "bindings")

_NEEDS_WHOLE = re.compile(r"torch::(nn|data|optim|jit|serialize|save|load|OrderedDict)\b|using namespace torch\b")
_NEEDS_PYTHON = re.compile(r"\bpy(bind11)?::|pybind11|PYBIND11|\bPy[A-Z_]|\bTHP|torch/csrc/|\bpython")
_INCLUDE = re.compile(r'#\s*include\s*([<"])([^>"]+)[>"]')
_HARMLESS = re.compile(r"#\s*pragma\s+once\b.*|#\s*ifndef\s+\w+|#\s*define\s+\w+")
_TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h$")
# A directory of the caller's with one of these has headers of its own in place of those in the prefix.
_SHADOWING = ("torch", "ATen", "c10", "pybind11", "Python.h")


def needs_whole(text: str) -> bool:
    """Whether a source names what only the whole of torch/extension.h has."""
    return bool(_NEEDS_WHOLE.search(text))


def prefix_of(text: str, path: Path | None, folders: Sequence[Path]) -> str | None:
    """Returns what can be put in front of a source without changing its meaning, or None.

    That is torch/extension.h if the source includes it before anything that could mean something to it:
    a macro, a declaration, another header of PyTorch.
    """
    if needs_whole(text) or any((folder / name).exists() for folder in folders for name in _SHADOWING):
        return None
    if not _starts_with_torch(text, path, folders, 0):
        return None
    return "module" if _NEEDS_PYTHON.search(text) else "code"


def _starts_with_torch(text: str, path: Path | None, folders: Sequence[Path], depth: int) -> bool:
    for line in without_comments(text).splitlines():
        line = line.strip()
        found = _INCLUDE.fullmatch(line)
        if found and found[2] == "torch/extension.h":
            return True
        if found and found[1] == '"' and not _TORCH.match(found[2]):
            header = _find(found[2], path, folders)
            return bool(
                header
                and depth < 8
                and _starts_with_torch(header.read_text(errors="replace"), header, folders, depth + 1)
            )
        if line and not (found and not _TORCH.match(found[2])) and not (depth and _HARMLESS.fullmatch(line)):
            return False
    return False


def _find(name: str, path: Path | None, folders: Sequence[Path]) -> Path | None:
    places = [*([path.parent] if path else []), *folders]
    return next((place / name for place in places if (place / name).is_file()), None)


def without_comments(text: str) -> str:
    """Returns C++ without comments; strings stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    return re.sub(pattern, lambda m: m[1] or " ", text, flags=re.DOTALL)
