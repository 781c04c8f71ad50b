"""Checks everything that a pack says, against its digests, its cubins, itself and the sources.

The file is read here without the reader that everything else uses: what a writer and its reader do wrong together would
not be seen otherwise, and reading goes on behind a finding.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..worker.cubin import read_cubin
from ..worker.errors import WorkerError
from ..worker.packfile import Entry, digest_of
from .diff import kind_of
from .places import is_tritons
from .records import check_description, check_kernel, check_table, classes_of

_HEADER, _ROW = struct.Struct("<8sIIQQ32s"), struct.Struct("<16sQII8s")
_ALIGNMENT = 64
_MACHINE_CUDA = 190
_FLAGS_AT = 0x30
_WARP_SIZE = 32


@dataclass(frozen=True)
class Finding:
    """Something wrong: where, and what."""

    place: str
    what: str


def verify(content: bytes, root: Path | None = None) -> tuple[list[Entry], list[Finding]]:
    """Returns what can be read of a pack, and what is wrong with it.

    Args:
        content: The pack file's bytes.
        root: Where the files are relative to that it was built from; they are compared if they are there.
    """
    findings: list[Finding] = []
    entries = []
    for index, (entry, wrong) in enumerate(_rows(content)):
        if entry is None:
            findings += [Finding("pack" if what.startswith("the pack") else f"row {index}", what) for what in wrong]
            continue
        entries.append(entry)
        findings += [Finding(place_of(entry.record), what) for what in [*wrong, *_entry(entry)]]
    findings += _together(entries)
    if root is not None:
        findings += _sources(entries, root)
    return entries, findings


def place_of(record: dict[str, Any]) -> str:
    """Returns what names a row in a list, as `add.py::add sm_90 3.6.0  *fp32:16, i32`."""
    place = f"{record['file']}::{record['function']}"
    if "key" in record:
        return f"{place} sm_{record['arch']} {record.get('triton')}  {record['key']}"
    return f"{place} sm_{record['arch']} tuned" if "arch" in record else f"{place} description"


def cubin_architecture(cubin: bytes) -> int:
    """Returns the architecture that a cubin's header names.

    Raises:
        ValueError: It is not a cubin.
    """
    try:
        (machine,) = struct.unpack_from("<H", cubin, 18)
        (flags,) = struct.unpack_from("<I", cubin, _FLAGS_AT)
    except struct.error:
        raise ValueError("is not an ELF file") from None
    if cubin[:4] != b"\x7fELF" or machine != _MACHINE_CUDA:
        raise ValueError("is not a cubin")
    # The lowest byte up to version 7 of NVIDIA's ABI, the next one since.
    return (flags >> 8 if cubin[8] >= 8 else flags) & 0xFF


def _rows(content: bytes) -> Iterator[tuple[Entry | None, list[str]]]:
    if len(content) < _HEADER.size or content[:8] != b"OPWPACK1":
        yield None, [f"the pack begins with {content[:8]!r}, expected b'OPWPACK1': it is not a pack"]
        return
    _, version, count, size, rows_at, checked = _HEADER.unpack_from(content)
    if version != 1:
        yield None, [f"the pack has version {version}, expected 1"]
        return
    if size != len(content):
        yield None, [f"the pack has {len(content)} bytes, expected {size}"]
    if rows_at < _HEADER.size or rows_at + count * _ROW.size > len(content):
        yield None, [f"the pack's {count} rows at {rows_at} end outside of it"]
        return
    table = content[rows_at : rows_at + count * _ROW.size]
    if rows_at + count * _ROW.size != size:
        yield None, [f"the pack's {count} rows at {rows_at} do not end where it ends"]
    if hashlib.sha256(table).digest() != checked:
        yield None, ["the pack's rows do not fit the digest in its header"]
    rows = list(_ROW.iter_unpack(table))
    if any(a[:2] > b[:2] for a, b in itertools.pairwise(rows)):
        yield None, ["the pack's rows are not sorted: lookups miss"]
    for row in rows:
        yield _row(content, rows_at, *row)


def _row(
    content: bytes, end: int, digest: bytes, at: int, length: int, zero: int, check: bytes
) -> tuple[Entry | None, list[str]]:
    if not _HEADER.size <= at <= at + length <= end:
        return None, [f"its record of {length} bytes at {at} lies outside of the records"]
    text = content[at : at + length]
    try:
        record = json.loads(text)
        filed_under = digest_of(record)
        place_of(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return None, [f"its record at {at} cannot be read: {error!r}"]
    wrong = []
    if zero:
        wrong.append(f"its row has {zero} where 0 is expected")
    if hashlib.sha256(text).digest()[:8] != check:
        wrong.append("the record does not fit its row's digest")
    if filed_under != digest:
        wrong.append("is filed under another digest: it is never found")
    if "key" not in record:
        return Entry(record), wrong
    try:
        blob_at, blob_length = record["blob"]
        inside = _HEADER.size <= blob_at <= blob_at + blob_length <= end
        blob = content[blob_at : blob_at + blob_length] if inside else b""
    except (KeyError, TypeError, ValueError):
        return Entry(record, b""), [*wrong, f"`blob` is {record.get('blob')!r}, expected [offset, size]"]
    if not inside:
        wrong.append(f"the cubin of {blob_length} bytes at {blob_at} lies outside of the records")
    elif blob_at % _ALIGNMENT:
        wrong.append(f"the cubin is at {blob_at}, which is not a multiple of {_ALIGNMENT}")
    elif hashlib.sha256(blob).hexdigest() != record.get("sha256"):
        wrong.append("the cubin does not fit the record's digest")
    return Entry(record, blob), wrong


def _entry(entry: Entry) -> Iterator[str]:
    kind = kind_of(entry.record)
    if kind == "description":
        yield from check_description(entry.record)
    elif kind == "tuned":
        yield from check_table(entry.record)
    else:
        wrong = list(check_kernel(entry.record))
        yield from wrong
        if not wrong and entry.blob:
            yield from _cubin(entry.record, entry.blob)


def _cubin(record: dict[str, Any], cubin: bytes) -> Iterator[str]:
    try:
        arch = cubin_architecture(cubin)
        found = read_cubin(cubin, record["symbol"])
    except WorkerError as error:
        yield error.message
        return
    except ValueError as error:
        yield f"the cubin {error}"
        return
    if arch != record["arch"]:
        yield f"the cubin is for sm_{arch}, expected sm_{record['arch']}"
    derived = tuple((parameter["offset"], parameter["size"]) for parameter in record["params"])
    if found.parameters != derived:
        yield f"the cubin's parameters are {list(found.parameters)} (offset, size), the record's {list(derived)}"
    if found.required_threads not in (None, record["num_warps"] * _WARP_SIZE):
        yield f"the cubin requires {found.required_threads} threads, the record has {record['num_warps']} warps"


def _together(entries: list[Entry]) -> Iterator[Finding]:
    """Yields what is wrong between rows: what is there twice, what is missing, what could be taken for another."""
    seen: set[tuple[Any, ...]] = set()
    descriptions: dict[tuple[str, str], dict[str, Any]] = {}
    for record in (entry.record for entry in entries):
        place = (kind_of(record), place_of(record), str(record.get("gpu")))
        if place in seen:
            yield Finding(place_of(record), "is there twice")
        seen.add(place)
        if kind_of(record) == "description":
            descriptions[record["file"], record["function"]] = record
    for entry in entries:
        record, kind = entry.record, kind_of(entry.record)
        description = descriptions.get((record["file"], record["function"]))
        if kind == "description":
            continue
        if description is None:
            yield Finding(place_of(record), "has no description: the runtime cannot launch it")
        elif kind == "kernel":
            yield from (Finding(place_of(record), what) for what in _arity(record, description))
        else:
            yield from (Finding(place_of(record), what) for what in _choices(record, description))
    names: dict[str, list[str]] = {}
    for file, function in descriptions:
        names.setdefault(function, []).append(file)
    for function, files in names.items():
        for a, b in itertools.combinations(sorted(files), 2):
            x, y = Path(a).parts[::-1], Path(b).parts[::-1]
            if all(one == other for one, other in zip(x, y)):
                yield Finding(f"{a}::{function}", f"cannot be told from {b}::{function}")


def _arity(record: dict[str, Any], description: dict[str, Any]) -> Iterator[str]:
    try:
        count, expected = len(classes_of(record["key"])), len(description["params"])
    except (WorkerError, KeyError, TypeError):
        return  # told already
    if count != expected:
        yield f"has {count} classes, and the description {expected} parameters"


def _choices(table: dict[str, Any], description: dict[str, Any]) -> Iterator[str]:
    autotune = description.get("autotune")
    if not autotune:
        yield "is of a kernel that is not under @triton.autotune"
        return
    count = len(autotune["configs"])
    for row in table.get("rows", []) if not list(check_table(table)) else []:
        if row["config"] >= count or len(row["microseconds"]) != count:
            yield f"has configuration {row['config']} of {len(row['microseconds'])}, and the description {count}"


def _sources(entries: list[Entry], root: Path) -> Iterator[Finding]:
    digests: dict[Path, str | None] = {}
    for entry in entries:
        for source in entry.record.get("sources") or []:
            if not (isinstance(source, list) and len(source) == 2) or is_tritons(str(source[0])):
                continue
            path = root / str(source[0])
            if path not in digests:
                there = path.is_file()
                digests[path] = hashlib.sha256(path.read_bytes()).hexdigest() if there else None
            if digests[path] not in (None, source[1]):
                yield Finding(place_of(entry.record), f"{source[0]} has changed since: build the pack again")
