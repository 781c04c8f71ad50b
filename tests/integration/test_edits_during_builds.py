"""A file that is saved while compilers read it, or that another one takes the place of: what runs is what is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiler

OPERATOR = """
import sys
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator
from pathlib import Path

@operator("edits::plus", cpu=Path(sys.argv[1]) / "plus.cpp")
def plus(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x - 1000  # another result than the kernel's: a fall-back would show

print(float(plus(torch.zeros(3))[2]))
"""
KERNEL = """
#include <opwright/kernel.h>
#include "{header}"
using opwright::View;
template <typename T> void plus(View<const T, 1> x, View<T, 1> output) {{
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) + T({amount});
}}
OPWRIGHT_KERNEL(plus, float)
"""
EXTENSION = """
import sys
import torch
from opwright.cpp_extension import load

module = load("edits", [sys.argv[1] + "/plus.cpp"])
print(float(module.plus(torch.zeros(3))[2]))
"""
BINDING = """
#include <torch/extension.h>
#include "{header}"
torch::Tensor plus(torch::Tensor x) {{ return x + double({amount}); }}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {{ m.def("plus", &plus); }}
"""
PROGRAMS = {"operator": (OPERATOR, KERNEL), "extension": (EXTENSION, BINDING)}


# An extension takes a minute for what an operator builds in a second.
CASES = [("operator", m, f) for m in ("before", "after") for f in ("plus.cpp", "amount.h")]
CASES += [("extension", "before", "plus.cpp"), ("extension", "after", "amount.h")]


def make_project(kind: str, tmp_path: Path):
    """Returns a program, its folder, and a function that saves its source and header."""
    program, source = PROGRAMS[kind]
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "next").mkdir()

    def save(place: str, amount: str, header: str) -> None:
        (folder / place / "plus.cpp").write_text(source.format(header="amount.h", amount=amount))
        (folder / place / "amount.h").write_text(f"#pragma once\n#define AMOUNT {header}\n")

    save("", "1 + AMOUNT", "10")
    return program, folder, save


def compiler_that_saves(folder: Path, moment: str, name: str, times: int = 1) -> Path:
    """Returns a compiler during whose first runs on the source a file is saved, before or after it is read."""
    count = folder / "count"
    save = (
        f'n=$(cat {count} 2>/dev/null || echo 0); if [ "$n" -lt {times} ]; then '
        f"echo $((n + 1)) > {count}; cp {folder}/next/{name} {folder}/{name}; fi"
    )
    run = 'c++ "$@" || exit $?'
    steps = {"before": f"{save}\n{run}", "after": f"{run}\n{save}"}[moment]
    wrapper = folder / "saving-c++"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in\n*plus.cpp*)\n{steps};;\n*) exec c++ "$@";;\nesac\n')
    wrapper.chmod(0o755)
    return wrapper


def run(program: str, folder: Path, compiler: Path | str = "c++", **environment: str) -> str:
    made = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env={
            **os.environ,
            "OPWRIGHT_CACHE_DIR": str(folder / "store"),
            "OPWRIGHT_CXX": str(compiler),
            "OPWRIGHT_REQUIRE_KERNELS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return made.stdout.strip() or made.stderr


@pytest.mark.parametrize(("kind", "moment", "name"), CASES)
def test_a_file_saved_during_a_build_is_what_runs(kind, moment, name, tmp_path) -> None:
    program, folder, save = make_project(kind, tmp_path)
    changed = {"plus.cpp": ("2 + AMOUNT", "10"), "amount.h": ("1 + AMOUNT", "20")}[name]
    save("next", *changed)
    compiler = compiler_that_saves(folder, moment, name)
    expected = {"plus.cpp": "12.0", "amount.h": "21.0"}[name]
    assert run(program, folder, compiler) == expected
    assert (folder / "count").read_text().strip() == "1", "the compiler saved nothing, so nothing was tested"
    assert run(program, folder, compiler) == expected  # in a later process, from the store
    save("", "1 + AMOUNT", "10")
    assert run(program, folder, compiler) == "11.0"  # what was there before was not kept under its name


def test_a_file_that_never_stops_changing_is_refused(tmp_path: Path) -> None:
    folder = tmp_path
    (folder / "amount.h").write_text("#define AMOUNT 10\n")
    (folder / "plus.cpp").write_text(KERNEL.format(header="amount.h", amount="AMOUNT"))
    compiler = folder / "saving-c++"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *plus.cpp*) echo "// again" >> {folder}/amount.h;; esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    text = run(OPERATOR, folder, compiler)
    assert "a file changed whenever it was compiled" in text
    assert str(folder / "amount.h") in text
    assert "call again when the file is saved" in text


# --- headers ----------------------------------------------------------------------------------------------


def write(folder: Path, include: str, **headers: int) -> None:
    """Saves a kernel that adds AMOUNT, and headers in folders of these names that define it."""
    folder.mkdir(exist_ok=True)
    text = KERNEL.replace('#include "{header}"', include).format(amount="AMOUNT")
    (folder / "plus.cpp").write_text(text)
    for place, amount in headers.items():
        (folder / place).mkdir(exist_ok=True)
        (folder / place / "amount.h").write_text(f"#define AMOUNT {amount}\n")


@pytest.mark.parametrize(
    "include", ['#include "own/amount.h"', '#include "own/../own/amount.h"', '#define H "own/amount.h"\n#include H']
)
def test_two_folders_with_the_same_source_have_headers_of_their_own(include: str, tmp_path: Path) -> None:
    """Two checkouts: the second one ran the kernel of the first."""
    store = str(tmp_path / "store")
    for _ in range(2):
        for i, name in enumerate(("main", "branch")):
            write(tmp_path / name, include, own=i)
            assert run(OPERATOR, tmp_path / name, OPWRIGHT_CACHE_DIR=store) == f"{i}.0"
    write(tmp_path / "branch", include, own=7)
    assert run(OPERATOR, tmp_path / "branch", OPWRIGHT_CACHE_DIR=store) == "7.0"


def test_two_folders_with_the_same_source_and_no_headers_share_a_build(tmp_path: Path) -> None:
    for name in ("main", "branch"):
        write(tmp_path / name, "#define AMOUNT 3")
        assert run(OPERATOR, tmp_path / name, OPWRIGHT_CACHE_DIR=str(tmp_path / "store")) == "3.0"
    assert len(list((tmp_path / "store").rglob("library.so"))) == 1


@pytest.mark.parametrize("how", ["-isystem", "-idirafter", "CPATH", "CPLUS_INCLUDE_PATH"])
def test_folders_of_headers_that_the_environment_names(how: str, tmp_path: Path) -> None:
    """The compiler takes some of them for the system's, whose headers it does not list."""

    def amount(place: str) -> str:
        folder = str(tmp_path / "project" / place)
        environment = {"OPWRIGHT_CXXFLAGS": f"{how} {folder}"} if how[0] == "-" else {how: folder}
        return run(OPERATOR, tmp_path / "project", **environment)

    write(tmp_path / "project", "#include <amount.h>", one=1, two=2)
    assert [amount("one"), amount("two"), amount("one")] == ["1.0", "2.0", "1.0"]
    write(tmp_path / "project", "#include <amount.h>", one=5)
    assert amount("one") == "5.0"


def test_a_compiler_and_a_folder_named_from_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers run in the folder of the build, and were not found there."""
    write(tmp_path / "project", "#include <amount.h>", one=3)
    monkeypatch.chdir(tmp_path / "project")
    Path("my-c++").symlink_to(shutil.which("c++") or "")
    assert run(OPERATOR, tmp_path / "project", "./my-c++", OPWRIGHT_CXXFLAGS="-Ione") == "3.0"


@pytest.mark.parametrize("name", ["a b", "a#b", "a$b"])
def test_folders_whose_names_mean_something_to_make(name: str, tmp_path: Path) -> None:
    write(tmp_path / "project", f'#include "{name}/amount.h"', **{name: 4})
    assert run(OPERATOR, tmp_path / "project") == "4.0"
    write(tmp_path / "project", f'#include "{name}/amount.h"', **{name: 5})
    assert run(OPERATOR, tmp_path / "project") == "5.0"
