"""The wheel of opwright_ops, built once in a run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock
from sample_wheels import blocker, build, write_project

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def has_nvcc() -> bool:
    """Whether the wheel has CUDA kernels."""
    return bool(shutil.which("nvcc")) or Path("/usr/local/cuda/bin/nvcc").exists()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, has_nvcc: bool) -> Path:
    """The wheel, the same file for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "popen-gw" in base.name else base) / "opwright_ops"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not list(folder.glob("dist/*.whl")):
            _build(folder, has_nvcc)
    (found,) = folder.glob("dist/*.whl")
    return found


def _build(folder: Path, has_nvcc: bool) -> None:
    project, ignored = folder / "ops", shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ops", project, ignore=ignored, dirs_exist_ok=True)
    if not has_nvcc:
        settings = project / "pyproject.toml"
        settings.write_text(re.sub(r"architectures = .*", "architectures = []", settings.read_text()))
    command = [
        sys.executable,
        "-m",
        "opwright",
        "wheel",
        project,
        "--no-isolation",
        "--output",
        folder / "dist",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is in the wheel."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def sample_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    result = build(write_project(folder / "project"), folder / "dist")
    assert result.returncode == 0, result.stdout + result.stderr
    (found,) = (folder / "dist").iterdir()
    return found


@pytest.fixture(scope="session")
def installed(sample_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        folder,
        sample_wheel,
    ]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def run(installed: Path):
    """Runs a program that has the wheel and torch, but neither Opwright nor what that needs."""

    def call(program: str, folder: Path = installed, code: int = 0) -> str:
        head = blocker("opwright", "jaxtyping", "rich", "cyclopts", "elftools")
        text = f"{head}\nsys.path.insert(0, {str(folder)!r})\n{textwrap.dedent(program)}"
        result = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
        assert result.returncode == code, result.stderr
        return result.stdout if code == 0 else result.stderr

    return call
