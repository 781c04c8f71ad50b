"""Records as JSON, written and read."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from opwright.errors import RecordError
from opwright.records.bench import BenchRecord
from opwright.records.build import BuildRecord
from opwright.records.call import CallRecord
from opwright.records.machine import VERSION
from opwright.records.verify import VerifyRecord
from opwright.records.versions import BaseRecord
from opwright.typed_json import decode, finite

Record = VerifyRecord | BenchRecord | CallRecord | BaseRecord | BuildRecord
KINDS = {
    "verify": VerifyRecord,
    "bench": BenchRecord,
    "call": CallRecord,
    "base": BaseRecord,
    "build": BuildRecord,
}


def builtins_of(record: Any) -> Any:
    """Returns a record, or a part of one, as dicts and lists that JSON knows."""
    return finite(asdict(record))


def encodable(value: Any) -> Any:
    """Returns records, lists of them or plain data as what is written to JSON."""
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    kind = next((name for name, type_ in KINDS.items() if type(value) is type_), None)
    return finite(value) if kind is None else {"type": kind, **builtins_of(value)}


def save(record: Record, path: Path) -> None:
    """Writes a record as JSON, whole or not at all.

    Raises:
        RecordError: it cannot be written there.
    """
    text = json.dumps(encodable(record), indent=2) + "\n"
    make_folder(path.parent)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staged.write_text(text)
        staged.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink()
        raise RecordError(str(path), "this record cannot be written", rows=[("reason", str(error))]) from None


def save_in(folder: Path, record: Record) -> Path:
    """Writes the record of an operator into a folder and returns where: `f.verify.json`, on a GPU `f.cuda.bench.json`.

    It takes the place of an older one, but of no other operator's: with two of one name, `a::f` and `b::f`, the
    second has its namespace before it, `b.f.verify.json`.

    Raises:
        RecordError: it cannot be written there.
    """
    kind = next(name for name, type_ in KINDS.items() if type(record) is type_)
    device = getattr(record, "device", "")
    on = "" if device in ("", "cpu") else f".{device.replace(':', '')}"
    namespace, _, name = record.name.rpartition("::")
    path = folder / f"{name}{on}.{kind}.json"
    with contextlib.suppress(RecordError):
        if path.exists() and read(path).name != record.name:
            path = path.with_name(f"{namespace}.{path.name}")
    save(record, path)
    return path


def make_folder(folder: Path) -> None:
    """Makes a folder for records, if it is not there.

    Raises:
        RecordError: no file can be written into it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is read-only for this user")
    except OSError as error:
        raise RecordError(
            str(folder), "no records can be written into this folder", rows=[("reason", str(error))]
        ) from None


def read(path: Path) -> Record:
    """Reads a record.

    Raises:
        RecordError: the file is damaged, or written by a newer version.
    """
    try:
        data = path.read_bytes()
        content = json.loads(data, parse_float=_finite, parse_constant=_finite)
        if b"\\ud" in data.lower():  # a lone surrogate is not a character and cannot be written again
            json.dumps(content, ensure_ascii=False).encode()
        return decoded(content)
    except (OSError, ValueError, RecursionError) as error:
        is_json = not isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
        reason = str(error) if is_json else f"it is not a record, which is JSON: {error}"
        raise RecordError(str(path), "this record cannot be read", rows=[("reason", reason)]) from None


def _finite(text: str) -> float:
    """Returns a finite number; JSON has neither infinity nor NaN."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"it has {text} for a number")
    return number


def decoded(content: Any) -> Record:
    """Returns the record that `encodable` has made JSON of.

    Raises:
        ValueError: it is not a record, or its version is newer.
    """
    content = dict(content) if isinstance(content, dict) else {}
    kind, version = content.pop("type", None), content.get("version", 1)
    if isinstance(version, int) and version > VERSION:
        raise ValueError(f"it has version {version}, and this Opwright reads up to {VERSION}")
    if kind == "mutants":
        raise ValueError("records of mutants are no longer read")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"it is of no known kind: {kind!r}")
    return decode(KINDS[kind], content, "record")
