// The joint of frames and positions, and its gradient.
#pragma once

#include <opwright/launch.cuh>
#include <opwright/vector.cuh>

#include "gpu_batch.cuh"

namespace opwright_ops {

using opwright::compute_t;
using opwright::kPackWidth;
using opwright::Pack;
using opwright::RowsOf;

template <typename S>
__device__ OPWRIGHT_INLINE S activate(Activation activation, S x) {
  if (activation == Activation::relu) return activate<Activation::relu>(x);
  if (activation == Activation::tanh) return activate<Activation::tanh>(x);
  return x;
}
template <typename S>
__device__ OPWRIGHT_INLINE S pass_gradient(Activation activation, S grad, S x) {
  if (activation == Activation::relu) return pass_gradient<Activation::relu>(grad, x);
  if (activation == Activation::tanh) return pass_gradient<Activation::tanh>(grad, x);
  return grad;
}

// N: adjacent elements that a thread loads at once. A block computes every gridDim.y-th group of
// the positions of one frame, a group being one for each of its rows of threads.
template <int N, typename T>
__global__ void __launch_bounds__(kRowThreads)
    join_kernel(Batch batch, int64_t frames, int64_t h, Vectors<T> f, Vectors<T> g,
                Activation activation, T* output) {
  using S = compute_t<T>;
  opwright::let_next_start();
  const int64_t entry = blockIdx.x / frames, t = blockIdx.x % frames;
  const Rows rows = rows_of_entry(batch, entry, frames);
  if (!batch.frames && t >= rows.frames) return;
  for (int64_t j = threadIdx.x * N; j < h; j += blockDim.x * N) {
    S x[N];
    opwright::unpack(opwright::load_pack<N>(f.at(entry, t) + j), x);
#pragma unroll 4
    for (int64_t u = blockIdx.y * blockDim.y + threadIdx.y; u < rows.width;
         u += gridDim.y * blockDim.y) {
      S y[N];
      opwright::unpack(opwright::load_pack<N>(g.at(entry, u) + j), y);
      OPWRIGHT_UNROLL
      for (int k = 0; k < N; ++k) y[k] = rows.has(t, u) ? activate(activation, x[k] + y[k]) : S(0);
      opwright::store_pack(output + rows.at(t, u) * h + j, opwright::pack_of<T>(y));
    }
  }
}

constexpr int kHeldPositions = 2;       // of a thread of the joint's backward
constexpr int kFramesAtOnce = 4;        // whose gradients it loads together
constexpr int kMinFrames = 16;          // that a block adds up
constexpr int kJoinBlocks = 8;          // for each multiprocessor, where there is enough to do
constexpr int kJoinBackwardBlocks = 2;  // likewise, backward

// A block adds up the gradients of some columns of one utterance, over positions and over some
// frames: each is read once. kLanes threads lie across the columns, the others across positions.
// More positions than kHeldPositions for each of those take several passes, and sums of frames that
// go on in `partial_f`. The sums over the frames of each block go to `partial_g`, if it is not
// null.
template <int N, int kLanes, typename T>
__global__ void __launch_bounds__(kRowThreads)
    join_backward_kernel(Batch batch, int64_t frames, int64_t positions, int64_t h, Vectors<T> f,
                         Vectors<T> g, Activation activation, RowsOf<const T> grad,
                         int64_t frames_of_block, compute_t<T>* partial_f, compute_t<T>* partial_g,
                         T* grad_f, T* grad_g) {
  using S = compute_t<T>;
  constexpr int kGroups = kRowThreads / kLanes, kWarps = kRowThreads / kWarp;
  constexpr int kColumns = kLanes * N;
  __shared__ S sums[2][kFramesAtOnce][kWarps][kColumns];
  opwright::let_next_start();
  const int64_t parts = (h + kColumns - 1) / kColumns, entry = blockIdx.x / parts;
  const Rows rows = rows_of_entry(batch, entry, frames);
  const int id = threadIdx.x, lane = id % kLanes, group = id / kLanes, warp = id / kWarp;
  const int64_t column = blockIdx.x % parts * kColumns, j = column + lane * N;
  const bool has_columns = j < h;
  const int64_t begin = blockIdx.y * frames_of_block, end = min(begin + frames_of_block, frames);
  int parity = 0;
  for (int64_t start = 0; start < positions; start += kGroups * kHeldPositions) {
    const bool is_last_pass = start + kGroups * kHeldPositions >= positions;
    S y[kHeldPositions][N], of_position[kHeldPositions][N] = {};
    OPWRIGHT_UNROLL
    for (int p = 0; p < kHeldPositions; ++p) {
      const int64_t u = start + group + p * kGroups;
      if (has_columns && u < rows.positions)
        opwright::unpack(opwright::load_pack<N>(g.at(entry, u) + j), y[p]);
    }
    for (int64_t first = begin; first < end; first += kFramesAtOnce, parity ^= 1) {
      Pack<T, N> loaded[kFramesAtOnce][kHeldPositions], frame[kFramesAtOnce];
      OPWRIGHT_UNROLL
      for (int k = 0; k < kFramesAtOnce; ++k) {
        const int64_t t = first + k;
        if (!has_columns || t >= rows.frames) continue;
        frame[k] = opwright::load_pack<N>(f.at(entry, t) + j);
        OPWRIGHT_UNROLL
        for (int p = 0; p < kHeldPositions; ++p) {
          const int64_t u = start + group + p * kGroups;
          if (u < rows.positions)
            loaded[k][p] = opwright::load_pack<N>(grad.row(rows.at(t, u)) + j);
        }
      }
      OPWRIGHT_UNROLL
      for (int k = 0; k < kFramesAtOnce; ++k) {
        S of_frame[N] = {};
        if (has_columns && first + k < rows.frames) {
          S x[N];
          opwright::unpack(frame[k], x);
          OPWRIGHT_UNROLL
          for (int p = 0; p < kHeldPositions; ++p) {
            if (start + group + p * kGroups >= rows.positions) continue;
            S of_row[N];
            opwright::unpack(loaded[k][p], of_row);
            OPWRIGHT_UNROLL
            for (int i = 0; i < N; ++i) {
              const S passed = pass_gradient(activation, of_row[i], x[i] + y[p][i]);
              of_frame[i] += passed;
              of_position[p][i] += passed;
            }
          }
        }
        OPWRIGHT_UNROLL
        for (int i = 0; i < N; ++i) {
          const S sum = opwright::warp_sum(of_frame[i], kLanes);
          if (id % kWarp < kLanes) sums[parity][k][warp][lane * N + i] = sum;
        }
      }
      __syncthreads();
      for (int i = id; i < kFramesAtOnce * kColumns; i += kRowThreads) {
        const int64_t t = first + i / kColumns,
                      at = (entry * frames + t) * h + column + i % kColumns;
        if (t >= end || column + i % kColumns >= h) continue;
        S sum = start ? partial_f[at] : S(0);
        for (int w = 0; w < kWarps; ++w) sum += sums[parity][i / kColumns][w][i % kColumns];
        if (is_last_pass)
          grad_f[at] = T(sum);
        else
          partial_f[at] = sum;
      }
    }
    OPWRIGHT_UNROLL
    for (int p = 0; p < kHeldPositions; ++p) {
      const int64_t u = start + group + p * kGroups;
      if (!has_columns || u >= positions) continue;
      const int64_t at = (entry * positions + u) * h + j;
      if (!partial_g) {
        opwright::store_pack(grad_g + at, opwright::pack_of<T>(of_position[p]));
        continue;
      }
      S* to = partial_g + blockIdx.y * (batch.logit_lengths.size(0) * positions * h) + at;
      OPWRIGHT_UNROLL
      for (int i = 0; i < N; ++i) to[i] = of_position[p][i];
    }
  }
}

template <typename T>
bool are_packs(const Vectors<T>& vectors) {
  constexpr int N = kPackWidth<T>;
  return opwright::is_aligned(vectors.data, N) && vectors.entry_stride % N == 0 &&
         vectors.step_stride % N == 0;
}

}  // namespace opwright_ops
