"""A driver that fails, a capture, a frozen process and wrong settings are Errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub
import synthetic_packs
from fault_cases import COPIES, LEFT, OUT, PACKED, TILE, C, constant, launch, number, outcomes
from syrupy.assertion import SnapshotAssertion

from opwright.triton.worker.packfile import Entry, pack

pytestmark = pytest.mark.compiler

# ---- the driver


@pytest.fixture(scope="module")
def entries(python: Path) -> list[Entry]:
    def request(function: str, args: list[str], file: Path = PACKED) -> dict[str, Any]:
        return {"file": str(file), "function": function, "arch": 90, "args": args, "options": {}}

    return synthetic_packs.compile_entries(
        python,
        [
            request("left", ["*i32:16", "i32", "=1"]),
            request("copies", [TILE, TILE, "i32:16"]),
        ],
    )


def with_shared(entries: list[Entry], size: int) -> list[Entry]:
    """The entries, `left` with so many bytes of shared memory."""
    return [
        synthetic_packs.changed(entry, shared=size) if entry.record.get("shared") == 0 else entry for entry in entries
    ]


FAILURES = {
    "cuInit": (999, LEFT),
    "cuDriverGetVersion": (1, LEFT),
    "cuCtxGetCurrent": (201, LEFT),
    "cuDeviceGet": (101, LEFT),
    "cuDevicePrimaryCtxRetain": (2, LEFT),
    "cuCtxSetCurrent": (201, LEFT),
    "cuCtxGetDevice": (201, LEFT),
    "cuDeviceGetAttribute": (101, LEFT),
    "cuModuleLoadData": (2, LEFT),
    "cuModuleGetFunction": (500, LEFT),
    "cuFuncGetAttribute": (1, LEFT),
    "cuFuncGetParamInfo": (1, LEFT),
    "cuFuncSetAttribute": (1, LEFT),
    "cuFuncSetCacheConfig": (1, LEFT),
    "cuTensorMapEncodeTiled": (1, COPIES),
    "cuLaunchKernelEx": (700, LEFT),
}


def from_pack(
    entries: list[Entry], folder: Path, launches: list[dict[str, Any]], **settings: Any
) -> tuple[list[str | None], list[Any]]:
    path = folder / "app.opk"
    path.write_bytes(pack(entries))
    return outcomes(None, launches, folder, triton_settings=f"pack={path},freeze", **settings)


@pytest.mark.parametrize("name", FAILURES)
def test_a_driver_that_fails_once(
    entries: list[Entry], tmp_path: Path, name: str, snapshot: SnapshotAssertion, request: Any
) -> None:
    code, launched = FAILURES[name]
    if name.startswith("cuFuncSet"):
        entries = with_shared(entries, 100_000)
    texts, records = from_pack(entries, tmp_path, [launched, launched], fail=f"{name}:1:{code}")
    assert texts[0] == snapshot
    assert texts[0] is not None
    assert (texts[1], len(records)) == (None, 1)


def test_a_driver_whose_answer_is_lost_is_not_a_damaged_pack(entries: list[Entry], tmp_path: Path) -> None:
    texts, _ = from_pack(entries, tmp_path, [LEFT], fail="cuFuncGetParamInfo:1:2")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in texts[0]


def test_too_much_shared_memory(entries: list[Entry], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    texts, records = from_pack(with_shared(entries, 240_000), tmp_path, [LEFT])
    assert texts[0] == snapshot
    assert records == []


def test_a_driver_that_is_absent(entries: list[Entry], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    source, target = tmp_path / "launches.json", tmp_path / "results.jsonl"
    source.write_text(json.dumps([LEFT, LEFT]))
    env = stub.environment() | {"LD_LIBRARY_PATH": "", "OPWRIGHT_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [runtime.build(stub.NATIVE / "triton_runner.cpp"), source, target],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line)["error"] for line in target.read_text().splitlines())
    if "cuInit" in first["message"]:
        pytest.skip("this machine has a driver")
    assert first == second
    assert first["message"] == snapshot


DRIVERS = {
    "no devices": {"devices": 0},
    "older than the cubin": {"driver_version": 12000},
    "other architecture": {"arch": 100},
}


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_that_cannot(entries: list[Entry], tmp_path: Path, name: str, snapshot: SnapshotAssertion) -> None:
    texts, records = from_pack(entries, tmp_path, [LEFT], **DRIVERS[name])
    assert texts[0] == snapshot
    assert records == []


# ---- capture


def capture(status: int, stream: str = "new") -> dict[str, Any]:
    return {"do": "capture", "stream": stream, "status": status}


def test_capture(python: Path, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    def on(stream: str, value: int = 5) -> dict[str, Any]:
        return launch("scaled", OUT, number(value), C, stream=stream)

    texts, records = outcomes(
        python,
        [
            capture(1),
            on("new"),
            capture(0),
            on("new"),
            capture(1),
            on("new"),
            on("new", 6),
            on("new", 16),
            capture(0),
            on("new", 16),
        ],
        tmp_path,
    )
    assert [text is None for text in texts] == [True, False, True, True, True, True, True, False, True, True]
    assert len(records) == 4
    assert texts[1] == snapshot(name="before anything")
    assert texts[7] == snapshot(name="another class")


def test_capture_refuses_to_load(entries: list[Entry], tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    texts, records = from_pack(
        entries, tmp_path, [capture(1), LEFT | {"stream": "new"}, capture(0), LEFT | {"stream": "new"}]
    )
    assert texts[1] == snapshot
    assert (texts[3], len(records)) == (None, 1)


def test_capture_of_another_stream_refuses_to_load(entries: list[Entry], tmp_path: Path) -> None:
    texts, _ = from_pack(
        entries,
        tmp_path,
        [
            capture(1, "captured"),
            LEFT | {"stream": "free"},
            capture(0, "captured"),
            LEFT | {"stream": "free"},
        ],
    )
    assert texts[3] is None
    assert texts[1] is None or texts[1].startswith("capturing: ")


# ---- frozen


def left(pointer: str, address: int, n: int, c: str) -> dict[str, Any]:
    return launch("left", {"tensor": pointer, "address": address}, number(n), constant(c), file=PACKED)


MISSING = {
    "another alignment": (left("i32", 0x1004, 5, "1"), "argument 1 `p`"),
    "another divisibility": (left("i32", 0x1000, 16, "1"), "argument 2 `n`"),
    "another constant": (left("i32", 0x1000, 5, "3"), "argument 3 `C`"),
    "another dtype": (left("fp32", 0x1000, 5, "1"), "argument 1 `p`"),
    "a shorter class": (left("i32", 0x1000, 5, "10"), "argument 3 `C`"),
    "another option": (left("i32", 0x1000, 5, "1") | {"options": {"num_warps": 8}}, "options"),
    "another function": (launch("right", OUT, number(5), C, file=PACKED), ""),
    "another file": (LEFT | {"file": "/elsewhere/kernels.py"}, ""),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_frozen_process_names_what_is_missing(
    entries: list[Entry], tmp_path: Path, name: str, snapshot: SnapshotAssertion
) -> None:
    launched, named = MISSING[name]
    base = next(entry for entry in entries if entry.record.get("key") == "*i32:16, i32, =1")
    more = [synthetic_packs.changed(base, key=key) for key in ("*i64:16, i64:16, =100", "*fp16, i32:16, =7")]
    texts, records = from_pack([*entries, *more], tmp_path, [launched])
    assert records == []
    assert not named or f"differs  {named}" in texts[0]
    assert texts[0] == snapshot


def test_nothing_is_loaded(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    texts, _ = outcomes(None, [LEFT], tmp_path, triton_settings="freeze")
    assert texts[0] == snapshot


def test_freeze_keeps_what_is_loaded(python: Path, tmp_path: Path) -> None:
    known, other = (launch("scaled", OUT, number(n), C) for n in (5, 16))
    texts, records = outcomes(python, [known, {"do": "freeze"}, known, other], tmp_path)
    assert [text is None for text in texts] == [True, True, True, False]
    assert len(records) == 2


@pytest.mark.parametrize("text", ["pyhton=x", "pack=/nowhere.opk", "timeout", "=", "freeze,record=/nowhere/keys"])
def test_settings(tmp_path: Path, text: str, snapshot: SnapshotAssertion) -> None:
    texts, records = outcomes(None, [LEFT], tmp_path, triton_settings=text)
    assert texts[0] == snapshot
    assert records == []


@pytest.mark.parametrize("text", ["timeout=", "timeout=10m", "workers=many", "timeout=-5"])
def test_settings_that_are_no_numbers(tmp_path: Path, text: str) -> None:
    texts, _ = outcomes(None, [LEFT], tmp_path, triton_settings=text)
    assert "OPWRIGHT_TRITON" in texts[0].split("hint")[0]
