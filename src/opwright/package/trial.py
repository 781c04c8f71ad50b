"""Puts the kernels of a wheel under the operators of its sources, so that what is checked is what users get."""

from __future__ import annotations

import ctypes
import json
import platform
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opwright.backends import cpu
from opwright.backends.registry import device_types
from opwright.build.load import open_library
from opwright.contract.schema import interface_of
from opwright.dispatch import kernels, registry
from opwright.errors import PackageError

if TYPE_CHECKING:
    from opwright.dispatch.operator import Operator

_folders: list[tempfile.TemporaryDirectory] = []  # a loaded library's file stays till the process ends


@dataclass
class WheelLibrary:
    """The library of a wheel, in the place of one that was built here."""

    handle: ctypes.PyDLL
    variants: dict[str, str]

    def register(self, backend: str) -> None:
        """Makes its kernels for a backend the ones that the dispatcher calls."""
        if self.handle.opwright_register(self.variants[backend].encode()) != 0:
            raise PackageError(self.variants[backend], "PyTorch refuses its kernels")

    def unregister(self, backend: str) -> None:
        """Takes its kernels back."""
        self.handle.opwright_unregister(self.variants[backend].encode())


def use_wheel(wheel: Path, operators: Iterable[Operator], level: str = "") -> None:
    """Lets operators, and their backward, run the kernels of a wheel; where it has none, their references run.

    Args:
        wheel: made by `opwright wheel` from the sources of the operators.
        level: which CPU kernels, "v3"; the best for this machine unless given.

    Raises:
        PackageError: it is not a wheel of these operators, or cannot run here.
    """
    made, path = _unpacked(wheel)
    if made["machine"] != platform.machine():
        raise PackageError(
            str(wheel),
            "it is for another platform",
            rows=[("wheel", made["machine"]), ("here", platform.machine())],
        )
    handle = open_library(path)
    handle.opwright_level.restype = ctypes.c_char_p
    best = handle.opwright_level().decode()
    usable = made["levels"][: made["levels"].index(best) + 1] if best else []
    if level and level not in usable:
        raise PackageError(
            str(wheel),
            f"its CPU kernels for `{level}` cannot run here",
            rows=[("usable", ", ".join(usable) or "none")],
        )
    library = WheelLibrary(
        handle, {**{b: b for b in device_types()}, cpu.BACKEND.device_type: cpu.variant_of(level or best)}
    )
    registered: set[str] = set()
    for operator in _with_backward(operators):
        held = made["operators"].get(operator.declaration.qualified_name)
        schema = interface_of(operator.contract, operator.declaration.name)
        if held is None or held["schema"] != schema:
            raise PackageError(
                operator.declaration.name, "the wheel was made from other sources",
                rows=[("here", schema), ("wheel", held["schema"] if held else "no such operator")],
                hint="`opwright wheel` makes it anew",
            )  # fmt: skip
        backends = [b for b in held["backends"] if b != cpu.BACKEND.device_type or usable]
        for backend in backends:
            if backend not in registered:
                library.register(backend)
                registered.add(backend)
        kernels.adopt(operator, dict.fromkeys(backends, library))
    kernels.offer(
        {
            (name, held["schema"]): dict.fromkeys(registered.intersection(held["backends"]), library)
            for name, held in made["operators"].items()
            if name not in registry.operators and registered.intersection(held["backends"])
        }
    )


def _unpacked(wheel: Path) -> tuple[dict[str, Any], Path]:
    """Returns what a wheel's library holds, and where it lies now."""
    folder = tempfile.TemporaryDirectory(prefix="opwright_")
    _folders.append(folder)
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith("/_opwright/provenance.json"))
            made = json.loads(archive.read(name))
            return made, Path(archive.extract(name.replace("provenance.json", "library.so"), folder.name))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        raise PackageError(str(wheel), "it is not a wheel of operators", hint="`opwright wheel` makes one") from None


def _with_backward(operators: Iterable[Operator]) -> Iterable[Operator]:
    for operator in operators:
        yield operator
        if operator.backward_operator is not None:
            yield operator.backward_operator
