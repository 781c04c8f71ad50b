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

from opwright.cli.new_command import new
from opwright.errors import PackageError
from opwright.package.new import new_operator, new_project


def run(folder: Path, environment: dict[str, str], commands: str) -> str:
    """Returns what a shell prints, to stdout and stderr, for these commands."""
    command = ["bash", "-e", "-c", commands]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def commands_of(readme: Path, heading: str) -> list[str]:
    """Returns the commands under a heading that need no package index."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", readme.read_text(), re.M | re.S)
    blocks = re.findall(r"^```console\n(.*?)^```", section, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert all(line.startswith("$ ") for line in lines)
    return [line[2:] for line in lines if not line.startswith("$ pip install nvidia-")]


@pytest.mark.compiler
def test_the_readme_of_a_project_word_for_word(environment: dict[str, str], tmp_path: Path) -> None:
    said = run(tmp_path, environment, "opwright new my-ops")
    run(tmp_path, environment, re.search(r"^next: (.*)", said, re.M)[1])
    project = tmp_path / "my-ops"
    develop = commands_of(project / "README.md", "Develop")
    assert "pip install --no-build-isolation --editable ." in develop
    said = run(project, environment, "\n".join(develop))
    for text in ("2 passed", "Verified my_ops::scale_shift", "Measured my_ops::scale_shift"):
        assert text in said
    assert "next: opwright verify src/my_ops/another/op.py::another" in said
    # As it is installed for development: kernels are built from the sources that are there.
    program = "import torch, my_ops; x = torch.ones(2, 3); print(my_ops.another(x, torch.ones(3), 2.0)[0, 0].item())"
    call = f"cd / && python -W ignore -c '{program}'"
    assert float(run(project, environment, call)) == 3
    kernel = project / "src/my_ops/another/cpu.cpp"
    kernel.write_text(kernel.read_text().replace("+ E(shift)", "+ E(shift) + E(1)"))
    assert float(run(project, environment, call)) == 4
    if not shutil.which("nvcc") and not Path("/usr/local/cuda/bin/nvcc").exists():
        settings = project / "pyproject.toml"
        settings.write_text(settings.read_text().replace('["80", "90", "100"]', "[]"))
    said = run(project, environment, "\n".join(commands_of(project / "README.md", "Ship")))
    assert "remark" not in said
    (wheel,) = (project / "dist").iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        (licence,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
        assert b"Copyright (c) The my-ops authors" in archive.read(licence)
    environment = environment | {"PYTHONPATH": str(tmp_path / "installed")}
    assert float(run(project, environment, call)) == 4


def test_what_is_written_is_tidy(tmp_path: Path) -> None:
    new_project("tidy", tmp_path)
    new_operator("another_operator", tmp_path / "tidy")
    project = tmp_path / "tidy"
    for path in filter(Path.is_file, project.rglob("*")):
        assert not re.search(r"\{\{|\{%|%\}", path.read_text()), path
    run(project, dict(os.environ), f"{sys.executable} -m ruff check . && {sys.executable} -m ruff format --check .")


def test_inside_another_project_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "outer/src").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    new("first")
    assert "warning" not in capsys.readouterr().err
    monkeypatch.chdir(tmp_path / "first")
    new("third", op=True)
    assert "warning" not in capsys.readouterr().err
    settings = tmp_path / "outer/pyproject.toml"
    settings.write_text("")
    monkeypatch.chdir(settings.parent / "src")
    new("second")
    assert f"warning: `second` was written into another project: {settings}\nhint: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("aten", "PyTorch has operators with this namespace"),
        ("cuda", "PyTorch has operators with this namespace"),
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


@pytest.mark.parametrize(
    ("name", "text", "hint"),
    [
        ("double", "C++ has a keyword of this name", "double_op"),  # a type
        ("template", "C++ has a keyword of this name", "template_op"),
        ("bitand", "C++ has a keyword of this name", "bitand_op"),  # another spelling of a sign
        ("co_yield", "C++ has a keyword of this name", "co_yield_op"),  # new in C++20
        ("class", "this cannot be the name of an operator", "class_op"),  # of Python and C++
        ("lambda", "this cannot be the name of an operator", "lambda_op"),  # of Python
        ("2 int", "this cannot be the name of an operator", "int_op"),
        ("größe", "this cannot be the name of an operator", "gr_e"),
        ("named/double", "C++ has a keyword of this name", "named/double_op"),
    ],
)
def test_a_keyword_is_not_the_name_of_an_operator_and_the_hint_is_one(
    tmp_path: Path, name: str, text: str, hint: str
) -> None:
    new_project("named", tmp_path)
    with pytest.raises(PackageError) as caught:
        new_operator(name, tmp_path / "named")
    assert text in str(caught.value)
    assert str(caught.value).endswith(f"hint: `{hint}`")
    assert new_operator(hint, tmp_path / "named")


def test_the_hint_for_a_keyword_as_the_name_of_a_project_is_another_name(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"hint: `class_ops`$"):
        new_project("class", tmp_path)


def test_code_between_imports_stays_where_it_is(tmp_path: Path) -> None:
    """Imports were moved to the end, below the code that uses them."""
    new_project("mine", tmp_path)
    init = tmp_path / "mine/src/mine/__init__.py"
    first = "from mine.scale_shift import scale_shift as scale_shift"
    init.write_text(f'"""Mine."""\n\n{first}\n\n__all__ = [scale_shift.__name__]\n')
    for name in ("zoom", "blur"):
        new_operator(name, tmp_path / "mine")
    imports = ["from mine.blur import blur as blur", first, "from mine.zoom import zoom as zoom"]
    assert init.read_text() == "\n".join(['"""Mine."""', "", *imports, "", "__all__ = [scale_shift.__name__]", ""])


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
