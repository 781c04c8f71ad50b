// Gradients of norms in one pass over the rows. The blocks stay, each with the sums of its rows for
// every column in shared memory; a second kernel adds those up.
#pragma once

#include "gpu_forward.cuh"

namespace opwright_ops {

template <typename T, typename W>
struct Backward {
  int64_t rows, n;
  RowsOf<const T> grad_output, grad_sum, input;
  Columns<W> weight;
  compute_t<T> eps;
  RowsOf<T> grad_input;
  // Sums of the columns: blocks x kinds x pitch, the kinds being weight and bias.
  compute_t<T>* partial;
  int64_t pitch;
  int32_t cluster;
  int32_t held;  // packs of a thread
  bool stages_weight;
  // Where a row does not fit: its mean and its scale, for the sums of the columns.
  compute_t<T>* moments;
};

// The median of a row's first three elements. Sums of differences to it, set right by what they say
// of the mean, lose no digit that a 16-bit result has, unless it is an outlier among thousands.
template <typename T>
struct Origin {
  T a, b, c;
  Origin() = default;
  __device__ explicit Origin(const T* row) : a(row[0]), b(row[1]), c(row[2]) {}
  __device__ compute_t<T> get() const {
    const compute_t<T> x = a, y = b, z = c;
    const auto low = x < y ? x : y, high = x < y ? y : x;
    return z < low ? low : z < high ? z : high;
  }
};

// 16 bytes of sums.
template <typename S>
struct alignas(16) Quad {
  static constexpr int kCount = 16 / sizeof(S);
  S of[kCount];
};

// Packs of a row that a thread keeps, and threads of a block that goes through many rows.
inline constexpr int kBackwardPacks = 4;
OPWRIGHT_HOST_DEVICE constexpr int backward_threads(int packs) {
  return packs > 1 ? kMaxThreads / 2 : kMaxThreads;
}

// The rows ahead of the one that is computed, on their way into shared memory: registers could not
// hold enough of them to keep the memory busy. Each thread copies and reads packs of its own.
template <typename T, int kPacks, int kTensors>
class Ahead {
 public:
  static constexpr int N = kPackWidth<T>;
  static constexpr int kRows = 2;
  OPWRIGHT_HOST_DEVICE static constexpr size_t bytes(int threads) {
    return size_t{kRows} * kTensors * kPacks * 16 * threads;
  }

  __device__ Ahead(void* memory, int threads, int thread)
      : packs_(static_cast<Pack<T, N>*>(memory) + thread), threads_(threads) {}

  // Starts to copy a pack of a row of one of the tensors.
  __device__ OPWRIGHT_INLINE void copy(int tensor, const T* row, int k, int32_t column) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(at(tensor, k)));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(row + column)
                 : "memory");
  }
  // After the copies of a row.
  __device__ OPWRIGHT_INLINE void next() {
    asm volatile("cp.async.commit_group;" ::: "memory");
    row_ = row_ + 1 == kRows ? 0 : row_ + 1;
  }
  // Waits for the copies of the oldest row, which `at` then has and `copy` overwrites.
  __device__ OPWRIGHT_INLINE void wait() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kRows - 1) : "memory");
  }
  __device__ OPWRIGHT_INLINE Pack<T, N>* at(int tensor, int k) const {
    return packs_ + ((row_ * kTensors + tensor) * kPacks + k) * threads_;
  }

 private:
  Pack<T, N>* packs_;
  int threads_, row_ = 0;
};

template <typename T, typename W, Norm kNorm, int kPacks, bool kIsCluster>
__global__ void __launch_bounds__(backward_threads(kPacks)) norm_backward_kernel(Backward<T, W> p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kIsCluster) return;  // never called: no clusters, so no code for them
#endif
  using S = compute_t<T>;
  using Part = Slice<T, kPacks>;
  using Group = Team<S, kIsCluster, kNorm == Norm::layer ? 4 : 2>;
  using Index = typename Part::Index;
  constexpr int N = Part::N, kQuads = N / Quad<S>::kCount;
  constexpr bool kIsLayer = kNorm == Norm::layer;
  constexpr int kKinds = kIsLayer ? 2 : 1;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  __shared__ __align__(16) S slots[Group::slots(backward_threads(kPacks))];
  Quad<S>* sums = reinterpret_cast<Quad<S>*>(shared_bytes);
  Group team(slots, kIsCluster ? p.cluster : 1);
  const int threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int held = Part::kIsHeld ? kPacks : p.held;
  const bool has_sums = p.partial != nullptr;
  // Sums of the columns: in registers beside packs that are held, else in shared memory.
  S weight_sums[Part::kHeld][N] = {}, bias_sums[kIsLayer ? Part::kHeld : 1][N] = {};
  if (!Part::kIsHeld && has_sums) {
    for (int i = 0; i < kKinds * held * kQuads; ++i) sums[i * threads + thread] = Quad<S>{};
  }
  if constexpr (kIsCluster) wait_for_cluster();  // its blocks have started, and can be written to
  opwright::wait_for_previous();

  const int64_t group = blockIdx.x / (kIsCluster ? p.cluster : 1);
  const int64_t teams = int64_t{gridDim.x} / (kIsCluster ? p.cluster : 1) * blockDim.y;
  const int64_t first = group * blockDim.y + threadIdx.y;
  // All teams go as far, those without a row too: some share a warp.
  const int64_t end = (p.rows + teams - 1) / teams * teams;
  Ahead<T, Part::kHeld, kNorm == Norm::add_rms ? 3 : 2> ahead(shared_bytes, threads, thread);
  // The weight, in shared memory for all teams of the block. One of T is always there: see start.
  constexpr int M = kPackWidth<W> < N ? kPackWidth<W> : N;
  const bool is_staged = Part::kIsHeld && (sizeof(W) == sizeof(T) || p.stages_weight);
  Pack<W, M>* weights =
      reinterpret_cast<Pack<W, M>*>(shared_bytes + ahead.bytes(threads)) + threadIdx.x;
  if constexpr (Part::kIsHeld) {
    if (p.weight.data && is_staged && threadIdx.y == 0) {
      const Part part(p.n, team);
      part.each([&](int k, Index column) {
        OPWRIGHT_UNROLL
        for (int i = 0; i < N / M; ++i) {
          weights[(k * (N / M) + i) * blockDim.x] =
              opwright::load_pack<M>(p.weight.data + column + i * M);
        }
      });
    }
    __syncthreads();
  }
  const auto start = [&](int64_t row) {
    if constexpr (Part::kIsHeld) {
      if (row < p.rows) {
        Part(p.n, team).each([&](int k, Index column) {
          ahead.copy(0, p.input.row(row), k, column);
          ahead.copy(1, p.grad_output.row(row), k, column);
          if (kNorm == Norm::add_rms) ahead.copy(2, p.grad_sum.row(row), k, column);
        });
      }
      ahead.next();
    }
  };
  for (int i = 0; i < ahead.kRows; ++i) start(first + i * teams);
  // Teams of several warps save one of two waits for each other: see Origin.
  constexpr bool kMayBeOnePass = kIsLayer && sizeof(T) == 2 && kPacks != 1;
  const bool is_one_pass = kMayBeOnePass && team.size() > kWarp;
  Origin<T> next_origin;
  if (is_one_pass && first < p.rows) next_origin = Origin<T>(p.input.row(first));
  for (int64_t row = first; row < end; row += teams) {
    const Part mine(row < p.rows ? p.n : 0, team);
    const T *from = p.input.row(row), *grads = p.grad_output.row(row);
    if constexpr (Part::kIsHeld) ahead.wait();
    const auto read_one = [&](int tensor, const T* of, int k, Index column, S(&to)[N]) {
      if constexpr (Part::kIsHeld)
        opwright::unpack(*ahead.at(tensor, k), to);
      else
        mine.values(of, column, to);
    };
    const auto read = [&](int k, Index column, S(&x)[N], S(&g)[N]) {
      read_one(0, from, k, column, x);
      read_one(1, grads, k, column, g);
    };
    const auto weigh = [&](int k, Index column, S(&g)[N]) {
      if (!p.weight.data) return;
      S w[N];
      if (is_staged) {
        OPWRIGHT_UNROLL
        for (int i = 0; i < N / M; ++i) {
          compute_t<W> part[M];
          opwright::unpack(weights[(k * (N / M) + i) * blockDim.x], part);
          OPWRIGHT_UNROLL
          for (int j = 0; j < M; ++j) w[i * M + j] = part[j];
        }
      } else {
        mine.values(p.weight, column, w);
      }
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) g[j] *= w[j];
    };
    S mean = 0, mean_grad = 0;
    // Of the squares of the differences to the mean, and of their products with the gradient.
    S both[2] = {};
    const auto add_moments = [&](S origin, const auto& add_others) {
      mine.each([&](int k, Index column) {
        S x[N], g[N];
        read(k, column, x, g);
        weigh(k, column, g);
        const int count = mine.count(column);
        OPWRIGHT_UNROLL
        for (int j = 0; j < N; ++j) {
          const S d = !kIsLayer || j < count ? x[j] - origin : S(0);
          both[0] += d * d;
          both[1] += d * g[j];
          add_others(d, g[j]);
        }
      });
    };
    if constexpr (kMayBeOnePass)
      if (is_one_pass) {
        const S origin = next_origin.get();
        if (row + teams < p.rows) next_origin = Origin<T>(p.input.row(row + teams));
        S means[2] = {};
        add_moments(origin, [&](S d, S g) { means[0] += d, means[1] += g; });
        S all[4] = {both[0], both[1], means[0], means[1]};
        team.add_up(all);
        const S shift = all[2] / S(p.n);
        mean = origin + shift, mean_grad = all[3] / S(p.n);
        both[0] = all[0] - all[2] * shift, both[1] = all[1] - all[3] * shift;
      }
    if (!is_one_pass) {
      if constexpr (kIsLayer) {
        S means[2] = {};
        mine.each([&](int k, Index column) {
          S x[N], g[N];
          read(k, column, x, g);
          weigh(k, column, g);
          OPWRIGHT_UNROLL
          for (int j = 0; j < N; ++j) means[0] += x[j], means[1] += g[j];
        });
        team.add_up(means);
        mean = means[0] / S(p.n), mean_grad = means[1] / S(p.n);
      }
      add_moments(mean, [](S, S) {});
      team.add_up(both);
    }
    const S scale = S(1) / S(sqrt(both[0] / S(p.n) + p.eps));
    const S slope = both[1] * scale / S(p.n);
    if (!Part::kIsHeld && p.moments && team.id() == 0) {
      p.moments[2 * row] = mean, p.moments[2 * row + 1] = scale;
    }
    // A pack's place is free for a later row as soon as it has been read.
    const int64_t later = row + ahead.kRows * teams;
    mine.each([&](int k, Index column) {
      S x[N], g[N], to_input[N];
      read(k, column, x, g);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) x[j] = (x[j] - mean) * scale, to_input[j] = g[j];
      weigh(k, column, to_input);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) {
        to_input[j] = (to_input[j] - mean_grad - x[j] * slope) * scale;
      }
      if constexpr (kNorm == Norm::add_rms) {
        S other[N];
        read_one(2, p.grad_sum.row(row), k, column, other);
        OPWRIGHT_UNROLL
        for (int j = 0; j < N; ++j) to_input[j] += other[j];
      }
      mine.stream(p.grad_input.row(row), column, to_input);
      if constexpr (Part::kIsHeld) {
        if (later < p.rows) {
          ahead.copy(0, p.input.row(later), k, column);
          ahead.copy(1, p.grad_output.row(later), k, column);
          if (kNorm == Norm::add_rms) ahead.copy(2, p.grad_sum.row(later), k, column);
        }
        OPWRIGHT_UNROLL
        for (int j = 0; j < N; ++j) {
          weight_sums[k][j] += g[j] * x[j];
          if (kIsLayer) bias_sums[k][j] += g[j];
        }
      } else if (has_sums) {
        OPWRIGHT_UNROLL
        for (int j = 0; j < N; ++j) {
          S* to =
              sums[(k * kQuads + j / Quad<S>::kCount) * threads + thread].of + j % Quad<S>::kCount;
          *to += g[j] * x[j];
          if (kIsLayer) to[int64_t{held} * kQuads * threads * Quad<S>::kCount] += g[j];
        }
      }
    });
    if constexpr (Part::kIsHeld) ahead.next();
  }
  if (!has_sums) return;
  if constexpr (Part::kIsHeld) {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    OPWRIGHT_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) {
        S* to =
            sums[(k * kQuads + j / Quad<S>::kCount) * threads + thread].of + j % Quad<S>::kCount;
        *to = weight_sums[k][j];
        if (kIsLayer)
          to[int64_t{held} * kQuads * threads * Quad<S>::kCount] = bias_sums[kIsLayer ? k : 0][j];
      }
    }
  }
  __syncthreads();
  opwright::let_next_start();
  const int across = blockDim.x, many = kKinds * held * kQuads * across;
  S* to = p.partial + group * kKinds * p.pitch;
  for (int i = thread; i < many; i += threads) {
    const int x = i / kQuads % across, q = i % kQuads, slab = i / kQuads / across;
    const int kind = slab / held, k = slab % held;
    const int place = (slab * kQuads + q) * threads + x;
    Quad<S> sum = sums[place];
    for (int y = 1; y < static_cast<int>(blockDim.y); ++y) {
      const Quad<S> other = sums[place + y * across];
      OPWRIGHT_UNROLL
      for (int j = 0; j < Quad<S>::kCount; ++j) sum.of[j] += other.of[j];
    }
    const int64_t id = (kIsCluster ? cluster_rank() * across : 0) + x;
    const int64_t column = (id + int64_t{k} * team.size()) * N + q * Quad<S>::kCount;
    if (column < p.pitch) *reinterpret_cast<Quad<S>*>(to + kind * p.pitch + column) = sum;
  }
}

// The gradients of weight and bias where rows do not fit: one thread for each column, over the rows
// of a part.
template <typename T, typename W>
__global__ void __launch_bounds__(256)
    column_gradient_kernel(Backward<T, W> p, int kinds, int64_t rows) {
  using S = compute_t<T>;
  opwright::wait_for_previous();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= p.n) return;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * rows;
  const int64_t end = first + rows < p.rows ? first + rows : p.rows;
  S weight = 0, bias = 0;
  for (int64_t row = first; row < end; ++row) {
    const S g = p.grad_output.row(row)[column];
    const S x = p.input.row(row)[column];
    weight += g * ((x - p.moments[2 * row]) * p.moments[2 * row + 1]);
    bias += g;
  }
  S* to = p.partial + static_cast<int64_t>(blockIdx.y) * kinds * p.pitch + column;
  to[0] = weight;
  if (kinds == 2) to[p.pitch] = bias;
}

// weight[c] and bias[c]: the sums of column c over `count` blocks.
template <typename S, typename W>
__global__ void __launch_bounds__(256)
    gradient_sum_kernel(const S* partial, int32_t count, int kinds, int64_t pitch, int64_t n,
                        W* weight, int64_t weight_stride, W* bias, int64_t bias_stride) {
  __shared__ S shared[256 / kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  const int kind = blockIdx.y;
  S sum = 0;
  opwright::let_next_start();  // waits for the kernel in front, too
  if (column < n) {
    const S* at = partial + kind * pitch + column;
    const int64_t step = kinds * pitch;
    constexpr int kAtOnce = 16;
    for (int32_t row = warp; row < count; row += kAtOnce * warps) {
      S values[kAtOnce];
      OPWRIGHT_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        values[i] = row + i * warps < count ? at[(row + i * warps) * step] : S(0);
      }
      OPWRIGHT_UNROLL
      for (int i = 0; i < kAtOnce; ++i) sum += values[i];
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  W* to = kind == 0 ? weight : bias;
  if (warp > 0 || column >= n || !to) return;
  sum = 0;
  for (int w = 0; w < warps; ++w) sum += shared[w][lane];
  to[column * (kind == 0 ? weight_stride : bias_stride)] = W(sum);
}

template <Norm kNorm, typename T, typename W>
void norm_backward(Backward<T, W> p, bool is_aligned, View<W, 1> grad_weight, View<W, 1> grad_bias,
                   cudaStream_t stream,
                   const opwright::Device& device = opwright::current_device()) {
  using S = compute_t<T>;
  constexpr int N = kPackWidth<T>, kPacks = kBackwardPacks;
  constexpr int kKinds = kNorm == Norm::layer ? 2 : 1, kTensors = kNorm == Norm::add_rms ? 3 : 2;
  const int64_t packs = (p.n + N - 1) / N;
  const bool has_sums = grad_weight.defined() || grad_bias.defined();
  p.pitch = (p.n + 7) / 8 * 8;
  int64_t count = 0;
  // Starts a kernel for rows of a cluster, in as many teams as shared memory has room for, and
  // returns true if that is one at least.
  const auto start = [&]<int kHeld, bool kIsHeld, bool kIsCluster>(int cluster, int threads,
                                                                   int teams) {
    using Group = Team<S, kIsCluster, kNorm == Norm::layer ? 4 : 2>;
    const size_t room =
        device.shared_bytes - sizeof(S) * Group::slots(backward_threads(kIsHeld ? kHeld : 0));
    const size_t values = size_t{N} * kHeld * threads;
    const auto bytes_of = [&](bool stages_weight) {
      const size_t of_rows = kIsHeld ? Ahead<T, kHeld, kTensors>::bytes(threads * teams) : 0;
      const size_t of_weight = stages_weight ? values * sizeof(W) : 0;
      const size_t of_sums = has_sums ? kKinds * values * sizeof(S) * teams : 0;
      return of_rows + of_weight > of_sums ? of_rows + of_weight : of_sums;
    };
    p.stages_weight = kIsHeld && p.weight.data;
    const int whole_warp = threads < kWarp ? kWarp / threads : 1;  // of teams
    while (teams > whole_warp && bytes_of(p.stages_weight) > room) teams -= whole_warp;
    if (sizeof(W) > sizeof(T) && bytes_of(p.stages_weight) > room) p.stages_weight = false;
    const size_t bytes = bytes_of(p.stages_weight);
    if (bytes > room) return false;
    const int64_t wanted = (p.rows + teams - 1) / teams;
    int64_t groups = opwright::clusters_within(device, cluster);
    // No more than share the rows evenly: a last round for a few would take as long as the others.
    const int64_t rounds = groups > 0 ? (wanted + groups - 1) / groups : wanted;
    groups = (wanted + rounds - 1) / rounds;
    if (has_sums) p.partial = opwright::scratch<S>(groups * kKinds * p.pitch);
    count = groups, p.held = kHeld, p.cluster = cluster;
    launch(norm_backward_kernel < T, W, kNorm, kIsHeld ? kHeld : 0, kIsCluster >, groups * cluster,
           dim3(threads, teams), cluster, bytes, stream, p);
    return true;
  };
  const auto start_any = [&]<bool kIsHeld>() {
    if (packs <= kWarp) {
      const int threads = power_of_two(packs);
      return start.template operator()<1, kIsHeld, false>(1, threads, kMaxThreads / threads);
    }
    constexpr int kMost = backward_threads(kPacks);
    const int most_cluster = device.capability >= 90 ? kMaxCluster : 1;
    // With more than two blocks, two teams for each: they wait for each other longer.
    for (const int cluster : {1, 2, kMaxCluster}) {
      const int64_t each = (packs + cluster - 1) / cluster;
      if (each > int64_t{kPacks} * kMost || cluster > most_cluster) continue;
      const int threads = whole_warps((each + kPacks - 1) / kPacks);
      const int teams = teams_in(kMost, threads);
      if (cluster == 1 ? start.template operator()<kPacks, kIsHeld, false>(1, threads, teams)
                       : start.template operator()<kPacks, kIsHeld, true>(
                             cluster, threads, teams < kMaxClusterTeams ? teams : kMaxClusterTeams))
        return true;
    }
    return false;
  };
  bool is_started = false;
  if constexpr (sizeof(T) < 8) {
    if (is_aligned) is_started = start_any.template operator()<true>();
  }
  if (!is_started) is_started = start_any.template operator()<false>();
  if (!is_started) {
    p.cluster = 1;
    if (has_sums) p.moments = opwright::scratch<S>(2 * p.rows);
    launch(norm_backward_kernel<T, W, kNorm, 0, false>, p.rows, dim3(backward_threads(kPacks)), 1,
           0, stream, p);
    if (!has_sums) return;
    const int64_t across = (p.n + 255) / 256, depth = 64;
    count = (p.rows + depth - 1) / depth < 65535 ? (p.rows + depth - 1) / depth : 65535;
    const int64_t rows = (p.rows + count - 1) / count;
    p.partial = opwright::scratch<S>(count * kKinds * p.pitch);
    opwright::launch_behind(column_gradient_kernel<T, W>, dim3(unsigned(across), unsigned(count)),
                            dim3(256), 0, stream, p, kKinds, rows);
  }
  if (!has_sums) return;
  const auto data = [](const View<W, 1>& view) { return view.defined() ? view.data() : nullptr; };
  opwright::launch_behind(gradient_sum_kernel<S, W>,
                          dim3(unsigned((p.n + kWarp - 1) / kWarp), kKinds), dim3(256), 0, stream,
                          p.partial, int32_t(count), kKinds, p.pitch, p.n, data(grad_weight),
                          grad_weight.defined() ? grad_weight.stride(0) : 0, data(grad_bias),
                          grad_bias.defined() ? grad_bias.stride(0) : 0);
}

}  // namespace opwright_ops
