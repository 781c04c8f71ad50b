"""Builds a pack from a manifest: every key, for every architecture, with every Triton. No GPU is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from opwright.errors import ManifestError, PackBuildError, PackFileError

from ..worker.packfile import Entry, PackError, read_pack, write_pack
from .cache import Cache
from .manifest import KernelEntry, Manifest
from .places import place_record
from .workers import NoPython, WorkerGone, WorkerPool

# What ptxas 12.8 to 13.4 know and Triton 3.5 to 3.9 compile for.
ARCHITECTURES = (75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
_NOBODYS = ("no-triton", "interpreted", "output", "request")  # errors that no other kernel would escape


@dataclass(frozen=True)
class Task:
    """One key to compile for one architecture with one Python's Triton."""

    python: str
    entry: KernelEntry
    arch: int


@dataclass(frozen=True)
class Failure:
    """A key that does not compile, or a kernel that cannot be read."""

    entry: KernelEntry
    message: str
    arch: int | None = None
    python: str = ""
    file: str | None = None
    line: int | None = None
    source: str | None = None


@dataclass
class BuildReport:
    """What was built.

    Attributes:
        kernels: The number of kernels in the pack, or that would be.
        cached: How many of them came from the cache.
        failures: What failed, in the manifest's order.
        size_bytes: The pack's size, 0 if it was not written.
        tuned_kept: Tables of measurements that the pack at this place had and that still hold.
    """

    kernels: int = 0
    cached: int = 0
    failures: list[Failure] = field(default_factory=list)
    size_bytes: int = 0
    tuned_kept: int = 0


def known_architectures(names: Iterable[str]) -> tuple[int, ...]:
    """Returns architectures by their numbers; `90a` is 90, for Triton compiles for the features of one GPU anyway.

    Raises:
        PackBuildError: There is no such architecture.
    """
    found = set()
    for name in names:
        number = int(name.rstrip("af"))
        if number not in ARCHITECTURES:
            raise PackBuildError(
                "--arch",
                f"there is no architecture `{name}` that Triton compiles for",
                rows=[("known", ", ".join(map(str, ARCHITECTURES)))],
                hint="`--arch 80,90,100`",
            )
        found.add(number)
    return tuple(sorted(found))


def build(
    manifest: Manifest,
    output: Path,
    architectures: tuple[int, ...],
    pythons: tuple[str, ...],
    *,
    jobs: int,
    keep_going: bool = False,
    expand: Callable[[str, Manifest], tuple[list[KernelEntry], list[Failure]]] | None = None,
    on_progress: Callable[[str], object] = lambda text: None,
) -> BuildReport:
    """Compiles what a manifest names and writes the pack.

    Args:
        manifest: What to compile.
        output: The pack; it is not written if anything fails, unless `keep_going`.
        architectures: Compute capabilities, as 90.
        pythons: Pythons with Triton, each of which compiles every key.
        jobs: The number of workers.
        keep_going: Write the pack of what did compile.
        expand: Returns the keys of all configurations of the kernels that are to be tuned, as one Python's Triton has them.
        on_progress: Called with what has just been compiled.

    Raises:
        ManifestError: Two kernels of the manifest cannot be told apart in a pack.
        PackBuildError: There is no Triton, or the pack cannot be written.
    """
    _check_names(manifest)
    report = BuildReport()
    tasks: dict[tuple[Any, ...], Task] = {}
    for python in dict.fromkeys(pythons):
        entries = [entry for entry in manifest.entries if entry.args is not None]
        if expand is not None and any(entry.tune for entry in manifest.entries):
            more, failures = expand(python, manifest)
            entries += more
            report.failures += failures
        for entry in entries:
            for arch in architectures:
                tasks.setdefault((python, *entry.identity, arch), Task(python, entry, arch))
    found = _compile_all(list(tasks.values()), jobs, report, on_progress)
    entries = _entries(manifest, found, report)
    report.failures.sort(key=lambda f: (f.entry.line, f.arch or 0, f.python))
    report.kernels = sum(entry.blob is not None for entry in entries)
    if not report.kernels or (report.failures and not keep_going):
        return report
    kept = _tuned_before(output, entries)
    report.tuned_kept = len(kept)
    write(output, [*entries, *kept])
    report.size_bytes = output.stat().st_size
    return report


def write(output: Path, entries: list[Entry]) -> None:
    """Writes a pack.

    Raises:
        PackBuildError: The file cannot be written.
    """
    try:
        write_pack(output, entries)
    except OSError as error:
        raise PackBuildError(
            str(output), f"the pack cannot be written: {error.strerror}", hint="`--out` another file"
        ) from error


def read(path: Path) -> list[Entry]:
    """Reads a pack.

    Raises:
        PackFileError: It cannot be read, or is not whole.
    """
    try:
        return read_pack(path)
    except OSError as error:
        raise PackFileError(
            str(path),
            f"the pack cannot be read: {error.strerror}",
            hint=f"`opwright pack build MANIFEST --out {path} --arch 90` writes one",
        ) from error
    except PackError as error:
        raise PackFileError(str(path), str(error), hint=f"`opwright pack verify {path}`") from error


def _check_names(manifest: Manifest) -> None:
    """Raises if the runtime, which compares the ends of paths, could take one kernel for another."""
    named: dict[str, list[tuple[list[str], KernelEntry]]] = {}
    for entry in manifest.entries:
        parts = manifest.name_in_pack(entry.file).split(os.path.sep)[::-1]
        for other, known in named.setdefault(entry.function, []):
            if entry.file != known.file and all(a == b for a, b in zip(parts, other)):
                raise ManifestError(
                    manifest.place(entry),
                    f"`{entry.function}` of two files cannot be told apart by their names in a pack",
                    rows=[("file", manifest.name_of(entry.file)), ("file", manifest.name_of(known.file))],
                    hint="put the manifest one folder higher, or rename one of the two",
                )
        named[entry.function].append((parts, entry))


def _compile_all(
    tasks: list[Task], jobs: int, report: BuildReport, on_progress: Callable[[str], object]
) -> list[tuple[Task, list[Entry]]]:
    """Returns what the workers made of the tasks, or the cache had; what failed is added to the report."""
    cache, pool = Cache(), WorkerPool()
    done: list[tuple[Task, list[Entry]]] = []
    waiting = []
    for task in tasks:
        known = cache.find(_path(cache, task), task.arch, str(task.entry.key))
        if known is None:
            waiting.append(task)
        else:
            done.append((task, known))
    report.cached = len(done)
    if not waiting:
        return done
    cache.create()

    def run(task: Task) -> None:
        found = _compile(task, cache, pool)
        if isinstance(found, Failure):
            report.failures.append(found)
        else:
            done.append((task, found))
        on_progress(f"{len(done) + len(report.failures)}/{len(tasks)} {task.entry.function} sm_{task.arch}")

    threads = ThreadPoolExecutor(min(jobs, len(waiting)))
    try:
        futures = [threads.submit(run, task) for task in waiting]
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in finished:
            future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        pool.close()
        threads.shutdown(wait=True)
    return done


def _path(cache: Cache, task: Task) -> Path:
    entry = task.entry
    return cache.path(task.python, entry.file, entry.function, task.arch, str(entry.key))


def _compile(task: Task, cache: Cache, pool: WorkerPool) -> list[Entry] | Failure:
    entry, out = task.entry, _path(cache, task)
    assert entry.args is not None
    request = {
        "do": "compile",
        "file": entry.file,
        "function": entry.function,
        "arch": task.arch,
        "args": list(entry.args),
        "options": dict(entry.options),
        "out": str(out),
    }
    try:
        reply = pool.ask(task.python, request)
    except NoPython as error:
        raise _no_triton(task.python, str(error)) from error
    except WorkerGone as error:
        return Failure(entry, str(error), task.arch, task.python)
    error = reply.get("error")
    if error is not None:
        if error["kind"] in _NOBODYS:
            raise _no_triton(task.python, error["message"])
        place = error.get("file"), error.get("line"), error.get("source")
        return Failure(entry, error["message"], task.arch, task.python, *place)
    try:
        found = read_pack(out)
    except (OSError, PackError) as read_error:
        return Failure(entry, f"what the worker wrote cannot be read: {read_error}", task.arch, task.python, str(out))
    if not any(e.record.get("key") == entry.key and e.record.get("arch") == task.arch for e in found):
        return Failure(entry, "the worker wrote another key", task.arch, task.python, str(out))
    return found


def _no_triton(python: str, message: str) -> PackBuildError:
    return PackBuildError(
        python,
        f"cannot compile Triton kernels: {message}",
        hint="`--python /path/to/venv/bin/python`, of an environment with Triton 3.5 to 3.9",
    )


def _entries(manifest: Manifest, found: list[tuple[Task, list[Entry]]], report: BuildReport) -> list[Entry]:
    """Returns the pack's entries: every kernel once, and of each function the description of the newest Triton."""
    kernels: dict[tuple[Any, ...], Entry] = {}
    descriptions: dict[tuple[str, str], dict[str, Entry]] = {}
    python_of: dict[str, str] = {}
    for task, entries in found:
        for entry in entries:
            placed = replace(entry, record=place_record(manifest, task.entry.file, entry.record))
            record = placed.record
            version = str(record["triton"])
            if python_of.setdefault(version, task.python) != task.python:
                raise PackBuildError(
                    "--python",
                    f"two Pythons have Triton {version}",
                    rows=[("first", python_of[version]), ("second", task.python)],
                    hint="name one of them",
                )
            if entry.blob is not None:
                place = (record["file"], record["function"], record["arch"], record["key"], version)
                kernels[place] = placed
                continue
            known = descriptions.setdefault((record["file"], record["function"]), {})
            if known.setdefault(version, placed).record != record:
                message = "its file changed while it was built; build again"
                report.failures.append(Failure(task.entry, message, task.arch, task.python, task.entry.file))
    newest = [known[max(known, key=_numbers)] for known in descriptions.values()]
    return [*kernels.values(), *newest]


def _numbers(version: str) -> list[int]:
    return [int(part) if part.isdigit() else 0 for part in version.split(".")]


def _tuned_before(output: Path, entries: list[Entry]) -> list[Entry]:
    """Returns the measurements of the pack that is replaced whose kernels have the configurations that they had."""
    try:
        before = read_pack(output)
    except (OSError, PackError):
        return []

    def configurations(found: list[Entry]) -> dict[tuple[str, str], Any]:
        records = [entry.record for entry in found]
        return {(r["file"], r["function"]): r.get("autotune") for r in records if "arch" not in r}

    then, now = configurations(before), configurations(entries)
    tuned = [entry for entry in before if "arch" in entry.record and "key" not in entry.record]
    places = [(entry.record["file"], entry.record["function"]) for entry in tuned]
    return [e for e, place in zip(tuned, places) if now.get(place) and now[place] == then.get(place)]
