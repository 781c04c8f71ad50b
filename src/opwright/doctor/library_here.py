"""A shared library beside what this machine has for it: what is loaded with it, what it lacks, whose it is."""

from __future__ import annotations

import os
import re
from functools import cached_property
from importlib import metadata
from pathlib import Path

from opwright.build.elf import SharedLibrary, read_library
from opwright.doctor import loader
from opwright.doctor.installed_torch import InstalledTorch, find_torch
from opwright.errors import LoadError


class LibraryHere:
    """A library, and what there is for it on this machine."""

    def __init__(self, library: SharedLibrary) -> None:
        self.library = library
        self.torch: InstalledTorch | None = find_torch()
        self.path = Path(os.path.abspath(library.path))

    @cached_property
    def closure(self) -> loader.Closure:
        return loader.closure_of(self.library, loader.torch_folders(self.torch.folder) if self.torch else ())

    @cached_property
    def missing(self) -> list[str]:
        """The symbols that nothing which is loaded with it has."""
        process = loader.process_closure()
        unknown = () if process.found else self.library.python_symbols
        present = (self.closure.defined, process.defined, unknown, self.brought_by_torch)
        needed = (symbol.name for symbol in self.library.undefined if not symbol.is_weak)
        return [name for name in needed if not any(name in names for names in present)]

    @cached_property
    def brought_by_torch(self) -> frozenset[str]:
        """The symbols that `import torch` makes visible to all: of OpenMP, the C++ library, CUDA's runtime."""
        if self.torch is None or not self.needs_torch:
            return frozenset()
        try:
            library = read_library(self.torch.libraries / "libtorch_global_deps.so")
        except LoadError:
            return frozenset()
        return loader.closure_of(library, loader.torch_folders(self.torch.folder)).defined

    @cached_property
    def owner(self) -> metadata.Distribution | None:
        """The installed package that the file belongs to."""
        for distribution in metadata.distributions(path=[str(folder) for folder in self.path.parents]):
            root = Path(os.path.abspath(str(distribution.locate_file(""))))
            listed = distribution.read_text("RECORD") or ""
            if self.path.is_relative_to(root) and f"{self.path.relative_to(root).as_posix()}," in listed:
                return distribution
        return None

    @property
    def needs_torch(self) -> bool:
        library = self.library
        named = any(name.startswith(("libtorch", "libc10")) for name in library.needed)
        return named or bool(library.unstable_torch_symbols or library.stable_torch_symbols)

    @property
    def is_stored(self) -> bool:
        """Whether it is in Opwright's store, where files do not carry the names of their modules."""
        return self.path.name in ("library.so", "extension.so") and self.path.with_name("record.json").exists()

    @cached_property
    def built_for_torch(self) -> tuple[str, str]:
        """The torch that it was built for, as "2.4", and what tells it; "" where nothing does."""
        if self.owner is None:
            return "", ""
        for requirement in self.owner.requires or ():
            pinned = re.match(r"torch\s*\(?==\s*([\d.]+)", requirement)
            if pinned:
                return pinned[1], f"{self.owner.name} requires torch=={pinned[1]}"
        named = re.search(r"(?:torch|pt)(\d)\.?(\d+)", self.owner.version)  # 2.6.3+cu12torch2.4cxx11abiFALSE
        return (f"{named[1]}.{named[2]}", f"{self.owner.name} {self.owner.version}") if named else ("", "")

    @property
    def rebuild(self) -> str:
        """The command that builds or installs it again, for what is here."""
        if self.owner is not None:
            name = self.owner.name
            if name == "torch":
                return f"`pip install --force-reinstall --no-cache-dir torch=={self.owner.version}`"
            return f"`pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation {name}`"
        if self.is_stored:
            return "`opwright cache clean`, and it is built again when it is next used"
        jit = re.match(r"(.*/torch_extensions/(?:py\w+/)?[^/]+)/", str(self.path))
        if jit:
            return f"`rm -r {jit[1]}`, and the next `load` builds it again"
        return "build it again: `pip install --no-build-isolation --force-reinstall .` in its project"
