"""`load` and `load_inline`."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from opwright.cpp_extension import bindings
from opwright.errors import ExtensionError

_CUDA_SUFFIXES = (".cu", ".cuh")


def load(
    name: str,
    sources: Any,
    extra_cflags: Any = None,
    extra_cuda_cflags: Any = None,
    extra_sycl_cflags: Any = None,
    extra_ldflags: Any = None,
    extra_include_paths: Any = None,
    build_directory: Any = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    is_standalone: bool = False,
    keep_intermediates: bool = True,
) -> ModuleType | str:
    """Builds and loads a C++ or CUDA extension: `torch.utils.cpp_extension.load`, kept by content.

    Args:
        build_directory: where the result is put beside the store; by default only in the store.

    Returns:
        The module; with `is_python_module=False` the path of the library, which is loaded; with
        `is_standalone` the path of the program.

    Raises:
        ExtensionError: an argument cannot be honoured.
        CompileError: a source does not compile, or the objects do not link.
    """
    files = [str(source) for source in ([sources] if isinstance(sources, (str, Path)) else sources)]
    if _is_torchs(with_sycl, files):
        from torch.utils import cpp_extension

        return cpp_extension.load(
            name, files, extra_cflags, extra_cuda_cflags, extra_sycl_cflags, extra_ldflags, extra_include_paths,
            build_directory, verbose, with_cuda, with_sycl, is_python_module, is_standalone, keep_intermediates,
        )  # fmt: skip
    if is_python_module and is_standalone:
        raise ValueError("`is_python_module` and `is_standalone` are mutually exclusive.")
    from opwright.cpp_extension.extension import Extension

    _check_name(name)
    if not files:
        raise ExtensionError(name, "there is no source", hint='`load("name", ["source.cpp"])`')
    has_cuda = any(file.endswith(_CUDA_SUFFIXES) for file in files)
    extension = Extension(
        name,
        [_read(name, file) for file in files],
        _flags(extra_cflags),
        _flags(extra_cuda_cflags),
        _flags(extra_ldflags),
        _flags(extra_include_paths),
        has_cuda if with_cuda is None else with_cuda,
        "program" if is_standalone else "module" if is_python_module else "library",
    )
    return _finish(extension, build_directory, verbose)


def load_inline(
    name: str,
    cpp_sources: Any,
    cuda_sources: Any = None,
    sycl_sources: Any = None,
    functions: Any = None,
    extra_cflags: Any = None,
    extra_cuda_cflags: Any = None,
    extra_sycl_cflags: Any = None,
    extra_ldflags: Any = None,
    extra_include_paths: Any = None,
    build_directory: Any = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    with_pytorch_error_handling: bool = True,
    keep_intermediates: bool = True,
    use_pch: bool = False,
    no_implicit_headers: bool = False,
) -> ModuleType | str:
    """Builds and loads an extension from strings: `torch.utils.cpp_extension.load_inline`, kept by content.

    Returns:
        As `load`.

    Raises:
        ExtensionError: an argument cannot be honoured.
        CompileError: a source does not compile, or the objects do not link.
    """
    if _is_torchs(with_sycl, []) or sycl_sources:
        from torch.utils import cpp_extension

        return cpp_extension.load_inline(
            name, _copied(cpp_sources), _copied(cuda_sources), _copied(sycl_sources), functions, extra_cflags,
            extra_cuda_cflags, extra_sycl_cflags, extra_ldflags, extra_include_paths, build_directory, verbose,
            with_cuda, with_sycl, is_python_module, with_pytorch_error_handling, keep_intermediates, use_pch,
            no_implicit_headers,
        )  # fmt: skip
    from opwright.cpp_extension.extension import Extension, ExtensionSource

    _check_name(name)
    cpp, cuda = _flags(cpp_sources), _flags(cuda_sources)
    text = bindings.cpp_text(
        name,
        cpp,
        functions,
        with_headers=not no_implicit_headers,
        with_error_handling=with_pytorch_error_handling,
    )
    made = [ExtensionSource("cpp", text)]
    if cuda:
        made.append(ExtensionSource("cuda", bindings.cuda_text(cuda, with_headers=not no_implicit_headers)))
    if functions is not None:
        made.append(ExtensionSource("c", bindings.init_text(name)))
    extension = Extension(
        name,
        made,
        _flags(extra_cflags),
        _flags(extra_cuda_cflags),
        _flags(extra_ldflags),
        _flags(extra_include_paths),
        bool(cuda) if with_cuda is None else with_cuda,
        "module" if is_python_module else "library",
    )
    return _finish(extension, build_directory, verbose)


def _finish(extension: Any, build_directory: Any, verbose: bool) -> ModuleType | str:
    from opwright.cpp_extension.extension import build

    entry, is_new = build(extension)
    if verbose:
        state = f"built in {entry.record.seconds['all']:.1f} s" if is_new else "taken from the store"
        print(f"{extension.name}: {state}: {entry.library}", file=sys.stderr)
    path = entry.library
    if build_directory is not None:
        suffix = "" if extension.kind == "program" else ".so"
        path = _export(entry.library, Path(build_directory), f"{extension.name}{suffix}")
    if extension.kind == "program":
        return str(path)
    if extension.kind == "library":
        import torch

        torch.ops.load_library(str(entry.library))
        return str(path)
    return _import(extension.name, entry.library)


def _import(name: str, path: Path) -> ModuleType:
    import torch  # noqa: F401  its libraries must be there before those of the extension

    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.__name__ = name
    return module


def _export(product: Path, folder: Path, name: str) -> Path:
    """Puts a copy where the caller wants it, all at once: a process that has the old one open keeps it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    os.close(handle)
    shutil.copy(product, temporary)
    os.replace(temporary, folder / name)
    return folder / name


def _is_torchs(with_sycl: bool | None, files: Sequence[str]) -> bool:
    """Whether PyTorch's own builds this: SYCL, ROCm, and systems other than Linux."""
    if with_sycl or any(file.endswith(".sycl") for file in files) or not sys.platform.startswith("linux"):
        return True
    import torch

    return torch.version.hip is not None


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ExtensionError(
            str(name),
            "the name of an extension must be an identifier",
            hint=f"`{re.sub(r'[^0-9A-Za-z_]+', '_', str(name)).strip('_') or 'my_extension'}`",
        )


def _read(name: str, file: str) -> Any:
    from opwright.cpp_extension.extension import ExtensionSource

    path = Path(os.path.abspath(file))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ExtensionError(
            name, "there is no such source", rows=[("got", file), ("at", str(path))], hint="check the path"
        ) from None
    except UnicodeDecodeError as error:
        raise ExtensionError(
            name,
            "the source is not UTF-8",
            rows=[("source", file), ("reason", str(error))],
            hint=f"`iconv -t utf-8 {file}`",
        ) from None
    return ExtensionSource("cuda" if file.endswith(_CUDA_SUFFIXES) else "cpp", text, path)


def _flags(value: Any) -> list[str]:
    """Returns an argument as a list of its own: the caller's is never changed."""
    return [] if value is None else [value] if isinstance(value, str) else [str(item) for item in value]


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
