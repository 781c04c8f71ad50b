"""Operators whose CUDA kernels give another result than their references, so that it shows which one ran."""

import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator

_FRAME = """
#include <opwright/kernel.h>
using opwright::compute_t;
using opwright::View;

template <typename T>
__global__ void add_kernel(const T* x, int64_t stride, T* y, int64_t n, float amount) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += step) {
    y[i] = T(compute_t<T>(x[i * stride]) + compute_t<T>(amount));
  }
}
template <typename T>
void add(View<const T, 1> x, View<T, 1> y, float amount, cudaStream_t stream) {
  const int64_t blocks = (x.size(0) + 255) / 256;
  add_kernel<<<blocks < 1024 ? blocks : 1024, 256, 0, stream>>>(
      x.data(), x.stride(0), y.data(), x.size(0), amount);
}
"""

PLUS = (
    _FRAME
    + """
template <typename T> void plus(View<const T, 1> x, View<T, 1> output, cudaStream_t stream) {
  add(x, output, 1, stream);
}
template <typename T>
void plus_backward(View<const T, 1> grad_output, View<T, 1> grad_x, cudaStream_t stream) {
  add(grad_output, grad_x, 10, stream);
}
OPWRIGHT_KERNEL(plus, float, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(plus_backward, float, opwright::half, opwright::bfloat16)
"""
)


@operator("gpu_tests::plus", cuda=PLUS)
def plus(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """x + 1 in the kernel, x + 1000 in the reference."""
    return x + 1000


@plus.backward
def plus_backward(grad_output):
    return grad_output + 2000


# Every block leaves a partial sum in scratch memory; one block adds them.
TOTAL = """
#include <opwright/kernel.h>
#include <opwright/scratch.h>
using opwright::View;

__global__ void partial_kernel(const float* x, int64_t n, float* partial) {
  float sum = 0;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    sum += x[i];
  }
  partial[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
__global__ void sum_kernel(const float* partial, int count, float* total) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += partial[i];
  *total = sum;
}
template <typename T> void total(View<const T, 1> x, View<T, 0> output, cudaStream_t stream) {
  float* partial = opwright::scratch<float>(4 * 32);
  partial_kernel<<<4, 32, 0, stream>>>(x.data(), x.size(0), partial);
  sum_kernel<<<1, 1, 0, stream>>>(partial, 4 * 32, output.data());
}
OPWRIGHT_KERNEL(total, float)
"""


@operator("gpu_tests::total", cuda=TOTAL)
def total(x: Float[Tensor, "n"]) -> Float[Tensor, ""]:
    """The sum in the kernel, 1000 in the reference."""
    return x.sum() * 0 + 1000


# The size of the output is not that of an input, so that a call can ask for more than there is.
SQUARE = """
#include <opwright/kernel.h>
using opwright::View;
__global__ void square_kernel(const float* x, float* y, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n * n) y[i] = x[i / n] * x[i % n];
}
template <typename T> void square(View<const T, 1> x, View<T, 2> output, cudaStream_t stream) {
  const int64_t n = x.size(0);
  square_kernel<<<(n * n + 255) / 256, 256, 0, stream>>>(x.data(), output.data(), n);
}
OPWRIGHT_KERNEL(square, float)
"""


@operator("gpu_tests::square", cuda=SQUARE)
def square(x: Float[Tensor, "n"]) -> Float[Tensor, "n n"]:
    return torch.outer(x, x)


BROKEN = """
#include <opwright/kernel.h>
using opwright::View;
__global__ void broken_kernel(const float* x, float* y, bool faults) {
  if (faults) y = reinterpret_cast<float*>(uintptr_t{16});
  y[0] = x[0];
}
template <typename T>
void broken(View<const T, 1> x, bool faults, int64_t threads, View<T, 1> output, cudaStream_t stream) {
  opwright::check(threads >= 0, "threads must not be negative");
  broken_kernel<<<1, unsigned(threads), 0, stream>>>(x.data(), output.data(), faults);
}
OPWRIGHT_KERNEL(broken, float)
"""


@operator("gpu_tests::broken", cuda=BROKEN)
def broken(x: Float[Tensor, "n"], faults: bool, threads: int = 1) -> Float[Tensor, "n"]:
    return x.clone()
