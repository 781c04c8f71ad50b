"""A worker in each of the Pythons with Triton that `.venv/triton-*` holds."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import stub

from opwright.triton.packs.workers import PROGRAM as CODE

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "src/opwright/triton"
KERNELS = Path(__file__).parent / "kernels"
PYTHONS = stub.find_tritons()


class Worker:
    """The process that C++ starts, asked as C++ asks it."""

    def __init__(self, version: str, scratch: Path, **environment: str) -> None:
        self.version = tuple(int(part) for part in version.split("."))
        self.python = str(PYTHONS[version])
        self.scratch = scratch
        self._numbers = itertools.count()
        self.process = subprocess.Popen(
            [self.python, "-c", CODE, str(FOLDER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TRITON_CACHE_DIR": str(scratch / "triton"), **environment},
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Returns the whole reply."""
        return self.ask_line(json.dumps({"id": next(self._numbers), **request}))

    def ask_line(self, line: str) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()
        reply = self.process.stdout.readline()
        assert reply, self.process.stderr and self.process.stderr.read().decode()
        return json.loads(reply)

    def describe(self, file: Path | str, function: str) -> dict[str, Any]:
        reply = self.ask(do="describe", file=self._path(file), function=function)
        return reply["ok"]

    def compile(
        self, file: Path | str, function: str, args: list[str], *, arch: int = 90, **options: Any
    ) -> dict[str, Any]:
        reply = self.try_compile(file, function, args, arch=arch, **options)
        assert "ok" in reply, reply
        return reply["ok"]

    def refuses(
        self, file: Path | str, function: str, args: list[str], *, arch: int = 90, **options: Any
    ) -> dict[str, Any]:
        """Returns the error of a compile that fails."""
        return self.try_compile(file, function, args, arch=arch, **options)["error"]

    def try_compile(
        self, file: Path | str, function: str, args: list[str], *, arch: int = 90, **options: Any
    ) -> dict[str, Any]:
        self.out = self.scratch / f"{next(self._numbers)}.opk"
        request = {
            "file": self._path(file),
            "function": function,
            "arch": arch,
            "args": args,
            "options": options,
        }
        return self.ask(do="compile", out=str(self.out), **request)

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            pipe.close()
        self.process.wait(20)

    def _path(self, file: Path | str) -> str:
        return str(KERNELS / file)


@pytest.fixture(scope="session")
def triton_pythons() -> dict[str, Path]:
    """Versions of Triton and the Pythons that have them."""
    if not PYTHONS:
        pytest.skip("no Python with Triton in .venv/triton-*/bin/python")
    return PYTHONS


@pytest.fixture(scope="session", params=list(PYTHONS) or ["none"])
def worker(request: pytest.FixtureRequest, triton_pythons: Any, tmp_path_factory: Any) -> Iterator[Worker]:
    """A worker of each version, the same for all tests of a process."""
    found = Worker(request.param, tmp_path_factory.mktemp(f"triton-{request.param}"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def newest(triton_pythons: dict[str, Path], tmp_path_factory: Any) -> Iterator[Worker]:
    """A worker of the newest version, for what does not depend on it."""
    found = Worker(max(triton_pythons), tmp_path_factory.mktemp("newest"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def python() -> Path:
    """The Python with the newest Triton, for what does not depend on its version."""
    tritons = stub.find_tritons()
    if not tritons:
        pytest.skip("no Triton at .venv/triton-*/bin/python")
    return tritons[max(tritons)]
