"""What the toolkit itself costs: building, loading, swapping, calling.

    python benchmarks/toolkit.py [--quick]

The time of a build is the median of several, each in a fresh process with a fresh store. The time of a call is the
minimum over repeated loops, with the candidates in turn. Times are compared within one run. `--quick` skips torch's own
load_inline.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from summary import Figure, update, write_raw

IMPORTS = """
import json, sys, time, timeit
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator
clock = time.perf_counter
"""
# Imports are excluded: everything that the first call would import is imported beforehand.
PREAMBLE = (
    IMPORTS
    + """
import filelock
import opwright.build.compile, opwright.build.load, opwright.build.store
"""
)

D_SIGMOID = '''
SOURCE = """
#include <cmath>
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void d_sigmoid(View<const T, 1> z, View<T, 1> output) {
  for (int64_t i = 0; i < z.size(0); ++i) {
    const float s = 1.f / (1.f + std::exp(-z(i)));
    output(i) = (1.f - s) * s;
  }
}
OPWRIGHT_KERNEL(d_sigmoid, float)
"""
def declare(source=SOURCE):
    @operator("bench::d_sigmoid", cpu=source)
    def d_sigmoid(z: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        s = torch.sigmoid(z)
        return (1 - s) * s
    return d_sigmoid
z = torch.randn(1000)
want = torch.sigmoid(z) * (1 - torch.sigmoid(z))
'''

COLD = (
    PREAMBLE
    + D_SIGMOID
    + """
start = clock()
f = declare()
got = f(z)
seconds = clock() - start
assert torch.allclose(got, want, atol=1e-6)
store = opwright.build.store.Store()
(entry,) = store.entries()
print(json.dumps({"seconds": seconds, "steps": entry.record.seconds}))
"""
)

COLD_BIAS_GELU = (
    PREAMBLE
    + """
x, b = torch.randn(4, 64), torch.randn(64)
want = torch.nn.functional.gelu(x + b, approximate="tanh")
start = clock()
from opwright_ops.bias_gelu import bias_gelu
got = bias_gelu(x, b, approximate="tanh")
seconds = clock() - start
assert torch.allclose(got, want, atol=1e-6)
(entry,) = opwright.build.store.Store().entries()
print(json.dumps({"seconds": seconds, "steps": entry.record.seconds}))
"""
)

# No GPU is needed: the kernels are built and loaded, not called.
COLD_CUDA = (
    PREAMBLE
    + """
import os
os.environ["OPWRIGHT_ARCH"] = "90"
from opwright.dispatch import kernels
from opwright_ops.OPERATOR import OPERATOR
start = clock()
library, is_new = kernels.build(kernels.unit_key(OPERATOR.operator.declaration, "cuda"))
print(json.dumps({"seconds": clock() - start}))
assert is_new
"""
)
COLD_CUDA_INLINE = (
    PREAMBLE
    + D_SIGMOID
    + """
import os
os.environ["OPWRIGHT_ARCH"] = "90"
from opwright.dispatch import kernels
CUDA = '''
#include <opwright/kernel.h>
using opwright::View;
__global__ void d_sigmoid_kernel(const float* z, float* output, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i >= n) return;
  const float s = 1.f / (1.f + expf(-z[i]));
  output[i] = (1.f - s) * s;
}
template <typename T>
void d_sigmoid(View<const T, 1> z, View<T, 1> output, cudaStream_t stream) {
  d_sigmoid_kernel<<<(z.size(0) + 255) / 256, 256, 0, stream>>>(z.data(), output.data(), z.size(0));
}
OPWRIGHT_KERNEL(d_sigmoid, float)
'''
@operator("bench::d_sigmoid", cuda=CUDA)
def d_sigmoid(z: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return z
start = clock()
library, is_new = kernels.build(kernels.unit_key(d_sigmoid.operator.declaration, "cuda"))
print(json.dumps({"seconds": clock() - start}))
assert is_new
"""
)

# What the first call adds to a warm one, in a new process with a filled store.
FIRST_CALL = (
    D_SIGMOID
    + """
f = declare()
start = clock()
got = f(z)
first = clock() - start
f(z)  # finds out what direct calls need
start = clock()
f(z)
print(json.dumps({"seconds": first - (clock() - start)}))
"""
)
WARM = PREAMBLE + FIRST_CALL  # the load alone
FIRST = IMPORTS + FIRST_CALL  # with what it imports, from Python's bytecode

EDIT = (
    PREAMBLE
    + D_SIGMOID
    + """
f = declare()
f(z)
times = []
for k in range(1, 8):
    start = clock()
    f = declare(SOURCE.replace("(1.f - s) * s", f"(1.f - s) * s + {k}.f"))
    got = f(z)
    times.append(clock() - start)
    assert torch.allclose(got, want + k, atol=1e-5)
print(json.dumps({"seconds": sorted(times)[len(times) // 2]}))
"""
)

CALLS = (
    PREAMBLE
    + D_SIGMOID
    + """
f = declare()
one = torch.ones(1)
needs = torch.ones(1, requires_grad=True)
f(one)
@torch.library.custom_op("bench::custom", mutates_args=())
def custom(z: Tensor) -> Tensor:
    return torch.ops.bench._d_sigmoid_kernel(z)
custom.register_fake(torch.empty_like)
custom.register_autograd(lambda ctx, g: g, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
calls = {
    "torch.add": lambda: torch.add(one, one),
    "opwright": lambda: f(one),
    "torch.ops entry": lambda: torch.ops.bench.d_sigmoid(one),
    "custom_op": lambda: custom(one),
    "torch.add, gradient": lambda: torch.add(needs, one),
    "opwright, gradient": lambda: f(needs),
    "custom_op, gradient": lambda: custom(needs),
}
best = {name: float("inf") for name in calls}
for _ in range(15):
    for name, call in calls.items():
        best[name] = min(best[name], timeit.timeit(call, number=5000) / 5000 * 1e6)
print(json.dumps(best))
"""
)

LOAD_INLINE = """
import json, time, torch
from torch.utils.cpp_extension import load_inline
source = '''
#include <torch/extension.h>
torch::Tensor d_sigmoid(torch::Tensor z) { auto s = torch::sigmoid(z); return (1 - s) * s; }
'''
z = torch.randn(1000)
start = time.perf_counter()
module = load_inline("d_sigmoid", source, functions=["d_sigmoid"])
got = module.d_sigmoid(z)
seconds = time.perf_counter() - start
assert torch.allclose(got, torch.sigmoid(z) * (1 - torch.sigmoid(z)), atol=1e-6)
print(json.dumps({"seconds": seconds}))
"""


def run(code: str, store: str | None = None) -> dict:
    """Runs a program in a fresh process, by default with a fresh store; returns what it prints."""
    with tempfile.TemporaryDirectory() as fresh:
        env = {**os.environ, "OPWRIGHT_CACHE_DIR": store or fresh, "TORCH_EXTENSIONS_DIR": fresh}
        env |= {"PYTHONPYCACHEPREFIX": f"{store or fresh}/python", "PYTHONDONTWRITEBYTECODE": ""}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr)
    return json.loads(result.stdout.strip().splitlines()[-1])


def median_of(code: str, repeats: int, **kwargs: str) -> tuple[float, list[dict]]:
    found = [run(code, **kwargs) for _ in range(repeats)]
    return statistics.median(f["seconds"] for f in found), found


def help_seconds() -> float:
    command = [sys.executable, "-c", "from opwright.cli import main; main()", "--help"]
    times = []
    for _ in range(11):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def figures(result: dict[str, Any]) -> list[Figure]:
    found = []
    for name, value in result["rows"].items():
        what, _, unit = name.rpartition(", ")
        found.append(Figure(what, value, unit) if unit in ("s", "us") else Figure(name, value, "ratio"))
    return found


def main() -> None:
    from opwright.machine import machine_card
    from opwright.records import builtins_of

    card = builtins_of(machine_card())
    rows: dict[str, float] = {}
    rows["cold build, d_sigmoid inline, s"], cold = median_of(COLD, 7)
    rows["cold build, d_sigmoid inline, its glue, s"] = statistics.median(c["steps"]["glue"] for c in cold)
    rows["cold build, d_sigmoid inline, its kernel, s"] = statistics.median(
        max(v for k, v in c["steps"].items() if k not in ("all",)) for c in cold
    )
    rows["cold build, bias_gelu, s"], _ = median_of(COLD_BIAS_GELU, 3)
    if shutil.which("nvcc"):
        rows["cold build, d_sigmoid inline, CUDA, sm_90, s"], _ = median_of(COLD_CUDA_INLINE, 5)
        for name in ("d_sigmoid", "bias_gelu"):
            program = COLD_CUDA.replace("OPERATOR", name)
            rows[f"cold build, opwright_ops {name}, CUDA, sm_90, s"], _ = median_of(program, 5)
    with tempfile.TemporaryDirectory() as store:
        run(COLD, store)
        rows["warm load, s"], _ = median_of(WARM, 7, store=store)
        run(FIRST, store)
        rows["first call, built, new process, s"], _ = median_of(FIRST, 7, store=store)
    rows["edit to new result, s"], _ = median_of(EDIT, 3)
    for name, value in run(CALLS).items():
        rows[f"call, {name}, us"] = value
    rows["call, opwright / torch.add"] = rows["call, opwright, us"] / rows["call, torch.add, us"]
    rows["opwright --help, s"] = help_seconds()
    if "--quick" not in sys.argv:
        rows["cold build, torch load_inline, s"], _ = median_of(LOAD_INLINE, 1)
    for name, value in rows.items():
        print(f"{name:<52} {value:9.4f}")
    result = {"machine": card, "rows": {k: round(v, 5) for k, v in rows.items()}}
    print(write_raw("toolkit", result))
    update(__file__, figures(result), card)


if __name__ == "__main__":
    main()
