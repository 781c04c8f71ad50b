// Norms of rows: each row is read once and written once, where it fits in the registers of a block.
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

template <typename T, typename W, Norm kNorm, int kPacks>
__global__ void __launch_bounds__(kPacks == 4 ? 512 : kMaxThreads) norm_kernel(Forward<T, W> p) {
  using S = compute_t<T>;
  using Part = Slice<T, kPacks>;
  using Index = typename Part::Index;
  constexpr int N = Part::N;
  __shared__ S slots[Team<S, false, 1>::slots(kMaxThreads)];
  Team<S, false, 1> team(slots, 1);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool is_row = row < p.rows;
  // Teams within a warp take part in its shuffles; others go.
  if (!is_row && blockDim.x >= kWarp) return;
  const Part mine(is_row ? p.n : 0, team);
  opwright::let_next_start();  // waits for the kernel in front, too

  const T* from;
  Pack<T, N> packs[Part::kHeld];
  if constexpr (kNorm == Norm::add_rms) {
    T* sums = p.sum.row(row);
    mine.fetch(p.input.row(row), packs);
    mine.each([&](int k, Index column) {
      S x[N], y[N];
      mine.values(p.input.row(row), packs, k, column, x);
      mine.values(p.residual.row(row), column, y);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) x[j] += y[j];
      if constexpr (Part::kIsHeld) packs[k] = opwright::pack_of<T>(x);
      mine.store(sums, column, x);
    });
    from = sums;
  } else {
    from = p.input.row(row);
    mine.fetch(from, packs);
  }

  S mean = 0;
  if constexpr (kNorm == Norm::layer) {
    S sums[1] = {};
    mine.each([&](int k, Index column) {
      S x[N];
      mine.values(from, packs, k, column, x);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) sums[0] += x[j];
    });
    team.add_up(sums);
    mean = sums[0] / S(p.n);
  }
  S squares[1] = {};
  mine.each([&](int k, Index column) {
    S x[N];
    mine.values(from, packs, k, column, x);
    const int count = mine.count(column);
    OPWRIGHT_UNROLL
    for (int j = 0; j < N; ++j) {
      const S d = x[j] - mean;
      if (kNorm != Norm::layer || j < count) squares[0] += d * d;
    }
  });
  team.add_up(squares);
  const S scale = S(1) / S(sqrt(squares[0] / S(p.n) + p.eps));
  mine.each([&](int k, Index column) {
    S x[N], w[N];
    mine.values(from, packs, k, column, x);
    OPWRIGHT_UNROLL
    for (int j = 0; j < N; ++j) x[j] = (x[j] - mean) * scale;
    if (p.weight.data) {
      mine.values(p.weight, column, w);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) x[j] *= w[j];
    }
    if (kNorm == Norm::layer && p.bias.data) {
      mine.values(p.bias, column, w);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) x[j] += w[j];
    }
    mine.store(p.output.row(row), column, x);
  });
}

template <Norm kNorm, typename T, typename W>
void norm_forward(const Forward<T, W>& p, bool is_aligned, cudaStream_t stream) {
  const int64_t packs = (p.n + kPackWidth<T> - 1) / kPackWidth<T>;
  const int multiprocessors = opwright::current_device().multiprocessors;
  const auto start = [&](auto kernel, int threads) {
    // Few rows are spread over all multiprocessors.
    const int64_t spread = (p.rows + multiprocessors - 1) / multiprocessors;
    const int most = teams_in(256, threads);
    const int teams = threads >= kWarp && spread < most ? static_cast<int>(spread) : most;
    launch(kernel, (p.rows + teams - 1) / teams, dim3(threads, teams), 1, 0, stream, p);
  };
  // float64 has the general kernel alone: its rows come from the first-level cache the second time.
  constexpr bool kHolds = sizeof(T) < 8;
  const auto choose = [&]<int kPacks>(int threads) {
    if (kHolds && is_aligned)
      start(norm_kernel < T, W, kNorm, kHolds ? kPacks : 0 >, threads);
    else
      start(norm_kernel<T, W, kNorm, 0>, threads);
  };
  if (packs <= kWarp)
    choose.template operator()<1>(power_of_two(packs));
  else if (packs <= 4 * 512)
    choose.template operator()<4>(whole_warps((packs + 3) / 4));
  else if (packs <= 8 * kMaxThreads)
    choose.template operator()<8>(whole_warps((packs + 7) / 8));
  else
    start(norm_kernel<T, W, kNorm, 0>, kMaxThreads);
}

}  // namespace opwright_ops
