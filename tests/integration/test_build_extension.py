"""`BuildExtension`: setuptools compiles through the store."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from extension_modules import source

from opwright.cpp_extension import BuildExtension, CppExtension

pytestmark = pytest.mark.compiler

SETUP = """
from setuptools import setup
from opwright.cpp_extension import BuildExtension, CppExtension
setup(
    name="built",
    ext_modules=[CppExtension("built", ["main.cpp", "a/k.cpp", "b/k.cpp", "c.c"], include_dirs=["include"],
                              define_macros=[("NAMED", '"a b"')], extra_compile_args={"cxx": ["-DFROM_CXX=5"]})],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
"""
MAIN = """
#include <Python.h>
int a(); int b();
extern "C" int c_value(void);
static PyObject* value(PyObject*, PyObject*) { return Py_BuildValue("(iiisi)", a(), b(), c_value(), NAMED, FROM_CXX); }
static PyMethodDef methods[] = {{"value", value, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "m", nullptr, -1, methods};
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
PyMODINIT_FUNC JOIN(PyInit_, TORCH_EXTENSION_NAME)(void) { return PyModule_Create(&definition); }
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    files = {
        "setup.py": SETUP,
        "main.cpp": MAIN,
        "a/k.cpp": "int a() { return 1; }\n",
        "b/k.cpp": "int b() { return 2; }\n",
        "include/values.h": "#define VALUE 3\n",
        "c.c": '#include <Python.h>\n#include "values.h"\nint c_value(void) { return VALUE; }\n',
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def build(project: Path, **environment: str) -> str:
    environment = {**os.environ, "OPWRIGHT_CACHE_DIR": str(project.parent / "store"), **environment}
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stderr


def value(project: Path, program: str = "import torch, built; print(*built.value())") -> str:
    result = subprocess.run([sys.executable, "-c", program], cwd=project, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_only_what_changed_is_compiled_whatever_the_checkout(project: Path) -> None:
    assert "4 compiled, 0 taken" in build(project)
    assert (project / "built.so").is_file()  # no_python_abi_suffix
    assert value(project) == "1 2 3 a b 5"
    assert "0 compiled, 4 taken" in build(project)

    times = (project / "a/k.cpp").stat()
    (project / "a/k.cpp").write_text("int a() { return 7; }\n")
    os.utime(project / "a/k.cpp", ns=(times.st_atime_ns, times.st_mtime_ns))  # as on a disk whose clock is off
    assert "1 compiled, 3 taken" in build(project)
    assert value(project) == "7 2 3 a b 5"

    (project / "include/values.h").write_text("#define VALUE 4\n")
    assert "1 compiled, 3 taken" in build(project)
    assert value(project) == "7 2 4 a b 5"

    other = project.parent / "other checkout"
    shutil.copytree(project, other, ignore=shutil.ignore_patterns("build", "*.so"))
    assert "0 compiled, 4 taken" in build(other)
    assert value(other) == "7 2 4 a b 5"


def test_neither_ninja_nor_an_earlier_build_directory(project: Path) -> None:
    tools = project.parent / "tools"
    tools.mkdir()
    pythons = [word for name in ("CC", "CXX") for word in (sysconfig.get_config_var(name) or "").split()]
    for name in {"gcc", "g++", "cc", "c++", "as", "ld", "env", "sh", *pythons}:
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    assert "4 compiled" in build(project, PATH=str(tools))
    shutil.rmtree(project / "build")
    assert "4 taken" in build(project, PATH=str(tools))
    assert value(project) == "1 2 3 a b 5"


def test_no_compiler(project: Path) -> None:
    with pytest.raises(AssertionError, match="the C\\+\\+ compiler that setuptools calls is not there"):
        build(project, PATH="/nonexistent")


def test_an_error_at_the_line_of_the_author(project: Path) -> None:
    (project / "b/k.cpp").write_text("int b() {\n  return nonsense;\n}\n")
    with pytest.raises(AssertionError, match=rf"{project}/b/k.cpp:2: .*nonsense"):
        build(project)
    (project / "b/k.cpp").write_text("int b() { return 2; }\n")
    assert "1 compiled, 3 taken" in build(project)  # those that were right are kept


def test_a_source_that_is_not_utf8(project: Path) -> None:
    (project / "a/k.cpp").write_bytes(b"int a() { return '\xe9' & 255; }\n")
    build(project)
    assert value(project).startswith("233 2 3")


def test_warnings_of_the_compiler_are_shown(project: Path) -> None:
    (project / "a/k.cpp").write_text("#warning to whom it may concern\nint a() { return 1; }\n")
    assert "a/k.cpp:1:2: warning: #warning to whom it may concern" in build(project)
    assert "to whom" not in build(project)  # nothing was compiled


def test_an_optional_extension_that_does_not_compile(project: Path) -> None:
    """The error was Opwright's, which setuptools did not take for one of a compiler."""
    other = 'CppExtension("absent", ["absent.cpp"], optional=True), CppExtension("built"'
    (project / "setup.py").write_text(SETUP.replace('CppExtension("built"', other, 1))
    (project / "absent.cpp").write_text("nonsense\n")
    assert re.search('building extension "absent" failed: `absent`: .*OPW202', build(project))
    assert value(project) == "1 2 3 a b 5"


def test_a_source_that_is_absent(project: Path) -> None:
    """Setuptools took the error for none of a compiler, and ended the build of the other extensions."""
    other = 'CppExtension("absent", ["absent.cpp"], optional=True), CppExtension("built"'
    (project / "setup.py").write_text(SETUP.replace('CppExtension("built"', other, 1))
    assert "`absent`: there is no such source   [OPW211]" in build(project)
    assert value(project) == "1 2 3 a b 5"


def test_debug_information_that_the_environment_asks_for(project: Path) -> None:
    """A -g of the environment was removed with the one that Python was built with."""
    found = []
    for flags in ("-O1", "-g -O1"):
        build(project, CFLAGS=flags, CXXFLAGS=flags)
        found.append(b".debug_info" in next(project.glob("build/temp*/main.o")).read_bytes())
    assert found == [False, True]


MODIFIED = """
class BuildExtension(BuildExtension):
    def build_extensions(self):
        self.compiler.compiler_so.append("-DB=20")
        super().build_extensions()
setup("""


def test_flags_for_c_are_those_for_cpp_too(project: Path) -> None:
    """Setuptools keeps the flags of both languages apart; PyTorch compiles C++ with those for C."""
    (project / "setup.py").write_text(SETUP.replace("setup(", MODIFIED, 1))
    (project / "a/k.cpp").write_text("int a() { return A; }\n")
    (project / "b/k.cpp").write_text("int b() { return B; }\n")
    (project / "c.c").write_text("#ifdef A_CXX\n#error\n#endif\nint c_value(void) { return A; }\n")
    build(project, CFLAGS="-DA=10 -O0", CXXFLAGS="-DA_CXX -Wextra")
    assert value(project) == "10 20 10 a b 5"


def test_the_version_of_the_limited_api_is_pytorchs(project: Path) -> None:
    """PyTorch's flag is the last; another among the flags of the caller was the one that counted."""
    setup = SETUP.replace('["-DFROM_CXX=5"]', '["-DFROM_CXX=5", "-DPy_LIMITED_API=0x03090000"]')
    (project / "setup.py").write_text(setup.replace("define_macros", "py_limited_api=True, define_macros"))
    (project / "a/k.cpp").write_text("int a() { return Py_LIMITED_API == 0x030A0000; }\n")
    build(project)
    assert value(project) == "1 2 3 a b 5"


def test_the_name_of_an_extension_is_pytorchs(project: Path) -> None:
    """PyTorch's macro is the last; another among those of the caller named the module."""
    macros = """define_macros=[("TORCH_EXTENSION_NAME", '"other"'), """
    (project / "setup.py").write_text(SETUP.replace("define_macros=[", macros))
    build(project)
    assert value(project) == "1 2 3 a b 5"


def test_relative_paths_of_flags(project: Path) -> None:
    flags = '"-DFROM_CXX=5", "-isystem", "later", "-include", "before.h"'
    (project / "setup.py").write_text(SETUP.replace('"-DFROM_CXX=5"', flags))
    (project / "later").mkdir()
    (project / "later" / "number.h").write_text("#define NUMBER 4\n")
    (project / "before.h").write_text("#define BEFORE 50\n")
    (project / "a/k.cpp").write_text("#include <number.h>\nint a() { return NUMBER + BEFORE; }\n")
    (project / "c.c").write_text("int c_value(void) { return 3; }\n")
    build(project)
    assert value(project) == "54 2 3 a b 5"


def failure(project: Path) -> str:
    with pytest.raises(AssertionError) as caught:
        build(project)
    return str(caught.value)


def test_a_hint_names_the_arguments_of_the_setup_file(project: Path) -> None:
    (project / "setup.py").write_text(SETUP.replace('"-DFROM_CXX=5"', '"-DFROM_CXX=5", "-fno-such-flag"'))
    assert 'hint: take it out of `extra_compile_args["cxx"]`' in failure(project)
    (project / "setup.py").write_text(SETUP)
    (project / "main.cpp").write_text('#include "absent.h"\n' + MAIN)
    text = failure(project)
    assert "include_dirs" in text
    assert "extra_include_paths" not in text


@pytest.mark.nvcc
def test_a_hint_names_the_extension_for_cuda(project: Path) -> None:
    (project / "main.cpp").write_text("#include <cuda_runtime.h>\n" + MAIN)
    text = failure(project)
    assert "hint: `CUDAExtension`, or `include_dirs=[" in text
    assert "with_cuda" not in text


@pytest.mark.nvcc
def test_a_cuda_extension_without_a_cuda_source(project: Path) -> None:
    """The headers of CUDA were not found."""
    (project / "setup.py").write_text(SETUP.replace("CppExtension", "CUDAExtension"))
    (project / "main.cpp").write_text("#include <cuda_runtime.h>\nstatic_assert(CUDART_VERSION > 0);\n" + MAIN)
    build(project)


@pytest.mark.nvcc
def test_a_hint_names_the_flags_of_nvcc_of_the_setup_file(project: Path) -> None:
    setup = SETUP.replace('{"cxx": ["-DFROM_CXX=5"]}', '{"nvcc": ["-fno-such-flag"]}').replace(
        "CppExtension", "CUDAExtension"
    )
    (project / "setup.py").write_text(setup.replace('"c.c"', '"c.cu"'))
    (project / "c.cu").write_text("int c;\n")
    text = failure(project)
    assert 'hint: write `"-Xcompiler=-fno-such-flag"` for the C++ compiler behind nvcc, or take it out of' in text
    assert 'take it out of `extra_compile_args["nvcc"]`' in text


def test_lists_of_the_caller_are_not_changed() -> None:
    given = {"include_dirs": ["i"], "libraries": ["m"], "library_dirs": ["l"], "extra_compile_args": ["-g"]}
    kept = {name: list(value) for name, value in given.items()}
    sources = ["a.cpp"]
    extension = CppExtension("e", sources, **given)
    assert given == kept
    assert sources == ["a.cpp"]
    assert extension.libraries[0] == "m"
    assert "torch_cpu" in extension.libraries


def test_it_is_pytorchs_class_too() -> None:
    from torch.utils import cpp_extension

    assert issubclass(BuildExtension, cpp_extension.BuildExtension)


PARALLEL = """
from setuptools import setup
from opwright.cpp_extension import BuildExtension, CppExtension
setup(
    name="many",
    ext_modules=[CppExtension(f"many{i}", [f"{i}/{n}.cpp" for n in ("main", "a", "b")],
                              define_macros=[("VALUE", i)]) for i in range(4)],
    cmdclass={"build_ext": BuildExtension},
    options={"build_ext": {"parallel": 2}},
)
"""


def test_extensions_built_by_several_threads(tmp_path: Path) -> None:
    """Each of the threads replaced the `compile` of one compiler: sources were compiled with another's macros."""
    main = source("a() + b()").replace("#include", "int a(); int b();\n#include", 1)
    project = tmp_path / "project"
    for i in range(4):
        (project / str(i)).mkdir(parents=True)
        (project / str(i) / "main.cpp").write_text(f"// {i}\n{main}")
        for name in "ab":
            (project / str(i) / f"{name}.cpp").write_text(f"int {name}() {{ return 10 * VALUE; }}\n")
    (project / "setup.py").write_text(PARALLEL)
    build(project)
    program = "import torch; print(*[__import__(f'many{i}').value() for i in range(4)])"
    assert value(project, program) == "0 20 40 60"
