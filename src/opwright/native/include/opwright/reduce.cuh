// Sums in a fixed order: the same bits on every run, for one shape on one kind of device.
//
//   const auto partials = partials_of<S>(rows, tiling, N);                              // host
//   launch_behind(kernel, tiling.grid, tiling.block, column_sums_bytes<S, N>(tiling.block), ...);
//   sum_partials(partials, rows.n, output, stream);
//
//   S sums[N];                              // device: of the columns of this thread's Lot
//   write_column_sums<T, S, N>(sums, rows, partials, output, output_stride);
#pragma once

#include <cstdint>

#include "opwright/launch.cuh"
#include "opwright/rows.cuh"
#include "opwright/scratch.h"
#include "opwright/view.h"

namespace opwright {

// The sum over the lanes of a warp that are equal modulo `stride` (a power of two); every lane gets
// it. All 32 lanes must take part.
template <typename S>
__device__ OPWRIGHT_INLINE S warp_sum(S value, int stride = 1) {
  for (int lanes = kWarp / 2; lanes >= stride; lanes /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, lanes);
  }
  return value;
}

// Bytes of shared memory that block_column_sums needs.
template <typename S, int N>
size_t column_sums_bytes(dim3 block) {
  return sizeof(S) * N * (block.y * (block.x + kWarp / N) + block.x);
}

// Adds the sums of the threads of a block that share columns (those of one threadIdx.x). Returns
// the block's blockDim.x * N sums, in shared memory. All threads must call it.
template <typename S, int N>
__device__ OPWRIGHT_INLINE S* block_column_sums(const S (&sums)[N]) {
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  // The padding puts N adjacent columns, which lie `pitch` apart, into different banks.
  const int across = blockDim.x, down = blockDim.y, pitch = across + kWarp / N;
  S* parts = reinterpret_cast<S*>(shared_bytes);
  S* totals = parts + down * N * pitch;
  OPWRIGHT_UNROLL
  for (int i = 0; i < N; ++i) parts[(threadIdx.y * N + i) * pitch + threadIdx.x] = sums[i];
  __syncthreads();
  for (int i = threadIdx.y * across + threadIdx.x; i < across * N; i += kThreads) {
    S sum = 0;
    for (int y = 0; y < down; ++y) sum += parts[(y * N + i % N) * pitch + i / N];
    totals[i] = sum;
  }
  __syncthreads();
  return totals;
}

// Where the column sums of a kernel's blocks go: `partial` is a matrix of `count` rows and n
// columns whose column sums are the result, or null if each column is in one block alone.
template <typename S>
struct Partials {
  S* partial;
  int32_t count;
  bool is_folded;  // a block has several elements of one row of `partial` and adds them itself
};

template <typename S>
Partials<S> partials_of(const Rows& rows, const Tiling& tiling, int pack) {
  const int64_t chunks = chunks_of(tiling);
  if (chunks == 1 && rows.height == 1) return {nullptr, 0, false};
  const bool is_folded = rows.height > 1 && rows.n * 2 <= int64_t{tiling.block.x} * pack;
  const int64_t count = chunks * (is_folded ? tiling.grid.x : rows.height);
  return {scratch<S>(count * rows.n), static_cast<int32_t>(count), is_folded};
}

// Adds up the sums of a block and writes them to `partials`, or to `output` if they are all.
template <typename T, typename S, int N>
__device__ OPWRIGHT_INLINE void write_column_sums(const S (&sums)[N], const Rows& rows,
                                                  const Partials<S>& partials, T* output,
                                                  int64_t output_stride) {
  const S* totals = block_column_sums<S, N>(sums);
  const int columns = blockDim.x * N, thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * columns, chunk = chunk_of_block();
  if (partials.is_folded) {
    const int n = static_cast<int>(rows.n), offset = static_cast<int>(first % n);
    const int64_t row = chunk * gridDim.x + blockIdx.x;
    for (int c = thread; c < n; c += kThreads) {
      S sum = 0;
      for (int i = c < offset ? c - offset + n : c - offset; i < columns; i += n) sum += totals[i];
      partials.partial[row * n + c] = sum;
    }
    return;
  }
  for (int i = thread; i < columns && first + i < rows.width; i += kThreads) {
    if (partials.partial)
      partials.partial[chunk * rows.width + first + i] = totals[i];
    else
      output[(first + i) * output_stride] = T(totals[i]);
  }
}

// output[c] = the sum of column c of a contiguous count x n matrix that the kernel in front wrote.
// 2^column_bits lanes (at most a warp) read adjacent columns, the others further rows.
template <typename T, typename S>
__global__ void __launch_bounds__(1024)
    column_sum_kernel(const S* partial, int32_t count, int64_t n, int column_bits, T* output,
                      int64_t output_stride) {
  __shared__ S shared[1024 / kWarp][kWarp];
  const int across = 1 << column_bits, down = blockDim.x >> column_bits;
  const int x = threadIdx.x & (across - 1), y = threadIdx.x >> column_bits;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * across + x;
  // Loads in flight: a read of what another multiprocessor wrote takes most of a microsecond.
  constexpr int kAtOnce = 4;
  S sum = 0;
  let_next_start();  // waits for the kernel in front, too
  if (column < n) {
    const S* at = partial + y * n + column;
    const int64_t step = down * n;
    for (int32_t row = y; row < count; row += kAtOnce * down, at += kAtOnce * step) {
      S values[kAtOnce];
      OPWRIGHT_UNROLL
      for (int i = 0; i < kAtOnce; ++i) values[i] = row + i * down < count ? at[i * step] : S(0);
      OPWRIGHT_UNROLL
      for (int i = 0; i < kAtOnce; ++i) sum += values[i];
    }
  }
  sum = warp_sum(sum, across);
  if (threadIdx.x % kWarp < across) shared[threadIdx.x / kWarp][x] = sum;
  __syncthreads();
  if (threadIdx.x < across && column < n) {
    S total = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x / kWarp); ++w) total += shared[w][x];
    output[column * output_stride] = T(total);
  }
}

// Launches it for what write_column_sums wrote; nothing where that was all.
template <typename T, typename S>
void sum_partials(const Partials<S>& partials, int64_t n, View<T, 1> output, cudaStream_t stream) {
  if (!partials.partial) return;
  // A warp's width of columns, or where there is much to add up 8: 32 bytes, the least that memory
  // delivers.
  const int most = partials.count > 256 ? 3 : 5;
  int column_bits = 0;
  while (column_bits < most && (1 << column_bits) < n) ++column_bits;
  const unsigned blocks = static_cast<unsigned>((n + (1 << column_bits) - 1) >> column_bits);
  const int threads = partials.count > 256 ? 1024 : 256;
  launch_behind(column_sum_kernel<T, S>, dim3(blocks), dim3(threads), 0, stream, partials.partial,
                partials.count, n, column_bits, output.data(), output.stride(0));
}

}  // namespace opwright
