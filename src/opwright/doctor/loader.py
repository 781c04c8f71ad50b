"""Where the dynamic loader finds the libraries that another needs, without loading any."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opwright.build.elf import SharedLibrary, read_library
from opwright.errors import LoadError

_DEFAULT_FOLDERS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib")
_CACHE_TAGS = {"x86_64": "x86-64", "aarch64": "AArch64"}


@dataclass
class Closure:
    """A library and all that is loaded with it.

    Attributes:
        found: name -> library, in the order in which symbols are looked up.
        late: the names that only `import torch`, done before, brings.
        absent: name -> the names of those that need it.
    """

    found: dict[str, SharedLibrary] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)
    absent: dict[str, list[str]] = field(default_factory=dict)

    @functools.cached_property
    def defined(self) -> frozenset[str]:
        """The names of all symbols inside."""
        return frozenset().union(*(library.defined for library in self.found.values()))


def closure_of(library: SharedLibrary, late_folders: Sequence[Path] = ()) -> Closure:
    """Returns what is loaded with a library.

    Args:
        late_folders: where `import torch` loads libraries from, which are then found by their names.
    """
    closure = Closure()
    waiting = deque([(library, name, library.inherited_search) for name in library.needed])
    while waiting:
        parent, name, inherited = waiting.popleft()
        if name in closure.found:
            continue
        if name in closure.absent:
            closure.absent[name].append(parent.path.name)
            continue
        found = _first(name, _folders(parent, inherited), library.machine)
        if found is None:
            found = _first(name, map(str, late_folders), library.machine)
            if found is not None and parent is library:
                closure.late.append(name)
        if found is None:
            closure.absent[name] = [parent.path.name]
            continue
        closure.found[name] = found
        waiting.extend((found, more, (*found.inherited_search, *inherited)) for more in found.needed)
    return closure


@functools.cache
def process_closure() -> Closure:
    """Returns what this Python's own process has loaded from the start: libpython, libc, ...; empty where it cannot be read."""
    try:
        program = read_library(Path(sys.executable).resolve())
    except LoadError:  # embedded, or not an ELF system
        return Closure()
    closure = closure_of(program)
    closure.found = {program.path.name: program, **closure.found}
    return closure


def torch_folders(torch_folder: Path) -> list[Path]:
    """Returns the folders that `import torch` loads libraries from: its own and those of nvidia's packages."""
    site = torch_folder.parent
    return [torch_folder / "lib", *sorted(site.glob("nvidia/*/lib"))]


def _folders(parent: SharedLibrary, inherited: Iterable[str]) -> Iterable[str]:
    if not parent.search:
        yield from inherited
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    yield from parent.search


def _first(name: str, folders: Iterable[str], machine: str) -> SharedLibrary | None:
    """Returns the first library of that name that is whole and for this machine."""
    if "/" in name:
        places = [name]
    else:
        listed = _cache(machine).get(name, [])
        places = [
            *(os.path.join(f, name) for f in folders),
            *listed,
            *(f"{f}/{name}" for f in _DEFAULT_FOLDERS),
        ]
    for place in places:
        if os.path.exists(place):
            found = _read(os.path.realpath(place))
            if found is not None and found.machine == machine:
                return found
    return None


@functools.cache
def _read(place: str) -> SharedLibrary | None:
    try:
        return read_library(Path(place))
    except LoadError:
        return None


@functools.cache
def _cache(machine: str) -> dict[str, list[str]]:
    """Returns what ld.so.cache lists for a machine."""
    try:
        listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, list[str]] = {}
    for name, tags, path in re.findall(r"^\s(\S+) \((.*?)\) => (.+)$", listed, re.MULTILINE):
        if _CACHE_TAGS.get(machine, "") in tags:
            found.setdefault(name, []).append(path)
    return found
