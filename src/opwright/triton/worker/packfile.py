"""Pack files: kernels and descriptions in one file that is mapped and looked up by digest.

    0     magic, version, number of rows, size of the file, offset of the rows, SHA-256 of the rows
    64    records (JSON) and blobs (cubins, at multiples of 64)
    rows  40 bytes each: digest, offset and size of the record, first bytes of the record's SHA-256

The same rows, records and blobs make the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"OPWPACK1"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQ32s")
_ROW = struct.Struct("<16sQII8s")
_ALIGNMENT = 64  # bytes, of a blob


class PackError(ValueError):
    """A file is not a pack, or does not match its digests."""


@dataclass(frozen=True)
class Entry:
    """A record, with its cubin if it is a kernel's."""

    record: dict[str, Any]
    blob: bytes | None = None


def digest_of(record: dict[str, Any]) -> bytes:
    """Returns the 16 bytes that a record is looked up by."""
    place = [os.path.basename(record["file"]), record["function"]]
    if "key" in record:
        lines = ["kernel", *place, str(record["arch"]), record["key"]]
    elif "arch" in record:
        lines = ["tuned", *place, str(record["arch"])]
    else:
        lines = ["describe", *place]
    return hashlib.sha256("\n".join(lines).encode()).digest()[:16]


def pack(entries: Iterable[Entry]) -> bytes:
    """Returns the bytes of a pack file; the order of the entries makes no difference."""
    ordered = sorted(entries, key=lambda entry: (digest_of(entry.record), _encode(_without_place(entry))))
    body = bytearray(_HEADER.size)
    blobs: dict[bytes, int] = {}
    for entry in ordered:
        if entry.blob is not None and entry.blob not in blobs:
            body += bytes(-len(body) % _ALIGNMENT)
            blobs[entry.blob] = len(body)
            body += entry.blob
    rows: list[bytes] = []
    for entry in ordered:
        record = dict(entry.record)
        if entry.blob is not None:
            record["blob"] = [blobs[entry.blob], len(entry.blob)]
            record["sha256"] = hashlib.sha256(entry.blob).hexdigest()
        text = _encode(record)
        check = hashlib.sha256(text).digest()[:8]
        rows.append(_ROW.pack(digest_of(record), len(body), len(text), 0, check))
        body += text
    body += bytes(-len(body) % _ALIGNMENT)
    table = b"".join(rows)
    checked = hashlib.sha256(table).digest()
    header = _HEADER.pack(MAGIC, VERSION, len(rows), len(body) + len(table), len(body), checked)
    body[: _HEADER.size] = header
    return bytes(body) + table


def write_pack(path: str | os.PathLike[str], entries: Iterable[Entry]) -> list[Entry]:
    """Writes a pack file: beside its place, synced, and renamed, so that no reader sees half of it.

    Returns:
        What the file holds, read back from its bytes: the records know the places of their blobs.
    """
    content = pack(entries)
    written = list(unpack(content))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    return written


def read_pack(path: str | os.PathLike[str]) -> list[Entry]:
    """Returns what a pack file holds, everything in it checked.

    Raises:
        PackError: The file is not a pack, is damaged, or a digest does not match.
        OSError: The file cannot be read.
    """
    return list(unpack(Path(path).read_bytes()))


def unpack(content: bytes) -> Iterator[Entry]:
    """Yields the entries of a pack file's bytes.

    Raises:
        PackError: As for `read_pack`.
    """
    if len(content) < _HEADER.size or content[:8] != MAGIC:
        raise PackError(f"is not a pack file: it begins with {content[:8]!r}, expected {MAGIC!r}")
    _, version, count, size, rows_at, checked = _HEADER.unpack_from(content)
    if version != VERSION:
        raise PackError(f"has version {version}, expected {VERSION}")
    if size != len(content):
        raise PackError(f"has {len(content)} bytes, expected {size}")
    if rows_at < _HEADER.size or rows_at + count * _ROW.size != size:
        raise PackError(f"has {count} rows at {rows_at}, which do not end where the file ends")
    table = content[rows_at:]
    if hashlib.sha256(table).digest() != checked:
        raise PackError("has rows that do not fit the header's digest")
    rows = list(_ROW.iter_unpack(table))
    if [row[:2] for row in rows] != sorted(row[:2] for row in rows):
        raise PackError("has rows that are not sorted")
    for digest, at, length, zero, check in rows:
        if zero != 0 or not _HEADER.size <= at <= at + length <= rows_at:
            raise PackError(f"has a record of {length} bytes at {at}, outside of its records")
        yield _read_entry(content, rows_at, digest, content[at : at + length], check)


def _read_entry(content: bytes, rows_at: int, digest: bytes, text: bytes, check: bytes) -> Entry:
    if hashlib.sha256(text).digest()[:8] != check:
        raise PackError("has a record that does not fit its row's digest")
    try:
        record = json.loads(text)
        fits = digest_of(record) == digest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise PackError(f"has a record that cannot be read: {error}") from None
    if not fits:
        raise PackError(f"has a record of `{record['function']}` under another digest")
    if "key" not in record:
        return Entry(record)
    try:
        at, length = record["blob"]
        if not (
            type(at) is type(length) is int and _HEADER.size <= at <= at + length <= rows_at and at % _ALIGNMENT == 0
        ):
            raise PackError(f"has a cubin of {length} bytes at {at}, outside of its records")
        blob = content[at : at + length]
        if hashlib.sha256(blob).hexdigest() != record["sha256"]:
            raise PackError(f"has a cubin of `{record['function']}` that does not fit its record's digest")
    except (KeyError, TypeError, ValueError) as error:
        raise (error if isinstance(error, PackError) else PackError(f"has a record without a cubin: {error}")) from None
    return Entry(record, blob)


def _encode(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _without_place(entry: Entry) -> dict[str, Any]:
    sha256 = None if entry.blob is None else hashlib.sha256(entry.blob).hexdigest()
    return {**entry.record, "blob": None, "sha256": sha256}
