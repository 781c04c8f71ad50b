"""Measures the configurations of autotuned kernels on this machine's GPU, and keeps the tables in the pack."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opwright.errors import PackBuildError, TuneError

from ..worker.packfile import Entry
from .build import Failure, read, write
from .choice import runs_on
from .manifest import KernelEntry, Manifest
from .workers import FOLDER

_PROGRAM = (
    "import sys; sys.path[:] = [sys.argv[1], *filter(None, sys.path)]; import worker, packs.tuner; "
    "sys.path.remove(sys.argv[1]); packs.tuner.main(*sys.argv[2:])"
)
_NO_TRITON = ("no-triton", "interpreted")


@dataclass(frozen=True)
class TuneReport:
    """What was measured.

    Attributes:
        gpu: The GPU's name.
        arch: Its architecture.
        kernels: The number of kernels measured.
        rows: The number of keys of tables.
        failures: Kernels that could not be measured.
        absent: Keys of configurations that the pack does not hold for this GPU, as `function sm_90 key`.
    """

    gpu: str
    arch: int
    kernels: int
    rows: int
    failures: list[Failure]
    absent: list[str]


def expand(python: str, manifest: Manifest) -> tuple[list[KernelEntry], list[Failure]]:
    """Returns the keys of every configuration of the kernels that are to be tuned, for their `tune` arguments.

    Raises:
        PackBuildError: The Python has no Triton.
    """
    entries = [entry for entry in manifest.entries if entry.tune]
    reply = _ask(python, entries, measure=False, architectures=())
    found, failures = [], []
    for entry, result in zip(entries, reply["results"]):
        if "error" in result:
            failures.append(_failure(entry, result["error"], python))
            continue
        for key in result["keys"]:
            options = tuple((name, value) for name, value in sorted(key["options"].items()))
            found.append(replace(entry, args=tuple(key["args"]), options=options, tune=()))
    return found, failures


def tune(manifest: Manifest, pack: Path, python: str) -> TuneReport:
    """Measures the kernels of a manifest that have `tune`, and replaces their tables for this GPU in a pack.

    Args:
        manifest: What to measure.
        pack: A pack built from it.
        python: A Python with Triton and torch.

    Raises:
        TuneError: No entry has `tune`, or there is no GPU or no torch.
        PackFileError: There is no pack yet, or it is damaged.
    """
    entries = [entry for entry in manifest.entries if entry.tune]
    if not entries:
        raise TuneError(
            str(manifest.path),
            "no kernel of the manifest has `tune`",
            hint='give one: "tune": [{"arguments": {"x": {"shape": [4096], "dtype": "fp16"}, "n": 4096}}]',
        )
    before = read(pack)
    architectures = sorted({entry.record["arch"] for entry in before if entry.blob is not None})
    reply = _ask(python, entries, measure=True, architectures=tuple(architectures))
    gpu, arch = reply["gpu"], reply["arch"]
    tables: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failures, absent = [], []
    held = {_held(entry.record) for entry in before if entry.blob is not None}
    for entry, result in zip(entries, reply["results"]):
        if "error" in result:
            failures.append(_failure(entry, result["error"], python))
            continue
        place = manifest.name_in_pack(entry.file), entry.function
        tables.setdefault(place, []).extend(result["rows"])
        for key in result["keys"]:
            options = tuple(sorted(key["options"].items()))
            text = replace(entry, args=tuple(key["args"]), options=options).key
            if not any((*place, a, text) in held for a in architectures if runs_on(a, arch)):
                absent.append(f"{entry.function} sm_{arch} {text}")
    records = [
        {"file": file, "function": function, "arch": arch, "gpu": gpu, "rows": _unique(rows)}
        for (file, function), rows in sorted(tables.items())
    ]
    replaced = {(r["file"], r["function"], r["arch"], r["gpu"]) for r in records}
    kept = [entry for entry in before if _table_place(entry.record) not in replaced]
    if records:
        write(pack, [*kept, *map(Entry, records)])
    return TuneReport(gpu, arch, len(records), sum(len(r["rows"]) for r in records), failures, absent)


def _held(record: dict[str, Any]) -> tuple[str, str, int, str]:
    return record["file"], record["function"], record["arch"], record["key"]


def _table_place(record: dict[str, Any]) -> tuple[Any, ...] | None:
    if "rows" not in record:
        return None
    return record["file"], record["function"], record["arch"], record["gpu"]


def _unique(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows of several entries of a kernel: the first of a key counts."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        found.setdefault(tuple(row["key"]), row)
    return [found[key] for key in sorted(found)]


def _ask(python: str, entries: list[KernelEntry], *, measure: bool, architectures: tuple[int, ...]) -> dict[str, Any]:
    request = {
        "measure": measure,
        "architectures": list(architectures),
        "kernels": [
            {"file": e.file, "function": e.function, "options": dict(e.options), "tune": list(e.tune)} for e in entries
        ],
    }
    with tempfile.TemporaryDirectory(prefix="opwright-tune-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "reply.json")
        asked.write_text(json.dumps(request), encoding="utf-8")
        try:
            done = subprocess.run(
                [python, "-c", _PROGRAM, str(FOLDER), str(asked), str(answered)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise _unusable(python, f"cannot be run: {error.strerror}", measure) from error
        if not answered.is_file():
            said = done.stdout.decode("utf-8", "replace").strip().splitlines()
            how = f"ended with status {done.returncode}" + (f": {said[-1]}" if said else "")
            raise _unusable(python, how, measure)
        reply = json.loads(answered.read_text(encoding="utf-8"))
    if "error" in reply:
        raise _unusable(python, reply["error"]["message"], measure)
    for result in reply["results"]:
        if result.get("error", {}).get("kind") in _NO_TRITON:
            raise _unusable(python, result["error"]["message"], measure)
    return reply


def _unusable(python: str, why: str, measure: bool) -> PackBuildError | TuneError:
    if measure:
        return TuneError(
            python,
            f"kernels cannot be measured: {why}",
            hint="`opwright pack tune MANIFEST --out PACK --python PY` on a machine with a GPU, where PY has torch and "
            "Triton",
        )
    return PackBuildError(
        python,
        f"the configurations of autotuned kernels cannot be found: {why}",
        hint="`--python /path/to/venv/bin/python`, of an environment with Triton 3.5 to 3.9",
    )


def _failure(entry: KernelEntry, error: dict[str, Any], python: str) -> Failure:
    place = error.get("file"), error.get("line"), error.get("source")
    return Failure(entry, error["message"], None, python, *place)
