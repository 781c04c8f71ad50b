"""On a GPU: wrong kernels and wrong callables that verify must catch there, and what bench measures."""

from __future__ import annotations

import itertools
import math
from typing import Annotated

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import opwright
from opwright.verify.tensors import poison_memory_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or a torch without CUDA"),
]

_numbers = itertools.count()

KERNEL = """
#include <opwright/kernel.h>
using opwright::View;

template <typename T>
__global__ void halve_kernel(const T* x, int64_t stride, T* y, int64_t n) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += step) {
    const int64_t at = i * STRIDE;
    if (WRITES) y[i] = T(opwright::compute_t<T>(x[at]) * opwright::compute_t<T>(FACTOR));
  }
  EXTRA
}

template <typename T>
void halve(View<const T, 1> x, View<T, 1> output, cudaStream_t stream) {
  halve_kernel<<<64, 256, 0, LAUNCH>>>(x.data(), x.stride(0), output.data(), x.size(0));
}
OPWRIGHT_KERNEL(halve, float, double, opwright::half, opwright::bfloat16)
"""
RIGHT = {"STRIDE": "stride", "WRITES": "true", "FACTOR": "0.5", "LAUNCH": "stream", "EXTRA": ""}
WRONG = {
    "last element left out": ({"WRITES": "i + 1 < n"}, "outputs written"),
    "last element left out, nothing to compare with": ({"WRITES": "i + 1 < n"}, "numerics"),
    "stride ignored": ({"STRIDE": "1"}, "numerics"),
    "one part in a thousand": ({"FACTOR": "0.5005"}, "numerics"),
    "out of bounds": ({"EXTRA": "if (blockIdx.x + threadIdx.x == 0) y[n] = T(1);"}, "outputs written"),
    "on the default stream": ({"LAUNCH": "0"}, "side stream"),
    "on the default stream, captured": ({"LAUNCH": "0"}, "graph"),
}  # fmt: skip


def make(**changes: str):
    source = KERNEL
    for name, text in {**RIGHT, **changes}.items():
        source = source.replace(name, text)

    @opwright.operator(f"kills_cuda{next(_numbers)}::halve", cuda=source)
    def halve(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x * 0.5

    return halve


@pytest.mark.nvcc
@pytest.mark.parametrize("kind", WRONG)
def test_killed(kind: str) -> None:
    changes, check = WRONG[kind]
    record = opwright.verify(make(**changes), checks=[check], devices=["cuda"])
    assert record.backends == ["cuda"]
    assert not record.passed
    assert record.failures[0].device == "cuda"
    assert record.failures[0].repeat.endswith("--device cuda")


@pytest.mark.nvcc
def test_what_is_left_unwritten_is_nan() -> None:
    """And not the right result, which an earlier call has left in the same memory."""
    x = torch.arange(1.0, 301.0)
    operator = make(WRITES="i + 1 < n")
    record = opwright.verify(operator, samples=[(x,), (x,)], checks=["numerics"], devices=["cuda"])
    (failure,) = record.failures
    assert "got nan" in failure.message
    assert failure.case.startswith("f32[1] ")
    assert "a part of f32[300]" in failure.case


@pytest.mark.parametrize("elements", [5, 1000, 3_000_000])
def test_poisoned_memory_is_nan(elements: int) -> None:
    x = torch.ones(elements, dtype=torch.bfloat16, device="cuda")
    poison_memory_for([x])
    assert torch.empty_like(x).isnan().all()


@pytest.mark.nvcc
def test_the_right_kernel_passes_on_both_devices() -> None:
    record = opwright.verify(make())
    assert record.passed, record.failures
    assert record.backends == ["reference", "cuda"]  # it has no kernel for the CPU
    ran = {c.name for c in record.checks if c.device == "cuda" and c.outcome == "passed"}
    assert ran >= {
        "outputs written",
        "numerics",
        "gradient numerics",
        "side stream",
        "graph",
        "threads",
        "opcheck",
    }


@pytest.mark.nvcc
def test_a_fault_ends_the_checks_of_its_device(start_python) -> None:
    program = f"""
import torch, opwright
from jaxtyping import Float
from torch import Tensor
source = {KERNEL!r}
for name, text in { ({**RIGHT, "EXTRA": "if (n == 13) *(T*)16 = T(1);"})!r}.items():
    source = source.replace(name, text)
@opwright.operator("faults::halve", cuda=source)
def halve(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x * 0.5
samples = [(torch.ones(5),), (torch.ones(13),), (torch.ones(7),)]
record = opwright.verify(halve, samples=samples, devices=["cuda", "cpu"])
print([(f.device, f.case) for f in record.failures])
print({{c.reason for c in record.checks if c.device == "cuda" and c.outcome == "skipped"}})
print({{c.outcome for c in record.checks if c.device == "cpu"}})
"""
    failed, skipped, on_cpu = start_python(program).stdout.splitlines()
    assert failed.startswith("[('cuda', 'f32[13]")
    assert "a fault on x=f32[13] (sample 1) has ended all work on the GPU" in skipped
    assert "passed" in on_cpu


# --- any callable ------------------------------------------------------------------------------------------


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(-x / math.sqrt(2))


def samples():
    generator = torch.Generator("cuda").manual_seed(0)
    yield (torch.randn(17, 33, device="cuda", generator=generator),)
    yield (torch.randn(1 << 18, device="cuda", generator=generator),)


def on_the_default_stream(x: Tensor) -> Tensor:
    with torch.cuda.stream(torch.cuda.default_stream()):
        return gelu(x)


def waiting_for_the_default_stream(x: Tensor) -> Tensor:
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    return gelu(x)


def waiting_for_the_gpu(x: Tensor) -> Tensor:
    x.flatten()[0].item()
    return gelu(x)


class Scratch:
    """Keeps one buffer for all calls, whatever the stream."""

    def __init__(self) -> None:
        self.buffers: dict[torch.Size, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        buffer = self.buffers.setdefault(x.shape, torch.empty_like(x))
        torch.mul(x, 0.5, out=buffer)
        torch.cuda._sleep(200_000)
        return buffer * torch.erfc(-x / math.sqrt(2))


CALLABLES = {
    "side stream": on_the_default_stream,
    "side stream, waits": waiting_for_the_default_stream,
    "graph": waiting_for_the_gpu,
    "threads": Scratch(),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_wrong_callables(kind: str) -> None:
    check = kind.split(",")[0]
    record = opwright.verify(CALLABLES[kind], reference=gelu, samples=samples, checks=[check, "numerics"])
    assert [f.check for f in record.failures] == [check], record.failures
    torch.randn(3, device="cuda")  # a capture that failed has ended


def test_a_right_callable() -> None:
    record = opwright.verify(gelu, reference=gelu, samples=samples)
    assert record.passed, record.failures
    assert {c.device for c in record.checks} == {"cuda:0"}


# --- bench -------------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_bench_gives_device_time_without_the_host() -> None:
    """A copy of 256 MiB at the measured rate, in spite of a host that needs five milliseconds for the call."""
    import time

    x = torch.randn(64 << 20, device="cuda")

    def slow_host(x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        time.sleep(0.005)
        return result.copy_(x)

    record = opwright.bench(
        slow_host, ["eager"], reference=torch.clone, samples=[(x,)], directions=["forward"], seconds=0.2
    )
    (m,) = record.measurements
    ours, eager = m.timings
    assert record.device == "cuda:0"
    assert 0.9 < m.copy_share < 1.1
    assert 0.85 < m.roof_share < 1.1
    assert ours.median_us == pytest.approx(eager.median_us, rel=0.05)
    assert ours.host_us > 5000 > 100 > eager.host_us
    assert not ours.waits
    assert not m.in_cache


@pytest.mark.alone
def test_bench_is_cold() -> None:
    """8 MiB fit the L2: warm they are faster than from memory, and cold they are not."""
    x = torch.randn(2 << 20, device="cuda")
    record = opwright.bench(torch.clone, [], reference=torch.clone, samples=[(x,)], directions=["forward"], seconds=0.2)
    (m,) = record.measurements
    assert m.in_cache
    assert m.timings[0].warm_us < 0.85 * m.timings[0].median_us


@pytest.mark.alone
def test_bench_names_a_call_that_waits() -> None:
    x = torch.randn(1 << 20, device="cuda")
    record = opwright.bench(
        waiting_for_the_gpu, [], reference=gelu, samples=[(x,)], directions=["forward"], seconds=0.05
    )
    assert record.measurements[0].timings[0].waits


@opwright.operator("verify_cuda::segment_sum")
def segment_sum(
    x: Float[Tensor, "n d"], index: Annotated[Int64[Tensor, "n"], opwright.Index("k")], k: int
) -> Float[Tensor, "k d"]:
    return x.new_zeros(k, x.shape[1]).index_add(0, index, x)


@opwright.operator("verify_cuda::largest")
def largest(x: Float[Tensor, "*batch n"], k: int = 3) -> tuple[Float[Tensor, "*batch k"], Int64[Tensor, "*batch k"]]:
    return tuple(x.topk(k, -1))


@opwright.operator("verify_cuda::distinct", data_dependent=["k"])
def distinct(x: Float[Tensor, "n"]) -> Float[Tensor, "k"]:
    return torch.unique(x)


@pytest.mark.parametrize("operator", [segment_sum, largest, distinct])
def test_operators_without_a_kernel_are_as_right_as_pytorch(operator) -> None:
    """PyTorch adds 16-bit numbers in 16 bits, in any order, takes others of equal numbers, and sorts NaN elsewhere."""
    record = opwright.verify(operator, devices=["cuda"])
    assert record.passed, [(f.check, f.case, f.message) for f in record.failures]
