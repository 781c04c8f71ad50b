"""The torch of this Python, read from its files: importing it takes a second, and a broken one cannot be."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from opwright.build.elf import SharedLibrary, read_library
from opwright.errors import LoadError


@dataclass(frozen=True)
class InstalledTorch:
    """The torch that `import torch` imports.

    Attributes:
        version: as "2.13.0+cpu".
        cuda: the CUDA it was built with, as "13.0"; "" for none.
    """

    folder: Path
    version: str
    cuda: str
    is_rocm: bool

    @property
    def libraries(self) -> Path:
        return self.folder / "lib"

    @property
    def number(self) -> tuple[int, int]:
        """Major and minor version."""
        major, minor = re.findall(r"\d+", self.version)[:2]
        return int(major), int(minor)

    @cached_property
    def has_cxx11_abi(self) -> bool:
        """What `torch._C._GLIBCXX_USE_CXX11_ABI` says, told by the symbols of libc10."""
        return read_library(self.libraries / "libc10.so").has_cxx11_abi is not False

    @cached_property
    def python_part(self) -> SharedLibrary | None:
        """The library that is bound to one version of Python."""
        try:
            return read_library(self.libraries / "libtorch_python.so")
        except LoadError:
            return None


def find_torch() -> InstalledTorch | None:
    """Returns the torch of this Python, or None; it is not imported."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # a stand-in without a spec
        return None
    for place in (spec and spec.submodule_search_locations) or ():
        facts = _assigned(Path(place) / "version.py")
        if facts.get("__version__"):
            cuda, rocm = facts.get("cuda") or "", facts.get("hip")
            return InstalledTorch(Path(place), str(facts["__version__"]), str(cuda), bool(rocm))
    return None


def _assigned(path: Path) -> dict[str, object]:
    """Returns the constants that a module assigns."""
    try:
        tree = ast.parse(path.read_text())
    except (OSError, SyntaxError, ValueError):
        return {}
    found = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found


def install_build(build: str, wanted: str = "torch") -> str:
    """Returns the command that installs a build of torch, such as "cu130"; PyPI has one for each version."""
    return f"`pip install --force-reinstall {wanted} --index-url https://download.pytorch.org/whl/{build}`"


def build_for(cuda: str) -> str:
    """Returns the name of torch's build for a CUDA, "13.0" or "12"; "" for the newest."""
    # One per major version: torch runs with every CUDA driver of its own major version.
    return exact_build_for({"11": "11.8", "12": "12.6"}.get(cuda.partition(".")[0], "13.0"))


def exact_build_for(cuda: str) -> str:
    """Returns the name of torch's build for just that CUDA, "12.1"."""
    return f"cu{cuda.replace('.', '')}"
