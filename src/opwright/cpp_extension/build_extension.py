"""`BuildExtension`, `CppExtension` and `CUDAExtension` for setuptools."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import setuptools
import torch
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError
from torch.utils import cpp_extension as torchs

from opwright.backends import cuda
from opwright.backends.flag_paths import absolute
from opwright.backends.toolchain import Compiler, identify, strip_launcher
from opwright.build import compile_commands
from opwright.build.changes import Watch, build_unchanged
from opwright.build.store import Entry, Store
from opwright.cpp_extension.extension import cpp_flags, cuda_flags, find_nvcc
from opwright.cpp_extension.objects import (
    Objects,
    Source,
    environment_folders,
    read_named_source,
    system_includes,
    torch_folder,
)
from opwright.errors import BuildError, NoCompilerError

_LANGUAGES = {".c": "c", ".cu": "cuda"}  # all else is C++
_LIMITED_API = f"-DPy_LIMITED_API={torchs.min_supported_cpython}"  # the oldest Python that torch supports
# Held while the compiler, which the threads of `build_ext -j` share, compiles for one extension.
_building = threading.Lock()


def CppExtension(name: str, sources: Sequence[str], *args: Any, **kwargs: Any) -> setuptools.Extension:
    """Returns a `setuptools.Extension` for C++, with torch's headers and libraries; lists given are not changed."""
    if not _is_own():
        return torchs.CppExtension(name, list(sources), *args, **_copied(kwargs))
    libraries = ["c10", "torch", "torch_cpu", *([] if kwargs.get("py_limited_api") else ["torch_python"])]
    return _extension(name, sources, args, kwargs, torchs.include_paths(), torchs.library_paths(), libraries)


def CUDAExtension(name: str, sources: Sequence[str], *args: Any, **kwargs: Any) -> setuptools.Extension:
    """Returns a `setuptools.Extension` for C++ and CUDA; lists given are not changed.

    It needs nvcc and no GPU, and can be built where torch has no CUDA.
    """
    if not _is_own():
        return torchs.CUDAExtension(name, list(sources), *args, **_copied(kwargs))
    if kwargs.get("dlink") or kwargs.get("dlink_libraries"):  # device code linked across sources
        extension = torchs.CUDAExtension(name, list(sources), *args, **_copied(kwargs))
        extension.opwright_leaves = True  # pyright: ignore[reportAttributeAccessIssue]: a mark for `BuildExtension`
        return extension
    nvcc = find_nvcc(name, Store())
    libraries = ["c10", "torch", "torch_cpu", *([] if kwargs.get("py_limited_api") else ["torch_python"])]
    libraries += [
        "cudart",
        *(n for n in ("c10_cuda", "torch_cuda") if (torch_folder() / "lib" / f"lib{n}.so").exists()),
    ]
    more_includes, more_folders = environment_folders()
    includes = [*(str(path) for path in system_includes(nvcc)[:-1]), *more_includes]
    folders = [*torchs.library_paths(), str(nvcc.cudart), *more_folders]
    return _extension(name, sources, args, kwargs, includes, folders, libraries)


def _extension(
    name: str,
    sources: Sequence[str],
    args: tuple,
    kwargs: dict[str, Any],
    include_dirs: list[str],
    library_dirs: list[str],
    libraries: list[str],
) -> setuptools.Extension:
    kwargs = _copied(kwargs)
    kwargs["include_dirs"] = [*(kwargs.get("include_dirs") or []), *include_dirs]
    kwargs["library_dirs"] = [*(kwargs.get("library_dirs") or []), *library_dirs]
    kwargs["libraries"] = [*(kwargs.get("libraries") or []), *libraries]
    kwargs["language"] = "c++"
    return setuptools.Extension(name, list(sources), *args, **kwargs)


class BuildExtension(torchs.BuildExtension):
    """Setuptools' `build_ext` that compiles through Opwright's cache: `torch.utils.cpp_extension.BuildExtension`.

    An unchanged source is compiled once, whatever the checkout or build directory; torch's headers are
    precompiled; CUDA is compiled without a GPU and without a CUDA build of torch. Options as PyTorch's
    (`with_options(use_ninja=..., no_python_abi_suffix=...)`); ninja is not used. ROCm, SYCL and systems other
    than Linux are left to PyTorch's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # PyTorch's warns where there is no ninja, which is not needed.
        super().__init__(
            *args, **{**kwargs, "use_ninja": kwargs.get("use_ninja", True) and torchs.is_ninja_available()}
        )

    def finalize_options(self) -> None:
        super().finalize_options()
        self.force = True  # the store knows what is up to date, by content; times say nothing

    def build_extensions(self) -> None:
        sources = [source for extension in self.extensions for source in extension.sources]
        leaves = any(getattr(extension, "opwright_leaves", False) for extension in self.extensions)
        if leaves or not _is_own() or any(source.endswith((".sycl", ".mm", ".hip")) for source in sources):
            super().build_extensions()
            return
        if ".cu" not in self.compiler.src_extensions:
            self.compiler.src_extensions = [*self.compiler.src_extensions, ".cu", ".cuh"]
        build_ext.build_extensions(self)

    def build_extension(self, extension: setuptools.Extension) -> None:
        if not _is_own() or getattr(extension, "opwright_leaves", False):
            super().build_extension(extension)
            return
        with _building:  # one extension after another; the sources of each are compiled side by side
            own = vars(self.compiler).get("compile")
            self.compiler.compile = lambda *args, **kwargs: self._compile(extension, *args, **kwargs)
            try:
                super().build_extension(extension)
            except BuildError as error:  # setuptools goes on without an optional extension for errors of its own
                raise CompileError(str(error)) from error
            finally:
                del self.compiler.compile
                if own:
                    self.compiler.compile = own

    def _compile(
        self,
        extension: setuptools.Extension,
        sources: Sequence[str],
        output_dir: str | None = None,
        macros: Any = None,
        include_dirs: Sequence[str] | None = None,
        debug: bool = False,
        extra_preargs: Sequence[str] | None = None,
        extra_postargs: Any = None,
        depends: Any = None,
    ) -> list[str]:
        """Stands in for the compiler's `compile`; returns the object files, in the places that setuptools wants."""
        given = (
            extra_postargs if isinstance(extra_postargs, Mapping) else {"cxx": extra_postargs, "nvcc": extra_postargs}
        )
        _, objects, _, options, _ = self.compiler._setup_compile(output_dir, macros, include_dirs, sources, depends, [])
        common = [*(extra_preargs or []), *(["-g"] if debug else [])]
        options, folders = _split(options)
        store = Store()
        folders = [os.path.abspath(folder) for folder in folders]
        has_cuda = any(_language(source) == "cuda" for source in sources)
        nvcc = find_nvcc(extension.name, store) if has_cuda else cuda.find_nvcc(store.identities)
        apart = {str(path) for path in system_includes(nvcc)}
        names_cuda = not apart.difference(map(str, system_includes(None))).isdisjoint(folders)
        if not has_cuda and not names_cuda:  # sources in C++ alone may be of a `CUDAExtension`, too
            nvcc = None
        own_folders = tuple(Path(folder) for folder in folders if folder not in apart)
        command = list(self.compiler.compiler_so)
        cxx_command = list(getattr(self.compiler, "compiler_so_cxx", None) or [])
        compiler = _compiler(cxx_command or command, store)
        limited = [_LIMITED_API] if getattr(extension, "py_limited_api", False) else []  # behind another of the caller
        made = []
        for source in sources:
            language = _language(source)
            path = Path(os.path.abspath(source))
            if language == "cuda":
                flags = cuda_flags([*common, *options, *(given.get("nvcc") or []), *limited])
            else:
                base = _base_flags(command, cxx_command if language == "cpp" else [])
                flags = (*base, *common, *options, *(given.get("cxx") or []), *limited)
                flags = (
                    cpp_flags(flags) if language == "cpp" else tuple(f for f in flags if not f.startswith("-std=c++"))
                )
            flags = tuple(f for f in absolute(flags, os.getcwd()) if not f.startswith("-DTORCH_EXTENSION_NAME="))
            text = read_named_source(extension.name, source)
            made.append(Source(language, text, path, flags, own_folders, extension.name.split(".")[-1]))

        def compile_all(watch: Watch) -> tuple[list[Entry], dict[str, float]]:
            now = [source.as_it_is_now() for source in made]
            with store.work() as work:
                compiling = Objects(extension.name, compiler, nvcc, store, work, watch, shows_warnings=True)
                compile_commands.record(
                    compile_commands.from_compiler(command, work, path) for path, command in compiling.commands(now)
                )
                try:
                    return compiling.compile(now)
                except BuildError as error:
                    rows = [tuple(map(_name_arguments, row)) for row in error.rows]
                    hint = _name_arguments(error.hint)
                    raise type(error)(error.subject, error.rule, rows=rows, body=error.body, hint=hint) from None

        entries, seconds = build_unchanged(extension.name, compile_all)
        known = len(entries) - len(seconds)
        print(f"{extension.name}: {len(seconds)} compiled, {known} taken from the cache", file=sys.stderr)
        for entry, place in zip(entries, objects, strict=True):
            os.makedirs(os.path.dirname(place), exist_ok=True)
            shutil.copyfile(entry.library, place)
        return objects


def _language(source: str) -> str:
    return _LANGUAGES.get(os.path.splitext(source)[1], "cpp")


def _name_arguments(text: str) -> str:
    """Returns a text about arguments of `load` with the names that they have in a `setup.py`."""
    for name, key in (("extra_cuda_cflags", "nvcc"), ("extra_cflags", "cxx")):
        text = re.sub(rf"{name}=(\[[^]]*\])", rf'extra_compile_args={{"{key}": \1}}', text)
        text = text.replace(name, f'extra_compile_args["{key}"]')
    return text.replace("extra_include_paths", "include_dirs").replace("with_cuda=True", "CUDAExtension")


def _split(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns preprocessor options, and the directories of -I among them apart."""
    return [o for o in options if not o.startswith("-I")], [o[2:] for o in options if o.startswith("-I")]


def _base_flags(command: Sequence[str], cxx_command: Sequence[str]) -> list[str]:
    """Returns the flags of setuptools' commands: those for C, which PyTorch takes for C++ too, and what CXX adds.

    The -g that Python was built with is omitted; one that the environment asks for stays. Debug information is four
    fifths of an object, and ties it to its place.
    """
    pythons = " ".join(str(sysconfig.get_config_var(name) or "") for name in ("CFLAGS", "CCSHARED")).split()
    asked = _words_of("CXX", "CXXFLAGS")
    flags = strip_launcher(command)[1:]
    flags += [flag for flag in strip_launcher(cxx_command)[1:] if flag not in pythons or flag in asked]
    asked += _words_of("CC", "CFLAGS", "CPPFLAGS")
    return [flag for flag in flags if flag in asked or not re.fullmatch(r"-g[0-3]?", flag)]


def _words_of(*variables: str) -> list[str]:
    return shlex.split(" ".join(os.environ.get(name, "") for name in variables))


def _compiler(command: Sequence[str], store: Store) -> Compiler:
    """Returns the compiler that setuptools calls; ccache and the like are put before it later."""
    words = strip_launcher(command)
    path = shutil.which(words[0])
    if path is None:
        raise NoCompilerError(
            words[0],
            "the C++ compiler that setuptools calls is not there",
            hint="`export CC=gcc CXX=g++`, or install it",
        )
    return Compiler(path, identify(path, store.identities))


def _is_own() -> bool:
    """Whether Opwright's own can build here."""
    return sys.platform.startswith("linux") and torch.version.hip is None


def _copied(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, list) else dict(v) if isinstance(v, dict) else v for k, v in kwargs.items()}
