"""`opwright new`: a new user's first minutes, from nothing to a wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from opwright.errors import PackageError
from opwright.package.new import new_operator, new_project


def call(folder: Path, *command: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.compiler
def test_from_nothing_to_a_wheel(tmp_path: Path) -> None:
    python, opwright = sys.executable, (sys.executable, "-m", "opwright")
    call(tmp_path, *opwright, "new", "my-ops")
    project = tmp_path / "my-ops"
    said = call(project, *opwright, "new", "--op", "twist")
    assert "next: opwright verify src/my_ops/twist/op.py::twist" in said
    # As it is installed for development: kernels are built from the sources that are there.
    venv = tmp_path / "site"
    install = (
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(venv),
    )
    call(project, python, *install, "--editable", ".")
    (path,) = [line for pth in venv.glob("*.pth") for line in pth.read_text().split() if "my-ops" in line]
    assert Path(path) == project / "src"
    call(project, python, "-m", "pytest", "-q", "-p", "no:cacheprovider", PYTHONPATH=path)

    def value_of(path: str) -> float:
        return float(call(tmp_path, python, "-W", "ignore", "-c", program, PYTHONPATH=path))

    program = "import torch, my_ops; x = torch.ones(2, 3); print(my_ops.twist(x, torch.ones(3), 2.0)[0, 0].item())"
    assert value_of(path) == 3
    kernel = project / "src/my_ops/twist/cpu.cpp"
    kernel.write_text(kernel.read_text().replace("+ E(shift)", "+ E(shift) + E(1)"))
    assert value_of(path) == 4
    if not shutil.which("nvcc") and not Path("/usr/local/cuda/bin/nvcc").exists():
        settings = project / "pyproject.toml"
        settings.write_text(settings.read_text().replace('["80", "90", "100"]', "[]"))
    call(project, *opwright, "wheel", "--no-isolation")
    (wheel,) = (project / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    assert value_of(str(tmp_path / "installed")) == 4


def test_what_is_written_is_tidy(tmp_path: Path) -> None:
    new_project("tidy", tmp_path)
    new_operator("another_operator", tmp_path / "tidy")
    project = tmp_path / "tidy"
    for path in filter(Path.is_file, project.rglob("*")):
        assert not re.search(r"\{\{|\{%|%\}", path.read_text()), path
    call(project, sys.executable, "-m", "ruff", "check", ".")
    call(project, sys.executable, "-m", "ruff", "format", "--check", ".")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aten", "PyTorch has operators with this namespace"),
        ("json", "Python has a module of this name"),
        ("3d", "cannot be the name of a package"),
        ("my ops", "cannot be the name of a package"),
        ("class", "cannot be the name of a package"),
    ],
)
def test_names_that_cannot_be_had(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(PackageError, match=text):
        new_project(name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(tmp_path: Path) -> None:
    new_project("mine", tmp_path)
    with pytest.raises(PackageError, match="exists and is not empty"):
        new_project("mine", tmp_path)
    with pytest.raises(PackageError, match="the folder exists"):
        new_operator("scale_shift", tmp_path / "mine")
    with pytest.raises(PackageError, match="there is no project in this folder"):
        new_operator("scale", tmp_path)
    (tmp_path / "mine/src/other").mkdir()
    (tmp_path / "mine/src/other/__init__.py").write_text("")
    with pytest.raises(PackageError, match="not clear which package"):
        new_operator("scale", tmp_path / "mine")
    assert new_operator("other/scale", tmp_path / "mine")[0].is_relative_to(tmp_path / "mine/src/other/scale")
    assert (tmp_path / "mine/src/other/__init__.py").read_text() == "from other.scale import scale as scale\n"
