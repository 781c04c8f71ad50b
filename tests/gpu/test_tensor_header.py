"""opwright/tensor.h in CUDA kernels: ATen works on their device and stream."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator

SOURCE = """
#include <opwright/kernel.h>
#include <opwright/tensor.h>
using namespace opwright;

template <typename T> __global__ void double_all(T* x, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i < n) x[i] = T(compute_t<T>(x[i]) * compute_t<T>(2));
}

// output = 2 * (0.5 * a @ b + 2 * a @ b), kernels of ATen and of its own in turn.
template <typename T>
void product(View<const T, 2> a, View<const T, 2> b, View<T, 2> output, cudaStream_t stream) {
  Tensor once = call("aten::mm", borrow(a), borrow(b));
  Tensor into = Tensor::empty<T>({a.size(0), b.size(1)});
  call("aten::addmm.out", once, borrow(a), borrow(b), 0.5, 2.0, into);
  double_all<<<(into.numel() + 255) / 256, 256, 0, stream>>>(into.data<T>(), into.numel());
  call("aten::copy_", borrow(output), into, true);
}
OPWRIGHT_KERNEL(product, float, double, opwright::half, opwright::bfloat16)
"""


@pytest.fixture(scope="module")
def product():
    @operator("gpu_tensor::product", cuda=SOURCE)
    def product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
        return a @ b

    return product


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_aten_in_a_cuda_kernel(product, dtype) -> None:
    a = torch.randint(-3, 4, (70, 33), device="cuda").to(dtype)
    b = torch.randint(-3, 4, (33, 50), device="cuda").to(dtype)
    wanted = 5 * (a.double() @ b.double())
    rtol = 4 * torch.finfo(dtype).eps  # `once` is rounded
    torch.testing.assert_close(product(a, b).double(), wanted, rtol=rtol, atol=0)
    torch.testing.assert_close(product(a.mT.contiguous().mT, b).double(), wanted, rtol=rtol, atol=0)


def test_on_a_side_stream_and_in_a_graph(product) -> None:
    a, b = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    expected = product(a, b)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = [product(a, b) for _ in range(20)]
    torch.cuda.synchronize()
    assert all(torch.equal(g, expected) for g in got)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(a, b)
    a.mul_(2)
    graph.replay()
    torch.testing.assert_close(captured, 2 * expected)


def test_no_memory_is_kept(product) -> None:
    a, b = torch.randn(256, 256, device="cuda"), torch.randn(256, 256, device="cuda")
    product(a, b)
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        product(a, b)
    assert torch.cuda.memory_allocated() == before
