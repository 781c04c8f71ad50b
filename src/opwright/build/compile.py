"""Builds a unit: glue, stub and kernels compiled side by side, then linked."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opwright import settings
from opwright.build.diagnostics import compile_error
from opwright.build.glue import glue_text, header_text
from opwright.build.store import BuildRecord, Entry, Store, digest_of
from opwright.build.toolchain import (
    GLUE_FLAGS,
    INCLUDE,
    KERNEL_FLAGS,
    LINK_FLAGS,
    NATIVE,
    Compiler,
    find_compiler,
    headers_digest,
    machine_identity,
)
from opwright.errors import CompileError, LoadError, NoCompilerError
from opwright.spec.declaration import Declaration, Source

_LEAST_FREE_BYTES = 1 << 16  # a compiler that fails with less than this left failed for want of space
_FORMAT = 1  # changes when the layout of a library changes


@dataclass
class Request:
    """What is to be built, and its address in the store."""

    unit: tuple[Declaration, ...]
    backend: str
    sources: tuple[Source, ...]
    texts: tuple[str, ...]
    glue: str
    header: str
    flags: tuple[str, ...]
    key: str = field(init=False)

    def __post_init__(self) -> None:
        parts = [
            f"format {_FORMAT}", self.backend, machine_identity(), headers_digest(),
            *GLUE_FLAGS, *LINK_FLAGS, *self.flags, self.glue, self.header, *self.texts,
        ]  # fmt: skip
        self.key = digest_of("\0".join(parts).encode())[:40]


def make_request(unit: Sequence[Declaration], backend: str) -> Request:
    """Returns the request for the kernels of a unit, from the sources as they are now."""
    sources = tuple(dict.fromkeys(d.sources[backend] for d in unit if backend in d.sources))
    return Request(
        unit=tuple(unit),
        backend=backend,
        sources=sources,
        texts=tuple(source.read() for source in sources),
        glue=glue_text(unit, backend),
        header=header_text(unit, backend),
        flags=(*KERNEL_FLAGS, *settings.cxxflags()),
    )


def ensure_built(request: Request, store: Store) -> tuple[Entry, bool]:
    """Returns the build of a request, and whether it had to be made.

    Raises:
        NoCompilerError: it is not in the store, and there is no compiler.
        CompileError: a source does not compile.
        StoreError: the store cannot be written, or belongs to someone else.
    """
    compiler = find_compiler(store.identities)
    entry = store.find(request.key, compiler.identity if compiler else None)
    if entry:
        return entry, False
    if compiler is None:
        raise NoCompilerError(
            request.unit[0].name,
            "there is no C++ compiler to build its kernel with",
            hint="`apt-get install g++`, or `OPWRIGHT_CXX=/path/to/c++`",
        )
    with store.lock(request.key):
        entry = store.find(request.key, compiler.identity)  # another process may have built it
        if entry:
            return entry, False
        with store.work() as work:
            return _build(request, compiler, store, work), True


def _build(request: Request, compiler: Compiler, store: Store, work: Path) -> Entry:
    start = time.perf_counter()
    _check_exports(request)
    (work / "unit.c").write_text(request.glue)
    (work / "contract.h").write_text(request.header)
    commands = {}
    for i, source in enumerate(request.sources):
        commands[source.origin] = _kernel_command(request, compiler, work, i)
    # The part of the glue that is the same for all operators is kept in the store as an object.
    support = store.support(_support_key(compiler))
    if support is None:
        commands |= _support_commands(compiler, work)
    glue = [compiler.path, *GLUE_FLAGS, "-I", str(NATIVE / "src"), "-c", "unit.c", "-o", "unit.o"]
    commands["glue"] = glue
    seconds = _run_all(commands, work, request)
    if support is None:
        support = store.publish_support(work, _support_key(compiler), _SUPPORT)
    objects = ["unit.o", *(f"kernel{i}.o" for i in range(len(request.sources)))]
    shared = [str(support / name) for name in _SUPPORT]
    link = [compiler.path, *LINK_FLAGS, *objects, *shared, "-o", "library.so"]
    seconds |= _run_all({"link": link}, work, request)
    seconds["all"] = time.perf_counter() - start
    record = BuildRecord(
        request=request.key,
        library=digest_of((work / "library.so").read_bytes()),
        compiler=compiler.identity,
        files=_files_read(request, work),
        operators=[d.qualified_name for d in request.unit],
        seconds=seconds,
        created=time.time(),
    )
    for name in (*objects, *(p.name for p in work.glob("*.d"))):
        (work / name).unlink(missing_ok=True)
    return store.publish(work, request.key, record)


def _check_exports(request: Request) -> None:
    """Refuses sources that export nothing: the reference would run, and nobody would know."""
    if any("OPWRIGHT_KERNEL(" in text for text in request.texts):
        return
    name = next((d.name for d in request.unit if d.forward is None), request.unit[0].name)
    raise CompileError(
        name,
        "its source exports no kernel",
        rows=[("source", source.origin) for source in request.sources],
        hint=f"`OPWRIGHT_KERNEL({name}, float, double)` behind the function, with the types it is good for",
    )


_SUPPORT = ("glue.o", "libtorch_cpu.so")


def _support_key(compiler: Compiler) -> str:
    return digest_of("\0".join([compiler.identity, headers_digest(), *GLUE_FLAGS]).encode())[:40]


def _support_commands(compiler: Compiler, work: Path) -> dict[str, list[str]]:
    (work / "stub.c").write_text(_stub_text())
    stub = [
        compiler.path, "-x", "c", "-w", "-shared", "-nostdlib", "-fPIC", "stub.c",
        "-Wl,-soname,libtorch_cpu.so", "-o", "libtorch_cpu.so",
    ]  # fmt: skip
    runtime = [compiler.path, *GLUE_FLAGS, "-c", str(NATIVE / "src" / "glue.c"), "-o", "glue.o"]
    return {"glue runtime": runtime, "stub": stub}


def _kernel_command(request: Request, compiler: Compiler, work: Path, index: int) -> list[str]:
    source = request.sources[index]
    path = source.path
    if path is None:
        path = work / f"kernel{index}.cpp"
        path.write_text(f'#line {source.line} "{source.origin}"\n{source.inline}')
    return [
        compiler.path, *request.flags, "-I", str(INCLUDE), "-include", "contract.h",
        "-MMD", "-MF", f"kernel{index}.d", "-c", str(path), "-o", f"kernel{index}.o",
    ]  # fmt: skip


def _run_all(commands: dict[str, list[str]], work: Path, request: Request) -> dict[str, float]:
    """Runs commands side by side, at most OPWRIGHT_JOBS at a time; returns the seconds of each."""
    waiting = list(commands.items())
    running: dict[str, tuple[subprocess.Popen, float, Path]] = {}
    seconds: dict[str, float] = {}
    logs: list[str] = []
    failed: list[tuple[str, str]] = []
    environment = {**os.environ, "LC_ALL": "C"}
    while waiting or running:
        while waiting and len(running) < max(settings.jobs(), 1):
            name, command = waiting.pop(0)
            output = work / f"output{len(seconds) + len(running)}.txt"
            with open(output, "wb") as f:
                process = subprocess.Popen(
                    command,
                    cwd=work,
                    stdout=f,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            running[name] = (process, time.perf_counter(), output)
        name = _wait_for_one(running)
        process, started, output = running.pop(name)
        seconds[name] = time.perf_counter() - started
        text = output.read_text(errors="replace")
        output.unlink()
        logs.append(f"$ {' '.join(commands[name])}\n{text}")
        if process.returncode != 0:
            failed.append((name, text))
    with open(work / "build.log", "a") as f:
        f.write("\n".join(logs))
    if failed:
        name, text = failed[0]
        if "No space left on device" in text or shutil.disk_usage(work).free < _LEAST_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(work))
        raise compile_error(request, name, text, "\n".join(logs))
    return seconds


def _wait_for_one(running: dict[str, tuple[subprocess.Popen, float, Path]]) -> str:
    pids = {process.pid: name for name, (process, _, _) in running.items()}
    if len(pids) == 1:
        name = next(iter(running))
        running[name][0].wait()
        return name
    while True:
        for name, (process, _, _) in running.items():
            if process.poll() is not None:
                return name
        time.sleep(0.001)


def _files_read(request: Request, work: Path) -> dict[str, str]:
    """Returns the digests of the files that the sources included, Opwright's own and systems' left out."""
    own = {str(source.path) for source in request.sources}
    found: dict[str, str] = {}
    for path in work.glob("*.d"):
        for name in _dependencies(path.read_text()):
            full = (work / name).resolve()
            if full.is_relative_to(NATIVE) or full.is_relative_to(work.resolve()) or str(full) in own:
                continue
            found[str(full)] = digest_of(full.read_bytes())
    return found


def _dependencies(text: str) -> list[str]:
    body = text.replace("\\\n", " ").split(":", 1)[1]
    return [name.replace("\\ ", " ") for name in re.findall(r"(?:\\ |\S)+", body)]


def _stub_text() -> str:
    """Returns an empty definition of every function that the glue takes from libtorch_cpu.

    Linking against the real library costs 0.1 s for its 400 MB, and needs torch; only the names
    matter to the linker, and the loader finds the library that the process already holds.
    """
    text = (NATIVE / "src" / "glue.h").read_text()
    names = re.findall(r"^extern \w+ ((?:aoti_)?torch_\w+)\(", text, re.MULTILINE)
    return "".join(f"void {name}(void) {{}}\n" for name in names)


def load_error(entry: Entry, reason: str) -> LoadError:
    """Returns the error for a library that the system's loader refuses."""
    return LoadError(
        entry.record.operators[0],
        "its library cannot be loaded",
        rows=[("library", str(entry.library)), ("reason", reason)],
        hint="`opwright doctor`",
    )
