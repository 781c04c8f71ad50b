"""Packs for tests: real kernels compiled once, and records made of them for keys that nobody compiled."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import stub

from opwright.triton.packs.workers import PROGRAM
from opwright.triton.worker.packfile import Entry, pack, read_pack

WORKER = stub.ROOT / "src" / "opwright" / "triton"
KERNELS = Path(__file__).parent / "kernels"


def compile_entries(python: Path, requests: list[dict[str, Any]]) -> list[Entry]:
    """Asks a worker to compile; returns kernels and descriptions. Kept under build/tests, by the worker's sources.

    Args:
        requests: `{"file", "function", "arch", "args", "options"}`, as in the protocol.
    """
    digest = hashlib.sha256(repr((str(python), requests)).encode())
    for source in (*sorted(WORKER.rglob("*.py")), *sorted({Path(request["file"]) for request in requests})):
        digest.update(source.read_bytes())
    kept = stub.BUILD / f"entries-{digest.hexdigest()[:16]}.opk"
    if not kept.exists():
        entries: dict[str, Entry] = {}
        with tempfile.TemporaryDirectory() as folder:
            lines = [
                json.dumps({"id": i, "do": "compile", "out": f"{folder}/{i}.opk", **request})
                for i, request in enumerate(requests)
            ]
            env = stub.environment() | {"TRITON_CACHE_DIR": str(stub.BUILD / f"worker-cache-{python.parents[1].name}")}
            done = subprocess.run(
                [str(python), "-c", PROGRAM, str(WORKER)],
                input="".join(f"{line}\n" for line in lines),
                env=env,
                capture_output=True,
                text=True,
                timeout=300,
            )
            replies = [json.loads(line) for line in done.stdout.splitlines()]
            assert len(replies) == len(requests), done.stderr[-2000:]
            assert all("ok" in reply for reply in replies), replies
            for i in range(len(requests)):
                for entry in read_pack(f"{folder}/{i}.opk"):
                    entries[json.dumps(strip(entry.record), sort_keys=True)] = Entry(strip(entry.record), entry.blob)
        temporary = kept.with_suffix(f".{id(entries)}")
        temporary.write_bytes(pack(entries.values()))
        temporary.rename(kept)
    return [Entry(strip(entry.record), entry.blob) for entry in read_pack(kept)]


def strip(record: dict[str, Any]) -> dict[str, Any]:
    """A record without the place of its blob, which `pack` writes."""
    return {name: value for name, value in record.items() if name not in ("blob", "sha256")}


def changed(entry: Entry, **more: Any) -> Entry:
    """The entry with other fields."""
    return Entry({**copy.deepcopy(entry.record), **more}, entry.blob)


def raw_pack(rows: list[tuple[bytes, dict[str, Any] | bytes]], blobs: list[bytes] = ()) -> bytes:  # type: ignore[assignment]
    """A pack of any rows and records, all its digests right: what `pack` would never write.

    Args:
        rows: Digest (16 bytes) and record; a record's `"blob"` may be the number of a blob.
    """
    body = bytearray(64)
    places = []
    for blob in blobs:
        body += bytes(-len(body) % 64)
        places.append([len(body), len(blob)])
        body += blob
    table = b""
    for digest, record in sorted(rows, key=lambda row: row[0]):
        if isinstance(record, dict):
            if isinstance(record.get("blob"), int):
                number = record["blob"]
                record = {
                    **record,
                    "blob": places[number],
                    "sha256": hashlib.sha256(blobs[number]).hexdigest(),
                }
            record = json.dumps(record, ensure_ascii=False).encode()
        table += struct.pack("<16sQII8s", digest, len(body), len(record), 0, hashlib.sha256(record).digest()[:8])
        body += record
    body += bytes(-len(body) % 64)
    header = struct.pack(
        "<8sIIQQ32s",
        b"OPWPACK1",
        1,
        len(rows),
        len(body) + len(table),
        len(body),
        hashlib.sha256(table).digest(),
    )
    return header + bytes(body[64:]) + table
