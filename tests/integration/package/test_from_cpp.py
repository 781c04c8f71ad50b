"""Operators of a wheel in C++ programs without Python: the examples' commands, and what CMake finds or refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import site
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import opwright

ROOT = Path(__file__).parents[3]
CMAKE = shutil.which("cmake")
needs_torch_for_cmake = pytest.mark.skipif(
    not (Path(torch.utils.cmake_prefix_path) / "Torch").is_dir(), reason="this torch has no CMake package"
)
pytestmark = [
    pytest.mark.skipif(CMAKE is None, reason="no cmake on PATH"),
    pytest.mark.timeout(3000),  # the first one waits for the wheel, which nvcc compiles for each kind of GPU
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the variables of a fresh, activated virtual environment that sees the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    seen = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "seen.pth").write_text("\n".join([str(Path(opwright.__file__).parents[1]), *seen]) + "\n")
    # pip would not install what it sees, from the sources, in the environment around this one.
    commands = {"pip": 'pip "$@" --force-reinstall --no-deps', "opwright": 'opwright "$@"'}
    for name, words in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\nexec {folder}/bin/python -m {words}\n")
        (folder / "bin" / name).chmod(0o755)
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {
        **ours,
        "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(folder),
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


@pytest.fixture
def follow(environment: dict[str, str], wheel: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that types the commands of a README, compares what is printed, and returns the folder."""

    def run(example: str) -> Path:
        folder = shutil.copytree(ROOT / "examples" / example, tmp_path / example)
        shutil.copy(wheel, folder)
        (text,) = re.findall(r"^```console\n(.*?)^```", (folder / "README.md").read_text(), re.M | re.S)
        commands = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
        done = subprocess.run(
            ["bash", "-e", "-c", commands], cwd=folder, env=environment, capture_output=True, text=True
        )
        if "PyTorch: CUDA cannot be found" in done.stderr:
            pytest.skip("this torch has CUDA, and its CMake files find no CUDA toolkit here")
        log = (folder / "log").read_text() if (folder / "log").exists() else ""
        assert done.returncode == 0, (log + done.stdout + done.stderr)[-6000:]
        assert done.stdout.splitlines() == [line for line in text.splitlines() if not line.startswith("$ ")]
        return folder

    return run


def loaded_by(program: Path, *arguments: str | Path) -> str:
    """Returns the paths of the libraries that a program loads while it runs; it has to succeed."""
    command, environment = [program, *arguments], os.environ | {"LD_DEBUG": "files"}
    done = subprocess.run(command, cwd=program.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return "\n".join(re.findall(r"calling init: (.*)", done.stderr))


def refused_by(program: Path, library: Path) -> str:
    done = subprocess.run([program, library], cwd=program.parents[1], capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stdout == ""
    return done.stderr


@pytest.mark.compiler
@needs_torch_for_cmake
def test_operators_from_cpp(follow, unpacked: Path, environment: dict[str, str]) -> None:
    folder = follow("operators_from_cpp")
    program = folder / "build/operators_from_cpp"
    library = unpacked / "opwright_ops/_opwright/library.so"

    # The installed one unless a path is given, as the README says: to the program, or to CMake.
    installed = Path(environment["VIRTUAL_ENV"]) / "lib"
    assert re.search(rf"^{installed}/.*/opwright_ops/_opwright/library.so$", loaded_by(program), re.M)
    loaded = loaded_by(program, library)
    assert re.search(rf"^{library}$", loaded, re.M)
    assert str(installed) not in loaded
    assert "libtorch_cpu.so" in loaded
    assert "python" not in " ".join(Path(line).name for line in loaded.splitlines())
    for command in (
        ["-B", "build", f"-DOPWRIGHT_OPS={os.path.relpath(library, folder)}"],
        ["--build", "build"],
    ):
        done = subprocess.run(["cmake", *command], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^{library}$", loaded_by(program), re.M)

    missing = folder / "missing.so"
    assert f"opwright: {missing} cannot be loaded: " in refused_by(program, missing)
    (folder / "text.so").write_text("no library")
    assert "text.so cannot be loaded: " in refused_by(program, folder / "text.so")
    other = Path(torch.__file__).parent / "lib/libc10.so"
    assert f"opwright: {other} is not a library of operators" in refused_by(program, other)


@pytest.mark.compiler
@needs_torch_for_cmake
def test_aot_inductor(follow) -> None:
    folder = follow("aot_inductor")
    with zipfile.ZipFile(folder / "model.pt2") as archive:
        (graph,) = (name for name in archive.namelist() if name.endswith(".wrapper.json"))
        calls = [call["node"]["target"] for call in json.loads(archive.read(graph))["nodes"]]
    # The model calls the operators, so that their kernels run: nothing else has these names without Python.
    assert calls == ["opwright_ops::bias_gelu", *["opwright_ops::lstm_bidirectional"] * 2, "opwright_ops::softmax"]
    loaded = loaded_by(folder / "build/run_model")
    assert "opwright_ops/_opwright/library.so" in loaded
    assert ".wrapper.so" in loaded
    assert "python" not in " ".join(Path(line).name for line in loaded.splitlines())

    missing = folder / "missing.so"
    assert f"opwright: {missing} cannot be loaded: " in refused_by(folder / "build/run_model", missing)


@pytest.fixture
def find(tmp_path: Path) -> Callable[..., tuple[str, bool]]:
    """Returns a function that calls opwright_find_operators where a package `my_ops` is, in a folder of PYTHONPATH.

    It gives what CMake writes, without line breaks, and whether it succeeds.
    """
    packages = tmp_path / "packages"
    (packages / "my_ops/_opwright").mkdir(parents=True)
    (packages / "my_ops/__init__.py").write_text("raise AssertionError('this package was imported')\n")
    (packages / "my_ops/_opwright/library.so").touch()
    (packages / "no_library").mkdir()
    (packages / "no_library/__init__.py").touch()
    (packages / "one_file.py").touch()
    script = tmp_path / "script.cmake"

    def run(arguments: str, *options: str, before: str = "") -> tuple[str, bool]:
        script.write_text(
            f"cmake_minimum_required(VERSION 3.20)\ninclude({ROOT}/src/opwright/cmake/OpwrightOperators.cmake)\n"
            f'{before}\nopwright_find_operators({arguments})\nmessage("found: ${{MY_OPS}}")\n'
        )
        python = f"-DPython3_EXECUTABLE={sys.executable}"
        command = [CMAKE, python, *options, "-P", script]
        environment = os.environ | {"PYTHONPATH": str(packages)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        return " ".join((done.stdout + done.stderr).split()), done.returncode == 0

    return run


def test_a_package_is_found_and_not_imported(find, tmp_path: Path) -> None:
    found = f"found: {tmp_path}/packages/my_ops/_opwright/library.so", True
    assert find("MY_OPS my_ops") == found
    assert find(f"MY_OPS my_ops PYTHON {sys.executable}", "-DPython3_EXECUTABLE=/no/python") == found


def test_a_path_is_taken_as_it_is(find, tmp_path: Path) -> None:
    (tmp_path / "here.so").touch()
    expected = f"found: {tmp_path}/here.so", True
    assert find("MY_OPS my_ops", f"-DMY_OPS={tmp_path}/here.so") == expected
    assert find("MY_OPS my_ops", "-DMY_OPS=here.so") == expected
    assert find("MY_OPS my_ops", before=f"set(MY_OPS {tmp_path}/here.so)") == expected
    assert find("MY_OPS no_such_package", f"-DMY_OPS={tmp_path}/here.so") == expected


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (
            "MY_OPS no_such_package",
            [],
            "`no_such_package` is not installed in {python} "
            "hint: {python} -m pip install no-such-package, or -DPython3_EXECUTABLE=/path/to/python3 of where it is",
        ),
        (
            "MY_OPS no_library",
            [],
            "`no_library` in {folder}/packages/no_library has no library: it is not from a wheel of `opwright wheel` "
            "hint: {python} -m pip install /path/to/that.whl, or -DMY_OPS=/path/to/library.so",
        ),
        (
            "MY_OPS one_file",
            [],
            "`one_file` in {folder}/packages/one_file.py has no library: it is not from a wheel",
        ),
        ("MY_OPS sys", [], "`sys` in built-in has no library: it is not from a wheel"),
        (
            "MY_OPS my_ops",
            ["-DMY_OPS={folder}/missing.so"],
            "`my_ops`: there is no file {folder}/missing.so "
            "hint: -UMY_OPS looks for it in Python, -DMY_OPS=/path/to/library.so takes another",
        ),
        ("MY_OPS my_ops", ["-DMY_OPS={folder}/packages"], "`my_ops`: there is no file {folder}/packages"),
        (
            "MY_OPS my_ops PYTHON /no/python",
            [],
            "`my_ops`: /no/python does not run: No such file or directory hint: -DPython3_EXECUTABLE=/path/to/python3",
        ),
        ("MY_OPS my-ops", [], "`my-ops` is not a package name hint: the name after `import`"),
        ("MY_OPS my_ops.part", [], "`my_ops.part` is not a package name hint: the name after `import`"),
        (
            "MY_OPS my_ops REQUIRED",
            [],
            "`my_ops`: no argument is called `REQUIRED` hint: opwright_find_operators(VARIABLE PACKAGE [PYTHON FILE])",
        ),
    ],
)
def test_what_is_not_there_is_an_error_that_says_what_to_type(
    find, tmp_path: Path, arguments, options, message
) -> None:
    names = {"folder": tmp_path, "python": sys.executable}
    text, is_found = find(arguments, *(option.format(**names) for option in options))
    assert not is_found
    assert f"opwright_find_operators: {message.format(**names)}" in text
    assert "found:" not in text
