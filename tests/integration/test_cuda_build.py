"""Building CUDA kernels where there is nvcc and no GPU, and what goes wrong there."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator
from opwright.backends import cuda
from opwright.build.request import make_request
from opwright.build.store import Store
from opwright.dispatch import kernels
from opwright.errors import (
    ArchitectureError,
    CompileError,
    HostCompilerError,
    NoNvccError,
    SettingError,
)

pytestmark = [pytest.mark.compiler, pytest.mark.nvcc]

ENTRY_POINTS = (
    "register", "unregister", "share", "retire", "set_chunk_steps", "slot", "call_directly", "use_python",
)  # fmt: skip
CPU = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void plus(View<const T, 1> x, View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(x(i) + 1);
}
OPWRIGHT_KERNEL(plus, float)
"""
CUDA = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T> __global__ void plus_kernel(const T* x, T* y, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = T(x[i] + T(1));
}
template <typename T> void plus(View<const T, 1> x, View<T, 1> output, cudaStream_t stream) {
  plus_kernel<<<(x.size(0) + 255) / 256, 256, 0, stream>>>(x.data(), output.data(), x.size(0));
}
OPWRIGHT_KERNEL(plus, float)
"""


def declare(ns: str, *, cpu: str | None = None, source: str | None = CUDA):
    @operator(f"{ns}::plus", cpu=cpu, cuda=source)
    def plus(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x - 1000

    return plus


def build(op, *backends: str):
    return kernels.build(*(kernels.unit_key(op.operator.declaration, backend) for backend in backends))[0]


@pytest.fixture(autouse=True)
def _one_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWRIGHT_ARCH", "80")


def tool(name: str, *arguments: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin")
    if path is None:
        pytest.skip(f"no {name}")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


# --- one library ------------------------------------------------------------------------------------------


def test_one_library_holds_both_halves_and_the_cpu_half_runs_here(ns: str) -> None:
    op = declare(ns, cpu=CPU)
    (keys,) = kernels.libraries_of([op.operator])
    assert [key[1] for key in keys] == ["cpu", "cuda"]
    library = kernels.build(*keys)[0]
    path = str(library.entry.library)
    assert re.findall(r"sm_\d+", tool("cuobjdump", "--list-elf", path)) == ["sm_80"]
    assert re.findall(r"sm_\d+", tool("cuobjdump", "--list-ptx", path)) == ["sm_80"]
    # A call asks for one backend, and finds this library.
    assert torch.equal(op(torch.zeros(3)), torch.ones(3))
    assert build(op, "cpu").entry.record.library == library.entry.record.library
    assert build(op, "cuda").entry.record.library == library.entry.record.library


def test_the_library_asks_nothing_of_cuda(ns: str) -> None:
    path = str(build(declare(ns), "cuda").entry.library)
    symbols = tool("nm", "-D", path).splitlines()
    undefined = {line.split()[-1] for line in symbols if " U " in line}
    assert not {name for name in undefined if "cuda" in name.lower() or name.startswith("cu")}
    assert "aoti_torch_get_current_cuda_stream" in {line.split()[-1] for line in symbols if " w " in line}
    # The static runtime stays inside: exported, it would be replaced by the one that torch has loaded.
    defined = {line.split()[-1] for line in symbols if re.search(r" [TDRBV] ", line)}
    assert defined == {f"opwright_{name}" for name in ENTRY_POINTS}
    needed = re.findall(r"NEEDED.*\[(.*)\]", tool("readelf", "-d", path))
    assert "libtorch.so" in needed
    assert not [name for name in needed if "cud" in name or "python" in name]
    ctypes.CDLL(path)


# --- the address ------------------------------------------------------------------------------------------


def test_architectures_belong_to_the_address(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = [declare(ns).operator.declaration]
    found = {}
    for text in ("80", "sm_80", "8.0+PTX", "90", "80,90", "80 90", "90a"):
        monkeypatch.setenv("OPWRIGHT_ARCH", text)
        found[text] = make_request(unit, ["cuda"]).key
    assert found["80"] == found["sm_80"] == found["8.0+PTX"]
    assert found["80,90"] == found["80 90"]
    assert len(set(found.values())) == 4
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    assert make_request(unit, ["cuda"]).key not in found.values()


def test_nvcc_belongs_to_the_address(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op = declare(ns)
    first = build(op, "cuda").entry
    real = cuda.find_nvcc(Store().identities)
    monkeypatch.setattr(cuda, "find_nvcc", lambda _: real.__class__(real.path, "another", real.root, real.cudart))
    assert build(op, "cuda").entry.path != first.path


def test_flags_of_architectures() -> None:
    assert cuda.architecture_flags(["90", "80"]) == (
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=[sm_90,compute_90]",
    )
    assert cuda.architecture_flags(["100", "90a"])[-1].endswith("code=[sm_100,compute_100]")


def test_without_a_gpu_the_default_set_is_compiled(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPWRIGHT_ARCH")
    monkeypatch.setattr(cuda, "gpu_architectures", lambda: ())
    assert cuda.architectures() == cuda.DEFAULT_ARCHITECTURES
    monkeypatch.setattr(cuda, "gpu_architectures", lambda: ("75",))
    assert cuda.architectures() == ("75",)


def test_a_wrong_architecture_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWRIGHT_ARCH", "hopper")
    with pytest.raises(SettingError, match=r"(?s)OPWRIGHT_ARCH.*'hopper'.*OPWRIGHT_ARCH=90"):
        cuda.architectures()


# --- faults -------------------------------------------------------------------------------------------------


def test_nvcc_too_old_for_the_architecture(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPWRIGHT_ARCH", "999")
    with pytest.raises(ArchitectureError, match=r"(?s)`plus`: nvcc does not know.*sm_999.*it knows .*90.*hint: "):
        build(declare(ns), "cuda")


ERRORS = {
    "shared memory": (
        CUDA.replace("  if (i", "  __shared__ float s[20000]; s[threadIdx.x] = x[0]; __syncthreads();\n  if (s[n] < i"),
        "ptxas error.*void plus_kernel<float>.*uses too much shared data",
        "above 48 KiB, declare it as `extern __shared__`",
    ),
    "lambda": (
        CUDA.replace("  plus_kernel", "  auto f = [=] __device__(int i) { return i; };\n  plus_kernel"),
        "lambda requires --extended-lambda",
        "`export NVCC_APPEND_FLAGS=--extended-lambda`",
    ),
    "host code": (
        CUDA.replace("if (i < n)", 'opwright::check(true, "x"); if (i < n)'),
        "calling a __host__ function",
        "`opwright::check` is host code: call it in the function that launches",
    ),
    "own host code": (
        CUDA.replace("template", "inline float f(opwright::Error) { return 1; }\ntemplate", 1).replace(
            "if (i < n)", 'if (f(opwright::Error("")) < n)'
        ),
        "calling a __host__ function",
        "mark the function `__device__`",
    ),
    "name": (
        CUDA.replace(" plus(", " launch(").replace("plus_kernel", "plus"),
        "`plus` must be the host function that launches, not the `__global__` function",
        "rename that function `plus_kernel`",
    ),
    "header": (
        "#include <nowhere.h>\n" + CUDA,
        "nowhere.h: No such file",
        "includes are found beside the source, in Opwright's own headers and, of `cuda.cu`, in the CUDA toolkit",
    ),
}


@pytest.mark.parametrize("mistake", ERRORS)
def test_an_error_of_nvcc_has_a_hint(mistake: str, ns: str) -> None:
    """That of ptxas was hidden behind what ptxas says of each kernel."""
    source, error, hint = ERRORS[mistake]
    with pytest.raises(CompileError) as caught:
        build(declare(ns, source=source), "cuda")
    assert re.search(error, str(caught.value)), str(caught.value)
    assert caught.value.hint.startswith(hint)
    assert "ptxas info" not in str(caught.value)


def test_no_nvcc(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_places", lambda home: iter(()))
    op = declare(ns, source=CUDA.replace("T(1)", "T(3)"))  # none that is in the store
    with pytest.raises(
        NoNvccError, match=r"(?s)`plus`: there is no CUDA compiler.*sm_80.*pip install nvidia-cuda-nvcc"
    ):
        build(op, "cuda")
    with pytest.warns(RuntimeWarning, match="no CUDA compiler"):
        assert not kernels.ensure_loaded(op.operator, "cuda")


def test_cuda_home_without_nvcc(ns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(NoNvccError, match="CUDA_HOME"):
        build(declare(ns), "cuda")


def test_nvcc_among_pythons_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = cuda.find_nvcc(Store().identities)
    folder = tmp_path / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    (folder / "nvcc").write_text(f'#!/bin/sh\nexec {real.path} "$@"\n')
    (folder / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(cuda.shutil, "which", lambda *args, **kwargs: None)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert next(cuda._places(None)) == str(folder / "nvcc")


def _refused_compiler(folder: Path) -> Path:
    """Writes a C++ compiler that claims to be of a version that no nvcc knows."""
    path = folder / "c++"
    path.write_text(
        '#!/bin/sh\ncase "$*" in *__CUDACC__*) set -- -U__GNUC__ -D__GNUC__=99 "$@";; esac\nexec /usr/bin/c++ "$@"\n'
    )
    path.chmod(0o755)
    return path


def test_a_host_compiler_that_nvcc_accepts_is_chosen(ns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = _refused_compiler(tmp_path)
    # Another compiler has its headers elsewhere; those of the one that nvcc uses are not compared either.
    refused.write_text(refused.read_text().replace("case", 'case "$*" in *"-E -v"*) exit 1;; esac\ncase', 1))
    monkeypatch.setenv("OPWRIGHT_CXX", str(refused))
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    entry = build(declare(ns), "cuda").entry
    assert [path for path in entry.record.files if "/c++/" in path] == []
    log = (entry.path / "build.log").read_text()
    assert "unsupported GNU version" in log
    # It is remembered: the next build does not try the refused one again.
    again = build(declare(ns, source=CUDA.replace("T(1)", "T(2)")), "cuda").entry
    assert "unsupported GNU version" not in (again.path / "build.log").read_text()


def test_no_host_compiler_is_accepted(ns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused = _refused_compiler(tmp_path)
    monkeypatch.setenv("OPWRIGHT_CXX", str(refused))
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "store"))
    (tmp_path / "g++").symlink_to(refused)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(cuda, "_HOST_COMPILERS", ())
    which = shutil.which
    monkeypatch.setattr(cuda.shutil, "which", lambda name, **k: None if name == "clang++" else which(name, **k))
    with pytest.raises(HostCompilerError, match=r"(?s)`plus`: nvcc accepts none.*refused.*apt-get install g\+\+-\d+"):
        build(declare(ns), "cuda")


def test_a_compile_error_is_shown_at_the_authors_line(ns: str) -> None:
    wrong = CUDA.replace("y[i] = T(x[i] + T(1));", "y[i] = nonsense(x[i]);")
    with pytest.raises(CompileError) as caught:
        build(declare(ns, source=wrong), "cuda")
    text = str(caught.value)
    assert "nonsense" in text
    assert re.search(r">\s+\d+ \|.*y\[i\] = nonsense\(x\[i\]\);", text)


def test_a_wrong_signature_is_told_with_the_right_one(ns: str) -> None:
    wrong = CUDA.replace("View<T, 1> output, cudaStream_t stream)", "View<T, 1> output)").replace("0, stream", "0, 0")
    with pytest.raises(CompileError, match=r"must be declared as.*cudaStream_t stream"):
        build(declare(ns, source=wrong), "cuda")


def test_the_error_of_one_of_two_inline_sources_shows_its_own_lines(ns: str) -> None:
    wrong = CUDA.replace("y[i] = T(x[i] + T(1));", "y[i] = nonsense;")
    op = declare(ns, cpu=CPU, source=wrong)
    with pytest.raises(CompileError, match=r">\s+\d+ \|.*nonsense"):
        build(op, "cpu", "cuda")


def test_the_command_builds_what_it_can_without_nvcc(run_python, tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(
        "import torch\nfrom jaxtyping import Float\nfrom torch import Tensor\nfrom opwright import operator\n"
        f'CPU = """{CPU}"""\nCUDA = """{CUDA}"""\n'
        '@operator("both_ns::plus", cpu=CPU, cuda=CUDA)\n'
        'def plus(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:\n    return x\n'
    )
    program = """
import sys, opwright.backends.cuda as cuda
cuda._places = lambda home: iter(())
sys.argv = ["opwright", "build", "both.py"]
from opwright.cli import main
main()
"""
    result = run_python(program, env={"OPWRIGHT_ARCH": ""})
    assert result.stdout.count("library.so") == 1
    assert "skipped the CUDA kernels of plus" in result.stderr
    required = run_python(program, env={"OPWRIGHT_ARCH": "90"}, check=False)
    assert required.returncode == 2
    assert "OPW207" in required.stderr


def test_the_kernel_of_the_guide_compiles(ns: str) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "cuda.md"
    (source,) = re.findall(r"```cuda\n(.*?)```", guide.read_text(), re.DOTALL)

    @operator(f"{ns}::scale_shift", cuda=source)
    def scale_shift(
        input: Float[Tensor, "*batch n"], scale: Float[Tensor, "n"], shift: float = 0.0
    ) -> Float[Tensor, "*batch n"]:
        return input * scale + shift

    assert build(scale_shift, "cuda").entry.record.operators == [f"{ns}::scale_shift"]


# --- halves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exports", "rest", "parts"),
    [
        ("plus, float, double", "", 1),
        ("plus, opwright::half, opwright::bfloat16", "", 1),
        ("plus, float, opwright::half", "", 2),
        ("plus, float,\n                bfloat16", "", 2),
        ("plus, float, opwright::half", "__constant__ float table[4];", 1),
    ],
)
def test_a_source_is_cut_where_that_is_safe(exports: str, rest: str, parts: int) -> None:
    assert len(cuda.parts_of(f"{rest}\nOPWRIGHT_KERNEL({exports})\n")) == parts


def test_both_halves_are_in_the_library(ns: str) -> None:
    # A function and a variable that both halves define, and kernels that are not templates.
    source = CUDA.replace("OPWRIGHT_KERNEL(plus, float)", "OPWRIGHT_KERNEL(plus, float, double, opwright::half)")
    source = source.replace("template <typename T> void plus", "int shared_count = 0;\nint count() { return ++shared_count; }\n"
        "__global__ void plain_kernel() {}\nvoid plain(cudaStream_t s) { plain_kernel<<<1, 1, 0, s>>>(); }\n"
        "template <typename T> void plus")  # fmt: skip
    source = source.replace("T(x[i] + T(1))", "T(float(x[i]) + 1.0f)")
    library = build(declare(ns, source=source), "cuda")
    assert {"kernel0_cuda_32bit", "kernel0_cuda_16bit"} <= set(library.entry.record.seconds)
    names = tool("nm", "--defined-only", str(library.entry.library))
    assert "opwright_cuda_plus_16bit" in names
    assert "opwright_cuda_plus_dtypes_16bit" in names


def test_a_source_whose_header_has_device_memory_stays_whole(ns: str, tmp_path: Path) -> None:
    """The variable existed once in each half, and the host filled one of them."""
    (tmp_path / "tables.cuh").write_text("__constant__ float table[4];\n")
    source = CUDA.replace("OPWRIGHT_KERNEL(plus, float)", "OPWRIGHT_KERNEL(plus, float, opwright::half)")
    source = source.replace("T(x[i] + T(1))", "T(float(x[i]) + table[0])")
    library = build(declare(ns, source=f'#include "{tmp_path}/tables.cuh"\n{source}'), "cuda")
    assert "kernel0_cuda" in library.entry.record.seconds


def test_a_kernel_without_a_template_is_exported_once(ns: str) -> None:
    source = """
#include <opwright/kernel.h>
__global__ void widen_kernel(const opwright::half* x, float* y) { y[threadIdx.x] = float(x[threadIdx.x]); }
void widen(opwright::View<const opwright::half, 1> x, opwright::View<float, 1> output, cudaStream_t stream) {
  widen_kernel<<<1, unsigned(x.size(0)), 0, stream>>>(x.data(), output.data());
}
OPWRIGHT_KERNEL(widen)
"""
    from jaxtyping import Float16, Float32

    @operator(f"{ns}::widen", cuda=source)
    def widen(x: Float16[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x.float()

    assert build(widen, "cuda").entry.record.operators == [f"{ns}::widen"]
