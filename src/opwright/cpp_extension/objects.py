"""Compiles the sources of extensions: each once for all processes, checkouts and extensions that ask for the same.

An object's address is made of all that it depends on but the files that it includes: those are recorded
with it and compared when it is looked for. The name of its file, the directory it lies in and the
name of its extension belong to it only where they matter.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from opwright import settings
from opwright.backends import cuda
from opwright.backends.cuda import Nvcc
from opwright.backends.toolchain import INCLUDE_VARIABLES, Compiler, header_folders, is_of_c_library, machine_identity
from opwright.build.changes import FileChanged, Watch
from opwright.build.diagnostics import text_error
from opwright.build.steps import StepFailed, run_all
from opwright.build.store import BuildRecord, Entry, Store, digest_of
from opwright.cpp_extension import precompiled
from opwright.cpp_extension.headers import EXTENSION, KINDS, WHOLE, WITHOUT_PYTHON, needs_whole, prefix_of
from opwright.errors import ExtensionError

_FORMAT = "extension 4"
_NAME = "TORCH_EXTENSION_NAME"
_NVCC_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_CPP_SUFFIXES = (".cpp", ".cc", ".cxx", ".C", ".c++", ".cp", ".CPP")
# Flags for debug information, which names files: those of GCC, and those of nvcc for device code.
_DEBUG_FLAG = re.compile(r"-g([1-3]|gdb\d?|dwarf.*)?|--debug|-G|--device-debug|-lineinfo|--generate-line-info")
# Flags that make an object depend on the CPU that compiles it, also where nvcc passes them on; then on the GPU.
_NATIVE_FLAG = re.compile(r"-m(arch|tune|cpu)=native\b")
_NATIVE_GPU_FLAG = re.compile(r"(-arch|--gpu-architecture)=native")
_FOLDER_FLAGS = ("-I", "-isystem", "-iquote", "-idirafter")  # the next word is a folder of headers
# A lighter header may be why a source fails that says one of these; PyTorch's own then decides.
_MAY_NEED_WHOLE = re.compile(
    r"not a member|not declared|has not been declared|does not name|no member|no matching function|incomplete type"
    r"|No such file|no type named|not a (class|type|template|namespace)|namespace name|undeclared|undefined|PCH|\.gch"
    r"|ambiguous|redefinition|redeclar|conflict"  # with what it has and PyTorch's does not
)


def read_source(path: Path) -> str:
    """Returns the text of a source; bytes that are not UTF-8, as compilers allow, are surrogates."""
    return path.read_text(encoding="utf-8", errors="surrogateescape")


def read_named_source(subject: str, file: str) -> str:
    """Returns the text of a source that the author of an extension names.

    Raises:
        ExtensionError: there is no such file.
    """
    path = Path(os.path.abspath(file))
    try:
        return read_source(path)
    except (FileNotFoundError, IsADirectoryError):
        raise ExtensionError(
            subject, "there is no such source", rows=[("got", file), ("at", str(path))], hint="check the path"
        ) from None


@dataclass(frozen=True)
class Source:
    """A source of an extension, and how it is compiled.

    Attributes:
        language: "c", "cpp" or "cuda".
        path: its file, or None for a text that a file is made of.
        flags: the compiler's, without those for the headers of torch, Python and CUDA.
        folders: the caller's directories of headers.
        name: what TORCH_EXTENSION_NAME stands for; "": it is not defined.
        prefix: what is put in front of a generated text (`headers.KINDS`); "": see for yourself.
        parts: names and texts of the strings that a generated text has `#line`s for.
    """

    language: str
    text: str
    path: Path | None = None
    flags: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    name: str = ""
    prefix: str = ""
    parts: tuple[tuple[str, str], ...] = ()

    def as_it_is_now(self) -> Source:
        """Returns the source with the text that its file has now."""
        return replace(self, text=read_source(self.path)) if self.path else self

    @functools.cached_property  # it reads the headers of the author
    def kind(self) -> str | None:
        """What is put in front of it (`headers.KINDS`), or None."""
        if self.prefix:
            return self.prefix
        if "-include" in self.flags or "-imacros" in self.flags:  # they stand before the source's first line
            return None
        named = [flag[2:] for flag in self.flags if flag.startswith("-I")]
        named += [folder for flag, folder in itertools.pairwise(self.flags) if flag in _FOLDER_FLAGS]
        return prefix_of(self.text, self.path, [*self.folders, *map(Path, filter(None, named))])

    @property
    def suffix(self) -> str:
        return {"c": "c", "cpp": "cpp", "cuda": "cu"}[self.language]

    @property
    def roots(self) -> list[Path]:
        """The directories whose files are recorded by what they are called inside."""
        return [*([self.path.parent] if self.path else []), *self.folders]

    @property
    def _all_flags(self) -> list[str]:
        """Its flags, and those that nvcc takes from the environment."""
        variables = _NVCC_VARIABLES if self.language == "cuda" else ()
        return [*self.flags, *(flag for name in variables for flag in os.environ.get(name, "").split())]

    @property
    def is_debugged(self) -> bool:
        """Whether its debug information names its file, so that the file's place belongs to the object."""
        return any(_DEBUG_FLAG.fullmatch(flag) for flag in self._all_flags)

    def key(self, with_cuda: bool) -> str:
        own = [self.language, str(len(self.folders)), str(bool(self.name)), str(with_cuda), *self.flags]
        if self.is_debugged:
            own.append(str(self.path))
        if self.language == "cuda":
            own += [os.environ.get(name, "") for name in _NVCC_VARIABLES]
        if any(_NATIVE_FLAG.search(flag) for flag in self._all_flags):
            own.append(machine_identity())
        if any(_NATIVE_GPU_FLAG.fullmatch(flag) for flag in self._all_flags):
            own += cuda.gpu_architectures()
        own += [f"{name}={os.environ[name]}" for name in INCLUDE_VARIABLES if os.environ.get(name)]
        parts = [_FORMAT, *own, *torch_identity(), headers_digest(), self.prefix, self.text]
        return digest_of("\0".join(parts).encode(errors="surrogateescape"))[:40]


@functools.cache
def torch_identity() -> tuple[str, ...]:
    """Returns what the ABI and the headers of an extension depend on."""
    import torch

    return (
        str(torch.__version__),
        str(torch.version.git_version),
        str(sysconfig.get_config_var("SOABI")),
        sys.implementation.cache_tag or "",
    )


@functools.cache
def headers_digest() -> str:
    """Returns the digest of Opwright's own headers for extensions."""
    return digest_of(b"".join(path.read_bytes() for path in sorted(EXTENSION.rglob("*.h"))))


class BindingsFailed(Exception):
    """Generated bindings do not compile, and all else does."""


class Objects:
    """Compiles the sources of one extension.

    Args:
        subject: the extension's name, for errors.
        work: a directory of this build alone.
        watch: of the files that are compiled.
        shows_warnings: what compilers say of sources that compile is printed.
    """

    def __init__(
        self,
        subject: str,
        compiler: Compiler,
        nvcc: Nvcc | None,
        store: Store,
        work: Path,
        watch: Watch,
        *,
        shows_warnings: bool = False,
    ) -> None:
        self.subject, self.compiler, self.nvcc, self.work, self.watch = subject, compiler, nvcc, work, watch
        self.shows_warnings = shows_warnings
        self.store = Store(store.root, "objects")
        self.launcher = _launcher()
        self.host = cuda.host_compiler(nvcc, compiler, store.identities) if nvcc else ""

    def compile(self, sources: Sequence[Source], *, use_pch: bool = False) -> tuple[list[Entry], dict[str, float]]:
        """Returns the objects of sources, and the seconds of those that had to be compiled.

        Args:
            use_pch: precompile the headers first, however long it takes.

        Raises:
            BindingsFailed: only generated bindings do not compile.
            CompileError: a source does not compile. The objects of the others are kept.
            FileChanged: a file is not what it was when its source was read.
        """
        for path in {source.path for source in sources if source.path}:
            self.watch.look(path)
        _check(sources)
        found = {i: entry for i, source in enumerate(sources) if (entry := self._known(source))}
        missing = [i for i in range(len(sources)) if i not in found]
        seconds: dict[str, float] = {}
        failed = self._attempt(sources, missing, found, seconds, use_pch=use_pch)
        is_refused = any(sources[i].language == "cuda" and cuda.is_refusal(text) for i, text in failed.items())
        if self.nvcc and is_refused:
            self.host = cuda.choose_host_compiler(self.nvcc, self.compiler, self.store.identities, self.subject)
            failed = self._attempt(sources, list(failed), found, seconds)
        again = [i for i, text in failed.items() if _may_need_whole(sources[i], text)]
        if again:
            failed = {i: text for i, text in failed.items() if i not in again}
            failed |= self._attempt(sources, again, found, seconds, whole=True)
        if failed:
            _check(sources)
            first = min(failed)
            if sources[first].prefix == "bindings":
                raise BindingsFailed
            log = (self.work / "build.log").read_text()
            raise text_error(self.subject, self.texts(sources), f"source{first}", failed[first], log)
        self._precompile_for_next_time(sources, missing)
        return [found[i] for i in range(len(sources))], seconds

    def commands(self, sources: Sequence[Source]) -> list[tuple[Path, list[str]]]:
        """Returns the files among the sources and the commands that an editor should know."""
        return [(s.path, self._command(s, i, None)) for i, s in enumerate(sources) if s.path]

    def texts(self, sources: Sequence[Source]) -> dict[str, tuple[str, str]]:
        """Returns what each source is called, and its text, by the path that compilers name."""
        parts = {name: (name, text) for source in sources for name, text in source.parts}
        for i, source in enumerate(sources):
            text = source.text.encode(errors="surrogateescape").decode(errors="replace")
            parts[str(self.path(source, i))] = (str(source.path or "your source"), text)
        return parts

    def path(self, source: Source, index: int) -> Path:
        """Returns what a compiler, which runs in `work`, is given: the same in every build, so that ccache knows it."""
        return source.path or Path(f"inline{index}.{source.suffix}")

    # --- looking up and keeping --------------------------------------------------------------------------

    def _known(self, source: Source) -> Entry | None:
        key = source.key(self.nvcc is not None)
        identity = identity_of(self.compiler, self.nvcc)
        return self.store.find(key, identity, source.roots, source.name or self.subject)

    def _keep(self, source: Source, index: int, seconds: float) -> Entry:
        files, uses_name = self._files_read(source, index)
        key = source.key(self.nvcc is not None)
        with self.store.work() as work:
            (self.work / f"{index}.o").rename(work / self.store.product)
            record = BuildRecord(
                request=key,
                library=digest_of((work / self.store.product).read_bytes()),
                compiler=identity_of(self.compiler, self.nvcc),
                files=files,
                operators=[source.name or self.subject] if uses_name else [],
                seconds={"compile": seconds},
                created=time.time(),
            )
            return self.store.publish(work, key, record)

    def _files_read(self, source: Source, index: int) -> tuple[dict[str, str], bool]:
        """Returns the digests of the files that a source includes, and whether its extension's name matters.

        Raises:
            FileChanged: the source or one of them changed meanwhile.
        """
        uses_name = bool(source.name) and any(_NAME in text for text in (source.text, *source.flags))
        included = []
        body = (self.work / f"{index}.d").read_text().replace("\\\n", " ").split(":", 1)[1]
        apart = self._headers_apart()
        for word in re.findall(r"(?:\\[ #]|\S)+", body):
            name = re.sub(r"\\([ #])", r"\1", word).replace("$$", "$")
            spelled = self.work / name  # `<folder>/../x.h`: another file for another checkout's folder
            full = Path(os.path.normpath(spelled))
            if full == source.path or str(full).startswith(apart) or is_of_c_library(str(full)):
                continue
            included.append(spelled)
            uses_name |= bool(source.name) and _NAME.encode() in spelled.read_bytes()
        digests = self.watch.digests([*([source.path] if source.path else []), *included])
        _check([source])
        return {_place(path, source.roots): digests[path] for path in included}, uses_name

    def _headers_apart(self) -> tuple[str, ...]:
        """Returns starts of paths of the headers that are not compared, since versions in the key stand for them."""
        folders = [self.store.root / "headers", self.work, EXTENSION, *system_includes(self.nvcc)]
        folders += [self.nvcc.root] if self.nvcc else []
        for compiler in {self.compiler.path, self.host} - {""}:
            folders += header_folders(compiler, self.store.identities)
        # GCC shortens the names of headers of the system where links allow it.
        return tuple({f"{path}/" for folder in folders for path in (folder, os.path.realpath(folder))})

    # --- compiling ---------------------------------------------------------------------------------------

    def _attempt(
        self,
        sources: Sequence[Source],
        indices: Sequence[int],
        found: dict[int, Entry],
        seconds: dict[str, float],
        *,
        whole: bool = False,
        use_pch: bool = False,
    ) -> dict[int, str]:
        """Compiles sources and keeps what succeeds; returns what the compiler says of the others."""
        headers = {i: None if whole else self._header(sources[i]) for i in indices}
        ready = self._ready(headers, use_pch)
        commands = {str(i): self._command(sources[i], i, headers[i], ready=ready, whole=whole) for i in indices}
        failed: dict[int, str] = {}
        outputs: dict[str, str] = {}
        try:
            taken = run_all(commands, self.work, outputs=outputs) if commands else {}
        except StepFailed as error:
            failed, taken = {int(i): text for i, text in error.outputs.items()}, error.seconds
        for i in [i for i in taken if not all((self.work / f"{i}.{end}").exists() for end in "od")]:
            del taken[i]
            failed[int(i)] = f"{commands[i][0]}: it has written nothing\n"
        for i, s in taken.items():
            found[int(i)] = self._keep(sources[int(i)], int(i), s)
            seconds[f"source{i}"] = s
            if self.shows_warnings:
                print(outputs[i], end="", file=sys.stderr)
        return failed

    def _header(self, source: Source) -> precompiled.Header | None:
        """Returns what is put in front of a source, or None."""
        if source.language != "cpp":
            return None
        kind = source.kind
        flags = precompiled.core_flags(source.flags)
        if kind is None or flags is None:
            return None
        identity = (self.compiler.identity, *torch_identity(), headers_digest())
        return precompiled.Header(
            KINDS[kind], self.compiler.path, ("-DTORCH_API_INCLUDE_EXTENSION_H", *flags), identity
        )

    def _ready(self, headers: dict[int, precompiled.Header | None], use_pch: bool) -> dict[precompiled.Header, Path]:
        """Returns which headers are precompiled; makes those first that pay off in this very build."""
        if not self._precompiles():
            return {}
        ready = {}
        for header in {h for h in headers.values() if h}:
            pays_off = list(headers.values()).count(header) > max(settings.jobs(), 2)
            path = precompiled.find(header, self.store)
            if path is None and (use_pch or pays_off):
                path = precompiled.make(header, self._system_includes(), self.store)
            if path:
                ready[header] = path
        return ready

    def _precompile_for_next_time(self, sources: Sequence[Source], missing: Sequence[int]) -> None:
        headers = {header for i in missing if (header := self._header(sources[i]))}
        if headers and self._precompiles():
            ordered = sorted(headers, key=lambda header: header.kind)
            precompiled.make_in_background(ordered, self._system_includes(), self.store)

    def _precompiles(self) -> bool:
        # sccache compiles nothing elsewhere, and keeps nothing, that has a precompiled header.
        is_gcc = precompiled.is_gcc(self.compiler.identity)
        return is_gcc and "sccache" not in self.launcher and settings.precompiles_headers()

    def _command(
        self,
        source: Source,
        index: int,
        header: precompiled.Header | None,
        *,
        ready: dict[precompiled.Header, Path] | None = None,
        whole: bool = False,
    ) -> list[str]:
        path = self.path(source, index)
        if source.path is None:
            (self.work / path).write_text(source.text)
        tail = ["-MD", "-MF", f"{index}.d", "-c", str(path), "-o", f"{index}.o"]
        if source.language == "cpp":
            # Thousands of errors follow from a wrong -std.
            tail = ["-fmax-errors=100", *([] if path.suffix in _CPP_SUFFIXES else ["-x", "c++"]), *tail]
        head = []
        if header:
            head += ["-include", str((ready or {}).get(header) or header.text)]
            head += [WITHOUT_PYTHON] if source.kind == "code" else []
        if source.name and header:  # GCC takes no precompiled header that was made with another name
            (self.work / f"name{index}.h").write_text(f"#define {_NAME} {source.name}\n")
            head += ["-include", f"./name{index}.h"]
        elif source.name:
            head.append(f"-D{_NAME}={source.name}")
        if source.name or header:
            head.append("-DTORCH_API_INCLUDE_EXTENSION_H")
        head += [f"-I{folder}" for folder in source.folders]
        head += self._system_includes()
        if source.language == "c":
            return [self.compiler.path, "-x", "c", *head, *source.flags, *tail]
        tail = [*([WHOLE] if whole or needs_whole(source.text) else []), *tail]
        if source.language == "cuda":
            assert self.nvcc is not None
            if not any(flag.startswith(("-ccbin", "--compiler-bindir")) for flag in source.flags):
                head += ["-ccbin", self.host]
            return [*self.launcher, self.nvcc.path, *head, *source.flags, "-x", "cu", *tail]
        if source.path and not source.is_debugged:
            head.append(f"-ffile-prefix-map={path.parent}/=")
        pch = ["-fpch-preprocess"] if ready and "ccache" in self.launcher else []
        return [*self.launcher, self.compiler.path, *head, *source.flags, *pch, *tail]

    def _system_includes(self) -> list[str]:
        return [word for folder in (EXTENSION, *system_includes(self.nvcc)) for word in ("-isystem", str(folder))]


def _check(sources: Sequence[Source]) -> None:
    """Raises FileChanged if the file of a source has another text now."""
    for source in sources:
        try:
            is_same = source.as_it_is_now() == source
        except FileNotFoundError:
            is_same = False
        if source.path and not is_same:
            raise FileChanged(source.path)


def _may_need_whole(source: Source, output: str) -> bool:
    return source.language != "c" and not needs_whole(source.text) and bool(_MAY_NEED_WHOLE.search(output))


def identity_of(compiler: Compiler, nvcc: Nvcc | None) -> str:
    """Returns one identity for both compilers; nvcc's changes when the headers of CUDA do."""
    return f"{compiler.identity}; {nvcc.identity}" if nvcc else compiler.identity


def torch_folder() -> Path:
    """Returns where torch is installed."""
    import torch

    return Path(torch.__file__).parent


def system_includes(nvcc: Nvcc | None) -> list[Path]:
    """Returns the directories of the headers of torch, CUDA and Python."""
    include = torch_folder() / "include"
    found = [include, include / "torch" / "csrc" / "api" / "include"]
    if nvcc:
        places = (nvcc.root / "include", *nvcc.root.glob("targets/*/include"))
        found += [path for path in places if path.exists()][:1]
    return [*found, Path(sysconfig.get_path("include", scheme="posix_prefix"))]


def environment_folders() -> tuple[list[str], list[str]]:
    """Returns the directories of headers and of libraries that the environment adds to those of CUDA, as in PyTorch."""
    cudnn = os.environ.get("CUDNN_HOME") or os.environ.get("CUDNN_PATH")
    includes = [os.environ.get("CUDA_INC_PATH"), f"{cudnn}/include" if cudnn else None]
    libraries = [f"{cudnn}/{name}" for name in ("lib64", "lib") if cudnn and os.path.isdir(f"{cudnn}/{name}")]
    return [path for path in includes if path and path != "/usr/include"], libraries


def _place(path: Path, roots: Sequence[Path]) -> str:
    return next((f"@{i}/{path.relative_to(r)}" for i, r in enumerate(roots) if path.is_relative_to(r)), str(path))


def _launcher() -> list[str]:
    """Returns ccache or sccache, where there is one, as PyTorch does."""
    if os.environ.get("TORCH_NO_COMPILER_WRAPPER"):
        return []
    return [name for name in ("ccache", "sccache") if shutil.which(name)][:1]
