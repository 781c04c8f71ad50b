"""Which of PyTorch's headers a source needs, and whether they can be there before it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from opwright.backends.toolchain import NATIVE

EXTENSION = NATIVE / "extension"  # lighter headers of PyTorch's names, found before PyTorch's own
WHOLE = "-DOPWRIGHT_WHOLE_TORCH"

# What a source can have in front of it, and the file of native/extension/prefix that is put there:
#   code      torch/extension.h without Python: `WITHOUT_PYTHON` then omits it where the source includes it
#   all       torch/all.h
#   module    torch/extension.h
#   bindings  what generated bindings need
KINDS = {"code": "all", "all": "all", "module": "module", "bindings": "bindings"}
WITHOUT_PYTHON = "-DOPWRIGHT_WITHOUT_PYTHON"

_NEEDS_WHOLE = re.compile(r"torch::(nn|data|optim|jit|serialize|save|load|OrderedDict)\b|using namespace torch\b")
_NEEDS_PYTHON = re.compile(r"\bpy(bind11)?::|pybind11|PYBIND11|\bPy[A-Z_]|\bTHP|torch/csrc/|\bpython")
_INCLUDE = re.compile(r'#\s*include\s*([<"])([^>"]+)[>"]')
_PYTHON_INCLUDE = re.compile(r"^\s*#\s*ifdef\s+\w*PYTHON\w*\s+#\s*include\s*<Python\.h>\s+#\s*endif\s*$", re.MULTILINE)
_GUARD = re.compile(r"#\s*ifndef\s+(\w+)\s+#\s*define\s+\1\s*$", re.MULTILINE)
_ONCE = re.compile(r"#\s*pragma\s+once\b.*")
_TORCH = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h$")
# Headers of PyTorch and Python that mean the same whether they stand before or after those in the prefix.
_ANY_ORDER = re.compile(r"(ATen|c10)/|torch/(types|library|python|version|cuda|autograd)\.h$|Python\.h$")
# The headers that a prefix has, and whether Python's are among them.
_PREFIXED = {"torch/extension.h": True, "torch/torch.h": True, "torch/all.h": False, "torch/script.h": False}
# A directory of the caller's with one of these has headers of its own in place of those in the prefix.
_SHADOWING = ("torch", "ATen", "c10", "pybind11", "Python.h")


def needs_whole(text: str) -> bool:
    """Returns whether a source names something that only PyTorch's whole headers have."""
    return bool(_NEEDS_WHOLE.search(text))


def prefix_of(text: str, path: Path | None, folders: Sequence[Path]) -> str | None:
    """Returns the kind of prefix (`KINDS`) that can stand in front of a source without changing its meaning, or None.

    There is one if the source includes one of `_PREFIXED` before any macro, declaration or header that contains one.
    """
    if needs_whole(text) or any((folder / name).exists() for folder in folders for name in _SHADOWING):
        return None
    found: set[str] = set()
    _scan(text, path, folders, found, 0)
    if any(_PREFIXED[name] for name in found):
        return "module" if _NEEDS_PYTHON.search(text) else "code"
    return "all" if found else None


def _scan(text: str, path: Path | None, folders: Sequence[Path], found: set[str], depth: int) -> bool:
    """Adds those of `_PREFIXED` that stand before anything else; returns whether there is nothing else."""
    text = _PYTHON_INCLUDE.sub("", without_comments(text))
    guard = _GUARD.match(text.lstrip())
    if depth and guard and path and _letters(path.stem) in _letters(guard[1]):  # it has the name of its file
        text = re.sub(r"#\s*endif\s*$", "", text.strip()[guard.end() :])
    for line in map(str.strip, text.splitlines()):
        include = _INCLUDE.fullmatch(line)
        mark, name = (include[1], include[2]) if include else ("", "")
        header = _find(name, path if mark == '"' else None, folders) if include else None
        if header:
            if depth == 8 or not _scan(header.read_text(errors="replace"), header, folders, found, depth + 1):
                return False
        elif name in _PREFIXED:
            found.add(name)
        elif line and not (
            (mark == "<" and not _TORCH.match(name))  # of the system
            or _ANY_ORDER.match(name)
            or (depth and _ONCE.fullmatch(line))
        ):
            return False
    return True


def _letters(name: str) -> str:
    return re.sub(r"\W|_", "", name).lower()


def _find(name: str, path: Path | None, folders: Sequence[Path]) -> Path | None:
    places = [*([path.parent] if path else []), *folders]
    return next((place / name for place in places if (place / name).is_file()), None)


def without_comments(text: str) -> str:
    """Returns C++ without comments; strings stay."""
    pattern = r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')'
    return re.sub(pattern, lambda m: m[1] or " ", text, flags=re.DOTALL)
