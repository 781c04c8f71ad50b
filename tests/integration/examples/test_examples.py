"""The examples: each does what its README shows, command by command, in a copy and an environment of its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import opwright_ops
import pytest
import torch

import opwright

EXAMPLES = Path(__file__).parents[3] / "examples"
EXTENSIONS = EXAMPLES / "existing_extensions"
NUMBERED = sorted(path.name for path in EXAMPLES.glob("[0-9]*"))
HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU, or a torch without CUDA")


@pytest.fixture
def follow(environment: dict[str, str], tmp_path: Path) -> Callable[..., None]:
    """Returns a function that types the commands of a README's block, and compares what is printed."""

    def run(example: str, block: int = 0, **variables: str) -> None:
        (found,) = EXAMPLES.rglob(f"{example}/README.md")
        folder = shutil.copytree(found.parent, tmp_path / example)
        blocks = re.findall(r"^```console\n(.*?)^```", (folder / "README.md").read_text(), re.M | re.S)
        lines = blocks[block].splitlines()
        commands = "\n".join(line[2:] for line in lines if line.startswith("$ "))
        done = subprocess.run(
            ["bash", "-e", "-c", commands],
            cwd=folder,
            env={**environment, "OPWRIGHT_WITHOUT": "pch", **variables},  # one compile each: none to precompile for
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        assert done.stdout.splitlines() == [line for line in lines if not line.startswith("$ ")], done.stderr

    return run


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.compiler
@pytest.mark.parametrize("example", [name for name in NUMBERED if "cuda" not in name])
def test_a_numbered_example(example: str, follow) -> None:
    follow(example)


@pytest.mark.compiler
@pytest.mark.parametrize("example", [name for name in NUMBERED if "verify" not in name])
def test_a_numbered_example_is_right(example: str) -> None:
    for file in (EXAMPLES / example).glob("*.py"):
        command = ["verify", str(file), "--check", "numerics", "--check", "boundaries", "--device", "cpu"]
        done = subprocess.run([sys.executable, "-m", "opwright", *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.compiler
@pytest.mark.nvcc
def test_the_numbered_example_for_cuda(follow) -> None:
    follow("06_cuda_kernel")


def test_numbered_examples_are_short_and_most_declare_an_operator() -> None:
    texts = {}
    for name in NUMBERED:
        sources = [path.read_text() for path in (EXAMPLES / name).iterdir() if path.suffix in (".py", ".cpp", ".cu")]
        texts[name] = "".join(sources)
        assert 0 < texts[name].count("\n") <= 60, name
    assert [name[:2] for name in NUMBERED] == [f"{i:02}" for i in range(1, len(NUMBERED) + 1)]
    assert len([text for text in texts.values() if "@operator(" in text]) > len(NUMBERED) / 2


@pytest.mark.compiler
@pytest.mark.parametrize("example", ["cpp_jit", "cpp_setuptools", "pybind_d_sigmoid"])
def test_on_the_cpu(example: str, follow) -> None:
    follow(example)


@pytest.mark.compiler
def test_on_several_processes(follow) -> None:
    """Two processes, then four from their checkpoint, against one; opwright_ops is not installed there."""
    ops = Path(opwright_ops.__file__).parents[1]
    follow("distributed", PYTHONPATH=str(ops), OMP_NUM_THREADS="1")


@pytest.mark.parametrize("example", ["cuda_jit", "cuda_setuptools"])
def test_without_a_gpu_the_cuda_examples_say_so(example: str, follow) -> None:
    follow(example, block=1, CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.nvcc
@needs_gpu
@pytest.mark.parametrize("example", ["cuda_jit", "cuda_setuptools"])
def test_on_a_gpu(example: str, follow) -> None:
    follow(example)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_the_cuda_package_says_that_it_needs_a_torch_with_cuda(environment, tmp_path: Path) -> None:
    folder = shutil.copytree(EXTENSIONS / "cuda_setuptools", tmp_path / "copy")
    command = ["pip", "install", "--no-build-isolation", "."]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "matmul_cuda needs a torch with CUDA" in done.stdout + done.stderr


@pytest.fixture
def cuda_headers(tmp_path: Path) -> Path:
    """Returns an include directory with the one header that c10/cuda needs and a CPU-only torch lacks."""
    header = tmp_path / "include" / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    header.parent.mkdir(parents=True)
    header.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    return tmp_path / "include"


def host_symbols(library: Path) -> str:
    return subprocess.run(["nm", "-C", str(library)], check=True, capture_output=True, text=True).stdout


def assert_good_manners(symbols: str) -> None:
    """The launchers use the current stream, set the device, and read the error of the launch."""
    for used in ("getCurrentCUDAStream", "ExchangeDevice", "c10_cuda_check_implementation"):
        assert re.search(rf" U c10::cuda::{used}", symbols), used


@pytest.mark.nvcc
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_jit_compiles_and_links_without_a_gpu(cuda_headers: Path, tmp_path: Path) -> None:
    from opwright.cpp_extension import load

    sources = [EXTENSIONS / "cuda_jit" / name for name in ("bindings.cpp", "d_sigmoid.cu")]
    with pytest.raises(ImportError, match=r"c10\S*cuda"):
        load("d_sigmoid_cuda", sources, extra_include_paths=[cuda_headers], build_directory=tmp_path)
    symbols = host_symbols(tmp_path / "d_sigmoid_cuda.so")
    assert_good_manners(symbols)
    for dtype in ("float", "double", "c10::Half", "c10::BFloat16"):
        assert f"d_sigmoid_kernel<{dtype}>" in symbols
        assert f"d_sigmoid_backward_kernel<{dtype}>" in symbols


@pytest.mark.nvcc
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_cuda_matmul_compiles_without_a_gpu(cuda_headers: Path, tmp_path: Path) -> None:
    from torch.utils.cpp_extension import COMMON_NVCC_FLAGS

    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")
    include = Path(torch.__file__).parent / "include"
    source = EXTENSIONS / "cuda_setuptools" / "src" / "matmul_cuda" / "matmul.cu"
    command = [nvcc, *COMMON_NVCC_FLAGS, "-std=c++20", "-arch=sm_90", f"-I{cuda_headers}"]
    command += ["-isystem", str(include), "-c", str(source), "-o", "matmul.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr
    symbols = host_symbols(tmp_path / "matmul.o")
    assert_good_manners(symbols)
    for dtype in ("float", "double", "c10::Half", "c10::BFloat16"):
        for tile in (64, 128):
            assert f"matmul_kernel<{dtype}, {tile}>" in symbols


@pytest.mark.compiler
def test_cuda_matmul_on_threads_of_the_cpu(tmp_path: Path) -> None:
    """The kernel's own text, a thread for a thread: every element, and no read outside the matrices."""
    text = (EXTENSIONS / "cuda_setuptools" / "src" / "matmul_cuda" / "matmul.cu").read_text()
    kernel = text[text.index("constexpr int kSide") : text.index("// How many tiles")]
    kernel = re.sub(r"__launch_bounds__\(.*?>\)", "", kernel, flags=re.S)
    kernel = kernel.replace("__shared__ alignas(16)", "alignas(16) static")
    harness = (Path(__file__).parent / "cuda_on_threads.cpp").read_text()
    (tmp_path / "program.cpp").write_text(harness.replace("// The kernel.", kernel))
    command = "c++ -std=c++20 -O1 -g -fsanitize=address -pthread program.cpp -o program".split()
    subprocess.run(command, cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    done = subprocess.run([str(tmp_path / "program")], capture_output=True, text=True)
    assert done.stdout.strip() == "128 products", done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b: a[:, 1:] @ b[1:],
        lambda a, b: torch.where(torch.arange(b.shape[1]) < 64, a @ b, 0),
        lambda a, b: a.contiguous().view(-1).view(a.shape) @ b.as_strided(b.shape, (b.shape[1], 1)),
        lambda a, b: (a.half().float() @ b.half().float()).to(a.dtype),
    ],
    ids=["a product missing", "columns missing", "strides ignored", "low precision"],
)
def test_the_check_of_matmul_finds_wrong_products(wrong) -> None:
    check = load_file(EXTENSIONS / "cpp_setuptools" / "check.py")
    torch.manual_seed(0)
    assert check.check_products(torch.mm, torch.float32) == 16 * len(check.SIZES)
    with pytest.raises(AssertionError):
        check.check_products(wrong, torch.float32)


def test_step1_of_the_migration_changes_one_import() -> None:
    folder = EXTENSIONS / "migrate"
    before, step1 = ((folder / step / "d_sigmoid.py").read_text() for step in ("before", "step1"))
    changed = before.replace("from torch.utils.cpp_extension", "from opwright.cpp_extension")
    assert changed != before
    assert changed.split() == step1.split()
    assert (folder / "before" / "d_sigmoid.cpp").read_text() == (folder / "step1" / "d_sigmoid.cpp").read_text()


def rows_of(text: str) -> dict[str, list[str]]:
    """Returns the cells of a Markdown table by the first of their row."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


@pytest.mark.compiler
@pytest.mark.parametrize(
    "steps",
    [["after"], pytest.param(["before", "step1", "after"], marks=pytest.mark.slow)],
    ids=["operator", "all"],
)
def test_the_migration_gains_what_its_readme_says(steps: list[str], environment) -> None:
    shown = rows_of((EXTENSIONS / "migrate" / "README.md").read_text())
    command = ["python", str(EXTENSIONS / "migrate" / "measure.py"), *steps]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    measured = rows_of(done.stdout)
    assert measured[""] == steps
    assert list(measured) == list(shown)
    for title, cells in measured.items():
        promised = dict(zip(shown[""], shown[title], strict=True))
        for step, cell in zip(steps, cells, strict=True):
            if cell in ("yes", "no") or title.startswith("lines"):
                assert cell == promised[step], (title, step)
            elif title.endswith(", s"):  # builds: seconds, whatever else the machine does
                assert float(cell) < 5 * float(promised[step]) + 2, (title, step)


@pytest.mark.compiler
@pytest.mark.slow
def test_the_migrated_operator_is_right() -> None:
    operator = load_file(EXTENSIONS / "migrate" / "after" / "op.py").d_sigmoid
    record = opwright.verify(operator)
    assert record.passed, record.failures
    assert record.backends == ["cpu"]


def test_every_example_is_tested_and_short() -> None:
    followed = {"cpp_jit", "cuda_jit", "cpp_setuptools", "cuda_setuptools", "pybind_d_sigmoid", "migrate"}
    assert {path.name for path in EXTENSIONS.iterdir() if path.is_dir()} == followed
    others = {"triton_vector_add", "triton_reduction", "triton_torch_operator"}  # test_triton_examples.py
    others |= {"operators_from_cpp", "aot_inductor"}  # tests/integration/package/test_from_cpp.py
    others |= {"distributed"}  # test_on_several_processes
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == {*NUMBERED, *others, EXTENSIONS.name}
    for readme in EXAMPLES.rglob("*/README.md"):
        prose = re.sub(r"^```.*?^```|^\|.*?$", "", readme.read_text(), flags=re.M | re.S)
        assert len(re.findall(r"\S.*", prose)) <= 15, readme
