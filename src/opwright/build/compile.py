"""Builds a unit: glue, stub and kernels compiled side by side, then linked."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NoReturn

from opwright import settings
from opwright.backends.protocol import CompiledBackend, CompileJob
from opwright.backends.registry import all_backends
from opwright.backends.toolchain import (
    GLUE_FLAGS,
    LINK_FLAGS,
    NATIVE,
    Compiler,
    header_folders,
    headers_digest,
    is_of_c_library,
)
from opwright.build import compile_commands
from opwright.build.announce import announced
from opwright.build.changes import FileChanged, Watch, build_unchanged
from opwright.build.diagnostics import compile_error
from opwright.build.remote import RemoteStore, remote_store
from opwright.build.request import Request, make_request, renew
from opwright.build.steps import StepFailed, run_all
from opwright.build.store import BuildRecord, Entry, Store, digest_of
from opwright.build.tools import Tools, find_tools
from opwright.contract.names import quote_for_c
from opwright.contract.sources import Source
from opwright.errors import CompileError, LoadError, NoCompilerError


def ensure_built(request: Request, store: Store) -> tuple[Entry, bool]:
    """Returns the build of a request, and whether it had to be made.

    Where a file changes while compilers read it, what is built in the end is the text that it has then.

    Raises:
        NoCompilerError: it is not in the store, and there is no compiler.
        CompileError: a source does not compile, or does not stop changing.
        StoreError: the store cannot be written, or belongs to someone else.
    """
    return build_unchanged(request.subject, lambda watch: _ensure_built(renew(request), store, watch))


def _ensure_built(request: Request, store: Store, watch: Watch) -> tuple[Entry, bool]:
    tools = find_tools(request, store)
    entry = store.find(request.key, tools.identity)
    if entry:
        return entry, False
    remote = remote_store()
    if remote is None:
        _require(tools, request)
    what = f"compiling {request.subject} for {', '.join(request.backends)}"
    with announced(what), store.lock(request.key):
        entry = store.find(request.key, tools.identity)  # another process may have built it
        if entry is None and remote is not None:
            entry = remote.fetch(store, request.key, tools.identity)
        if entry:
            return entry, False
        _require(tools, request)
        if remote is None:
            return _build_here(request, tools, store, watch), True
        with remote.claim(store, request.key, tools.identity) as entry:
            if entry:
                return entry, False
            entry = _build_here(request, tools, store, watch)
            push(entry, request, store, remote)
            return entry, True


def push(entry: Entry, request: Request, store: Store, remote: RemoteStore) -> None:
    """Writes the build of a request to a remote store, and its parts for one backend each, which calls ask for."""
    remote.push(entry)
    for part in _parts(request):
        if made := store.find(part.key, find_tools(part, store).identity):
            remote.push(made)


def _build_here(request: Request, tools: Tools, store: Store, watch: Watch) -> Entry:
    with store.work() as work:
        return _build(request, tools, store, work, watch)


def _parts(request: Request) -> list[Request]:
    """Returns the requests for one backend each, where a request is for several: a call asks for those."""
    backends = request.backends if len(request.backends) > 1 else ()
    return [make_request(request.unit, (backend,), request.texts) for backend in backends]


def _require(tools: Tools, request: Request) -> None:
    for backend, tool in tools.own.items():
        if tool is None:
            raise backend.make_compiler_error(request.subject)
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
    runtimes = {b: store.support(_runtime_key(b, compiler)) for b in request.languages if b.runtime_objects()}
    for backend, runtime in runtimes.items():
        if runtime is None:
            commands |= backend.make_runtime_commands(compiler)
    starts: dict[str, float] = {}
    try:
        seconds = run_all(commands, work, starts)
    except StepFailed as failed:
        if not kernels.repair(failed.output):
            _raise_compile_error(request, failed)
        seconds = _run_all(commands | kernels.commands(), work, request, starts)
    files = _files_read(request, tools, store.identities, work, watch)
    if support is None:
        support = store.publish_support(work, _support_key(compiler), SUPPORT)
    shared = [str(support / name) for name in SUPPORT if not (request.has_own_runtime and name == "glue.o")]
    link = [compiler.path, *LINK_FLAGS, "unit.o", *kernels.objects, *shared]
    for backend in request.languages:
        if backend in runtimes:
            objects = backend.runtime_objects()
            runtime = runtimes[backend] or store.publish_support(work, _runtime_key(backend, compiler), objects)
            link += [str(runtime / name) for name in objects]
        link += backend.link_flags(tools.own.get(backend))
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
    for part in _parts(request):
        store.alias(entry, part.key, find_tools(part, store).identity)
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
    written = [(all_backends()[s.backend], t) for s, t in request.texts.items() if s not in request.translations]
    if all(backend.exports_kernels(text) for backend, text in written):
        return
    raise CompileError(
        request.subject,
        "its source exports no kernel",
        rows=[("source", source.origin) for found in request.sources.values() for source in found],
        hint=f"`OPWRIGHT_KERNEL({request.subject}, float, double)` behind the function, with the types it is good for",
    )


SUPPORT = ("glue.o", "overlap.o", "direct.o", "libtorch_cpu.so", "libtorch.so")


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

    def compile_(name: str) -> list[str]:
        return [compiler.path, *GLUE_FLAGS, "-c", str(NATIVE / "src" / f"{name}.c"), "-o", f"{name}.o"]

    return {
        "glue runtime": compile_("glue"),
        "memory that overlaps": compile_("overlap"),
        "direct calls": compile_("direct"),
        "stub of libtorch_cpu": stub("libtorch_cpu.so", "stub.c"),
        # Where torch has CUDA, libtorch.so brings libtorch_cuda.so, which the weak functions are in.
        "stub of libtorch": stub("libtorch.so", "empty.c"),
    }


def _runtime_key(backend: CompiledBackend, compiler: Compiler) -> str:
    """Returns the address of what all libraries with kernels of a backend are linked with."""
    return digest_of("\0".join(backend.describe_runtime(compiler)).encode())[:40]


class _Kernels:
    """The compiles of a request's kernels.

    Attributes:
        objects: what they make.
    """

    def __init__(self, request: Request, tools: Tools, identities: Path, work: Path) -> None:
        self._tools, self._identities, self._subject = tools, identities, request.subject
        self._jobs: list[tuple[CompiledBackend, CompileJob, str]] = []
        for device in request.backends:
            header = f"contract_{device}.h"
            (work / header).write_text(request.headers[device])
            for i, source in enumerate(request.sources[device]):
                backend = all_backends()[source.backend]
                if source in request.translations:
                    path = work / f"launch{i}.cpp"
                    path.write_text(request.translations[source])
                else:
                    path = source.path or _write_inline(source, work / f"source{i}_{device}{backend.suffix}")
                for part in backend.split(source.with_headers(request.texts[source])):
                    stem = f"kernel{i}_{backend.name}{part}"
                    job = _job(request, tools, identities, backend, path, stem)
                    self._jobs.append((backend, job, part))
        self.objects = [f"{job.stem}.o" for _, job, _ in self._jobs]

    def commands(self) -> dict[str, list[str]]:
        return {job.stem: backend.make_command(job, part) for backend, job, part in self._jobs}

    def repair(self, output: str) -> bool:
        """Returns whether commands that failed with this output may work now."""
        compiler, subject = self._tools.compiler, self._subject
        languages = dict.fromkeys(backend for backend, _, _ in self._jobs)
        return any(b.repair(output, self._tools.own.get(b), compiler, self._identities, subject) for b in languages)


def _job(
    request: Request, tools: Tools, identities: Path, backend: CompiledBackend, path: Path, stem: str
) -> CompileJob:
    device, own = backend.device_type, tools.own.get(backend)
    flags = request.flags[device]
    return CompileJob(path, f"contract_{device}.h", stem, flags, own, tools.compiler, identities)


def _write_inline(source: Source, path: Path) -> Path:
    path.write_text(f"#line {source.line} {quote_for_c(source.origin)}\n{source.inline}")
    return path


def write_compile_commands(request: Request, tools: Tools | None, store: Store) -> list[Path]:
    """Keeps the commands of a request's kernels for editors; returns the files that have them now.

    The contract's header is put beside, since the folder of a build is the store's. Sources outside of
    projects, and those that there is no compiler for, are passed over.
    """
    tools = tools or find_tools(request, store)
    found: dict[Path, list[compile_commands.Command]] = {}
    for backend, sources in request.languages.items():
        for path in (s.path for s in sources if s.path and s not in request.translations):
            project = compile_commands.project_of(path)
            if project is None or tools.compiler is None or not tools.own.get(backend, True):
                continue
            folder = project / "build" / "opwright" / f"{request.unit[0].namespace}.{request.subject}"
            job = _job(request, tools, store.identities, backend, path, "kernel")
            compile_commands.keep_text(folder / job.header, request.headers[backend.device_type])
            command = backend.make_command(job)
            found.setdefault(project, []).append(compile_commands.from_compiler(command, folder, path))
    written = [compile_commands.write(commands, project) for project, commands in found.items()]
    return [path for path in written if path]


def _run_all(
    commands: dict[str, list[str]], work: Path, request: Request, starts: dict[str, float]
) -> dict[str, float]:
    """Runs commands side by side; returns the seconds of each, and notes in `starts` when it began."""
    try:
        return run_all(commands, work, starts)
    except StepFailed as failed:
        _raise_compile_error(request, failed)


def _raise_compile_error(request: Request, failed: StepFailed) -> NoReturn:
    _check_sources(request)
    raise compile_error(request, failed.step, failed.output, failed.log) from None


def _files_read(request: Request, tools: Tools, identities: Path, work: Path, watch: Watch) -> dict[str, str]:
    """Returns the digests of the files that the sources included.

    It skips those of Opwright and compilers, which the cache key stands for, and of the C library, assumed to fit.

    Raises:
        FileChanged: a source or one of them changed meanwhile.
    """
    own = request.compiled_files
    compiler = tools.compiler
    folders = [NATIVE, work.resolve(), *header_folders(compiler.path, identities)]
    folders += [
        path for backend, tool in tools.own.items() for path in backend.system_folders(tool, compiler, identities)
    ]
    known = tuple({f"{path}/" for folder in folders for path in (folder, folder.resolve())})
    listed = {name for path in work.glob("*.d") for name in _dependencies(path.read_text())}
    read = {(work / name).resolve() for name in listed if not name.startswith(known)}
    included = {p for p in read - own if not str(p).startswith(known) and not is_of_c_library(str(p))}
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
