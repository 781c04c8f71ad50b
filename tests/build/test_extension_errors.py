"""Mistakes in extensions, through the compilers of this machine: the cause by name, the author's line, what mends it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from opwright.cpp_extension import load, load_inline
from opwright.errors import BuildError

pytestmark = pytest.mark.compiler

PYBIND = "#include <pybind11/pybind11.h>\n"
PYTHON = "#include <Python.h>\n"
# name -> source, what the error has to say
SOURCES = {
    "a missing header": (
        '\n#include "mylib/thing.h"\n',
        [r"header `mylib/thing\.h` is not found", r"k\.cpp:2: ", r">    2 \| #include", "extra_include_paths"],
    ),
    "a template in the library": (
        "#include <algorithm>\n#include <map>\n#include <vector>\nstruct A {};\n"
        "int f(std::vector<A> v, std::map<A, int> m) {\n  m[A{}] = 2;\n  std::sort(v.begin(), v.end());\n  return 0;\n}\n",
        [r"k\.cpp:6: no match for", r">    6 \|   m\[A\{\}\] = 2;", r"it shows in /\S*stl_function\.h:\d+", r"\d+ more: /"],
    ),
    "a function of one's own": (
        "#include <string>\nint twice(int x);\nint g() {\n  return twice(std::string());\n}\n",
        [r"k\.cpp:4: ", "std::string", r">    4 \|"],
    ),
    "a missing definition": (
        PYTHON + "int other(float*, int);\nint y = other(nullptr, 1);\n",
        [r"`other\(float\*, int\)` is used and never defined", r"k\.cpp:2", "extra_ldflags"],
    ),
}  # fmt: skip
IMPORTS = {
    "another name": (
        PYTHON + "static PyModuleDef definition = {PyModuleDef_HEAD_INIT};\n"
        "PyMODINIT_FUNC PyInit_other() { return PyModule_Create(&definition); }\n",
        ["is called `other`, and it is loaded as `mistake`", "PyInit_other", "TORCH_EXTENSION_NAME"],
    ),
    "no module": (PYTHON + "int y;\n", ["has no PYBIND11_MODULE", "is_python_module=False"]),
    "operators": (
        '#include <torch/csrc/stable/library.h>\nSTABLE_TORCH_LIBRARY(mistakes, m) { m.def("f(int x) -> int"); }\n',
        ["registers operators", "is_python_module=False"],
    ),
    "an undefined symbol": (
        PYTHON + "int other(float*, int);\nint y = other(nullptr, 1);\n",
        [r"`other\(float\*, int\)` is used and never defined", "extra_ldflags"],
    ),
    "another signature": (
        PYTHON + "int other(float*, int);\nint other(float*) { return 1; }\nint y = other(nullptr, 1);\n",
        ["defined otherwise", r"used +other\(float\*, int\)", r"defined +other\(float\*\)"],
    ),
}
BOUND = {
    "overloaded": (
        "int f(int x) { return x; }\nint f(double x) { return 1; }\n",
        ["`functions` names `f`, which is overloaded", "overload_cast", r">    2 \| int f\(int x\)"],
    ),
    "unbindable": (
        "struct S { S(S&) = delete; };\nvoid f(S s);\n",
        ["`functions` names `f`, and pybind11 cannot bind it", r">    3 \| void f\(S s\)"],
    ),
    "unclosed": ("int f(int x) {\n  if (x) { return x;\n}\n", ["ends too early", r">    2 \| int f\(int x\) \{"]),
}  # fmt: skip
CUDA = {
    "device": (
        "__global__ void k(float* x) {\n  x[0] = nonsense;\n}\n",
        {},
        [r"k\.cu:2: identifier", "nonsense", r">    2 \|   x\[0\]"],
    ),
    "template": (
        '#include "box.h"\n\ntemplate <typename T> __global__ void k(Box<T> b) { b.get(); }\n'
        "void f(double* p) { k<double><<<1, 1>>>({p}); }\n",
        {},
        [r"box\.h:3: ", "only 4 bytes"],
    ),
    "flag": (
        "int x;\n",
        {"extra_cuda_cflags": ["-fopenmp"]},
        ["does not know a flag", '"-Xcompiler=-fopenmp"'],
    ),
    "architecture": (
        "int x;\n",
        {"extra_cuda_cflags": ["-gencode=arch=compute_37,code=sm_37"]},
        ["does not know the architecture compute_37", "TORCH_CUDA_ARCH_LIST"],
    ),
    "header": ('#include "mylib/thing.cuh"\n', {}, [r"header `mylib/thing\.cuh` is not found", r"k\.cu:1"]),
}


def expect(patterns: list[str], error: BuildError) -> None:
    text = str(error)
    for pattern in patterns:
        assert re.search(pattern, text), text
    assert len(text.splitlines()) <= 20
    log = re.search(r"/\S*opwright-\S*\.log", text)
    assert log is None or "$ " in Path(log[0]).read_text()


@pytest.mark.parametrize("kind", list(SOURCES))
def test_a_source(kind: str, tmp_path: Path) -> None:
    text, patterns = SOURCES[kind]
    (tmp_path / "k.cpp").write_text(text)
    with pytest.raises(BuildError) as caught:
        load("mistake", str(tmp_path / "k.cpp"), extra_ldflags=["-Wl,-z,defs"])
    expect(patterns, caught.value)


def test_an_error_in_a_header_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.h").write_text("inline int f() {\n  return nonsense;\n}\n")
    (tmp_path / "k.cpp").write_text('#include "own.h"\n')
    with pytest.raises(BuildError) as caught:
        load("mistake", str(tmp_path / "k.cpp"))
    expect([r"own\.h:2: 'nonsense'", r">    2 \|   return nonsense;"], caught.value)


def test_warnings_of_the_compiler(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "k.cpp").write_text(f"// {tmp_path}\n#warning to whom it may concern\n")
    (tmp_path / "l.cpp").write_text("nonsense\n")
    with pytest.raises(BuildError):
        load("warns", [tmp_path / "k.cpp", tmp_path / "l.cpp"], is_python_module=False, verbose=True)
    assert "k.cpp:2:2: warning: #warning to whom" in capfd.readouterr().err
    load("warns", [tmp_path / "k.cpp"], is_python_module=False, verbose=True)
    assert "to whom" not in capfd.readouterr().err  # it was compiled the first time


def test_two_sources_with_one_function(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.cpp").write_text("\nint f(int x) { return x; }\n")
    with pytest.raises(BuildError) as caught:
        load("mistake", [str(tmp_path / "a.cpp"), str(tmp_path / "b.cpp")])
    expect([r"`f\(int\)` is defined twice", r"a\.cpp:2", r"b\.cpp:2", "inline"], caught.value)


def test_a_library_that_the_loader_does_not_find(tmp_path: Path) -> None:
    (tmp_path / "mine.c").write_text("int mine(void) { return 7; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnearby.so", tmp_path / "mine.c"], check=True)
    text = PYTHON + 'extern "C" int mine();\nint y = mine();\n'
    with pytest.raises(BuildError) as caught:
        load_inline("mistake", text, extra_ldflags=[f"-L{tmp_path}", "-lnearby"], no_implicit_headers=True)
    expect(["linked with `libnearby.so`", f"-Wl,-rpath,{tmp_path}"], caught.value)


@pytest.mark.parametrize("kind", IMPORTS)
def test_an_import(kind: str) -> None:
    text, patterns = IMPORTS[kind]
    with pytest.raises(BuildError) as caught:
        load_inline("mistake", text, no_implicit_headers=True, extra_cflags=["-O0"])
    expect(patterns, caught.value)


@pytest.mark.parametrize("kind", BOUND)
def test_what_functions_names(kind: str) -> None:
    text, patterns = BOUND[kind]
    with pytest.raises(BuildError) as caught:
        load_inline(
            "mistake",
            PYBIND + text,
            functions=["f"],
            no_implicit_headers=True,
            with_pytorch_error_handling=False,
            extra_cflags=["-O0"],
        )
    expect(patterns, caught.value)


def test_an_old_standard() -> None:
    with pytest.raises(BuildError) as caught:
        load_inline(
            "mistake",
            "#include <c10/util/StringUtil.h>\n",
            extra_cflags=["-std=c++14"],
            no_implicit_headers=True,
        )
    expect([r"needs C\+\+\d\d or later", r"got +-std=c\+\+14", r"take `-std=c\+\+14` out"], caught.value)


@pytest.mark.slow
def test_a_namespace_twice() -> None:
    text = "#include <torch/library.h>\n" + 'TORCH_LIBRARY(twice, m) { m.def("f() -> int"); }\n' * 2
    with pytest.raises(BuildError) as caught:
        load_inline("mistake", text, no_implicit_headers=True, is_python_module=False)
    expect(["namespace `twice` has two TORCH_LIBRARY", "TORCH_LIBRARY_FRAGMENT"], caught.value)


@pytest.mark.nvcc
@pytest.mark.parametrize("kind", CUDA)
def test_a_cuda_source(kind: str, tmp_path: Path) -> None:
    text, options, patterns = CUDA[kind]
    (tmp_path / "k.cu").write_text(text)
    (tmp_path / "box.h").write_text(
        "template <typename T> struct Box {\n  T* p;\n"
        '  __device__ T get() { static_assert(sizeof(T) == 4, "only 4 bytes"); return *p; }\n};\n'
    )
    with pytest.raises(BuildError) as caught:
        load("mistake", str(tmp_path / "k.cu"), **options)
    expect(patterns, caught.value)
