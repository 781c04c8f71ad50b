"""Pack files: read back, the same for the same content, and never a wrong record from a damaged file."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opwright.triton.worker.packfile import Entry, PackError, digest_of, pack, read_pack, unpack, write_pack

pytestmark = pytest.mark.triton


def _kernel(key: str = "i32", blob: bytes = b"\x7fELF cubin", **more: Any) -> Entry:
    return Entry({"file": "k/add.py", "function": "add", "arch": 90, "key": key, **more}, blob)


ENTRIES = [
    _kernel(),
    _kernel(triton="3.9.0", blob=b"\x7fELF other"),
    _kernel('*fp32:16, ="é"', b"x" * 65),
    _kernel("i64"),
    Entry({"file": "k/add.py", "function": "add", "line": 3}),
    Entry({"file": "k/add.py", "function": "add", "arch": 90, "table": []}),
]
CONTENT = pack(ENTRIES)


def _placed(entry: Entry) -> dict[str, Any]:
    return {name: value for name, value in entry.record.items() if name not in ("blob", "sha256")}


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.opk"
    write_pack(path, ENTRIES)
    found = read_pack(path)
    assert sorted((json.dumps(_placed(e), sort_keys=True), e.blob or b"") for e in found) == sorted(
        (json.dumps(_placed(e), sort_keys=True), e.blob or b"") for e in ENTRIES
    )
    assert [path.name for path in path.parent.iterdir()] == ["a.opk"]


def test_the_layout_is_as_decided() -> None:
    magic, version, count, size, rows_at = struct.unpack_from("<8sIIQQ", CONTENT)
    assert (magic, version, count, size) == (b"OPWPACK1", 1, len(ENTRIES), len(CONTENT))
    rows = CONTENT[rows_at:]
    assert CONTENT[32:64] == hashlib.sha256(rows).digest()
    assert len(rows) == 40 * count
    digest = hashlib.sha256(b"kernel\nadd.py\nadd\n90\ni64").digest()[:16]
    (row,) = [rows[at : at + 40] for at in range(0, len(rows), 40) if rows[at : at + 16] == digest]
    offset, length, zero, check = struct.unpack_from("<QII8s", row, 16)
    text = CONTENT[offset : offset + length]
    assert (zero, check) == (0, hashlib.sha256(text).digest()[:8])
    at, length = json.loads(text)["blob"]
    assert at % 64 == 0
    assert CONTENT[at : at + length] == b"\x7fELF cubin"


def test_digests_of_descriptions_and_tables() -> None:
    place = {"file": "/a/b/add.py", "function": "add"}
    assert digest_of(place) == hashlib.sha256(b"describe\nadd.py\nadd").digest()[:16]
    assert digest_of({**place, "arch": 80}) == hashlib.sha256(b"tuned\nadd.py\nadd\n80").digest()[:16]


@given(st.permutations(ENTRIES))
def test_the_order_of_the_entries_makes_no_difference(entries: list[Entry]) -> None:
    assert pack(entries) == CONTENT


def test_equal_cubins_are_held_once() -> None:
    assert CONTENT.count(b"\x7fELF cubin") == 1


@given(st.integers(0, len(CONTENT) - 1))
def test_truncated(length: int) -> None:
    with pytest.raises(PackError):
        list(unpack(CONTENT[:length]))


@given(st.integers(0, len(CONTENT) - 1), st.integers(1, 255))
def test_a_flipped_byte_gives_an_error_or_the_same_records(at: int, mask: int) -> None:
    damaged = bytearray(CONTENT)
    damaged[at] ^= mask
    try:
        found = list(unpack(bytes(damaged)))
    except PackError:
        return
    assert found == list(unpack(CONTENT))  # the byte was padding


def _resigned(rows: bytes, count: int | None = None, size: int | None = None, rows_at: int | None = None) -> bytes:
    """The content with other rows, as one who can compute digests would write it."""
    at = struct.unpack_from("<Q", CONTENT, 24)[0]
    body = CONTENT[64:at]
    header = struct.pack(
        "<8sIIQQ32s",
        b"OPWPACK1",
        1,
        len(rows) // 40 if count is None else count,
        at + len(rows) if size is None else size,
        at if rows_at is None else rows_at,
        hashlib.sha256(rows).digest(),
    )
    return header + body + rows


big = st.sampled_from([0, 1, 63, 64, 2**31, 2**32 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)


@settings(max_examples=200)
@given(big, st.sampled_from([0, 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1))
def test_hostile_rows(offset: int, length: int) -> None:
    at = struct.unpack_from("<Q", CONTENT, 24)[0]
    digest, _, _, zero, check = struct.unpack("<16sQII8s", CONTENT[at : at + 40])
    row = struct.pack("<16sQII8s", digest, offset, length, zero, check)
    assert _resigned(CONTENT[at:]) == CONTENT
    with pytest.raises(PackError):
        list(unpack(_resigned(row)))


@given(big, big, st.integers(0, 2**32 - 1))
def test_hostile_header(size: int, rows_at: int, count: int) -> None:
    at = struct.unpack_from("<Q", CONTENT, 24)[0]
    for hostile in ({"size": size}, {"rows_at": rows_at}, {"count": count}):
        content = _resigned(CONTENT[at:], **hostile)
        if content != CONTENT:
            with pytest.raises(PackError):
                list(unpack(content))


@pytest.mark.parametrize(
    "record",
    [
        b"[]",
        b"{",
        b"null",
        b'{"file":1,"function":"add"}',
        b"[" * 100000,
        b'{"file":"add.py","function":"other"}',
        b"\xff",
    ],
)
def test_hostile_records(record: bytes) -> None:
    digest = digest_of({"file": "add.py", "function": "add"})
    row = struct.pack("<16sQII8s", digest, 64, len(record), 0, hashlib.sha256(record).digest()[:8])
    at = 64 + len(record)
    checked = hashlib.sha256(row).digest()
    header = struct.pack("<8sIIQQ32s", b"OPWPACK1", 1, 1, at + 40, at, checked)
    with pytest.raises(PackError):
        list(unpack(header + record + row))


@pytest.mark.parametrize(
    "blob", [[64, 2**63], [-64, 10], [2**70, 1], ["64", 1], [64], None, [65, 1], [64, 1.0], [True, 1]]
)
def test_hostile_cubins(blob: Any) -> None:
    place = {"file": "add.py", "function": "add", "arch": 90, "key": "i32", "blob": blob, "sha256": "0" * 64}
    record = json.dumps(place).encode()
    row = struct.pack("<16sQII8s", digest_of(place), 64, len(record), 0, hashlib.sha256(record).digest()[:8])
    at = 64 + len(record)
    header = struct.pack("<8sIIQQ32s", b"OPWPACK1", 1, 1, at + 40, at, hashlib.sha256(row).digest())
    with pytest.raises(PackError):
        list(unpack(header + record + row))


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    write_pack(tmp_path / "a.opk", ENTRIES)
    with pytest.raises(TypeError):
        write_pack(tmp_path / "a.opk", [_kernel(unwritable=object())])
    assert read_pack(tmp_path / "a.opk") == list(unpack(CONTENT))
    assert len(list(tmp_path.iterdir())) == 1
