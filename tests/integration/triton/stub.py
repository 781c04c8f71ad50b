"""The stub driver for tests: builds it, gives the environment that uses it, finds Tritons, runs genuine launches.

import stub
library = stub.build()                                          libcuda.so.1's folder, built once
subprocess.run(..., env=stub.environment(devices=2, arch="90,80", record=path))
stub.read_records(path)
stub.run_genuine(python, [{"file": ..., "function": ..., "grid": [1], "args": [...]}])
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "tests" / "native"
BUILD = ROOT / "build" / "tests"
GENUINE = Path(__file__).with_name("genuine_launch.py")
_FLAGS = ["-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Wl,-soname,libcuda.so.1"]
_ABSENT = "no Triton at .venv/triton-*/bin/python; link an environment that has it there"


def build(flags: tuple[str, ...] = ()) -> Path:
    """Builds the stub if its sources changed; returns the folder of `libcuda.so.1`.

    Args:
        flags: More for the compiler, such as `-fsanitize=thread`.
    """
    sources = sorted(NATIVE.glob("stub_*.[ch]"))
    digest = hashlib.sha256(repr(flags).encode())
    for source in sources:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    folder = BUILD / f"stub-{digest.hexdigest()[:16]}"
    library = folder / "libcuda.so.1"
    if library.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        built = Path(temporary, "libcuda.so.1")
        compiler = shutil.which("gcc") or shutil.which("cc")
        code = [str(source) for source in sources if source.suffix == ".c"]
        subprocess.run([compiler, *_FLAGS, *flags, "-o", str(built), *code], check=True)
        link = Path(temporary, "libcuda.so")  # what Triton 3.5 links its launchers with
        link.symlink_to(library.name)
        link.rename(folder / link.name)
        built.rename(library)
    return folder


def environment(
    *,
    devices: int = 1,
    arch: str | int = 90,
    record: str | Path | None = None,
    counts: str | Path | None = None,
    fail: str | None = None,
    driver_version: int | None = None,
    unified: bool = True,
    oversized_shared: bool = False,
    folder: Path | None = None,
) -> dict[str, str]:
    """Returns a whole environment for a process in which `dlopen("libcuda.so.1")` finds the stub.

    The arguments are the STUB_ variables of tests/native/stub_driver.c; `folder` is one that `build` returned.
    """
    folder = folder or build()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("STUB_", "TRITON_"))}
    paths = [str(folder), *filter(None, [kept.get("LD_LIBRARY_PATH")])]
    settings = {
        **kept,
        "LD_LIBRARY_PATH": os.pathsep.join(paths),
        "TRITON_LIBCUDA_PATH": str(folder),
        "STUB_DEVICES": str(devices),
        "STUB_ARCH": str(arch),
        "STUB_UNIFIED": str(int(unified)),
        "STUB_OVERSIZED_SHARED": str(int(oversized_shared)),
    }
    given = {
        "STUB_RECORD": record,
        "STUB_COUNTS": counts,
        "STUB_FAIL": fail,
        "STUB_DRIVER_VERSION": driver_version,
    }
    return settings | {name: str(value) for name, value in given.items() if value is not None}


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Reads a file that the recorder wrote; absent means that nothing was launched."""
    path = Path(path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def find_tritons() -> dict[str, Path]:
    """Returns the Pythons at `.venv/triton-<version>/bin/python` by version."""
    found = sorted((ROOT / ".venv").glob("triton-*/bin/python"))
    return {path.parents[1].name.removeprefix("triton-"): path for path in found}


def run_genuine(
    python: Path, launches: list[dict[str, Any]], *, timeout_s: float = 300, **settings: Any
) -> list[dict[str, Any]]:
    """Runs genuine_launch.py; returns its results.

    Args:
        python: One of `find_tritons`.
        launches: As genuine_launch.py describes them.
        settings: Of `environment`.

    Raises:
        AssertionError: The script itself failed; a failed launch is a result.
    """
    env = environment(**settings)
    # Compiled kernels and, for 3.6, launchers: kept from run to run, for they cost 0.1 to 1 s each.
    env["TRITON_CACHE_DIR"] = str(BUILD / f"triton-cache-{python.parents[1].name}")
    env["TRITON_DEFAULT_FP_FUSION"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "launches.json"), Path(folder, "results.json")
        source.write_text(json.dumps(launches))
        done = subprocess.run(
            [str(python), str(GENUINE), str(source), str(target)],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(target.read_text())


def image_digest(cubin: bytes) -> str:
    """Returns what a record's "image" is for a cubin: FNV-1a, 64 bits."""
    digest = 0xCBF29CE484222325
    for byte in cubin:
        digest = (digest ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return f"{digest:016x}"


def unpack_params(record: dict[str, Any], types: str) -> list[Any]:
    """Returns a record's parameters as numbers, by the letters of `struct`, such as "QQQiQQ"."""
    assert len(record["params"]) == len(types), record["params"]
    return [
        struct.unpack("<" + letter, bytes.fromhex(param["hex"]))[0] for letter, param in zip(types, record["params"])
    ]


def run_check(check: Callable[..., None], *arguments: Any, **settings: Any) -> None:
    """Calls a function of a test file in a process of its own above the stub.

    Its file ends in `if __name__ == "__main__": globals()[sys.argv[1]](*sys.argv[2:])`; arguments arrive as texts.

    Args:
        settings: Of `environment`.

    Raises:
        AssertionError: The function raised; the message is what it wrote.
    """
    done = subprocess.run(
        [sys.executable, check.__code__.co_filename, check.__name__, *map(str, arguments)],
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"


@pytest.fixture(scope="session", params=sorted(find_tritons()) or ["none"])
def triton_python(request: pytest.FixtureRequest) -> Path:
    """The Python of each Triton that there is."""
    if request.param == "none":
        pytest.skip(_ABSENT)
    return find_tritons()[request.param]


def triton_version(python: Path) -> tuple[int, ...]:
    """Returns the version that an environment's name states."""
    return tuple(map(int, re.findall(r"\d+", python.parents[1].name)))


if __name__ == "__main__":  # python tests/integration/triton/stub.py COMMAND...: runs it above the stub
    settings = environment()
    if len(sys.argv) == 1:
        print(build())
    else:
        sys.exit(subprocess.call(sys.argv[1:], env=settings))
