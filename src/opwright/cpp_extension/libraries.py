"""Loads the libraries of extensions, and replaces one that registers operators by its next version.

A library built here registers nothing while it is loaded (native/extension/opwright_registration.h): it is
asked to afterwards, so that what is wrong is an exception, and an earlier version is asked to take
back what it registered. Nothing is ever unloaded: code of the earlier version may still be running.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from opwright.build.elf import read_library
from opwright.build.store import digest_of
from opwright.cpp_extension.explain import import_error, namespace_taken
from opwright.errors import LoadError

if TYPE_CHECKING:
    import torch

_MISMATCH = re.compile(r"Mismatch in kernel C\+\+ signatures\s+operator: ([\w:.]+)")
_NEW_PROCESS = "start Python again (in a notebook, restart the kernel): the edited version is then the first one"
_lock = threading.RLock()
_loaded: dict[str, _Library] = {}  # by path
_imported: dict[str, Path] = {}  # where the module is that has a name to itself
_kept_alive: dict[str, torch.library.Library] = {}  # by qualified name of an operator


@dataclass
class _Library:
    """A loaded library; `handle` has the three functions only if `registers`."""

    name: str
    handle: ctypes.CDLL
    registers: bool
    lines: list[str]  # what it registers: "DEF namespace" or "USE namespace"
    has_classes: bool  # registers custom classes, which PyTorch never takes back
    active: bool = False

    @property
    def namespaces(self) -> set[str]:
        return {line[4:] for line in self.lines}

    @property
    def owned(self) -> set[str]:
        """The namespaces that it has the TORCH_LIBRARY of."""
        return {line[4:] for line in self.lines if line.startswith("DEF")}

    def replaces(self, other: _Library) -> bool:
        return other.active and other is not self and other.name == self.name


def load_library(name: str, path: Path) -> None:
    """Loads a library; what it registers with PyTorch replaces what an earlier version registered.

    A version of an extension has its name: under another one, a namespace has a second TORCH_LIBRARY.

    Raises:
        LoadError: it cannot be loaded, or what it registers is refused. The earlier version stays.
    """
    import torch

    with _lock:
        library = _loaded.get(str(path)) or _open(name, path)
        if library.registers and not library.active:
            for other in _loaded.values():
                if other.active and other.name != library.name and library.owned & other.owned:
                    raise namespace_taken(name, min(library.owned & other.owned), other.name)
            earlier = [other for other in _loaded.values() if library.replaces(other)]
            if any(other.has_classes and library.namespaces & other.namespaces for other in earlier):
                raise LoadError(
                    name,
                    "it registers a custom class, and PyTorch cannot replace one within a process",
                    rows=[("stays", "the version that is loaded")],
                    hint=_NEW_PROCESS,
                )
            _replace(library, earlier, path)
        torch.ops.loaded_libraries.add(str(path))


def load_module(name: str, path: Path) -> ModuleType:
    """Loads a library as a Python module.

    Raises:
        LoadError: it cannot be loaded, or is not a module of this name.
    """
    load_library(name, path)
    spec = importlib.util.spec_from_file_location(_spec_name(name, path), path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        module.__name__ = name  # before the module's classes take it as their `__module__`
        spec.loader.exec_module(module)
    except ImportError as error:
        raise import_error(name, path, error) from error
    spec.name, module.__package__ = name, ""
    return module


def _spec_name(name: str, path: Path) -> str:
    """Returns a name for the spec of a module, whose last part Python asks the library for: PyInit_<name>.

    pybind11 3 returns the module that it made first for the name of a spec, so each library has a name of its own.
    The one that `import name` would find has that name itself: an import is then given the same module.
    """
    other = sys.modules.get(name)
    is_free = other is None or getattr(other, "__file__", None) == str(path)
    if path.stem == name and is_free and _imported.setdefault(name, path) == path:
        return name
    return f"opwright_{digest_of(bytes(path))}.{name}"


def _open(name: str, path: Path) -> _Library:
    os.environ["OPWRIGHT_LOADS"] = str(path)
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise import_error(name, path, error) from error
    finally:
        del os.environ["OPWRIGHT_LOADS"]
    registers = hasattr(handle, "opwright_register")
    lines: list[str] = []
    has_classes = False
    if registers:
        for function in (handle.opwright_register, handle.opwright_registrations):
            function.restype = ctypes.c_char_p
        lines = handle.opwright_registrations().decode().splitlines()
        has_classes = any("10class_base" in symbol.name for symbol in read_library(path).undefined)
    library = _loaded[str(path)] = _Library(name, handle, registers, lines, has_classes)
    return library


def _replace(library: _Library, earlier: list[_Library], path: Path) -> None:
    namespaces = library.namespaces.union(*(other.namespaces for other in earlier))
    before = _schemas(namespaces) if earlier else {}
    for other in earlier:
        for operator in _schemas(other.namespaces):
            _keep_alive(operator)
        other.handle.opwright_release()
        other.active = False
    error = library.handle.opwright_register()
    entries = set(before)
    while error and (found := _MISMATCH.search(error.decode(errors="replace"))) and found[1] in entries:
        # PyTorch's entry of an operator accepts one C++ signature as long as it lives.
        entries.remove(found[1])
        _let_die(found[1])
        error = library.handle.opwright_register()
    library.active = error is None
    for other in earlier if error else ():
        other.active = other.handle.opwright_register() is None
    if before:
        _forget(before, _schemas(namespaces))
    if error:
        # PyTorch appends where in its own code it noticed.
        text = error.decode(errors="replace").split("\nException raised from")[0].strip()
        if "Only a single TORCH_LIBRARY" in text:
            raise import_error(library.name, path, RuntimeError(text))
        raise LoadError(
            library.name,
            "PyTorch refuses what it registers",
            body=text,
            rows=[("library", str(path))],
            hint=_NEW_PROCESS if text.startswith("Custom class") else "correct the TORCH_LIBRARY, and call again",
        )


def _schemas(namespaces: set[str]) -> dict[str, str]:
    """Returns the schemas of the operators in namespaces, by qualified name."""
    from opwright import _torch

    found = {}
    for schema in _torch.all_schemas():
        if schema.name.partition("::")[0] in namespaces:
            name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
            found[name] = str(schema)
    return found


def _keep_alive(operator: str) -> None:
    """Keeps PyTorch's entry of an operator, which others point to, while no version of it is registered."""
    import torch

    if operator not in _kept_alive:
        library = torch.library.Library(operator.partition("::")[0], "IMPL", "Vulkan")
        library.impl(operator.partition("::")[2], torch.library.fallthrough_kernel)
        _kept_alive[operator] = library


def _let_die(operator: str) -> None:
    """Lets PyTorch drop its entry of an operator; what Python has of it says so, instead of reading freed memory."""
    import torch

    from opwright import _torch

    namespace, _, name = operator.partition("::")
    packet = vars(getattr(torch.ops, namespace)).pop(name.partition(".")[0], None)
    overloads = [v for v in vars(packet).values() if isinstance(v, _torch.OpOverload)] if packet else []
    for entry in [packet, *overloads] if packet else ():
        _torch.replace_direct_entry(entry, functools.partial(_refuse, operator))
    library = _kept_alive.pop(operator, None)
    if library:
        _torch.destroy_library(library)


def _refuse(operator: str, *args: object, **kwargs: object) -> None:
    raise RuntimeError(
        f"{operator} was replaced by a version with another signature: use torch.ops.{operator.replace('::', '.')} anew"
    )


def _forget(before: dict[str, str], after: dict[str, str]) -> None:
    """Drops what torch.ops remembers of operators whose schema is another one now."""
    import torch

    for operator, schema in before.items():
        if after.get(operator) != schema:
            namespace, _, name = operator.partition("::")
            vars(getattr(torch.ops, namespace)).pop(name.partition(".")[0], None)
