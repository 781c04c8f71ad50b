"""`load` and `load_inline`."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from opwright.backends.flag_paths import absolute, absolute_in_link
from opwright.cpp_extension import bindings, libraries
from opwright.cpp_extension.build_directory import put
from opwright.cpp_extension.extension import Extension, build, cpp_flags, cuda_flags, words
from opwright.cpp_extension.objects import BindingsFailed, Source, environment_folders, read_named_source, torch_folder
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
        build_directory: where the result is put and loaded from; by default it stays in the store.

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
    _check_name(name, is_module=is_python_module)
    if not files:
        raise ExtensionError(name, "there is no source", hint='`load("name", ["source.cpp"])`')
    paths = [os.path.abspath(file) for file in files]
    twice = next((file for i, file in enumerate(files) if paths[i] in paths[:i]), None)
    if twice:
        raise ExtensionError(name, f"`{twice}` is named twice in `sources`", hint="name each source once")
    if with_cuda is None:
        with_cuda = any(file.endswith(_CUDA_SUFFIXES) for file in files)
    own_name = "" if is_standalone else name
    folder = _folder(build_directory)
    include_paths, ldflags = _with_cudas(with_cuda, extra_include_paths, extra_ldflags)
    options = _Options(name, own_name, extra_cflags, extra_cuda_cflags, include_paths, folder)
    extension = Extension(
        name,
        [options.file(name, file) for file in files],
        absolute_in_link(words(name, "extra_ldflags", ldflags), folder),
        with_cuda,
        "program" if is_standalone else "module" if is_python_module else "library",
        shows_warnings=verbose,
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
    _check_name(name, is_module=is_python_module or functions is not None)
    cpp, cuda = _list(cpp_sources), _list(cuda_sources)
    if with_cuda is None:
        with_cuda = bool(cuda)
    folder = _folder(build_directory)
    include_paths, ldflags = _with_cudas(with_cuda, extra_include_paths, extra_ldflags)
    options = _Options(name, name, extra_cflags, extra_cuda_cflags, include_paths, folder)
    with_headers = not no_implicit_headers

    def extension(apart: bool) -> Extension:
        texts = bindings.cpp_sources(
            name,
            cpp,
            functions,
            with_headers=with_headers,
            with_error_handling=with_pytorch_error_handling,
            apart=apart,
        )
        parts = [(f"cpp_sources[{i}]", text) for i, text in enumerate(cpp)]
        parts += [(f"cuda_sources[{i}]", text) for i, text in enumerate(cuda)]
        parts += [(bindings.GENERATED, bindings.generated_part(text)) for text, _ in texts[-1:]]
        sources = [options.text("cpp", text, prefix, parts=parts) for text, prefix in texts]
        if cuda:
            sources.append(options.text("cuda", bindings.cuda_text(cuda, with_headers=with_headers), parts=parts))
        if functions is not None:
            sources.append(options.text("c", bindings.init_text(name)))
        return Extension(
            name,
            sources,
            absolute_in_link(words(name, "extra_ldflags", ldflags), folder),
            with_cuda,
            "module" if is_python_module else "library",
            use_pch,
            verbose,
        )

    try:
        return _finish(extension(True), build_directory, verbose)
    except BindingsFailed:  # a declaration was not what it seemed
        return _finish(extension(False), build_directory, verbose)


class _Options:
    """The options of a call as the flags of its sources.

    Args:
        name: what TORCH_EXTENSION_NAME stands for; "": it is not defined.
        folder: the directory that paths in flags are relative to.
    """

    def __init__(self, subject: str, name: str, cflags: Any, cuda_cflags: Any, include_paths: Any, folder: str) -> None:
        self.name = name
        self.cflags = absolute(words(subject, "extra_cflags", _list(cflags)), folder)
        self.cuda_cflags = absolute(words(subject, "extra_cuda_cflags", _list(cuda_cflags)), folder)
        given = [Path(os.path.abspath(path.strip())) for path in _list(include_paths)]
        torchs = torch_folder()  # whose headers are found without it, and lighter ones before them
        self.folders = tuple(path for path in given if not path.is_relative_to(torchs))

    def text(
        self,
        language: str,
        text: str,
        prefix: str = "",
        path: Path | None = None,
        parts: Sequence[tuple[str, str]] = (),
    ) -> Source:
        if language == "c":
            return Source("c", text, flags=("-O1", "-fPIC"))
        flags = cuda_flags(self.cuda_cflags) if language == "cuda" else cpp_flags(self.cflags)
        name = "" if prefix == "bindings" else self.name
        return Source(language, text, path, flags, self.folders, name, prefix, tuple(parts))

    def file(self, name: str, file: str) -> Source:
        path = Path(os.path.abspath(file))
        return self.text("cuda" if file.endswith(_CUDA_SUFFIXES) else "cpp", read_named_source(name, file), path=path)


def _finish(extension: Extension, build_directory: Any, verbose: bool) -> ModuleType | str:
    entry, is_new = build(extension)
    place = contextlib.nullcontext(entry.library)
    if build_directory is not None:
        place = put(entry, Path(build_directory), extension.name, is_program=extension.kind == "program")
    with place as path:
        if verbose:
            state = f"built in {entry.record.seconds['all']:.1f} s" if is_new else "taken from the cache"
            print(f"{extension.name}: {state}: {path}", file=sys.stderr)
        if extension.kind == "module":
            return libraries.load_module(extension.name, path)
        if extension.kind == "library":
            libraries.load_library(extension.name, path)
        return str(path)


def _with_cudas(with_cuda: bool, include_paths: Any, ldflags: Any) -> tuple[list[str], list[str]]:
    """Returns directories of headers and linker flags, with those that the environment names if `with_cuda`."""
    includes, libraries = environment_folders() if with_cuda else ([], [])
    return [*_list(include_paths), *includes], [*_list(ldflags), *(shlex.quote(f"-L{path}") for path in libraries)]


def _folder(build_directory: Any) -> str:
    """Returns the directory that paths in flags are relative to: that in which PyTorch runs ninja, or else this one."""
    return os.path.abspath(os.curdir if build_directory is None else build_directory)


def _is_torchs(with_sycl: bool | None, files: Sequence[str]) -> bool:
    """Whether PyTorch's own builds this: SYCL, ROCm, and systems other than Linux."""
    if with_sycl or any(file.endswith(".sycl") for file in files) or not sys.platform.startswith("linux"):
        return True
    import torch

    return torch.version.hip is not None


def _check_name(name: str, *, is_module: bool) -> None:
    """Refuses what cannot be the name of a module, or else of a file."""
    pattern = r"[A-Za-z_]\w*" if is_module else r"\w[^/\\\s\0]*"
    if not isinstance(name, str) or not re.fullmatch(pattern, name, re.ASCII):
        similar = re.sub(r"[^0-9A-Za-z_]+", "_", name).strip("_") if isinstance(name, str) else ""
        if is_module and similar[:1].isdigit():
            similar = f"my_{similar}"
        raise ExtensionError(
            str(name),
            "the name of an extension must be an identifier" if is_module else "the name must be one of a file",
            hint=f"`{similar or 'my_extension'}`",
        )


def _list(value: Any) -> list[str]:
    """Returns an argument as a list of its own: the caller's is never changed."""
    if isinstance(value, (str, Path)):
        value = [value]
    if value is None:
        return []
    is_list = isinstance(value, Iterable) and not isinstance(value, Mapping)  # a setup.py has {"cxx": [...]}
    if not is_list or not all(isinstance(item, (str, Path)) for item in value):
        raise TypeError(f"expected a string or a list of strings, got {value!r}")
    for item in map(str, value):
        try:
            item.encode()
        except UnicodeEncodeError as error:
            raise ExtensionError(
                "text", "it is not UTF-8", rows=[("reason", str(error))], hint="decode it as what it is"
            ) from None
    return [str(item) for item in value]


def _copied(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else value
