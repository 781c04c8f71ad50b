"""The C++ runtime for tests: built once, and its twin of genuine_launch.py run above the stub driver."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import stub
from filelock import FileLock

ROOT = stub.ROOT
SOURCES = ROOT / "src" / "opwright" / "native" / "src" / "triton"
INCLUDE = ROOT / "src" / "opwright" / "native" / "include"
WORKER = ROOT / "src" / "opwright" / "triton"
RUNNER = ROOT / "tests" / "native" / "triton_runner.cpp"
FLAGS = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC"]


def build(program: Path, flags: tuple[str, ...] = ()) -> Path:
    """Builds a program with the runtime if any source changed; returns its path.

    Args:
        program: A C++ file.
        flags: More for the compiler, such as `-fsanitize=thread`.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    headers = [*INCLUDE.rglob("*.h"), *SOURCES.glob("*.h")]
    digest = hashlib.sha256(repr(flags).encode())
    for source in sorted([*headers, *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = stub.BUILD / f"runtime-{digest.hexdigest()[:16]}"
    # triton_library.cpp includes the runner.
    text = program.read_bytes() + RUNNER.read_bytes()
    target = folder / f"{program.stem}-{hashlib.sha256(text).hexdigest()[:12]}"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):  # other test processes want the same
        return target if target.exists() else _build(compiler, program, target, flags)


def _build(compiler: str | None, program: Path, target: Path, flags: tuple[str, ...]) -> Path:
    folder = target.parent
    common = [compiler, *FLAGS, *flags, f'-DOPWRIGHT_TRITON_WORKER_DIR="{WORKER}"', "-I", str(INCLUDE)]
    library = folder / "libopwright_triton.a"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        if not library.exists():
            sources = sorted(SOURCES.glob("*.cpp"))
            objects = [str(Path(temporary, f"{source.stem}.o")) for source in sources]
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                jobs = [
                    pool.submit(subprocess.run, [*common, "-c", str(source), "-o", made], check=True)
                    for source, made in zip(sources, objects)
                ]
                for job in jobs:
                    job.result()
            archive = str(Path(temporary, library.name))
            subprocess.run(["ar", "rcs", archive, *objects], check=True)
            os.replace(archive, library)
        linked = str(Path(temporary, target.name))
        subprocess.run([*common, str(program), "-o", linked, str(library), "-ldl", "-pthread", "-lstdc++"], check=True)
        os.replace(linked, target)
    return target


def run_launches(
    python: Path | None,
    launches: list[dict[str, Any]],
    folder: Path,
    *,
    triton_settings: str = "",
    runner: Path | None = None,
    **settings: Any,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Runs launches as genuine_launch.py does; returns the results and the stub's record.

    Args:
        python: The worker's; None: none that works.
        folder: For files; the cache is in it.
        triton_settings: More of OPWRIGHT_TRITON.
        settings: Of stub.environment.
    """
    source, target, record = folder / "launches.json", folder / "results.jsonl", folder / "record.jsonl"
    source.write_text(json.dumps(launches))
    record.unlink(missing_ok=True)
    chosen = f"python={python or '/nonexistent/python'}"
    env = stub.environment(record=record, **settings) | {
        "OPWRIGHT_CACHE_DIR": os.environ.get("OPWRIGHT_TEST_CACHE", str(folder / "cache")),
        "OPWRIGHT_TRITON": ",".join(filter(None, [chosen, triton_settings])),
        "TRITON_CACHE_DIR": str(stub.BUILD / f"worker-cache-{python.parents[1].name if python else ''}"),
    }
    program = runner or build(RUNNER)
    done = subprocess.run([program, source, target], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-4000:]}"
    results = [json.loads(line) for line in target.read_text().splitlines()]
    return results, stub.read_records(record)
