"""From 32 threads every launch arrives once and as it was meant, under the thread and the address sanitizer."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import runtime
import stub
import synthetic_packs

from opwright.triton.worker.packfile import Entry, pack

pytestmark = pytest.mark.compiler
KERNELS = synthetic_packs.KERNELS / "pack_kernels.py"
PROGRAM = runtime.ROOT / "tests" / "native" / "triton_threads.cpp"
FORK_PROGRAM = runtime.ROOT / "tests" / "native" / "triton_fork.cpp"
SANITIZERS = {
    "thread": ("-fsanitize=thread", "-g1"),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g1"),
}
THREADS, ROUNDS, CLASSES = 32, 3, 150
ROUND_SIZE, THREAD_SIZE = 4096 * 16, 64 * 4096 * 16  # bytes of address


def left(python: Path) -> list[Entry]:
    """`left` for an int and, with the code of `right`, for a multiple of 16; and its description."""
    asked = [
        {"file": str(KERNELS), "function": name, "arch": 90, "args": ["*i32:16", "i32", "=1"], "options": {}}
        for name in ("left", "right")
    ]
    made = synthetic_packs.compile_entries(python, asked)
    return [
        synthetic_packs.changed(entry, function="left", key="*i32:16, i32:16, =1")
        if entry.record["function"] == "right"
        else entry
        for entry in made
        if entry.record["function"] == "left" or "key" in entry.record
    ]


def many(entries: list[Entry], **more: Any) -> bytes:
    """A pack of both kernels for hundreds of constants, which the code does not read."""
    made = []
    for entry in entries:
        if "key" not in entry.record:
            made.append(entry)
            continue
        base = entry.record["key"].removesuffix("=1")
        made += [synthetic_packs.changed(entry, key=f"{base}={c}", **more) for c in range(CLASSES)]
    return pack(made)


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    tritons = stub.find_tritons()
    if not tritons:
        pytest.skip("no Triton at .venv/triton-*/bin/python")
    return left(tritons[max(tritons)])


def run(
    kind: str, content: bytes, folder: Path, *, threads: int = THREADS, rounds: int = ROUNDS
) -> tuple[list[str], list[Any]]:
    """Runs the program; gives its lines and the stub's record."""
    flags = SANITIZERS[kind]
    path, record = folder / "many.opk", folder / "record.jsonl"
    path.write_bytes(content)
    env = stub.environment(devices=2, record=record, folder=stub.build(flags=flags)) | {
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
        "ASAN_OPTIONS": "detect_leaks=0",
        "OPWRIGHT_TRITON": "python=/nonexistent/python",
        "OPWRIGHT_CACHE_DIR": str(folder / "cache"),
    }
    arguments = [KERNELS, CLASSES, path, threads, rounds]
    done = subprocess.run(
        [runtime.build(PROGRAM, flags), *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-6000:]}"
    return done.stdout.splitlines(), stub.read_records(record)


@pytest.mark.parametrize("kind", SANITIZERS)
def test_every_launch_arrives_once(entries: list[Entry], tmp_path: Path, kind: str) -> None:
    (count, *errors), records = run(kind, many(entries), tmp_path)
    assert errors == []
    assert int(count) == len(records) == THREADS * ROUNDS * CLASSES
    images = {
        entry.record["key"].split(", ")[1]: stub.image_digest(entry.blob) for entry in entries if entry.blob is not None
    }
    assert len(set(images.values())) == 2
    found = collections.Counter()
    for record in records:
        address, n, *_ = stub.unpack_params(record, "QiQQ")
        place = address - (1 << 40)
        number, rest = divmod(place, THREAD_SIZE)
        turn, constant = divmod(rest, ROUND_SIZE)
        constant //= 16
        found[number, turn, constant] += 1
        assert n == (32 if (constant * 7 + turn) % 3 == 0 else 5 + 2 * constant)
        assert record["device"] == number % 2
        assert record["image"] == images["i32:16" if n % 16 == 0 else "i32"]
    assert set(found.values()) == {1}
    assert len(found) == THREADS * ROUNDS * CLASSES


def test_two_gpus_load_large_shared_memory_at_once(entries: list[Entry], tmp_path: Path) -> None:
    """What a load finds out belongs to its context: nothing of it is written where the other reads."""
    (_, *errors), records = run("thread", many(entries, shared=100_000), tmp_path, threads=16, rounds=1)
    assert errors == []
    assert {record["shared"] for record in records} == {100_000}


# A worker that refuses everything after a moment, and says whose child it is.
REFUSING_WORKER = """#!{python} -S
import json, os, sys, time
for line in sys.stdin:
    time.sleep(0.02)
    error = {{"kind": "compile", "message": f"the worker of {{os.getppid()}}."}}
    print(json.dumps({{"id": json.loads(line)["id"], "error": error}}), flush=True)
"""
FORKS = 40


@pytest.mark.parametrize("flags", [(), SANITIZERS["thread"]], ids=["plain", "thread"])
def test_a_child_of_fork_launches_loads_and_compiles(
    entries: list[Entry], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Whatever the other threads of the parent hold at that moment: mutexes, a compile, the workers' pipes."""
    # For another number of warps, too, which a thread of the parent asks for.
    content = [entry for entry in entries if "key" not in entry.record]
    for entry in entries:
        if "key" in entry.record:
            base = entry.record["key"].removesuffix("=1")
            options = ["", *(f"; num_warps={warps}" for warps in range(1, 5))]
            keys = [f"{base}={constant}{more}" for constant in range(CLASSES) for more in options]
            content += [synthetic_packs.changed(entry, key=key) for key in keys]
    path, worker = tmp_path / "many.opk", tmp_path / "python"
    path.write_bytes(pack(content))
    worker.write_text(REFUSING_WORKER.format(python=sys.executable))
    worker.chmod(0o755)
    env = stub.environment(folder=stub.build(flags=flags)) | {
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:die_after_fork=0",
        "OPWRIGHT_TRITON": f"python={worker},workers=2,timeout=10",
        "OPWRIGHT_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [runtime.build(FORK_PROGRAM, flags), *map(str, (KERNELS, CLASSES, path, FORKS))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.stdout == "", done.stderr[-4000:]
    assert done.returncode == 0, done.stderr[-4000:]
