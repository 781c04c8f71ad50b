"""Why the library of an extension cannot be imported, in the words of its author."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from opwright.build import whereabouts
from opwright.build.demangle import demangle
from opwright.build.elf import SharedLibrary, read_library
from opwright.cpp_extension.bindings import MODULE
from opwright.errors import LoadError, OpwrightError

_OPERATORS = re.compile(r"torch::Library|torch_library_init|aoti_torch_library")


def import_error(name: str, library_path: str | Path, error: BaseException) -> OpwrightError:
    """Returns the error for a library that was built and cannot be imported.

    Args:
        name: what the extension is loaded as.
        error: what Python's import or the system's loader raised.
    """
    for pattern, explain in _CAUSES:
        match = re.search(pattern, str(error))
        if match:
            return explain(match, name, Path(library_path))
    return LoadError(
        name,
        "its library cannot be loaded",
        rows=[("library", str(library_path)), ("reason", f"{type(error).__name__}: {error}")],
        hint=f"`opwright doctor {library_path}`",
    )


def _no_module(match: re.Match[str], name: str, path: Path) -> LoadError:
    library = _library(path)
    others = [found for found in library.module_names if found != MODULE] if library else []
    expected = ("expected", f"PyInit_{name}")
    if others:
        return LoadError(
            name,
            f"its PYBIND11_MODULE is called `{others[0]}`, and it is loaded as `{name}`",
            rows=[("it has", " ".join(f"PyInit_{other}" for other in others)), expected],
            hint=f'write `PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)`, or load it as `"{others[0]}"`',
        )
    if library and any(_OPERATORS.search(demangle(symbol.name)) for symbol in library.undefined):
        return LoadError(
            name,
            "it registers operators and is not a Python module",
            rows=[("it has", "TORCH_LIBRARY"), expected],
            hint="`is_python_module=False`, then `torch.ops.<namespace>.<operator>`",
        )
    return LoadError(
        name,
        "it has no PYBIND11_MODULE, so it is not a Python module",
        rows=[("it has", "no PyInit_ function"), expected],
        hint='`PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("f", &f); }` at the end of a source; '
        '`load_inline` writes it for `functions=["f"]`; `is_python_module=False` for a plain library',
    )


def _undefined_symbol(match: re.Match[str], name: str, path: Path) -> LoadError:
    symbol = demangle(match["symbol"])
    library = _library(path)
    base = _base_name(symbol)
    similar = sorted(
        shown for found in (library.defined if library else ()) if _base_name(shown := demangle(found)) == base
    )
    if similar:
        return LoadError(
            name,
            f"`{symbol}` is declared and used, and defined otherwise",
            rows=[("used", symbol), *(("defined", found) for found in similar[:3])],
            hint='the declaration and the definition must agree in parameters, namespace and `extern "C"`',
        )
    return LoadError(
        name,
        f"`{symbol}` is used and never defined",
        rows=[("library", str(path))],
        hint=whereabouts.of_symbol(symbol),
    )


def _absent_library(match: re.Match[str], name: str, path: Path) -> LoadError:
    needed = match["library"]
    if needed.startswith("libcuda.so"):
        hint = "the NVIDIA driver brings it: `nvidia-smi` says whether it is installed"
    else:
        found = whereabouts.of_library(needed.removeprefix("lib").split(".so")[0], _link_command(path))
        folder = re.search(r"-L([^\"]+)", found.hint)
        hint = f'`extra_ldflags=["-Wl,-rpath,{folder[1]}"]`' if folder else found.hint
    return LoadError(
        name,
        f"it is linked with `{needed}`, which the loader does not find",
        rows=[("library", str(path))],
        hint=hint,
    )


def _old_runtime(match: re.Match[str], name: str, path: Path) -> LoadError:
    if match["version"].startswith("GLIBC_"):
        hint = "it was built on a newer system: build it on this one"
    else:
        hint = (
            "the compiler's own is newer: `export LD_PRELOAD=$(c++ -print-file-name=libstdc++.so.6)`, or in conda "
            "`conda install libstdcxx-ng`"
        )
    return LoadError(
        name,
        f"it needs {match['version']}, which the `{Path(match['library']).name}` of this process does not have",
        rows=[("loaded", match["library"]), ("needed by", match["by"] or str(path))],
        hint=hint,
    )


def _namespace_twice(match: re.Match[str], name: str, path: Path) -> LoadError:
    namespace = match["namespace"]
    return LoadError(
        name,
        f"the namespace `{namespace}` has a TORCH_LIBRARY already",
        rows=[(kind, place) for kind, place in (("first", match["first"]), ("again", match["again"])) if place],
        hint=f"`TORCH_LIBRARY_FRAGMENT({namespace}, m)` adds operators to a namespace, of which `TORCH_LIBRARY` is "
        "the only one",
    )


def namespace_taken(name: str, namespace: str, owner: str) -> LoadError:
    """Returns the error for a library with the TORCH_LIBRARY of a namespace that another extension has."""
    return LoadError(
        name,
        f"the namespace `{namespace}` has a TORCH_LIBRARY already, in the extension `{owner}`",
        hint=f"`TORCH_LIBRARY_FRAGMENT({namespace}, m)` adds operators to it; an edited version that is loaded as "
        f'`"{owner}"` replaces it',
    )


def _registered_type(match: re.Match[str], name: str, path: Path) -> LoadError:
    return LoadError(
        name,
        f"another module in this process has bound the class `{match['type']}`",
        hint=f'`py::class_<{match["type"]}>(m, "{match["type"]}", py::module_local())`',
    )


def _library(path: Path) -> SharedLibrary | None:
    try:
        return read_library(path)
    except LoadError:
        return None


def _link_command(path: Path) -> list[str]:
    """Returns the words of the command that linked a library in the store, from the log beside it."""
    try:
        lines = (path.parent / "build.log").read_text().splitlines()
    except OSError:
        return []
    return next((line.split() for line in reversed(lines) if line.startswith("$ ") and "-shared" in line), [])


def _base_name(symbol: str) -> str:
    """Returns `other` for `ns::other(float*, int)`."""
    return symbol.split("(")[0].split("<")[0].split("::")[-1]


_CAUSES: list[tuple[str, Callable[[re.Match[str], str, Path], LoadError]]] = [
    (r"does not define module export function", _no_module),
    (r"undefined symbol: (?P<symbol>[^\s,]+)", _undefined_symbol),
    (r"(?P<library>\S+): cannot open shared object file", _absent_library),
    (
        r"(?P<library>\S+): version [`'](?P<version>(?:GLIBC|GLIBCXX|CXXABI)_[^']+)' not found"
        r"(?: \(required by (?P<by>.+?)\))?",
        _old_runtime,
    ),
    (
        r"Only a single TORCH_LIBRARY can be used to register the namespace (?P<namespace>\w+)"
        r"(?:[\s\S]*?was registered at (?P<first>[^;\n]+);[\s\S]*?was registered at (?P<again>\S+))?",
        _namespace_twice,
    ),
    (r'generic_type: type "(?P<type>[^"]+)" is already registered', _registered_type),
]
