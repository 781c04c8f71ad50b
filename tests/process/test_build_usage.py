"""Registers and spills from ptxas's log, and the commands of a build in time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fork_server import run_opwright

from opwright.build import steps
from opwright.build.steps import run_all
from opwright.build.usage import kernels_in, readable, steps_of
from opwright.records import read

# What nvcc 13.0 prints with -Xptxas=-v, of a kernel that spills, one with a function that is not inlined, and an error.
LOG = """$ nvcc -c k.cu
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN12_GLOBAL__N_110add_kernelIdLi4EEEvPT_PKS1_l' for 'sm_80'
ptxas info    : Function properties for _ZN12_GLOBAL__N_110add_kernelIdLi4EEEvPT_PKS1_l
    24 bytes stack frame, 40 bytes spill stores, 56 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 2048 bytes smem, 376 bytes cmem[0]
ptxas info    : Compile time = 2.143 ms
ptxas info    : Function properties for _Z6helperf
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'plain' for 'sm_90'
ptxas info    : Function properties for plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers
"""


def test_kernels_are_read_from_the_log() -> None:
    found = kernels_in(LOG)
    assert [(k.kernel, k.architecture, k.registers, k.spill_bytes, k.stack_bytes, k.shared_bytes) for k in found] == [
        ("add_kernel<double, 4>", "sm_80", 255, 40, 24, 2048),
        ("plain", "sm_90", 14, 0, 0, 0),
    ]
    assert kernels_in("g++: error: no such file") == []


def test_names_are_readable() -> None:
    assert readable("_Z10add_kernelIdEvPT_PKS0_l") == "add_kernel<double>"
    assert readable("_Z1fPFvvE") == "f"
    assert readable("plain") == "plain"


def test_commands_that_wait_begin_later(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OPWRIGHT_JOBS", "1")
    starts: dict[str, float] = {}
    began = time.perf_counter()
    nap = [sys.executable, "-c", "import time; time.sleep(0.2)"]
    seconds = run_all({"first": nap, "second": nap}, tmp_path, starts)
    first, second = steps_of({name: at - began for name, at in starts.items()}, seconds)
    assert (first.name, second.name) == ("first", "second")
    assert first.seconds >= 0.2
    assert second.start >= first.start + first.seconds - 0.01


def is_running(pid: str) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()  # an orphan that nobody has waited for
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="what a command has started is known on Linux only")
def test_an_interrupt_ends_compilers_behind_their_driver(tmp_path: Path, monkeypatch) -> None:
    """SIGINT for one process, unlike Ctrl-C on a terminal, reaches no compiler."""
    pids = tmp_path / "pids"

    def interrupt(running: object) -> str:
        while not (pids.exists() and len(pids.read_text().split()) == 2):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "_wait_for_one", interrupt)
    driver = ["sh", "-c", f"sleep 600 & echo $$ $! > {pids}; wait"]
    with pytest.raises(KeyboardInterrupt):
        steps.run_all({"compile": driver}, tmp_path)
    deadline = time.monotonic() + 10
    while any(map(is_running, pids.read_text().split())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


KERNEL = '''
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("usage::f", {backend}="""
#include <opwright/kernel.h>
{body}
OPWRIGHT_KERNEL(f, float)
""")
def f(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x + x
'''
CPU = """template <typename T>
void f(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) + x(i);
}"""
CUDA = """template <typename T>
__global__ void f_kernel(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  __shared__ T kept[32];
  kept[threadIdx.x] = x(threadIdx.x);
  __syncthreads();
  output(threadIdx.x) = kept[31 - threadIdx.x];
}
template <typename T>
void f(opwright::View<const T, 1> x, opwright::View<T, 1> output, cudaStream_t stream) {
  f_kernel<<<1, 32, 0, stream>>>(x, output);
}"""


def build(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    environment = {"OPWRIGHT_CACHE_DIR": str(folder / "store"), "OPWRIGHT_ARCH": "80 90"}
    return run_opwright("build", "op.py", *flags, cwd=folder, env=environment)


@pytest.mark.compiler
def test_build_writes_a_record_also_of_a_build_from_the_store(tmp_path: Path) -> None:
    (tmp_path / "op.py").write_text(KERNEL.format(backend="cpu", body=CPU))
    done = build(tmp_path, "--out", "records")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "records" / "f.build.json"
    record = read(path)
    assert record.name == "usage::f"
    assert {"kernel0_cpu", "glue", "link"} <= {step.name for step in record.steps}
    steps = {step.name: step for step in record.steps}
    assert steps["link"].start >= steps["kernel0_cpu"].start + steps["kernel0_cpu"].seconds - 0.01
    assert record.library_bytes == Path(done.stdout.strip()).stat().st_size
    assert record.kernels == []
    again = build(tmp_path, "--out", "again")
    assert "(1 cached)" in again.stderr
    kept = json.loads((tmp_path / "again" / "f.build.json").read_text())
    assert kept["steps"] == json.loads(path.read_text())["steps"]


@pytest.mark.compiler
@pytest.mark.nvcc
def test_nvcc_reports_the_registers_of_a_kernel(tmp_path: Path) -> None:
    (tmp_path / "op.py").write_text(KERNEL.format(backend="cuda", body=CUDA))
    done = build(tmp_path, "--out", "records")
    assert done.returncode == 0, done.stderr
    kernels = read(tmp_path / "records" / "f.build.json").kernels
    assert [(k.kernel, k.architecture) for k in kernels] == [("f_kernel<float>", "sm_80"), ("f_kernel<float>", "sm_90")]
    assert all(0 < k.registers < 64 and k.shared_bytes >= 128 and not k.spill_bytes for k in kernels)
