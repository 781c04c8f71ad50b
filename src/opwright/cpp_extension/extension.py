"""One extension: what it is made of, its address in the store, how it is built."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from opwright import settings
from opwright.backends import cuda
from opwright.backends.flag_paths import linked_files
from opwright.backends.toolchain import Compiler, absent_cxx, find_compiler
from opwright.build import compile_commands
from opwright.build.announce import announced
from opwright.build.changes import Watch, build_unchanged
from opwright.build.diagnostics import text_error
from opwright.build.steps import StepFailed, run_all
from opwright.build.store import BuildRecord, Entry, Store, digest_of
from opwright.cpp_extension.objects import Objects, Source, identity_of, torch_folder
from opwright.errors import ExtensionError, NoCompilerError, NoNvccError

_FORMAT = "extension 2"
_QUOTED = re.compile(r"""\\.|"((?:\\.|[^"\\])*)"|'[^']*'""", re.DOTALL)  # group 1: where a shell still substitutes
_SUBSTITUTION = re.compile(r"`([^`]*)`?|\$\(([^()]*)\)?")


@dataclass
class Extension:
    """What `load` and `load_inline` were asked for.

    Attributes:
        sources: with the flags of the caller; `build` adds the others.
        ldflags: the caller's own.
        kind: "module", "library" or "program".
        use_pch: precompile PyTorch's headers first, however long it takes.
        shows_warnings: print what compilers say of sources that compile.
    """

    name: str
    sources: list[Source]
    ldflags: Sequence[str] = ()
    with_cuda: bool = False
    kind: str = "module"
    use_pch: bool = False
    shows_warnings: bool = False
    roots: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.with_cuda |= any(source.language == "cuda" for source in self.sources)
        self.roots = [root for source in self.sources for root in source.roots]

    def as_it_is_now(self) -> Extension:
        """Returns the extension with the texts that its files have now."""
        return replace(self, sources=[source.as_it_is_now() for source in self.sources])

    @property
    def key(self) -> str:
        parts = [
            self.name,
            self.kind,
            *self.ldflags,
            *(source.key(self.with_cuda) for source in self.sources),
        ]
        return digest_of("\0".join([_FORMAT, *parts]).encode())[:40]


def build(extension: Extension) -> tuple[Entry, bool]:
    """Returns the build of an extension, and whether a compiler ran.

    Where a file changes while compilers read it, what is built in the end is the text that it has then.

    Raises:
        NoCompilerError: it is not in the store, and there is no compiler.
        CompileError: a source does not compile or does not stop changing, or the objects do not link.
        StoreError: the store cannot be written.
    """
    return build_unchanged(extension.name, lambda watch: _ensure_built(extension.as_it_is_now(), watch))


def _ensure_built(extension: Extension, watch: Watch) -> tuple[Entry, bool]:
    store = Store(folder="extensions")
    absent = absent_cxx()
    compiler = None if absent else find_compiler(store.identities)
    identity = _identity(extension, compiler, store)
    entry = store.find(extension.key, identity, extension.roots)
    if entry:
        return entry, False
    if absent:
        raise NoCompilerError(
            extension.name,
            "the C++ compiler that CXX names does not exist",
            rows=[("CXX", os.environ["CXX"])],
            hint="`export CXX=g++`, or `unset CXX` to take `c++`",
        )
    if compiler is None:
        raise NoCompilerError(
            extension.name,
            "there is no C++ compiler to build it with",
            hint="`apt-get install g++`, or `OPWRIGHT_CXX=/path/to/c++`",
        )
    with announced(f"compiling {extension.name}"), store.lock(extension.key):
        entry = store.find(extension.key, identity, extension.roots)
        if entry:
            return entry, False
        nvcc = find_nvcc(extension.name, store) if extension.with_cuda else None
        with store.work() as work:
            return _build(extension, compiler, nvcc, store, work, watch), True


def _identity(extension: Extension, compiler: Compiler | None, store: Store) -> str | None:
    """Returns the identity of the compilers of an extension; None, for any, where one of them is absent."""
    if compiler is None:
        return None
    nvcc = None
    if extension.with_cuda:
        with contextlib.suppress(NoNvccError):
            nvcc = cuda.find_nvcc(store.identities)
        if nvcc is None:
            return None
    return identity_of(compiler, nvcc)


def find_nvcc(subject: str, store: Store) -> cuda.Nvcc:
    """Returns the CUDA compiler.

    Raises:
        NoNvccError: there is none.
    """
    nvcc = cuda.find_nvcc(store.identities)
    if nvcc is None:
        raise NoNvccError(
            subject,
            "there is no CUDA compiler (nvcc) to build it with",
            rows=[("looked in", "CUDA_HOME, PATH, /usr/local/cuda, Python's packages")],
            hint="`pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm`",
        )
    return nvcc


def _build(
    extension: Extension, compiler: Compiler, nvcc: cuda.Nvcc | None, store: Store, work: Path, watch: Watch
) -> Entry:
    start = time.perf_counter()
    objects = Objects(extension.name, compiler, nvcc, store, work, watch, shows_warnings=extension.shows_warnings)
    compile_commands.record(
        compile_commands.from_compiler(command, work, path) for path, command in objects.commands(extension.sources)
    )
    found, seconds = objects.compile(extension.sources, use_pch=extension.use_pch)
    library = _torch_libraries(extension, compiler, nvcc, store, work)
    linked = [path for path in linked_files(extension.ldflags) if not path.is_relative_to(torch_folder())]
    for path in linked:
        watch.look(path)
    link = [compiler.path, *(str(entry.library) for entry in found), *_link_flags(extension, nvcc, library)]
    try:
        seconds |= run_all({"link": [*link, "-o", store.product]}, work)
    except StepFailed as failed:
        raise text_error(
            extension.name, objects.texts(extension.sources), failed.step, failed.output, failed.log
        ) from None
    digests = watch.digests(linked)
    seconds["all"] = time.perf_counter() - start
    record = BuildRecord(
        request=extension.key,
        library=digest_of((work / store.product).read_bytes()),
        compiler=identity_of(compiler, nvcc),
        files=_files(extension.sources, found) | {str(path): digest for path, digest in digests.items()},
        operators=[],
        seconds=seconds,
        created=time.time(),
    )
    return store.publish(work, extension.key, record)


def _files(sources: Sequence[Source], found: Sequence[Entry]) -> dict[str, str]:
    """Returns what the objects' sources included; the roots of all sources are numbered through."""
    files: dict[str, str] = {}
    offset = 0
    for source, entry in zip(sources, found, strict=True):
        for name, digest in entry.record.files.items():
            number, slash, rest = name[1:].partition("/") if name.startswith("@") else ("", "", "")
            files[f"@{int(number) + offset}/{rest}" if slash else name] = digest
        offset += len(source.roots)
    return files


def _linked(extension: Extension, nvcc: cuda.Nvcc | None) -> list[str]:
    """Returns the libraries of torch that an extension is linked with, those that there are."""
    wanted = ["c10", *(["c10_cuda"] if nvcc else []), "torch_cpu", *(["torch_cuda"] if nvcc else []), "torch"]
    wanted += [] if extension.kind == "program" else ["torch_python"]
    return [name for name in wanted if (torch_folder() / "lib" / f"lib{name}.so").exists()]


def _torch_libraries(
    extension: Extension, compiler: Compiler, nvcc: cuda.Nvcc | None, store: Store, work: Path
) -> Path:
    """Returns the directory of the libraries to link with: empty ones of the same names.

    A library needs only their names; reading the 434 MB of the real ones is most of what a link takes.
    """
    real = torch_folder() / "lib"
    if extension.kind == "program" or re.search(
        r"-z[,\s]*defs|no-undefined|no-allow-shlib", " ".join(extension.ldflags)
    ):
        return real
    names = [f"lib{name}.so" for name in _linked(extension, nvcc)]
    key = digest_of("\0".join(["stubs", compiler.identity, *names]).encode())[:40]
    found = store.support(key)
    if found is None:
        empty = [compiler.path, "-shared", "-nostdlib", "-x", "c", "/dev/null"]
        run_all({name: [*empty, f"-Wl,-soname,{name}", "-o", name] for name in names}, work)
        found = store.publish_support(work, key, names)
    return found


def _link_flags(extension: Extension, nvcc: cuda.Nvcc | None, library: Path) -> list[str]:
    is_program = extension.kind == "program"
    flags = [] if is_program else ["-shared"]
    flags += extension.ldflags
    linked = [f"-l{name}" for name in _linked(extension, nvcc)]
    flags += [f"-L{library}", "-Wl,--push-state,--no-as-needed", *linked, "-Wl,--pop-state"]
    if nvcc:
        flags += [f"-L{nvcc.cudart}", "-lcudart"]
    if is_program:
        flags.append(f"-Wl,-rpath,{library}")
    return flags


def words(subject: str, argument: str, flags: Sequence[str]) -> list[str]:
    """Returns the flags of an argument one by one: a string may hold several.

    PyTorch writes flags into a file of ninja, where `$$` is a `$`.
    """
    found = []
    for flag in flags:
        flag = flag.replace("$$", "$")
        unquoted = _QUOTED.sub(lambda part: re.sub(r"\\.", "", part[1] or ""), flag)
        if substitution := _SUBSTITUTION.search(unquoted):
            command = (substitution[1] or substitution[2] or "").split() or ["pkg-config", "--libs", "NAME"]
            raise ExtensionError(
                subject,
                f"no shell runs what is in `{argument}`",
                rows=[("got", flag)],
                hint=f"`{argument}=subprocess.check_output({json.dumps(command)}, text=True).split()`",
            )
        try:
            found += shlex.split(flag)
        except ValueError as error:
            raise ExtensionError(
                subject,
                f"what is in `{argument}` is not quoted as a shell would want it",
                rows=[("got", flag), ("reason", str(error))],
                hint=f"`{shlex.quote(flag)}`",
            ) from None
    return found


def cpp_flags(own: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags for a C++ source, the caller's own among them."""
    standard = [] if any(flag.startswith("-std=") for flag in own) else ["-std=c++20"]
    level = [] if any(re.fullmatch(r"-O\w*", flag) for flag in own) else ["-O2"]
    return ("-fPIC", *standard, *level, *own)


def cuda_flags(own: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags for a CUDA source, the caller's own among them."""
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

    names_standard = any(flag.startswith(("-std=", "--std=")) for flag in own)
    names_level = any(re.fullmatch(r"-O\w*|--optimize.*", flag) for flag in own)
    return (
        *COMMON_NVCC_FLAGS,
        *_architecture_flags(own),
        "-Xcompiler",
        "-fPIC",
        *([] if names_level else ["-O2"]),
        *own,
        *([] if names_standard else ["-std=c++20"]),
    )


def _architecture_flags(given: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags for the architectures, unless the caller's own flags name some."""
    if any(re.match(r"-?-(gencode|arch|gpu-architecture|generate-code)\b", flag.strip()) for flag in given):
        return ()
    listed = settings.torch_architectures() or cuda.architectures()
    return cuda.architecture_flags(listed)
