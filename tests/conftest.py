"""Fixtures for all tests."""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _own_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps the tests out of the user's store; one store for all workers of a run, so that builds are shared."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "popen-gw" in base.name else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPWRIGHT_CACHE_DIR", str(shared / "store"))
        # Nothing is precompiled beside the tests, but where that is what is tested.
        patch.setenv("OPWRIGHT_WITHOUT", "pch")
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_compiler = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
    has_nvcc = _has_nvcc()
    has_chromium = any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    for item in items:
        if item.get_closest_marker("compiler") and not has_compiler:
            item.add_marker(pytest.mark.skip(reason="no C++ compiler on PATH"))
        if item.get_closest_marker("nvcc") and not has_nvcc:
            item.add_marker(pytest.mark.skip(reason="no nvcc under CUDA_HOME, on PATH or in /usr/local/cuda"))
        if item.get_closest_marker("chromium") and not has_chromium:
            item.add_marker(pytest.mark.skip(reason="no Chromium on PATH"))


def _has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return bool(shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin"))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Makes a module of a text."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(text: str) -> ModuleType:
        name = f"made_module_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return make


@pytest.fixture
def run_python(tmp_path: Path):
    """Runs a Python program in a fresh process; returns the completed process."""
    import subprocess

    def run(program: str, *, env: dict[str, str] | None = None, check: bool = True, timeout: float = 300):
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert not check or result.returncode == 0, result.stderr[-4000:]
        return result

    return run


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the variables of a fresh virtual environment that sees the packages of this one, and no PYTHONPATH."""
    import site
    import subprocess

    import opwright

    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    seen = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "seen.pth").write_text("\n".join([str(Path(opwright.__file__).parents[1]), *seen]) + "\n")
    for name in ("pip", "pytest", "opwright"):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m {name} "$@"\n')
        command.chmod(0o755)
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {
        **ours,
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
