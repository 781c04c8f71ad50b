"""One extension: what it is made of, its address in the store, how it is built."""

from __future__ import annotations

import functools
import os
import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opwright import settings
from opwright.build import cuda
from opwright.build.diagnostics import text_error
from opwright.build.steps import StepFailed, run_all
from opwright.build.store import BuildRecord, Entry, Store, digest_of
from opwright.build.toolchain import NATIVE, Compiler, find_compiler
from opwright.errors import NoCompilerError, NoNvccError

_FORMAT = "extension 1"
_NAME = "TORCH_EXTENSION_NAME"
_LIGHT = NATIVE / "extension"  # holds a lighter torch/extension.h
_WHOLE = "-DOPWRIGHT_WHOLE_TORCH"
# What only the whole header has: a source that names it is not tried with the lighter one.
_NEEDS_WHOLE = re.compile(r"torch::(nn|data|optim|jit|serialize|save|load|OrderedDict)\b")


@dataclass(frozen=True)
class ExtensionSource:
    """One source: a file, or a text that a file is made of."""

    language: str  # "c", "cpp" or "cuda"
    text: str
    path: Path | None = None

    @property
    def suffix(self) -> str:
        return {"c": "c", "cpp": "cpp", "cuda": "cu"}[self.language]


@dataclass
class Extension:
    """What `load` and `load_inline` were asked for.

    Attributes:
        cflags, cuda_cflags, ldflags: the caller's own.
        kind: "module", "library" or "program".
    """

    name: str
    sources: list[ExtensionSource]
    cflags: Sequence[str] = ()
    cuda_cflags: Sequence[str] = ()
    ldflags: Sequence[str] = ()
    include_paths: Sequence[str] = ()
    with_cuda: bool = False
    kind: str = "module"
    roots: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.roots = [Path(path).absolute() for path in self.include_paths]

    @property
    def key(self) -> str:
        parts = [self.name, self.kind, *self.ldflags, *(self.object_key(source) for source in self.sources)]
        return digest_of("\0".join([_FORMAT, *parts]).encode())[:40]

    def object_key(self, source: ExtensionSource) -> str:
        """Returns the address of a source's object. Neither its name nor its place belongs to it."""
        given = self.cuda_cflags if source.language == "cuda" else self.cflags
        own = [str(len(self.roots)), *given, self.kind, str(self.with_cuda)]
        if source.language == "cuda":
            own += [*_architecture_flags(self.cuda_cflags), os.environ.get("NVCC_APPEND_FLAGS", "")]
        parts = [_FORMAT, source.language, *own, *torch_identity(), _light_text(), source.text]
        return digest_of("\0".join(parts).encode())[:40]

    def roots_of(self, source: ExtensionSource) -> list[Path]:
        """Returns the directories whose files are recorded by what they are called inside."""
        return [*([source.path.parent] if source.path else []), *self.roots]


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
def _light_text() -> str:
    return (_LIGHT / "torch" / "extension.h").read_text()


def build(extension: Extension) -> tuple[Entry, bool]:
    """Returns the build of an extension, and whether a compiler ran.

    Raises:
        NoCompilerError: it is not in the store, and there is no compiler.
        CompileError: a source does not compile, or the objects do not link.
        StoreError: the store cannot be written.
    """
    store = Store(folder="extensions")
    roots = [root for source in extension.sources for root in extension.roots_of(source)]
    compiler = find_compiler(store.identities)
    identity = compiler.identity if compiler else None
    entry = store.find(extension.key, identity, roots)
    if entry:
        return entry, False
    if compiler is None:
        raise NoCompilerError(
            extension.name,
            "there is no C++ compiler to build it with",
            hint="`apt-get install g++`, or `OPWRIGHT_CXX=/path/to/c++`",
        )
    with store.lock(extension.key):
        entry = store.find(extension.key, identity, roots)
        if entry:
            return entry, False
        with store.work() as work:
            return _Build(extension, compiler, store, work).run(), True


class _Build:
    def __init__(self, extension: Extension, compiler: Compiler, store: Store, work: Path) -> None:
        self.extension, self.compiler, self.store, self.work = extension, compiler, store, work
        self.objects = Store(store.root, "objects")
        self.nvcc = None
        if any(source.language == "cuda" for source in extension.sources) or extension.with_cuda:
            self.nvcc = cuda.find_nvcc(store.identities)
            if self.nvcc is None:
                raise NoNvccError(
                    extension.name,
                    "there is no CUDA compiler (nvcc) to build it with",
                    rows=[("looked in", "CUDA_HOME, PATH, /usr/local/cuda, Python's packages")],
                    hint="`pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm`",
                )

    def run(self) -> Entry:
        start = time.perf_counter()
        extension = self.extension
        found = [self._known_object(source) for source in extension.sources]
        missing = [i for i, entry in enumerate(found) if entry is None]
        seconds = self._compile_all(missing)
        for i in missing:
            found[i] = self._keep_object(i, seconds[f"source{i}"])
        link = [self.compiler.path, *(str(entry.library) for entry in found), *self._link_flags()]
        seconds |= self._steps({"link": [*link, "-o", self.store.product]})
        seconds["all"] = time.perf_counter() - start
        files: dict[str, str] = {}
        offset = 0
        for source, entry in zip(extension.sources, found, strict=True):
            for name, digest in entry.record.files.items():
                number, slash, rest = name[1:].partition("/") if name.startswith("@") else ("", "", "")
                files[f"@{int(number) + offset}/{rest}" if slash else name] = digest
            offset += len(extension.roots_of(source))
        record = BuildRecord(
            request=extension.key,
            library=digest_of((self.work / self.store.product).read_bytes()),
            compiler=self.compiler.identity,
            files=files,
            operators=[],
            seconds=seconds,
            created=time.time(),
        )
        return self.store.publish(self.work, extension.key, record)

    def _compile_all(self, indices: list[int]) -> dict[str, float]:
        """Compiles sources; if one fails, all again with the whole of torch/extension.h, whose errors count."""
        commands = {f"source{i}": self._compile(i) for i in indices}
        if not any(str(_LIGHT) in command for command in commands.values()):
            return self._steps(commands)
        try:
            return run_all(commands, self.work)
        except StepFailed:
            return self._steps({name: [*command, _WHOLE] for name, command in commands.items()})

    def _steps(self, commands: dict[str, list[str]]) -> dict[str, float]:
        try:
            return run_all(commands, self.work)
        except StepFailed as failed:
            texts = {
                str(self._path(i)): (str(source.path or "your source"), source.text)
                for i, source in enumerate(self.extension.sources)
            }
            raise text_error(self.extension.name, texts, failed.step, failed.output, failed.log) from None

    def _path(self, index: int) -> Path:
        source = self.extension.sources[index]
        return source.path or self.work / f"inline{index}.{source.suffix}"

    def _known_object(self, source: ExtensionSource) -> Entry | None:
        roots = self.extension.roots_of(source)
        key = self.extension.object_key(source)
        return self.objects.find(key, self._identity(source), roots, self.extension.name)

    def _identity(self, source: ExtensionSource) -> str:
        return (
            f"{self.compiler.identity}; {self.nvcc.identity}"
            if source.language == "cuda"
            else self.compiler.identity
        )

    def _compile(self, index: int) -> list[str]:
        extension, source, path = self.extension, self.extension.sources[index], self._path(index)
        if source.path is None:
            path.write_text(source.text)
        tail = ["-MMD", "-MF", f"{index}.d", "-c", str(path), "-o", f"{index}.o"]
        if source.language == "c":
            return [self.compiler.path, "-x", "c", "-O1", "-fPIC", *tail]
        common = (
            []
            if extension.kind == "program"
            else [f"-D{_NAME}={extension.name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        )
        common += [f"-I{root}" for root in extension.roots]
        is_light = source.language == "cpp" and "torch/extension.h" in source.text
        folders = [str(_LIGHT)] if is_light and not _NEEDS_WHOLE.search(source.text) else []
        folders += _system_includes(self.nvcc)
        common += [flag for folder in folders for flag in ("-isystem", folder)]
        if source.language == "cuda":
            return [
                self.nvcc.path,
                *common,
                *_cuda_flags(extension.cuda_cflags, self.compiler),
                "-x",
                "cu",
                *tail,
            ]
        return [self.compiler.path, *common, *_cpp_flags(extension.cflags), *tail]

    def _keep_object(self, index: int, seconds: float) -> Entry:
        source = self.extension.sources[index]
        files, uses_name = self._files_read(index)
        key = self.extension.object_key(source)
        with self.objects.work() as work:
            (self.work / f"{index}.o").rename(work / self.objects.product)
            record = BuildRecord(
                request=key,
                library=digest_of((work / self.objects.product).read_bytes()),
                compiler=self._identity(source),
                files=files,
                operators=[self.extension.name] if uses_name else [],
                seconds={"compile": seconds},
                created=time.time(),
            )
            return self.objects.publish(work, key, record)

    def _files_read(self, index: int) -> tuple[dict[str, str], bool]:
        """Returns the digests of the files that a source includes, and whether the module's name matters."""
        source = self.extension.sources[index]
        roots = self.extension.roots_of(source)
        uses_name = _NAME in source.text
        found: dict[str, str] = {}
        body = (self.work / f"{index}.d").read_text().replace("\\\n", " ").split(":", 1)[1]
        for name in re.findall(r"(?:\\ |\S)+", body):
            full = Path(os.path.normpath(self.work / name.replace("\\ ", " ")))
            if full in (self._path(index), source.path) or (
                self.nvcc and full.is_relative_to(self.nvcc.root)
            ):
                continue
            data = full.read_bytes()
            uses_name |= _NAME.encode() in data
            place = next(
                (f"@{i}/{full.relative_to(r)}" for i, r in enumerate(roots) if full.is_relative_to(r)),
                str(full),
            )
            found[place] = digest_of(data)
        return found, uses_name

    def _link_flags(self) -> list[str]:
        extension = self.extension
        library = _torch_folder() / "lib"
        flags = [] if extension.kind == "program" else ["-shared"]
        flags += [word for flag in extension.ldflags for word in shlex.split(flag)]
        wanted = [
            "c10",
            *(["c10_cuda"] if self.nvcc else []),
            "torch_cpu",
            *(["torch_cuda"] if self.nvcc else []),
            "torch",
        ]
        wanted += [] if extension.kind == "program" else ["torch_python"]
        flags.append(f"-L{library}")
        flags += [f"-l{name}" for name in wanted if (library / f"lib{name}.so").exists()]
        if self.nvcc:
            flags += [f"-L{self.nvcc.cudart}", "-lcudart"]
        if extension.kind == "program":
            flags.append(f"-Wl,-rpath,{library}")
        return flags


def _torch_folder() -> Path:
    import torch

    return Path(torch.__file__).parent


def _system_includes(nvcc: cuda.Nvcc | None) -> list[str]:
    include = _torch_folder() / "include"
    found = [str(include), str(include / "torch" / "csrc" / "api" / "include")]
    if nvcc:
        found += [
            str(path)
            for path in (nvcc.root / "include", *nvcc.root.glob("targets/*/include"))
            if path.exists()
        ][:1]
    return [*found, sysconfig.get_path("include", scheme="posix_prefix")]


def _cpp_flags(given: Sequence[str]) -> list[str]:
    own = [word for flag in given for word in shlex.split(flag)]
    standard = [] if any(flag.startswith("-std=") for flag in own) else ["-std=c++20"]
    level = [] if any(re.fullmatch(r"-O\w*", flag) for flag in own) else ["-O2"]
    return ["-fPIC", *standard, *level, *own]


def _cuda_flags(given: Sequence[str], compiler: Compiler) -> list[str]:
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

    own = [word for flag in given for word in shlex.split(flag)]
    host = (
        []
        if any(flag.startswith(("-ccbin", "--compiler-bindir")) for flag in own)
        else ["-ccbin", compiler.path]
    )
    standard = [] if any(flag.startswith(("-std=", "--std=")) for flag in own) else ["-std=c++20"]
    return [
        *COMMON_NVCC_FLAGS,
        *_architecture_flags(given),
        *host,
        "-Xcompiler",
        "-fPIC",
        "-O2",
        *own,
        *standard,
    ]


def _architecture_flags(given: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags for the architectures, unless the caller's own flags name some."""
    if any(re.match(r"-?-(gencode|arch|gpu-architecture|generate-code)\b", flag.strip()) for flag in given):
        return ()
    listed = settings.torch_architectures() or cuda.architectures()
    return cuda.architecture_flags(listed)
