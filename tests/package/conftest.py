"""The wheel of opwright_ops, built once in a run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]


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
