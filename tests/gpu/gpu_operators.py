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

__global__ void partial_kernel(View<const float, 1> x, float* partial) {
  float sum = 0;
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < x.size(0); i += step) sum += x(i);
  partial[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
__global__ void sum_kernel(const float* partial, int count, float* total) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += partial[i];
  *total = sum;
}
template <typename T> void total(View<const T, 1> x, View<T, 0> output, cudaStream_t stream) {
  float* partial = opwright::scratch<float>(4 * 32);
  partial_kernel<<<4, 32, 0, stream>>>(x, partial);
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
__global__ void square_kernel(View<const float, 1> x, float* y, int64_t n) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n * n) y[i] = x(i / n) * x(i % n);
}
template <typename T> void square(View<const T, 1> x, View<T, 2> output, cudaStream_t stream) {
  const int64_t n = x.size(0);
  square_kernel<<<(n * n + 255) / 256, 256, 0, stream>>>(x, output.data(), n);
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


# The tiling of bias_gelu's backward, with a limit of chunks along gridDim.y that small tensors reach.
COLUMN_SUMS = """
#include <opwright/kernel.h>
#include <opwright/reduce.cuh>
using namespace opwright;

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    column_sums_kernel(Rows rows, int32_t depth, Plane<const T> x, Partials<compute_t<T>> partials, T* output,
                       int64_t output_stride) {
  using S = compute_t<T>;
  const Lot<N> lot(rows, depth);
  wait_for_previous();
  S sums[N] = {};
  const T* at = x.at(lot);
  for (int32_t panel = lot.first; panel < lot.end; panel += lot.step, at += lot.step * x.panel) {
    S values[N];
    unpack(load_pack<N>(at), values);
    for (int i = 0; i < N; ++i) sums[i] += values[i];
  }
  for (int i = 0; i < lot.partial; ++i) sums[i] += S(at[i]);
  let_next_start();
  write_column_sums<T, S, N>(sums, rows, partials, output, output_stride);
}

template <typename T>
void column_sums(View<const T, 2> x, int64_t max_chunks, View<T, 1> output, cudaStream_t stream) {
  using S = compute_t<T>;
  const View<T, 2> like{const_cast<T*>(x.data()), {x.size(0), x.size(1)}, {x.stride(0), x.stride(1)}};
  const Packing packing = packing_of(like, x);
  const auto run = [&]<int N>() {
    const Rows rows = cut_rows(x.size(0), x.size(1), N, packing.height_step);
    const Tiling tiling = tile(rows, {.pack = N, .deep = 2, .across = 64, .max_chunks = max_chunks});
    const auto partials = partials_of<S>(rows, tiling, N);
    launch_behind(column_sums_kernel<T, N>, tiling.grid, tiling.block, column_sums_bytes<S, N>(tiling.block),
                  stream, rows, tiling.depth, plane_of(rows, x), partials, output.data(), output.stride(0));
    sum_partials(partials, rows.n, output, stream);
  };
  if (packing.width > 1 && packing.is_aligned) run.template operator()<kPackWidth<T>>();
  else run.template operator()<1>();
}
OPWRIGHT_KERNEL(column_sums, float, double, opwright::half)
"""


@operator("gpu_tests::column_sums", cuda=COLUMN_SUMS)
def column_sums(x: Float[Tensor, "rows n"], max_chunks: int) -> Float[Tensor, "n"]:
    return x.sum(0)


# Kernels that overlap: `late` lets the next one start at once and writes after a while; `early` reads before it waits,
# as a kernel may that takes what the kernel in front of it does not write.
OVERLAP = """
#include <opwright/kernel.h>
#include <opwright/launch.cuh>
using opwright::View;

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}
__global__ void late_kernel(const float* x, uint64_t delay, float* y) {
  opwright::let_next_start();
  const uint64_t begin = nanoseconds();
  while (nanoseconds() - begin < delay) {}
  *y = *x;
}
__global__ void early_kernel(const volatile float* x, float* y) {
  const float seen = *x;
  opwright::wait_for_previous();
  *y = seen;
}
template <typename T> void late(View<const T, 1> x, int64_t delay, View<T, 1> output, cudaStream_t stream) {
  late_kernel<<<1, 1, 0, stream>>>(x.data(), uint64_t(delay), output.data());
}
template <typename T> void early(View<const T, 1> x, View<T, 1> output, cudaStream_t stream) {
  opwright::launch_behind(early_kernel, dim3(1), dim3(1), 0, stream, x.data(), output.data());
}
"""


@operator("gpu_tests::late", cuda=OVERLAP + "OPWRIGHT_KERNEL(late, float)")
def late(x: Float[Tensor, "n"], delay: int) -> Float[Tensor, "n"]:
    return x.clone()


@operator("gpu_tests::early", cuda=OVERLAP + "OPWRIGHT_KERNEL(early, float)")
def early(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.clone()
