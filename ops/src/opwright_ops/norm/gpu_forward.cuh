// Norms of rows: each row is read once and written once, where it fits in the registers or the
// shared memory of a block.
#pragma once

#include "gpu_team.cuh"

namespace opwright_ops {

enum class Norm { rms, add_rms, layer };

template <typename T, typename W>
struct Forward {
  int64_t rows, n;
  RowsOf<const T> input, residual;
  Columns<W> weight, bias;
  compute_t<T> eps;
  RowsOf<T> output, sum;
};

// kIsStaged: packs are copied to shared memory, and read from there in each pass.
template <typename T, typename W, Norm kNorm, int kPacks, bool kIsStaged>
__global__ void __launch_bounds__(kPacks == 4 ? 512 : kMaxThreads) norm_kernel(Forward<T, W> p) {
  using S = compute_t<T>;
  using Part = Slice<T, kPacks>;
  using Index = typename Part::Index;
  constexpr int N = Part::N;
  constexpr bool kIsLayer = kNorm == Norm::layer, kIsHeld = Part::kIsHeld;
  // Up to 4 packs in registers are unpacked, less the mean; 8 are kept as they lie in memory.
  constexpr bool kKeepsNumbers = kIsHeld && kPacks <= 4 && !kIsStaged;
  // The mean is rounded: the sum of the differences to it tells by how much, and corrects it and
  // the squares. Sums of equal 16-bit numbers are exact, and other errors are below their
  // precision.
  constexpr bool kCorrectsMean = kIsLayer && sizeof(T) > 2;
  constexpr int kSums = kCorrectsMean ? 2 : 1;
  using Group = Team<S, false, kSums>;
  __shared__ __align__(16) unsigned char sums_bytes[Group::bytes(kMaxThreads, 1)];
  Group team(sums_bytes, 1);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_row = row < p.rows;
  // Teams within a warp take part in its shuffles; others go.
  if (!is_row && blockDim.x >= kWarp) return;
  const Part mine(is_row ? p.n : 0, team);
  // Calls body(k, column, is_there) for the packs of this thread. Where they are held, those behind
  // the end of the row are zeros.
  const bool is_last_there =  // for a warp
      mine.first - static_cast<Index>(threadIdx.x % kWarp * N) + (kPacks - 1) * mine.step < mine.n;
  const auto each = [&](const auto& body) {
    if constexpr (kIsHeld) {
      OPWRIGHT_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        const Index column = mine.first + k * mine.step;
        const bool is_there = column < mine.n;
        // Up to 4 packs are computed without a test, as zeros behind the end; only the last is
        // tested, once for a warp.
        if (kPacks > 4 ? is_there : k == 0 || k < kPacks - 1 || is_last_there)
          body(k, column, is_there);
      }
    } else {
      mine.each([&](int k, Index column) { body(k, column, true); });
    }
  };
  opwright::let_next_start();  // waits for the kernel in front, too

  const T* from = p.input.row(row);
  Pack<T, N> packs[kIsStaged ? 1 : Part::kHeld] = {};
  extern __shared__ __align__(16) unsigned char staged_bytes[];
  // Those of all threads lie side by side; the residual's are behind the input's.
  Pack<T, N>* const staged =
      reinterpret_cast<Pack<T, N>*>(staged_bytes) + threadIdx.y * blockDim.x + threadIdx.x;
  const int apart = blockDim.x * blockDim.y;
  const auto pack = [&](int k) -> Pack<T, N>& {
    if constexpr (kIsStaged)
      return staged[k * apart];
    else
      return packs[k];
  };
  if constexpr (kIsStaged) {
    OPWRIGHT_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      const Index column = mine.first + k * mine.step;
      const bool is_there = column < mine.n;
      const Index at = is_there ? column : 0;
      opwright::copy_async(&pack(k), from + at, is_there);
      if (kNorm == Norm::add_rms)
        opwright::copy_async(&pack(kPacks + k), p.residual.row(row) + at, is_there);
    }
    opwright::wait_for_copies();
  } else if constexpr (kNorm != Norm::add_rms) {
    mine.fetch(from, packs);
  }
  if constexpr (kNorm == Norm::add_rms) {
    T* sums = p.sum.row(row);
    each([&](int k, Index column, bool is_there) {
      if (!is_there) return;
      S x[N], y[N];
      if constexpr (kIsStaged) {
        opwright::unpack(pack(k), x);
        opwright::unpack(pack(kPacks + k), y);
      } else {
        mine.values(from, column, x);
        mine.values(p.residual.row(row), column, y);
      }
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) x[j] += y[j];
      if constexpr (kIsHeld) pack(k) = opwright::pack_of<T>(x);
      mine.store(sums, column, x);
    });
    from = sums;
  }
  S numbers[kKeepsNumbers ? kPacks : 1][N];
  if constexpr (kKeepsNumbers) {
    OPWRIGHT_UNROLL
    for (int k = 0; k < kPacks; ++k) opwright::unpack(pack(k), numbers[k]);
  }
  const auto read = [&](int k, Index column, S(&x)[N]) {
    if constexpr (kKeepsNumbers) {
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) x[j] = numbers[k][j];
    } else if constexpr (kIsHeld) {
      opwright::unpack(pack(k), x);
    } else {
      mine.values(from, column, x);
    }
  };

  S mean = 0, shift = 0;
  if constexpr (kIsLayer) {
    S sums[1] = {};
    each([&](int k, Index column, bool) {
      S x[N];
      read(k, column, x);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) sums[0] += x[j];
    });
    team.add_up(sums);
    mean = sums[0] / S(p.n);
  }
  S sums[kSums] = {};  // of the squares, and of the differences to the mean
  each([&](int k, Index column, bool is_there) {
    S x[N];
    read(k, column, x);
    const int count = kIsHeld ? N : mine.count(column);
    const S less = is_there ? mean : S(0);
    OPWRIGHT_UNROLL
    for (int j = 0; j < N; ++j) {
      if (kIsLayer) x[j] = j < count ? x[j] - less : S(0);
      if constexpr (kKeepsNumbers) numbers[k][j] = x[j];
      sums[0] += x[j] * x[j];
      if constexpr (kCorrectsMean) sums[1] += x[j];
    }
  });
  team.add_up(sums);
  if constexpr (kCorrectsMean) {
    shift = sums[1] / S(p.n);
    sums[0] -= sums[1] * shift;
  }
  const S variance = sums[0] / S(p.n) + p.eps;
  S scale;
  if constexpr (sizeof(T) == 2)
    scale = rsqrtf(variance);
  else
    scale = S(1) / S(sqrt(variance));
  each([&](int k, Index column, bool is_there) {
    S x[N], w[N];
    read(k, column, x);
    OPWRIGHT_UNROLL
    for (int j = 0; j < N; ++j) {
      if constexpr (kIsLayer && !kKeepsNumbers) x[j] -= mean;
      if constexpr (kCorrectsMean) x[j] -= shift;
      x[j] *= scale;
    }
    const Index at = is_there ? column : 0;
    if (p.weight.data) {
      mine.values(p.weight, at, w);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) x[j] = rounded_product(x[j], w[j]);
    }
    if (kIsLayer && p.bias.data) {
      mine.values(p.bias, at, w);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) x[j] += w[j];
    }
    if (is_there) mine.store(p.output.row(row), column, x);
  });
}

template <Norm kNorm, typename T, typename W>
void norm_forward(const Forward<T, W>& p, bool is_aligned, cudaStream_t stream) {
  const int64_t packs = (p.n + kPackWidth<T> - 1) / kPackWidth<T>;
  const int multiprocessors = opwright::current_device().multiprocessors;
  const auto start = [&](auto kernel, int threads, int staged_packs) {
    // Few rows are spread over all multiprocessors.
    const int64_t spread = (p.rows + multiprocessors - 1) / multiprocessors;
    // Rather more than 256 threads in a block than fewer, since it takes time to start one. With
    // 224 threads a row, two of them in a block were slower.
    const int most = teams_in(threads < 224 ? (255 / threads + 1) * threads : 256, threads);
    const int teams = threads >= kWarp && spread < most ? static_cast<int>(spread) : most;
    const size_t bytes = size_t{16} * staged_packs * threads * teams;
    launch(kernel, (p.rows + teams - 1) / teams, dim3(threads, teams), 1, bytes, stream, p);
  };
  // float64 has the general kernel alone: its rows come from the first-level cache the second time.
  constexpr bool kHolds = sizeof(T) < 8;
  // What a staged block of 512 threads needs, with what the kernel declares; sm_75 has 64 KiB.
  const bool has_room = opwright::current_device().shared_bytes >= 72 << 10;
  const auto choose = [&]<int kPacks>(int threads) {
    if (!kHolds || !is_aligned) return start(norm_kernel<T, W, kNorm, 0, false>, threads, 0);
    // What is faster where: the layer norm has more instructions, and short or very long rows of
    // the RMS norm lose.
    if constexpr (kHolds && kNorm == Norm::add_rms && kPacks == 4) {
      if (!has_room) return start(norm_kernel<T, W, kNorm, 0, false>, threads, 0);
      start(norm_kernel<T, W, kNorm, kPacks, true>, threads, 2 * kPacks);
    } else if constexpr (kHolds) {
      if constexpr (kNorm == Norm::rms && kPacks > 1) {
        if (has_room && threads >= 128 && threads <= 512)
          return start(norm_kernel<T, W, kNorm, kPacks, true>, threads, kPacks);
      }
      start(norm_kernel<T, W, kNorm, kPacks, false>, threads, 0);
    }
  };
  if (packs <= kWarp)
    choose.template operator()<1>(power_of_two(packs));
  else if (packs <= 4 * 512)
    choose.template operator()<4>(whole_warps((packs + 3) / 4));
  else if (packs <= 8 * kMaxThreads)
    choose.template operator()<8>(whole_warps((packs + 7) / 8));
  else
    start(norm_kernel<T, W, kNorm, 0, false>, kMaxThreads, 0);
}

}  // namespace opwright_ops
