// Sums over rows and the gradient of each element: a row is read once forward, and read and written
// once backward.
#pragma once

#include <cassert>

#include <opwright/launch.cuh>
#include <opwright/math.h>
#include <opwright/reduce.cuh>
#include <opwright/vector.cuh>
#include <opwright/view.h>

namespace opwright_ops {

using opwright::compute_t;
using opwright::kPackWidth;
using opwright::kWarp;
using opwright::Pack;
using opwright::rows_of;
using opwright::RowsOf;
using opwright::View;

constexpr int kThreads = 256;  // of a block that adds up one row
constexpr int kAtOnce = 2;     // packs that a thread loads together, while it adds up those before
constexpr int kGradientThreads = 128;
constexpr int kGradientPacks = 2;  // of a thread, all loaded before the first is used
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
// number nearest to that, and the sum of the elements themselves.
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
  __device__ OPWRIGHT_INLINE void add(S x) {
    exponentials += exp_of_term(x - origin);
    if constexpr (kHasElements) elements += x;
  }
  __device__ OPWRIGHT_INLINE void merge(const Sums& other) {
    const S most = fmax(origin, other.origin);
    exponentials = exponentials * exp_of_term(origin - most) +
                   other.exponentials * exp_of_term(other.origin - most);
    elements += other.elements;
    origin = most;
  }
};

// Joins the sums of the lanes of a warp, in a fixed order; every lane gets it.
template <typename S, bool kHasElements>
__device__ OPWRIGHT_INLINE void merge_lanes(Sums<S, kHasElements>& sums) {
  OPWRIGHT_UNROLL
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    Sums<S, kHasElements> other;
    other.origin = __shfl_xor_sync(0xffffffffu, sums.origin, lanes);
    other.exponentials = __shfl_xor_sync(0xffffffffu, sums.exponentials, lanes);
    if constexpr (kHasElements) {
      other.elements = __shfl_xor_sync(0xffffffffu, sums.elements, lanes);
    }
    sums.merge(other);
  }
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
      for (int j = 0; j < N; ++j) sums.add(x[j]);
    }
  };
  const int64_t step = kAtOnce * threads;
  Packs loaded, ahead;
  fetch(id, loaded);
  const int64_t behind = packs * N + id;
  if (behind < n) {
    const S x = row[behind];
    sums.raise(x);
    sums.add(x);
  }
  for (int64_t first = id; first < packs; first += 2 * step) {
    fetch(first + step, ahead);
    add(first, loaded);
    fetch(first + 2 * step, loaded);
    add(first + step, ahead);
  }
  return sums;
}

template <typename T>
struct Forward {
  int64_t rows, n;
  RowsOf<const T> input;
  double* normalizer;
  // For a cross-entropy; null where only the normalizer is asked for.
  double* loss;
  const int64_t* target;
  int64_t target_stride, ignore_index;
  double label_smoothing, z_loss;
};

template <bool kIsAligned, bool kHasElements, typename T>
__global__ void __launch_bounds__(kThreads) forward_kernel(Forward<T> p) {
  using S = compute_t<T>;
  __shared__ Sums<S, kHasElements> parts[kThreads / kWarp];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  opwright::let_next_start();  // waits for the kernel in front, too
  if (row >= p.rows) return;   // a whole warp: such blocks have no barrier
  const T* from = p.input.row(row);
  auto sums = sums_of<kIsAligned, kHasElements>(from, p.n, threadIdx.x, blockDim.x);
  merge_lanes(sums);
  if (blockDim.x > kWarp) {
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = sums;
    __syncthreads();
    if (threadIdx.x >= kWarp) return;
    sums = {};
    if (threadIdx.x < blockDim.x / kWarp) sums = parts[threadIdx.x];
    merge_lanes(sums);
  }
  if (threadIdx.x != 0) return;
  const double value = double(sums.origin) + log(double(sums.exponentials));
  p.normalizer[row] = value;
  if (!p.loss) return;
  const int64_t target = p.target[row * p.target_stride];
  double loss = 0;
  if (target != p.ignore_index) {
    assert(0 <= target && target < p.n && "a target is neither a class nor ignore_index");
    loss = value - (1 - p.label_smoothing) * double(S(from[target]));
    if constexpr (kHasElements) loss -= p.label_smoothing * (double(sums.elements) / double(p.n));
    if (p.z_loss != 0) loss += p.z_loss * value * value;
  }
  p.loss[row] = loss;
}

template <typename T>
void launch_forward(const Forward<T>& p, cudaStream_t stream) {
  const bool is_small = p.n <= 2 * kAtOnce * kWarp * kPackWidth<T>;
  const int across = is_small ? kWarp : kThreads, down = is_small ? kThreads / kWarp : 1;
  const auto start = [&](auto kernel) {
    opwright::launch_behind(kernel, dim3(static_cast<unsigned>((p.rows + down - 1) / down)),
                            dim3(across, down), 0, stream, p);
  };
  const bool is_aligned = are_aligned(p.input);
  if (p.label_smoothing != 0)
    start(is_aligned ? forward_kernel<true, true, T> : forward_kernel<false, true, T>);
  else
    start(is_aligned ? forward_kernel<true, false, T> : forward_kernel<false, false, T>);
}

// The gradient of a row x is grad * (slope * exp(x[j] - normalizer) - shift), with `at_target` in
// the place of `shift` at the target.
template <typename T>
struct Backward {
  int64_t rows, n;
  RowsOf<const T> input;
  RowsOf<T> output;
  View<const double, 1> grad, normalizer;
  // For a cross-entropy; null otherwise.
  const int64_t* target;
  int64_t target_stride, ignore_index;
  compute_t<T> shift, at_target;
  double z_loss;
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

// kIsAligned: the rows of the input begin as far behind 16 bytes as those of the output.
template <bool kIsAligned, typename T>
__global__ void __launch_bounds__(kGradientThreads) backward_kernel(Backward<T> p) {
  using S = compute_t<T>;
  constexpr int N = kPackWidth<T>;
  // Blocks that run at the same time are neighbours in memory.
  const int64_t row =
      (static_cast<int64_t>(blockIdx.z) * kMaxGridY + blockIdx.y) * blockDim.y + threadIdx.y;
  opwright::let_next_start();  // waits for the kernel in front, too
  if (row >= p.rows) return;
  const T* from = p.input.row(row);
  T* to = p.output.row(row);
  // The packs are those of the output.
  const int bytes_before = static_cast<int>(-reinterpret_cast<uintptr_t>(to) & 15);
  const int64_t before = min(int64_t{bytes_before / static_cast<int>(sizeof(T))}, p.n);
  const int64_t packs = (p.n - before) / N;
  const int id = threadIdx.x, threads = blockDim.x;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGradientPacks * threads + id;
  Pack<T, N> loaded[kGradientPacks];
  OPWRIGHT_UNROLL
  for (int k = 0; k < kGradientPacks; ++k) {
    const int64_t pack = first + k * threads;
    if (pack < packs) loaded[k] = load<kIsAligned>(from + before + pack * N);
  }

  const int64_t target = p.target ? p.target[row * p.target_stride] : -1;
  const bool is_ignored = p.target && target == p.ignore_index;
  const double normalizer = p.normalizer(row);
  const S grad = S(p.grad(row)), high = S(normalizer);
  const S low = high - high == 0 ? S(normalizer - high) : S(0);
  const S slope = p.z_loss != 0 ? S(1 + 2 * p.z_loss * normalizer) : S(1);
  // One fma wherever the element lies, so that it has the same bits.
  const auto gradient = [&](S x, S minus) {
    return opwright::fma(softmax_of<T>(x, high, low), slope, -minus) * grad;
  };
  OPWRIGHT_UNROLL
  for (int k = 0; k < kGradientPacks; ++k) {
    const int64_t pack = first + k * threads;
    if (pack >= packs) break;
    const int64_t column = before + pack * N;
    S x[N], y[N];
    opwright::unpack(loaded[k], x);
    OPWRIGHT_UNROLL
    for (int j = 0; j < N; ++j) y[j] = gradient(x[j], p.shift);
    const int64_t at = target - column;
    if (is_ignored || (0 <= at && at < N)) {
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) {
        if (is_ignored)
          y[j] = 0;
        else if (j == at)
          y[j] = gradient(x[j], p.at_target);
      }
    }
    opwright::store_pack(to + column, opwright::pack_of<T>(y));
  }
  if (blockIdx.x != 0) return;
  const auto write_one = [&](int64_t column) {
    const S value = gradient(S(from[column]), column == target ? p.at_target : p.shift);
    to[column] = T(is_ignored ? S(0) : value);
  };
  if (id < before) write_one(id);
  const int64_t behind = before + packs * N + id;
  if (behind < p.n) write_one(behind);
}

template <typename T>
void launch_backward(const Backward<T>& p, cudaStream_t stream) {
  const int64_t packs = (p.n + kPackWidth<T> - 1) / kPackWidth<T>;
  int across = kWarp;
  while (across < kGradientThreads && across * kGradientPacks < packs) across *= 2;
  const int down = kGradientThreads / across;
  const int64_t chunk = across * kGradientPacks, blocks = (p.rows + down - 1) / down;
  const bool is_aligned =
      (reinterpret_cast<uintptr_t>(p.input.data) - reinterpret_cast<uintptr_t>(p.output.data)) %
              16 ==
          0 &&
      (p.input.stride - p.output.stride) % kPackWidth<T> == 0;
  opwright::launch_behind(is_aligned ? backward_kernel<true, T> : backward_kernel<false, T>,
                          dim3(static_cast<unsigned>((packs + chunk - 1) / chunk),
                               static_cast<unsigned>(blocks < kMaxGridY ? blocks : kMaxGridY),
                               static_cast<unsigned>((blocks + kMaxGridY - 1) / kMaxGridY)),
                          dim3(across, down), 0, stream, p);
}

constexpr int kTotalThreads = 1024;

// The sum of a row of losses, or their mean over those that have a target, in a fixed order.
__global__ void __launch_bounds__(kTotalThreads)
    total_kernel(View<const double, 2> loss, View<const int64_t, 2> target, int64_t ignore_index,
                 bool is_mean, double* total, double* weight) {
  __shared__ double parts[2][kTotalThreads / kWarp];
  opwright::let_next_start();  // waits for the kernel in front, too
  const int64_t i = blockIdx.x;
  double sum = 0, count = 0;
  for (int64_t row = threadIdx.x; row < loss.size(1); row += kTotalThreads) {
    sum += loss(i, row);
    count += target(i, row) != ignore_index;
  }
  sum = opwright::warp_sum(sum), count = opwright::warp_sum(count);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (lane == 0) parts[0][warp] = sum, parts[1][warp] = count;
  __syncthreads();
  if (warp != 0) return;
  sum = opwright::warp_sum(parts[0][lane]), count = opwright::warp_sum(parts[1][lane]);
  if (lane != 0) return;
  total[i] = is_mean ? sum / count : sum;
  weight[i] = is_mean ? 1 / count : 1;
}

__global__ void __launch_bounds__(kThreads)
    spread_kernel(View<const double, 1> grad_total, View<const double, 1> weight, int64_t n,
                  int64_t count, double* grad_loss) {
  opwright::let_next_start();  // waits for the kernel in front, too
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at < count) grad_loss[at] = grad_total(at / n) * weight(at / n);
}

}  // namespace opwright_ops
