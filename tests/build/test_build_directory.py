"""`build_directory`: what lies there is what is loaded."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from extension_modules import inline, source

from opwright.build.store import digest_of
from opwright.cpp_extension import load, load_inline

pytestmark = pytest.mark.compiler

CLASS = """
#include <pybind11/pybind11.h>
struct InFolder { int value = 3; };
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::class_<InFolder>(m, "InFolder").def(pybind11::init<>()).def_readonly("value", &InFolder::value);
}
"""
LIBRARY = """
import sys, torch
from opwright.cpp_extension import load, load_inline
text = '#include <torch/csrc/stable/library.h>\\nSTABLE_TORCH_LIBRARY(in_folder, m) { m.def("f(int x) -> int"); }\\n'
options = dict(no_implicit_headers=True, is_python_module=False, build_directory=sys.argv[1])
path = load_inline("operators", text, **options)
torch.ops.load_library(path)
print(torch.ops.in_folder.f, path)
"""


def test_an_import_from_the_folder_is_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library in the cache was loaded, and an import of the copy bound the classes of pybind11 twice."""
    module = load_inline("in_folder", CLASS, no_implicit_headers=True, build_directory=tmp_path)
    assert module.__file__ == str(tmp_path / "in_folder.so")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("in_folder").InFolder is module.InFolder


def test_a_library_that_is_loaded_from_the_path_returned(tmp_path: Path) -> None:
    """Two copies registered a namespace twice, which ended the process."""
    command = [sys.executable, "-c", LIBRARY, "folder"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.split() == ["in_folder.f", str(tmp_path / "folder" / "operators.so")], result.stderr


def test_versions_of_a_module(tmp_path: Path) -> None:
    first = inline("versions", 1, build_directory=tmp_path)
    inode = (tmp_path / "versions.so").stat().st_ino
    again = inline("versions", 1, build_directory=tmp_path)
    assert (again.__file__, (tmp_path / "versions.so").stat().st_ino) == (first.__file__, inode)  # not written anew
    second = inline("versions", 2, build_directory=tmp_path)
    assert (first.value(), second.value()) == (1, 2)
    assert second.__file__ == str(tmp_path / "versions_v1.so")
    newest, loaded = ((tmp_path / name).read_bytes() for name in ("versions.so", "versions_v1.so"))
    assert digest_of(newest) == digest_of(loaded)
    assert inline("versions", 1, build_directory=tmp_path).value() == 1
    assert sorted(os.listdir(tmp_path)) == ["versions.so", "versions_v1.so"]


# The first two are what works with PyTorch, whose ninja makes `$$` a `$` before a shell reads it.
@pytest.mark.parametrize("origin", ["'$$ORIGIN'", "\\$$ORIGIN", "$ORIGIN", "\\$ORIGIN", "'$ORIGIN'"])
def test_a_library_beside_the_module(origin: str, tmp_path: Path) -> None:
    (tmp_path / "near.c").write_text("int near(void) { return 7; }\n")
    library = f"near_{digest_of(origin.encode())}"  # the loader takes one that is loaded for another of its name
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / f"lib{library}.so", tmp_path / "near.c"], check=True)
    flags = [f"-L{tmp_path}", f"-l{library}", f"-Wl,-rpath,{origin}"]
    text = 'extern "C" int near();\n' + source("near()")
    assert (
        load_inline("beside", text, no_implicit_headers=True, build_directory=tmp_path, extra_ldflags=flags).value()
        == 7
    )


@pytest.mark.parametrize("name", ["my-lib", "1.5"])
def test_a_library_whose_name_is_none_of_a_module(name: str, tmp_path: Path) -> None:
    (tmp_path / "k.cpp").write_text("int value = 1;\n")
    path = load(name, tmp_path / "k.cpp", is_python_module=False, build_directory=tmp_path)
    assert path == str(tmp_path / f"{name}.so")
