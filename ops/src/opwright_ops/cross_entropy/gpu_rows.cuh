// Sums over rows and the gradient of each element: a row is read once forward, and read and written
// once backward.
#pragma once

#include <cassert>

#include <opwright/launch.cuh>
#include <opwright/math.h>
#include <opwright/reduce.cuh>
#include <opwright/vector.cuh>
#include <opwright/view.h>

#include "base.h"

namespace opwright_ops {

using opwright::compute_t;
using opwright::kPackWidth;
using opwright::kWarp;
using opwright::Pack;
using opwright::rows_of;
using opwright::RowsOf;
using opwright::View;

constexpr int kThreads = 256;       // of a block that adds up one row
constexpr int kWarpPacks = 1024;    // of the longest row that a warp adds up
constexpr int kShortThreads = 128;  // of a block that adds up several rows
constexpr int kMinLanes = 8;        // of a row: as many as elements that are not in a pack
constexpr int kAtOnce = 2;  // packs that a thread loads together, while it adds up those before
constexpr int kGradientThreads = 128;
constexpr int kGradientPacks = 4;  // of a thread, all loaded before the first is used
constexpr int64_t kMaxGridY = 32768;

template <typename S>
inline constexpr S kLargest = sizeof(S) == 8 ? S(0x1.fffffffffffffp1023) : S(0x1.fffffep127f);

// Whether every row begins at 16 bytes.
template <typename T>
bool are_aligned(const RowsOf<T>& rows) {
  constexpr int N = kPackWidth<T>;
  return opwright::is_aligned(rows.data, N) && rows.stride % N == 0;
}

template <bool kIsAligned, typename T>
__device__ OPWRIGHT_INLINE Pack<T, kPackWidth<T>> load(const T* at) {
  if constexpr (kIsAligned)
    return opwright::load_pack<kPackWidth<T>>(at);
  else
    return opwright::load_unaligned<kPackWidth<T>>(at);
}

// e^x of a term of a sum, where x is at most 0, or infinite; those below 2^-126 do not count.
__device__ OPWRIGHT_INLINE double exp_of_term(double x) { return exp(x); }
__device__ OPWRIGHT_INLINE float exp_of_term(float x) {
  float power = x * 1.4426950408889634f;
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(power));
  return power;
}

// The sum of exp(x - origin) over a part of a row, where origin is its largest element or the
// number nearest to that, and the sum of the differences between the elements and `base`.
template <typename S, bool kHasElements>
struct Sums {
  S origin = -kLargest<S>, exponentials = 0, elements = 0;

  // Moves the origin to `most` if that is larger. Not to infinity: exp(inf - kLargest) is inf all
  // the same, and exp(-inf + kLargest) is 0.
  __device__ OPWRIGHT_INLINE void raise(S most) {
    most = fmin(most, kLargest<S>);
    if (most > origin) {
      exponentials *= exp_of_term(origin - most);
      origin = most;
    }
  }
  __device__ OPWRIGHT_INLINE void add(S x, S base) {
    exponentials += exp_of_term(x - origin);
    if constexpr (kHasElements) elements += x - base;
  }
  __device__ OPWRIGHT_INLINE void merge(const Sums& other) {
    const S most = fmax(origin, other.origin);
    exponentials = exponentials * exp_of_term(origin - most) +
                   other.exponentials * exp_of_term(other.origin - most);
    elements += other.elements;
    origin = most;
  }
};

// Joins the sums of `count` adjacent lanes of a warp (a power of two), in a fixed order; each of
// them gets it. All lanes of the warp must call it.
template <typename S, bool kHasElements>
__device__ OPWRIGHT_INLINE void merge_lanes(Sums<S, kHasElements>& sums, int count) {
  OPWRIGHT_UNROLL
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    if (lanes >= count) continue;
    Sums<S, kHasElements> other;
    other.origin = __shfl_xor_sync(0xffffffffu, sums.origin, lanes);
    other.exponentials = __shfl_xor_sync(0xffffffffu, sums.exponentials, lanes);
    if constexpr (kHasElements) {
      other.elements = __shfl_xor_sync(0xffffffffu, sums.elements, lanes);
    }
    sums.merge(other);
  }
}

// What all elements of a row may have in common: it would take the digits of the rest of their sum.
// The median of three, so that no single outlier is taken for it.
template <typename T>
__device__ OPWRIGHT_INLINE compute_t<T> base_of(const T* row, int64_t n) {
  using S = compute_t<T>;
  return n > 0 ? opwright_ops::base_of(S(row[0]), S(row[n / 2]), S(row[n - 1])) : S(0);
}

// Sums of a row, by the threads of a warp or of a block: thread `id` of `threads`. Pack p of a row
// belongs to thread p % threads wherever the row lies, so that it has the same bits everywhere.
template <bool kIsAligned, bool kHasElements, typename T>
__device__ OPWRIGHT_INLINE Sums<compute_t<T>, kHasElements> sums_of(const T* row, int64_t n, int id,
                                                                    int threads) {
  using S = compute_t<T>;
  constexpr int N = kPackWidth<T>;
  using Packs = Pack<T, N>[kAtOnce];
  Sums<S, kHasElements> sums;
  const S base = kHasElements ? base_of(row, n) : S(0);
  const int64_t packs = n / N;
  const auto fetch = [&](int64_t first, Packs& loaded) {
    OPWRIGHT_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      const int64_t p = first + k * threads;
      if (p < packs) loaded[k] = load<kIsAligned>(row + p * N);
    }
  };
  const auto add = [&](int64_t first, const Packs& loaded) {
    S most = -kLargest<S>;
    OPWRIGHT_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * threads >= packs) break;
      S x[N];
      opwright::unpack(loaded[k], x);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) most = fmax(most, x[j]);
    }
    sums.raise(most);
    OPWRIGHT_UNROLL
    for (int k = 0; k < kAtOnce; ++k) {
      if (first + k * threads >= packs) break;
      S x[N];
      opwright::unpack(loaded[k], x);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) sums.add(x[j], base);
    }
  };
  const int64_t step = kAtOnce * threads;
  Packs loaded, ahead;
  fetch(id, loaded);
  const int64_t behind = packs * N + id;
  if (behind < n) {
    const S x = row[behind];
    sums.raise(x);
    sums.add(x, base);
  }
  for (int64_t first = id; first < packs; first += 2 * step) {
    fetch(first + step, ahead);
    add(first, loaded);
    fetch(first + 2 * step, loaded);
    add(first + step, ahead);
  }
  return sums;
}

// What becomes of the sums of a row: `End` has
//   kHasElements: whether it needs the sum of the elements,
//   kSkipsRows and is_used(row): whether some rows are not read; empty(row) is called for those,
//   operator()(row, from, value, elements): `value` is the logarithm of the sum of exp(x).
template <bool kIsAligned, typename T, typename End>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(int64_t rows, int64_t n, RowsOf<const T> input, End end) {
  using RowSums = Sums<compute_t<T>, End::kHasElements>;
  __shared__ RowSums parts[kThreads / kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  opwright::let_next_start();  // waits for the kernel in front, too
  const bool is_row = row < rows;
  bool is_read = is_row;
  if constexpr (End::kSkipsRows) is_read = is_row && end.is_used(row);
  const T* from = input.row(is_read ? row : 0);
  auto sums =
      sums_of<kIsAligned, End::kHasElements>(from, is_read ? n : 0, threadIdx.x, blockDim.x);
  merge_lanes(sums, min(blockDim.x, kWarp));
  if (blockDim.x > kWarp) {
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = sums;
    __syncthreads();
    if (threadIdx.x >= kWarp) return;
    sums = {};
    if (threadIdx.x < blockDim.x / kWarp) sums = parts[threadIdx.x];
    merge_lanes(sums, kWarp);
  }
  if (threadIdx.x != 0 || !is_row) return;
  if (is_read) {
    const double base = End::kHasElements ? double(base_of(from, n)) : 0.0;
    end(row, from, double(sums.origin) + log(double(sums.exponentials)),
        double(sums.elements) + base * double(n));
  } else if constexpr (End::kSkipsRows) {
    end.empty(row);
  }
}

template <typename T, typename End>
void launch_forward(const View<const T, 2>& view, const End& end, cudaStream_t stream) {
  const RowsOf<const T> input = rows_of(view);
  const int64_t rows = view.size(0), n = view.size(1), packs = n / kPackWidth<T>;
  // By the width alone, so that a row has the same bits beside any others.
  int across = kThreads, down = 1;
  if (packs <= kWarpPacks) {
    across = kMinLanes;
    while (across < kWarp && across * 2 * kAtOnce < packs) across *= 2;
    down = kShortThreads / across;
  }
  opwright::launch_behind(
      are_aligned(input) ? forward_kernel<true, T, End> : forward_kernel<false, T, End>,
      dim3(static_cast<unsigned>((rows + down - 1) / down)), dim3(across, down), 0, stream, rows, n,
      input, end);
}

// The gradient of a row x is grad * (slope * exp(x[j] - normalizer) - shift), with minus[i] in the
// place of `shift` in the column at[i]. Both columns are different.
template <typename S>
struct RowGradient {
  double normalizer;
  S grad, slope, shift;
  int64_t at[2];
  S minus[2];
  bool is_zero;
};

// exp(x - high - low): accurate to float32 where that is the type of the result. In 16 bits, what
// is smaller than 2^-126 is 0.
template <typename T, typename S>
__device__ OPWRIGHT_INLINE S softmax_of(S x, S high, S low) {
  if constexpr (sizeof(T) == 2)
    return exp_of_term(x - high);
  else
    return opwright::exp((x - high) - low);
}

// Gradient: of(row), a row's RowGradient, and kColumns, how many of its columns count; kSkipsRows:
// whether rows where is_used(row) is false are not read. kIsAligned: the rows of the input begin as
// far behind 16 bytes as those of the output.
template <bool kIsAligned, typename T, typename Gradient>
__global__ void __launch_bounds__(kGradientThreads)
    backward_kernel(int64_t rows, int64_t n, RowsOf<const T> input, RowsOf<T> output,
                    Gradient gradient_of) {
  using S = compute_t<T>;
  constexpr int N = kPackWidth<T>, kColumns = Gradient::kColumns;
  // Blocks that run at the same time are neighbours in memory.
  const int64_t row =
      (static_cast<int64_t>(blockIdx.z) * kMaxGridY + blockIdx.y) * blockDim.y + threadIdx.y;
  opwright::let_next_start();  // waits for the kernel in front, too
  if (row >= rows) return;
  const T* from = input.row(row);
  T* to = output.row(row);
  // The packs are those of the output.
  const int bytes_before = static_cast<int>(-reinterpret_cast<uintptr_t>(to) & 15);
  const int64_t before = min(int64_t{bytes_before / static_cast<int>(sizeof(T))}, n);
  const int64_t packs = (n - before) / N;
  const int id = threadIdx.x, threads = blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGradientPacks * threads + id;
  bool is_read = true;
  if constexpr (Gradient::kSkipsRows) is_read = gradient_of.is_used(row);
  Pack<T, N> loaded[kGradientPacks];
  OPWRIGHT_UNROLL
  for (int k = 0; k < kGradientPacks; ++k) {
    const int64_t pack = first + k * threads;
    if (is_read && pack < packs) loaded[k] = load<kIsAligned>(from + before + pack * N);
  }

  const RowGradient<S> g = gradient_of.of(row);
  const S high = S(g.normalizer), low = high - high == 0 ? S(g.normalizer - high) : S(0);
  // One fma wherever the element lies, so that it has the same bits.
  const auto gradient = [&](S x, S minus) {
    return opwright::fma(softmax_of<T>(x, high, low), g.slope, -minus) * g.grad;
  };
  OPWRIGHT_UNROLL
  for (int k = 0; k < kGradientPacks; ++k) {
    const int64_t pack = first + k * threads;
    if (pack >= packs) break;
    const int64_t column = before + pack * N;
    S x[N], y[N];
    opwright::unpack(loaded[k], x);
    OPWRIGHT_UNROLL
    for (int j = 0; j < N; ++j) y[j] = gradient(x[j], g.shift);
    OPWRIGHT_UNROLL
    for (int i = 0; i < kColumns; ++i) {
      const int64_t at = g.at[i] - column;
      if (at < 0 || at >= N) continue;
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) {
        if (j == at) y[j] = gradient(x[j], g.minus[i]);
      }
    }
    if (g.is_zero) {
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) y[j] = 0;
    }
    opwright::store_pack(to + column, opwright::pack_of<T>(y));
  }
  if (blockIdx.x != 0) return;
  const auto write_one = [&](int64_t column) {
    S minus = g.shift;
    for (int i = 0; i < kColumns; ++i) {
      if (column == g.at[i]) minus = g.minus[i];
    }
    to[column] = T(g.is_zero ? S(0) : gradient(S(from[column]), minus));
  };
  if (id < before) write_one(id);
  const int64_t behind = before + packs * N + id;
  if (behind < n) write_one(behind);
}

template <typename T, typename Gradient>
void launch_backward(const View<const T, 2>& view, const View<T, 2>& result,
                     const Gradient& gradient_of, cudaStream_t stream) {
  const RowsOf<const T> input = rows_of(view);
  const RowsOf<T> output = rows_of(result);
  const int64_t rows = view.size(0), n = view.size(1);
  const int64_t packs = (n + kPackWidth<T> - 1) / kPackWidth<T>;
  int across = kMinLanes;
  while (across < kGradientThreads && across * kGradientPacks < packs) across *= 2;
  const int down = kGradientThreads / across;
  const int64_t chunk = across * kGradientPacks, blocks = (rows + down - 1) / down;
  const auto address = [](const auto* at) { return reinterpret_cast<uintptr_t>(at); };
  const bool is_aligned = (address(input.data) - address(output.data)) % 16 == 0 &&
                          (input.stride - output.stride) % kPackWidth<T> == 0;
  opwright::launch_behind(
      is_aligned ? backward_kernel<true, T, Gradient> : backward_kernel<false, T, Gradient>,
      dim3(static_cast<unsigned>((packs + chunk - 1) / chunk),
           static_cast<unsigned>(blocks < kMaxGridY ? blocks : kMaxGridY),
           static_cast<unsigned>((blocks + kMaxGridY - 1) / kMaxGridY)),
      dim3(across, down), 0, stream, rows, n, input, output, gradient_of);
}

}  // namespace opwright_ops
