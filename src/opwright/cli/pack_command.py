"""opwright pack"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from opwright.cli.console import print_json, print_rows, progress, say
from opwright.cli.help import Out, make_app
from opwright.errors import plural

if TYPE_CHECKING:
    from opwright.triton.packs.build import BuildReport, Failure
    from opwright.triton.packs.manifest import Manifest

pack_app = make_app("pack")


@pack_app.command
def record(*command: str, output: Out = Path("manifest.json")) -> int:
    """Run COMMAND and add every kernel key that it launches to a manifest.

    The exit code is that of COMMAND.

    Args:
        command: The command, after `--`: opwright pack record -- python serve.py
        output: The manifest; what it has already stays.
    """
    from opwright.errors import RecordingError
    from opwright.triton.packs.record import record as run

    if not command:
        raise RecordingError("", "no command is given", hint="`opwright pack record -- COMMAND ARGUMENTS`")
    found = run(list(command), output)
    if found.skipped:
        say(f"skipped {plural(found.skipped, 'line')} of the record that cannot be read")
    if not found.seen:
        say("hint: nothing was recorded: only kernels launched through opwright/triton.h are, each at its first launch")
    total = plural(len(found.manifest.entries), "kernel key")
    say(f"Recorded {plural(found.seen, 'kernel key')}, {found.added} of them new; {output} has {total}")
    return found.status


@pack_app.command
def build(
    manifest: Path,
    *,
    output: Out,
    python: Annotated[list[str] | None, Parameter(negative="")] = None,
    keep_going: Annotated[bool, Parameter(negative="")] = False,
    tune: Annotated[bool, Parameter(negative="")] = False,
    json: bool = False,
) -> int:
    """Compile what MANIFEST names into one file, for the architectures of --arch. No GPU is needed.

    Without --arch, those that the manifest was recorded on.

    Exit code 1: a kernel does not compile; 5: the manifest names none.

    Args:
        manifest: What to compile, as `opwright pack record` writes it.
        output: The pack to write.
        python: A Python with Triton; may be repeated, for several versions of Triton in one pack.
        keep_going: Write the pack without the kernels that do not compile.
        tune: Measure autotuned kernels on the GPU here, as `opwright pack tune` does.
        json: Print what was built as JSON.
    """
    from opwright import settings
    from opwright.errors import PackBuildError
    from opwright.triton.packs.build import build as run
    from opwright.triton.packs.build import known_architectures
    from opwright.triton.packs.listing import size_text
    from opwright.triton.packs.manifest import read_manifest
    from opwright.triton.packs.tune import expand
    from opwright.triton.packs.workers import default_python

    started = time.perf_counter()
    read = read_manifest(manifest)
    if not read.entries:
        say(f"error: {manifest} names no kernel\n\nhint: `opwright pack record --out {manifest} -- COMMAND`")
        return 5
    names = settings.architectures() or tuple(map(str, read.architectures))
    if not names:
        raise PackBuildError("--arch", "the manifest does not say for which architectures", hint="`--arch 80,90,100`")
    architectures = known_architectures(names)
    pythons = tuple(python or [default_python()])
    with progress("Building") as line:
        report = run(
            read,
            output,
            architectures,
            pythons,
            jobs=settings.jobs(),
            keep_going=keep_going,
            expand=expand,
            on_progress=line.update,
        )
    _say_failures(read, report.failures)
    if json:
        print_json(_build_facts(report, output, architectures))
    elif report.size_bytes:
        print(output)
    if report.tuned_kept:
        say(f"Kept {plural(report.tuned_kept, 'tuned table')} of the {output} that was there")
    seconds = time.perf_counter() - started
    arches = " ".join(f"sm_{arch}" for arch in architectures)
    if report.size_bytes:
        size = f"{size_text(report.size_bytes)}, {report.cached} cached"
        say(f"Built {plural(report.kernels, 'kernel')} for {arches} in {seconds:.1f} s ({size})")
    if report.failures:
        rest = "" if report.size_bytes else f"; {output} was not written (--keep-going writes the others)"
        say(f"{plural(len(report.failures), 'kernel')} failed{rest}")  # of one architecture and one Triton each
        return 1
    return _tune(read, output, pythons[0]) if tune else 0


@pack_app.command(name=["list", "ls"])
def ls(pack: Path, *, json: bool = False) -> int:
    """List the kernels of PACK.

    Args:
        pack: A pack file.
        json: Print JSON.
    """
    from opwright.errors import align
    from opwright.triton.packs.build import read
    from opwright.triton.packs.listing import driver_text, kernels_of, size_text, tables_of

    entries = read(pack)
    kernels, tables = kernels_of(entries), tables_of(entries)
    if json:
        print_json({"pack": str(pack), "bytes": pack.stat().st_size, "kernels": kernels, "tuned": tables})
        return 0
    rows = align(
        [
            (
                f"    sm_{kernel['arch']}",
                f"Triton {kernel['triton']}",
                f"ptxas {kernel['ptxas']}",
                f"driver >= {driver_text(kernel['cuda'])}",
                f"{plural(kernel['num_warps'], 'warp')}",
                f"{size_text(kernel['shared'])} shared",
                size_text(kernel["bytes"]),
            )
            for kernel in kernels
        ]
        or [("",)]
    )
    place = key = None
    for kernel, row in zip(kernels, rows):
        if place != (kernel["file"], kernel["function"]):
            place, key = (kernel["file"], kernel["function"]), None
            print("::".join(place))
        if key != kernel["key"]:
            key = kernel["key"]
            print(f"  {key}")
        print(row)
    for table in tables:
        tuned = f"{table['file']}::{table['function']} sm_{table['arch']}"
        print(f"{tuned} tuned on {table['gpu']}, {plural(len(table['rows']), 'key')}")
    functions = len({(kernel["file"], kernel["function"]) for kernel in kernels})
    total = f"{plural(len(kernels), 'kernel')} of {plural(functions, 'function')}"
    print(f"{total}, {size_text(pack.stat().st_size)}")
    return 0


@pack_app.command
def verify(pack: Path, *, root: Path | None = None, json: bool = False) -> int:
    """Check every digest, record and cubin of PACK.

    Exit code 1: something is wrong.

    Args:
        pack: A pack file.
        root: The folder of the manifest: the sources that are there must be those that the pack was built from.
        json: Print what is wrong as JSON.
    """
    from opwright.errors import PackFileError
    from opwright.triton.packs.verify import verify as run

    try:
        content = pack.read_bytes()
    except OSError as error:
        raise PackFileError(str(pack), f"the pack cannot be read: {error.strerror}") from error
    entries, findings = run(content, root)
    if json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.place}: {finding.what}")
    kernels = sum(entry.blob is not None for entry in entries)
    if findings:
        say(f"Failed {pack}: {plural(len(findings), 'finding')}\n\nhint: build it again: `opwright pack build`")
        return 1
    say(f"Verified {pack}: {plural(kernels, 'kernel')}, {plural(len(entries), 'row')}")
    return 0


@pack_app.command
def diff(before: Path, after: Path, *, json: bool = False) -> int:
    """Say what AFTER has that BEFORE has not, and the reverse.

    Exit code 1: they differ.

    Args:
        before: A pack file.
        after: Another one.
        json: Print JSON.
    """
    from opwright.triton.packs.build import read
    from opwright.triton.packs.diff import differences

    found = differences(read(before), read(after))
    if json:
        print_json([asdict(difference) for difference in found])
    else:
        rows = []
        for one in found:
            sign = {"added": "+", "removed": "-", "changed": "~"}[one.kind]
            place = one.place
            what = "" if one.what == "kernel" else one.what
            arch = f"sm_{place['arch']}" if "arch" in place else ""
            name = f"{sign} {place['file']}::{place['function']}"
            detail = " ".join(filter(None, [place.get("key") or place.get("gpu"), what]))
            changes = f"  ({', '.join(one.changes)})" if one.changes else ""
            rows.append((name, arch, place.get("triton", ""), detail + changes))
        print_rows(rows)
    counts = [sum(one.kind == kind for one in found) for kind in ("added", "removed", "changed")]
    say("Compared: {} added, {} removed, {} changed".format(*counts) if found else "Compared: the same")
    return int(bool(found))


@pack_app.command
def tune(
    manifest: Path,
    *,
    output: Out,
    python: str | None = None,
) -> int:
    """Measure every configuration of the autotuned kernels of MANIFEST on the GPU here, into the tables of a pack.

    Measured are the kernels whose lines say with which arguments:
    "tune": [{"arguments": {"x": {"shape": [4096], "dtype": "fp16"}, "n": 4096}, "grid": "grid"}].
    Tables of other GPUs stay.

    Exit code 1: a kernel cannot be measured, or is not in the pack.

    Args:
        manifest: The manifest that the pack was built from.
        output: The pack, which gets the tables.
        python: A Python with Triton and torch.
    """
    from opwright.triton.packs.manifest import read_manifest
    from opwright.triton.packs.workers import default_python

    return _tune(read_manifest(manifest), output, python or default_python())


@pack_app.command
def embed(pack: Path, *, output: Out, name: str | None = None) -> int:
    """Write a C file that links PACK into a program, as opwright_pack_NAME_begin and opwright_pack_NAME_end.

    Args:
        pack: A pack file; it is read when the C file is compiled.
        output: The C file.
        name: What the symbols are called after; the pack's name if left out.
    """
    from opwright.errors import PackBuildError
    from opwright.triton.packs.embed import embed_text

    text = embed_text(pack, name)
    try:
        output.write_text(text)
    except OSError as error:
        raise PackBuildError(str(output), f"cannot be written: {error.strerror}") from error
    print(output)
    return 0


def _tune(manifest: Manifest, pack: Path, python: str) -> int:
    from opwright.triton.packs.tune import tune as run

    started = time.perf_counter()
    with progress("Tuning"):
        report = run(manifest, pack, python)
    _say_failures(manifest, report.failures)
    for key in report.absent:
        say(f"not in the pack: {key}; hint: `opwright pack build {manifest.path} --out {pack}`")
    measured = f"{plural(report.kernels, 'kernel')}, {plural(report.rows, 'key')}"
    say(f"Tuned {measured} on {report.gpu} (sm_{report.arch}) in {time.perf_counter() - started:.1f} s")
    return int(bool(report.failures or report.absent))


def _build_facts(report: BuildReport, output: Out, architectures: tuple[int, ...]) -> dict:
    return {
        "pack": str(output) if report.size_bytes else None,
        "bytes": report.size_bytes,
        "kernels": report.kernels,
        "cached": report.cached,
        "architectures": list(architectures),
        "failures": [
            {
                "file": failure.entry.file,
                "function": failure.entry.function,
                "key": failure.entry.key,
                "arch": failure.arch,
                "python": failure.python,
                "message": failure.message,
                "place": f"{failure.file}:{failure.line}" if failure.file else None,
            }
            for failure in report.failures
        ],
    }


def _say_failures(manifest: Manifest, failures: list[Failure]) -> None:
    """Says what failed; what failed alike for several architectures or Pythons is said once."""
    alike: dict[tuple, list[Failure]] = {}
    for failure in failures:
        alike.setdefault((failure.entry.line, failure.message, failure.file, failure.line), []).append(failure)
    for group in alike.values():
        say(_failure_text(manifest, group))


def _failure_text(manifest: Manifest, alike: list[Failure]) -> str:
    from opwright.errors import align

    failure = alike[0]
    architectures = " ".join(dict.fromkeys(f"sm_{one.arch}" for one in alike if one.arch))
    rows = [("key", f"{architectures}  {failure.entry.key}".lstrip())] if failure.entry.args is not None else []
    rows.append(("manifest", manifest.place(failure.entry)))
    rows += [("python", python) for python in dict.fromkeys(one.python for one in alike)]
    if failure.file:
        rows.append(("at", f"{failure.file}:{failure.line}" if failure.line else failure.file))
    if failure.source:
        rows.append(("", failure.source))
    name = f"`{failure.entry.function}`"
    head = failure.message if name in failure.message else f"{name}: {failure.message}"
    return "\n".join([f"error: {head}", "", *("  " + line for line in align(rows)), ""])
