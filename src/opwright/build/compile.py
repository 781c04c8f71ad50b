"""Builds a unit: glue, stub and kernels compiled side by side, then linked."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from opwright import settings
from opwright.build import compile_commands, cuda
from opwright.build.announce import announced
from opwright.build.changes import FileChanged, Watch, build_unchanged
from opwright.build.cuda import Nvcc
from opwright.build.diagnostics import compile_error
from opwright.build.glue import glue_text, header_text, kernel_signature
from opwright.build.steps import StepFailed, run_all
from opwright.build.store import BuildRecord, Entry, Store, digest_of
from opwright.build.toolchain import (
    GLUE_FLAGS,
    INCLUDE,
    INCLUDE_VARIABLES,
    KERNEL_FLAGS,
    LINK_FLAGS,
    NATIVE,
    Compiler,
    dependencies_flag,
    find_compiler,
    headers_digest,
    machine_identity,
    triton_digest,
)
from opwright.errors import CompileError, LoadError, NoCompilerError, NoNvccError
from opwright.spec.declaration import Declaration, Source
from opwright.triton.launch_file import read_launch_file
from opwright.triton.translate import quote_for_c, translate

_FORMAT = 2  # changes when the layout of a library changes
# An include that depends on where the source lies, or whose name cannot be read off it.
_INCLUDES_BESIDE = re.compile(r"^\s*#\s*(include|include_next|embed)\b\s*[^\s<]|__has_include", re.MULTILINE)


@dataclass
class Request:
    """What is to be built, and its address in the store.

    Attributes:
        unit: the operators of the library.
        backends: whose kernels it holds.
        sources: the sources of each backend.
        texts: their contents, which a build of the request is made from.
        launches: the C++ of the launch functions in a `triton.py`, by its source.
        glue, headers: generated from the contracts; a header for each backend.
        flags: of each backend's compiler.
        has_own_runtime: the glue brings what all operators share, as a probe does.
    """

    unit: tuple[Declaration, ...]
    backends: tuple[str, ...]
    sources: dict[str, tuple[Source, ...]]
    texts: dict[Source, str]
    launches: dict[Source, str]
    glue: str
    headers: dict[str, str]
    flags: dict[str, tuple[str, ...]]
    has_own_runtime: bool = False
    key: str = field(init=False)

    def __post_init__(self) -> None:
        parts = [f"format {_FORMAT}", headers_digest(), *GLUE_FLAGS, *LINK_FLAGS, self.glue, *self.texts.values()]
        for backend in self.backends:
            parts += [backend, *self.flags[backend], self.headers[backend]]
        if "cpu" in self.backends:
            parts.append(machine_identity())
        for source, text in self.texts.items():
            if source.path and _INCLUDES_BESIDE.search(text):  # the same text elsewhere may include another file
                parts.append(str(source.path.parent))
        parts += [f"{name}={os.environ[name]}" for name in INCLUDE_VARIABLES if os.environ.get(name)]
        if self.launches:
            parts += [triton_digest(), *_RUNTIME_FLAGS, *self.launches.values()]
        if self.needs_nvcc:  # nvcc reads these itself
            parts += [os.environ.get(f"NVCC_{name}_FLAGS", "") for name in ("PREPEND", "APPEND")]
        self.key = digest_of("\0".join(parts).encode())[:40]

    @property
    def needs_nvcc(self) -> bool:
        """Whether it holds CUDA C++."""
        return any(source.backend == "cuda" for source in self.sources.get("cuda", ()))

    @property
    def compiled_files(self) -> set[Path]:
        """The sources that compilers read from where the author keeps them."""
        return {source.path for source in self.texts if source.path and source.backend != "triton"}

    @property
    def subject(self) -> str:
        """The operator that errors are about."""
        return next((d.name for d in self.unit if d.forward is None), self.unit[0].name)

    def known_architectures(self) -> list[str]:
        """Returns the architectures that nvcc knows."""
        nvcc = cuda.find_nvcc(Store().identities)
        return cuda.known_architectures(nvcc) if nvcc else []


def make_request(
    unit: Sequence[Declaration], backends: Sequence[str], texts: Mapping[Source, str] | None = None
) -> Request:
    """Returns the request for the kernels of a unit.

    Args:
        texts: those of the sources; by default as they are now.
    """
    sources = {b: tuple(dict.fromkeys(d.sources[b] for d in unit if b in d.sources)) for b in backends}
    texts = {s: texts[s] if texts else s.read() for found in sources.values() for s in found}
    return Request(
        unit=tuple(unit),
        backends=tuple(backends),
        sources=sources,
        texts=texts,
        launches={s: _translated(s, text, unit) for s, text in texts.items() if s.backend == "triton"},
        glue=glue_text(unit, backends),
        headers={backend: header_text(unit, backend) for backend in backends},
        flags={backend: _flags(backend) for backend in backends},
    )


def _as_it_is_now(request: Request) -> Request:
    """Returns the request for the same kernels, from the sources as they are now."""
    texts = {source: source.read() for source in request.texts}
    if texts == request.texts:
        return request
    launches = {source: _translated(source, texts[source], request.unit) for source in request.launches}
    return replace(request, texts=texts, launches=launches)


def _translated(source: Source, text: str, unit: Sequence[Declaration]) -> str:
    """Returns the C++ of a `triton.py`."""
    held = [d for d in unit if d.sources.get("cuda") == source]
    file = read_launch_file(held[0].name, source.origin, text)
    signatures = [kernel_signature(declaration, "cuda") for declaration in held]
    return translate(file, [declaration.contract for declaration in held], signatures)


def _flags(backend: str) -> tuple[str, ...]:
    if backend == "cpu":
        return (*KERNEL_FLAGS, *settings.cxxflags())
    return (*cuda.NVCC_FLAGS, *cuda.architecture_flags(cuda.architectures()))


@dataclass(frozen=True)
class Tools:
    """The compilers that a request needs; None where there is none."""

    compiler: Compiler | None
    nvcc: Nvcc | None
    needs_nvcc: bool

    @property
    def identity(self) -> str | None:
        """What a build is recorded under; None when a tool is missing, so that any build will do."""
        if self.compiler is None or (self.needs_nvcc and self.nvcc is None):
            return None
        return f"{self.compiler.identity}; {self.nvcc.identity}" if self.nvcc else self.compiler.identity


def ensure_built(request: Request, store: Store) -> tuple[Entry, bool]:
    """Returns the build of a request, and whether it had to be made.

    Where a file changes while compilers read it, what is built in the end is the text that it has then.

    Raises:
        NoCompilerError: it is not in the store, and there is no compiler.
        CompileError: a source does not compile, or does not stop changing.
        StoreError: the store cannot be written, or belongs to someone else.
    """
    return build_unchanged(request.subject, lambda watch: _ensure_built(_as_it_is_now(request), store, watch))


def _ensure_built(request: Request, store: Store, watch: Watch) -> tuple[Entry, bool]:
    tools = _find_tools(request, store)
    entry = store.find(request.key, tools.identity)
    if entry:
        return entry, False
    _require(tools, request)
    what = f"compiling {request.subject} for {', '.join(request.backends)}"
    with announced(what), store.lock(request.key):
        entry = store.find(request.key, tools.identity)  # another process may have built it
        if entry:
            return entry, False
        with store.work() as work:
            return _build(request, tools, store, work, watch), True


def _find_tools(request: Request, store: Store) -> Tools:
    nvcc = cuda.find_nvcc(store.identities) if request.needs_nvcc else None
    return Tools(find_compiler(store.identities), nvcc, request.needs_nvcc)


def _require(tools: Tools, request: Request) -> None:
    if tools.needs_nvcc and tools.nvcc is None:
        raise NoNvccError(
            request.subject,
            "there is no CUDA compiler (nvcc) to build its kernel with",
            rows=[
                ("architecture", ", ".join(f"sm_{name}" for name in cuda.architectures())),
                ("looked in", "CUDA_HOME, PATH, /usr/local/cuda, Python's packages"),
            ],
            hint="`pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm`, "
            "or `export CUDA_HOME=/path/to/cuda`",
        )
    if tools.compiler is None:
        raise NoCompilerError(
            request.subject,
            "there is no C++ compiler to build its kernel with",
            hint="`apt-get install g++`, or `OPWRIGHT_CXX=/path/to/c++`",
        )


def _build(request: Request, tools: Tools, store: Store, work: Path, watch: Watch) -> Entry:
    start = time.perf_counter()
    for path in request.compiled_files:
        watch.look(path)
    _check_sources(request)
    _check_exports(request)
    compiler = tools.compiler
    (work / "unit.c").write_text(request.glue)
    kernels = _Kernels(request, tools, store.identities, work)
    if settings.compile_commands():  # first: what does not compile is what an editor is opened for
        write_compile_commands(request, tools, store)
    commands = dict(kernels.commands())
    # The part of the glue that is the same for all operators is kept in the store as an object.
    support = store.support(_support_key(compiler))
    if support is None:
        commands |= support_commands(compiler, work)
    commands["glue"] = [
        compiler.path, *GLUE_FLAGS, "-I", str(NATIVE / "src"), "-c", "unit.c", "-o", "unit.o",
    ]  # fmt: skip
    runtime = None
    if request.launches:
        runtime = store.support(_runtime_key(compiler))
        if runtime is None:
            commands |= _runtime_commands(compiler)
    starts: dict[str, float] = {}
    try:
        seconds = _run_all(commands, work, request, starts)
    except HostRefused:
        kernels.host = cuda.choose_host_compiler(tools.nvcc, compiler, store.identities, request.subject)
        seconds = _run_all(commands | kernels.commands(), work, request, starts)
    files = _files_read(request, tools, work, watch)
    if support is None:
        support = store.publish_support(work, _support_key(compiler), SUPPORT)
    shared = [str(support / name) for name in SUPPORT if not (request.has_own_runtime and name == "glue.o")]
    link = [compiler.path, *LINK_FLAGS, "unit.o", *kernels.objects, *shared]
    if request.launches:
        if runtime is None:
            runtime = store.publish_support(work, _runtime_key(compiler), _runtime_objects())
        link += [*(str(runtime / name) for name in _runtime_objects()), "-ldl", "-pthread"]
    if tools.nvcc:
        link += cuda.link_flags(tools.nvcc)
    seconds |= _run_all({"link": [*link, "-o", "library.so"]}, work, request, starts)
    seconds["all"] = time.perf_counter() - start
    record = BuildRecord(
        request=request.key,
        library=digest_of((work / "library.so").read_bytes()),
        compiler=tools.identity,
        files=files,
        operators=[d.qualified_name for d in request.unit],
        seconds=seconds,
        created=time.time(),
        starts={name: began - start for name, began in starts.items()},
    )
    for name in ("unit.o", *kernels.objects, *(p.name for p in work.glob("*.d"))):
        (work / name).unlink(missing_ok=True)
    entry = store.publish(work, request.key, record)
    if len(request.backends) > 1:
        for backend in request.backends:  # so that a call, which asks for one backend, finds it too
            part = make_request(request.unit, (backend,), request.texts)
            store.alias(entry, part.key, _find_tools(part, store).identity)
    return entry


def _check_sources(request: Request) -> None:
    """Raises FileChanged if a source is not what the request was made from."""
    for source, text in request.texts.items():
        try:
            is_same = source.read() == text
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise FileChanged(source.path)


def _check_exports(request: Request) -> None:
    """Refuses sources that export nothing: the reference would run, and nobody would know."""
    written = [text for source, text in request.texts.items() if source.backend != "triton"]
    if all("OPWRIGHT_KERNEL(" in text for text in written):
        return
    raise CompileError(
        request.subject,
        "its source exports no kernel",
        rows=[("source", source.origin) for found in request.sources.values() for source in found],
        hint=f"`OPWRIGHT_KERNEL({request.subject}, float, double)` behind the function, with the types it is good for",
    )


SUPPORT = ("glue.o", "libtorch_cpu.so", "libtorch.so")


def _support_key(compiler: Compiler) -> str:
    return digest_of("\0".join([compiler.identity, headers_digest(), *GLUE_FLAGS]).encode())[:40]


def support_commands(compiler: Compiler, work: Path) -> dict[str, list[str]]:
    """Returns the commands that make the files named in SUPPORT, which every library is linked with."""
    (work / "stub.c").write_text(_stub_text())
    (work / "empty.c").write_text("")

    def stub(name: str, source: str) -> list[str]:
        return [
            compiler.path, "-x", "c", "-w", "-shared", "-nostdlib", "-fPIC", source,
            f"-Wl,-soname,{name}", "-o", name,
        ]  # fmt: skip

    runtime = [compiler.path, *GLUE_FLAGS, "-c", str(NATIVE / "src" / "glue.c"), "-o", "glue.o"]
    return {
        "glue runtime": runtime,
        "stub of libtorch_cpu": stub("libtorch_cpu.so", "stub.c"),
        # Where torch has CUDA, libtorch.so brings libtorch_cuda.so, which the weak functions are in.
        "stub of libtorch": stub("libtorch.so", "empty.c"),
    }


# The runtime of Triton kernels, compiled once for all operators that have some.
_RUNTIME = NATIVE / "src" / "triton"
_RUNTIME_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden")


def _runtime_objects() -> tuple[str, ...]:
    return tuple(f"triton_{path.stem}.o" for path in sorted(_RUNTIME.glob("*.cpp")))


def _runtime_key(compiler: Compiler) -> str:
    return digest_of("\0".join([compiler.identity, triton_digest(), str(_RUNTIME), *_RUNTIME_FLAGS]).encode())[:40]


def _runtime_commands(compiler: Compiler) -> dict[str, list[str]]:
    worker = NATIVE.parent / "triton"
    return {
        f"Triton runtime: {path.stem}": [
            compiler.path, *_RUNTIME_FLAGS, "-I", str(INCLUDE), f'-DOPWRIGHT_TRITON_WORKER_DIR="{worker}"',
            "-c", str(path), "-o", f"triton_{path.stem}.o",
        ]
        for path in sorted(_RUNTIME.glob("*.cpp"))
    }  # fmt: skip


class _Kernels:
    """The compiles of a request's kernels.

    Attributes:
        host: the compiler of the host half of CUDA sources.
        objects: what the compiles make.
    """

    def __init__(self, request: Request, tools: Tools, identities: Path, work: Path) -> None:
        self._request, self._tools, self._work = request, tools, work
        self.host = _host(tools, identities)
        self._compiles = []
        for backend in request.backends:
            for i, source in enumerate(request.sources[backend]):
                if source.backend == "triton":
                    path = work / f"launch{i}.cpp"
                    path.write_text(request.launches[source])
                    self._compiles.append(("triton", path, f"kernel{i}_triton", ""))
                    continue
                path = source.path or self._write(f"source{i}_{backend}", backend, source)
                for part in cuda.parts_of(request.texts[source]) if backend == "cuda" else ("",):
                    self._compiles.append((backend, path, f"kernel{i}_{backend}{part}", part))
        self.objects = [f"{stem}.o" for _, _, stem, _ in self._compiles]
        for backend, header in request.headers.items():
            (work / f"contract_{backend}.h").write_text(header)

    def _write(self, stem: str, backend: str, source: Source) -> Path:
        path = self._work / f"{stem}.{'cpp' if backend == 'cpu' else 'cu'}"
        path.write_text(f"#line {source.line} {quote_for_c(source.origin)}\n{source.inline}")
        return path

    def commands(self) -> dict[str, list[str]]:
        return {
            stem: _kernel_command(self._request, self._tools, self.host, backend, path, stem, part)
            for backend, path, stem, part in self._compiles
        }


def _host(tools: Tools, identities: Path) -> str:
    return cuda.host_compiler(tools.nvcc, tools.compiler, identities) if tools.nvcc else ""


def _kernel_command(
    request: Request, tools: Tools, host: str, backend: str, path: Path, stem: str, part: str = ""
) -> list[str]:
    """Returns the command that compiles one kernel source, in a folder with the contract's header."""
    if backend == "triton":
        return [
            tools.compiler.path, *_RUNTIME_FLAGS, "-I", str(INCLUDE), "-include", "contract_cuda.h",
            "-c", str(path), "-o", f"{stem}.o",
        ]  # fmt: skip
    header, flags = f"contract_{backend}.h", request.flags[backend]
    if backend == "cuda":
        return cuda.compile_command(tools.nvcc, host, (*flags, *cuda.PARTS[part]), path, header, stem)
    return [
        tools.compiler.path, *flags, "-I", str(INCLUDE), "-include", header,
        dependencies_flag(flags), "-MF", f"{stem}.d", "-c", str(path), "-o", f"{stem}.o",
    ]  # fmt: skip


def write_compile_commands(request: Request, tools: Tools | None, store: Store) -> list[Path]:
    """Keeps the commands of a request's kernels for editors; returns the files that have them now.

    The contract's header is put beside, since the folder of a build is the store's. Sources outside of
    projects, and those that there is no compiler for, are passed over.
    """
    tools = tools or _find_tools(request, store)
    host = _host(tools, store.identities) if tools.compiler else ""
    found: dict[Path, list[compile_commands.Command]] = {}
    for backend in request.backends:
        for path in (s.path for s in request.sources[backend] if s.path and s.backend == backend):
            project = compile_commands.project_of(path)
            if project is None or (tools.nvcc if backend == "cuda" else tools.compiler) is None:
                continue
            folder = project / "build" / "opwright" / f"{request.unit[0].namespace}.{request.subject}"
            compile_commands.keep_text(folder / f"contract_{backend}.h", request.headers[backend])
            command = _kernel_command(request, tools, host, backend, path, "kernel")
            found.setdefault(project, []).append(compile_commands.from_compiler(command, folder, path))
    written = [compile_commands.write(commands, project) for project, commands in found.items()]
    return [path for path in written if path]


class HostRefused(Exception):
    """nvcc refuses the host compiler."""


def _run_all(
    commands: dict[str, list[str]], work: Path, request: Request, starts: dict[str, float]
) -> dict[str, float]:
    """Runs commands side by side; returns the seconds of each, and notes in `starts` when it began."""
    try:
        return run_all(commands, work, starts)
    except StepFailed as failed:
        if "cuda" in request.backends and cuda.is_refusal(failed.output):
            raise HostRefused from None
        _check_sources(request)
        raise compile_error(request, failed.step, failed.output, failed.log) from None


def _files_read(request: Request, tools: Tools, work: Path, watch: Watch) -> dict[str, str]:
    """Returns the digests of the files that the sources included, Opwright's own and systems' left out.

    Raises:
        FileChanged: a source or one of them changed meanwhile.
    """
    own = request.compiled_files
    known = [NATIVE, work.resolve(), *([tools.nvcc.root] if tools.nvcc else [])]
    read = {(work / name).resolve() for path in work.glob("*.d") for name in _dependencies(path.read_text())}
    included = {path for path in read - own if not any(path.is_relative_to(folder) for folder in known)}
    digests = watch.digests(own | included)
    _check_sources(request)
    return {str(path): digests[path] for path in sorted(included)}


def _dependencies(text: str) -> list[str]:
    body = text.replace("\\\n", " ").split(":", 1)[1]
    return [re.sub(r"\\([ #])", r"\1", name).replace("$$", "$") for name in re.findall(r"(?:\\[ #]|\S)+", body)]


def _stub_text() -> str:
    """Returns an empty definition of every function that the glue takes from libtorch_cpu.

    Linking against the real library costs 0.1 s for its 400 MB, and needs torch; only the names
    matter to the linker, and the loader finds the library that the process already holds.
    """
    text = (NATIVE / "src" / "glue.h").read_text()
    declared = re.findall(r"^extern \w+ ((?:aoti_)?torch_\w+)(\([^;]*);", text, re.MULTILINE)
    names = [name for name, rest in declared if "weak" not in rest]
    return "".join(f"void {name}(void) {{}}\n" for name in names)


def load_error(entry: Entry, reason: str) -> LoadError:
    """Returns the error for a library that the system's loader refuses."""
    return LoadError(
        entry.record.operators[0],
        "its library cannot be loaded",
        rows=[("library", str(entry.library)), ("reason", reason)],
        hint="`opwright doctor`",
    )
