"""The defects of torch.utils.cpp_extension 2.13 by name: each shows with PyTorch's own, and not with Opwright's.

Every test runs one program twice, and only the module that it imports differs. PyTorch's builder must fail in
the way that is described, so that a test which could not fail shows itself; a PyTorch that has mended a
defect skips that builder.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from extension_modules import SOURCE

pytestmark = pytest.mark.compiler

KNOWN = "2.13.99"  # the newest PyTorch that has all of the defects
HANG_SECONDS = 15

PREAMBLE = f"""
from {{module}} import load, load_inline

def source(value):
    return {SOURCE!r}.replace("VALUE", str(value))

def inline(name, value, **options):
    return load_inline(name, [source(value)], no_implicit_headers=True, **options)

"""


@dataclass
class Builder:
    """Runs programs with PyTorch's `cpp_extension` or with Opwright's, and checks their output.

    Attributes:
        module: the name of the module that the programs import.
        folder: where they build.
    """

    module: str
    folder: Path

    def run(self, program: str, timeout: float = 300, **env: str) -> str:
        """Returns what a program printed, then what it wrote to stderr and how it ended, if not well."""
        scripts = sysconfig.get_path("scripts")  # where pip puts ninja
        environment = {
            **os.environ,
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "OPWRIGHT_CACHE_DIR": str(self.folder / "store"),
            "TORCH_EXTENSIONS_DIR": str(self.folder / "torch"),
            **env,
        }
        process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE.replace("{module}", self.module) + program],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return f"still running after {timeout} s"
        return out.strip() if process.returncode == 0 else f"{out}{err}\nexit {process.returncode}"

    def check_output(self, output: str, expected: str, defect: str) -> None:
        """Checks that Opwright's output is the expected one, and that PyTorch's has the defect.

        Args:
            defect: a regular expression that the output of a PyTorch with the defect matches.
        """
        if self.module.startswith("opwright"):
            assert output == expected
        elif re.search(defect, output):
            assert output != expected
        elif torch.torch_version.TorchVersion(torch.__version__) > KNOWN:
            pytest.skip(f"PyTorch {torch.__version__} does not have this defect")
        else:
            pytest.fail(f"PyTorch {torch.__version__} should have failed with {defect!r}, and said:\n{output}")


@pytest.fixture(params=["torch.utils.cpp_extension", "opwright.cpp_extension"], ids=["torch", "opwright"])
def builder(request: pytest.FixtureRequest, tmp_path: Path) -> Builder:
    if request.param.startswith("torch") and not shutil.which(
        "ninja", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    ):
        pytest.skip("no ninja, which PyTorch's own needs: `pip install ninja`")
    (tmp_path / "torch").mkdir()
    return Builder(request.param, tmp_path)


def test_1_a_stale_lock_is_waited_for_without_end(builder: Builder, tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    output = builder.run(f"print(inline('stale', 3, build_directory={str(tmp_path)!r}).value())", HANG_SECONDS)
    if builder.module.startswith("torch"):
        assert (tmp_path / "main.cpp").is_file()  # it came as far as the lock, and was not just slow
        if (tmp_path / "build.ninja").exists():
            output = "past the lock"  # the build may take longer than the time that was waited
    builder.check_output(output, expected="3", defect="still running after")


def test_2_a_finished_build_needs_ninja(builder: Builder) -> None:
    program = "print(inline('warm', 4).value())"
    assert builder.run(program) == "4"
    builder.check_output(builder.run(program, PATH="/nonexistent"), "4", "Ninja is required")


def test_3_two_processes_with_one_name_and_two_sources(builder: Builder, tmp_path: Path) -> None:
    """PyTorch's second process writes the first one's source anew, waits, and takes what was made."""
    build = tmp_path / "build"
    build.mkdir()
    compiler = tmp_path / "c++"  # compiles when both have come, or there is nothing to come to
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-c*main.cpp*)\n  for i in $(seq 600); do\n'
        f"    grep -q FromLong.222 {build}/main.cpp && break; sleep 0.1\n  done\nesac\n"
        f'exec {shutil.which("c++") or shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)

    def run(value: int) -> str:
        program = f"print(inline('same', {value}, build_directory={str(build)!r}).value())"
        return builder.run(program, CXX=str(compiler))

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, 111)
        limit = time.monotonic() + 60
        while not ((build / "lock").exists() or first.done()) and time.monotonic() < limit:
            time.sleep(0.02)
        second = pool.submit(run, 222)
        output = f"{first.result()} {second.result()}"
    builder.check_output(output, "111 222", "^(111 111|222 222)$")


def test_4_two_sources_with_one_base_name(builder: Builder, tmp_path: Path) -> None:
    program = f"""
import pathlib
files = [pathlib.Path({str(tmp_path)!r}, folder, "k.cpp") for folder in "ab"]
for file, text in zip(files, ("int other();" + source("other()"), "int other() {{ return 6; }}")):
    file.parent.mkdir()
    file.write_text(text)
print(load("base_names", [str(file) for file in files]).value())
"""
    builder.check_output(builder.run(program), "6", r"multiple rules generate k\.o")


def test_5_the_callers_lists_are_changed(builder: Builder) -> None:
    program = """
cpp, cuda = ["int f();"], ["int f() { return 1; }"]
try:
    load_inline("lists", cpp, cuda, functions=["f"])
except Exception:
    pass  # the compiler is /bin/false
print(len(cpp), len(cuda))
"""
    builder.check_output(builder.run(program, CXX="false"), "1 1", "^5 4$")


# What a build of a CUDA source asks for its flags; the compiler itself need not be there.
FLAGS = {
    "torch.utils.cpp_extension": "from torch.utils.cpp_extension import _get_cuda_arch_flags as flags\n",
    "opwright.cpp_extension": "from opwright.cpp_extension.extension import _architecture_flags as flags\n",
}


@pytest.mark.parametrize("given", ["-march=native", "-I/home/research/include"])
def test_6_a_flag_with_arch_inside_takes_the_architectures_away(builder: Builder, given: str) -> None:
    program = FLAGS[builder.module] + f"print('sm_80' in str(flags(['-Xcompiler', {given!r}])))"
    builder.check_output(builder.run(program, TORCH_CUDA_ARCH_LIST="8.0"), "True", "^False$")


@pytest.mark.parametrize(
    ("listed", "expected", "defect"),
    [
        ("", "sm_90", "IndexError: list index out of range"),
        ("12.0f", "sm_120f", r"Unknown CUDA arch \(12\.0f\)"),
    ],
    ids=["none listed", "12.0f"],
)
def test_7_no_gpu(builder: Builder, listed: str, expected: str, defect: str) -> None:
    program = FLAGS[builder.module] + f"print({expected!r} if {expected!r} in str(flags([])) else flags([]))"
    env = {"TORCH_CUDA_ARCH_LIST": listed, "OPWRIGHT_ARCH": "", "CUDA_VISIBLE_DEVICES": ""}
    builder.check_output(builder.run(program, **env), expected, defect)


# A cell that is run, edited, and run again: first another result, then another schema.
CELLS = {
    "TORCH_LIBRARY": """
#include <torch/library.h>
int64_t f(int64_t x PARAMETER) { return x + AMOUNT; }
TORCH_LIBRARY(cells, m) { m.def("f(int x SCHEMA) -> int", f); }
""",
    # No header of ATen: a second, where torch/library.h takes six.
    "STABLE_TORCH_LIBRARY": """
#include <torch/csrc/stable/library.h>
void f(StableIValue* stack, uint64_t inputs, uint64_t outputs) {
  stack[0] = torch::stable::detail::from(torch::stable::detail::to<int64_t>(stack[0]) + AMOUNT);
}
STABLE_TORCH_LIBRARY(cells, m) { m.def("f(int x SCHEMA) -> int"); }
STABLE_TORCH_LIBRARY_IMPL(cells, CompositeExplicitAutograd, m) { m.impl("f", &f); }
""",
}
EDITED = """
import torch
def cell(amount, parameter="", schema=""):
    text = TEXT.replace("AMOUNT", amount).replace("PARAMETER", parameter).replace("SCHEMA", schema)
    load_inline("cell", [text], no_implicit_headers=True, is_python_module=False)
cell("1")
print(torch.ops.cells.f(10), flush=True)
cell("2")
print(torch.ops.cells.f(10), flush=True)
cell("y" if "y" in PARAMETER else "3", PARAMETER, ", int y=4")
print(torch.ops.cells.f(10), len(torch.ops.cells.f.default._schema.arguments))
"""


@pytest.mark.parametrize("kind", ["STABLE_TORCH_LIBRARY", pytest.param("TORCH_LIBRARY", marks=pytest.mark.slow)])
def test_8_an_edited_cell_ends_the_process(builder: Builder, kind: str) -> None:
    parameter = ", int64_t y" if kind == "TORCH_LIBRARY" else ""
    program = f"TEXT, PARAMETER = {CELLS[kind]!r}, {parameter!r}" + EDITED
    last = 14 if parameter else 13
    builder.check_output(builder.run(program), f"11\n12\n{last} 2", r"^11\n(?!12)[\s\S]*exit -(6|11)")


def test_9_nothing_is_optimised(builder: Builder) -> None:
    program = (
        'text = "#ifdef __OPTIMIZE__\\n#define LEVEL 2\\n#else\\n#define LEVEL 0\\n#endif\\n" + source("LEVEL")\n'
        'print(load_inline("level", [text], no_implicit_headers=True).value())'
    )
    builder.check_output(builder.run(program), "2", "^0$")
