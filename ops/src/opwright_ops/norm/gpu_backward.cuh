// Gradients of norms in one pass over the rows. The blocks stay, each with the sums of its rows for
// every column in shared memory; a second kernel adds those up.
#pragma once

#include <opwright/scratch.h>

#include "gpu_forward.cuh"

namespace opwright_ops {

template <typename T, typename W>
struct Backward {
  int64_t rows, n;
  RowsOf<const T> grad_output, grad_sum, input;
  Columns<W> weight;
  compute_t<T> eps;
  RowsOf<T> grad_input;
  // Sums of the columns that each group of teams leaves: see ColumnSums.
  compute_t<T>* partial;
  int32_t cluster;
  int32_t held;                 // packs of a thread
  int32_t rounds;               // rows of a team, at most
  uint32_t weight_at, team_at;  // in shared memory, bytes
  bool stages_weight;
  // Where a row does not fit: its mean and its scale, for the sums of the columns.
  compute_t<T>* moments;
};

// Layer norms of 16-bit rows take sums of differences to the median of a row's first three
// elements, which the mean then sets right. No digit of a 16-bit result is lost, unless the median
// is an outlier among thousands. It saves one of two passes, and one of two waits for each other.
template <typename T, Norm kNorm>
inline constexpr bool kIsOnePass = kNorm == Norm::layer && sizeof(T) == 2;

template <typename T>
__device__ OPWRIGHT_INLINE compute_t<T> median_of_three(const T* row) {
  const compute_t<T> a = row[0], b = row[1], c = row[2];
  return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

// 16 bytes of sums.
template <typename S>
struct alignas(16) Quad {
  static constexpr int kCount = 16 / sizeof(S);
  S of[kCount];
  __device__ OPWRIGHT_INLINE void add(const Quad& other) {
    OPWRIGHT_UNROLL
    for (int j = 0; j < kCount; ++j) of[j] += other.of[j];
  }
};

// Packs of a row that a thread keeps, and threads of a block that goes through many rows.
inline constexpr int kBackwardPacks = 4;
OPWRIGHT_HOST_DEVICE constexpr int backward_threads(int packs) {
  return packs > 1 ? kMaxThreads / 2 : kMaxThreads;
}

// A team's rows on their way through shared memory: registers could not hold enough of them to keep
// the memory busy. Each thread copies and reads packs of its own, zeros behind the end of a row.
template <typename T, typename W, Norm kNorm, int kPacks>
class Staged {
 public:
  static constexpr int N = kPackWidth<T>, kTensors = kNorm == Norm::add_rms ? 3 : 2;
  static constexpr int kRows = 2;  // one that is computed, one on its way
  OPWRIGHT_HOST_DEVICE static constexpr int bytes(int threads) {
    return (threads + kWarp - 1) / kWarp * kRows * (kWarpBytes + kFirstBytes);
  }

  // For a thread of a block, and the rows from `first` on in steps of `teams`.
  __device__ Staged(unsigned char* memory, int threads, int thread, const Backward<T, W>& p,
                    int64_t first, int64_t teams, int column, int step)
      : p_(p), teams_(teams), step_(step), column_(column), is_first_lane_(thread % kWarp == 0) {
    const int warp = thread / kWarp, warps = (threads + kWarp - 1) / kWarp;
    packs_ = memory + warp * (kRows * kWarpBytes) + thread % kWarp * 16;
    firsts_ = kFirstBytes ? memory + warps * (kRows * kWarpBytes) + warp * (kRows * kFirstBytes)
                          : packs_ - threadIdx.x * 16;
    input_ = p.input.row(first) + column;
    grad_ = p.grad_output.row(first) + column;
    if (kNorm == Norm::add_rms) sum_ = p.grad_sum.row(first) + column;
    result_ = p.grad_input.row(first) + column;
  }

  // Starts to copy a pack of the next row. It takes the place of the row that is computed.
  __device__ OPWRIGHT_INLINE void copy(int k, bool is_there, bool is_row) {
    opwright::copy_async(at(0, k), input_ + k * step_, is_there && is_row);
    opwright::copy_async(at(1, k), grad_ + k * step_, is_there && is_row);
    if (kNorm == Norm::add_rms)
      opwright::copy_async(at(2, k), sum_ + k * step_, is_there && is_row);
    if (kFirstBytes > 0 && k == 0 && is_first_lane_)
      opwright::copy_async(firsts_ + place_ * kFirstBytes, input_ - column_, is_row);
  }
  // After the copies of a row.
  __device__ OPWRIGHT_INLINE void next() {
    opwright::end_copies();
    input_ += teams_ * p_.input.stride, grad_ += teams_ * p_.grad_output.stride;
    if (kNorm == Norm::add_rms) sum_ += teams_ * p_.grad_sum.stride;
    place_ ^= 1;
  }
  // Waits for the copies of the oldest row.
  __device__ OPWRIGHT_INLINE void wait() const { opwright::wait_for_copies<kRows - 1>(); }
  __device__ OPWRIGHT_INLINE void read(int tensor, int k, compute_t<T> (&to)[N]) const {
    opwright::unpack(*reinterpret_cast<const Pack<T, N>*>(at(tensor, k)), to);
  }
  __device__ OPWRIGHT_INLINE compute_t<T> origin() const {
    __syncwarp();  // another lane has copied it
    constexpr int kRowBytes = kFirstBytes ? kFirstBytes : kWarpBytes;
    const auto words = *reinterpret_cast<const uint2*>(firsts_ + place_ * kRowBytes);
    return median_of_three(opwright::bit_cast<Pack<T, 8 / sizeof(T)>>(words).elements);
  }
  __device__ OPWRIGHT_INLINE void write(int k, const compute_t<T> (&values)[N], bool is_there) {
    store_once(result_ + k * step_, opwright::pack_of<T>(values), is_there);
  }
  __device__ OPWRIGHT_INLINE void next_result() { result_ += teams_ * p_.grad_input.stride; }

 private:
  static constexpr int kWarpBytes = kTensors * kPacks * kWarp * 16;  // of a row
  // A warp has a copy of a row's first pack. A team of a few lanes reads that of its first lane.
  static constexpr int kFirstBytes = kIsOnePass<T, kNorm> && kPacks > 1 ? 16 : 0;

  __device__ OPWRIGHT_INLINE unsigned char* at(int tensor, int k) const {
    return packs_ + place_ * kWarpBytes + (tensor * kPacks + k) * (kWarp * 16);
  }

  const Backward<T, W>& p_;
  int64_t teams_;
  int step_, column_, place_ = 0;
  bool is_first_lane_;
  unsigned char *packs_, *firsts_;
  const T *input_, *grad_, *sum_ = nullptr;
  T* result_;
};

// The sums of columns over a team's rows. `groups` leave them: for each kind (weight, bias), pack
// of a thread and quad of a pack, a quad of each of `size` threads.
template <typename S>
struct ColumnSums {
  const Quad<S>* partial;
  int32_t groups, kinds, packs, quads;
  int64_t size;
};

// The weight's packs of a team, in shared memory for all teams of the block.
template <typename W, int kPacks, int N>
struct StagedWeight {
  static constexpr int M = kPackWidth<W> < N ? kPackWidth<W> : N;
  OPWRIGHT_HOST_DEVICE static constexpr int bytes(int threads) {
    return (threads + kWarp - 1) / kWarp * kPacks * kWarp * N * int{sizeof(W)};
  }
  Pack<W, M>* packs;

  __device__ explicit StagedWeight(unsigned char* memory)
      : packs(reinterpret_cast<Pack<W, M>*>(memory + threadIdx.x / kWarp * bytes(kWarp)) +
              threadIdx.x % kWarp) {}
  // Ones where there is no weight.
  __device__ OPWRIGHT_INLINE void copy(int k, const W* from) {
    OPWRIGHT_UNROLL
    for (int i = 0; i < N / M; ++i) {
      Pack<W, M> pack;
      OPWRIGHT_UNROLL
      for (int j = 0; j < M; ++j) pack.elements[j] = W(1.0f);
      if (from) pack = opwright::load_pack<M>(from + i * M);
      packs[(k * (N / M) + i) * kWarp] = pack;
    }
  }
  template <typename S>
  __device__ OPWRIGHT_INLINE void read(int k, S (&to)[N]) const {
    OPWRIGHT_UNROLL
    for (int i = 0; i < N / M; ++i) {
      compute_t<W> part[M];
      opwright::unpack(packs[(k * (N / M) + i) * kWarp], part);
      OPWRIGHT_UNROLL
      for (int j = 0; j < M; ++j) to[i * M + j] = part[j];
    }
  }
};

template <typename T, typename W, Norm kNorm, int kPacks, bool kIsCluster>
__global__ void __launch_bounds__(backward_threads(kPacks)) norm_backward_kernel(Backward<T, W> p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (kIsCluster) return;  // never called: no clusters, so no code for them
#endif
  using S = compute_t<T>;
  using Part = Slice<T, kPacks>;
  using Index = typename Part::Index;
  constexpr int N = Part::N, kQuads = N / Quad<S>::kCount;
  constexpr bool kIsLayer = kNorm == Norm::layer, kIsHeld = Part::kIsHeld;
  constexpr bool kTakesDifferences = kIsOnePass<T, kNorm>;
  constexpr bool kIsExact = sizeof(T) == 2 && sizeof(W) == 2;  // the product of both
  constexpr int kKinds = kIsLayer ? 2 : 1, kSums = kTakesDifferences ? 4 : 2;
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Quad<S>* const sums = reinterpret_cast<Quad<S>*>(shared_bytes);
  Team<S, kIsCluster, kSums> team(shared_bytes + p.team_at, kIsCluster ? p.cluster : 1);
  const int threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int held = kIsHeld ? kPacks : p.held;
  const bool has_sums = p.partial != nullptr;
  // Sums of the columns: in registers beside packs that are held, else in shared memory.
  S weight_sums[Part::kHeld][N] = {}, bias_sums[kIsLayer ? Part::kHeld : 1][N] = {};
  if (!kIsHeld && has_sums) {
    for (int i = 0; i < kKinds * held * kQuads; ++i) sums[i * threads + thread] = Quad<S>{};
  }
  if constexpr (kIsCluster) wait_for_cluster();  // its blocks have started, and can be written to
  opwright::wait_for_previous();

  const int64_t group = blockIdx.x / (kIsCluster ? p.cluster : 1);
  const int64_t teams = int64_t{gridDim.x} / (kIsCluster ? p.cluster : 1) * blockDim.y;
  const int64_t first = group * blockDim.y + threadIdx.y;
  // The rows of this team. All teams take the same number of rounds, the last perhaps without a
  // row: they may share a warp, and compute-sanitizer counts their barriers.
  const int count = p.rounds - (first + (p.rounds - 1) * teams < p.rows ? 0 : 1);

  const Part whole(p.n, team);
  bool is_there[Part::kHeld];
  OPWRIGHT_UNROLL
  for (int k = 0; k < Part::kHeld; ++k) is_there[k] = whole.first + k * whole.step < whole.n;
  // Whether a warp has a last pack.
  const bool is_last_there = whole.first - thread % kWarp * N + (kPacks - 1) * whole.step < whole.n;
  // Calls body(k, column) for the packs of this thread in a row, and behind its end where packs
  // are held: they are zeros there.
  const auto each = [&](bool is_row, const auto& body) {
    if constexpr (kIsHeld) {
      OPWRIGHT_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        if (kPacks > 1 && k == kPacks - 1 && !is_last_there) break;
        body(k, whole.first + k * whole.step);
      }
    } else {
      Part(is_row ? p.n : 0, team).each(body);
    }
  };

  using Rows = Staged<T, W, kNorm, Part::kHeld>;
  Rows staged(shared_bytes, threads, thread, p, first, teams, static_cast<int>(whole.first),
              static_cast<int>(whole.step));
  StagedWeight<W, Part::kHeld, N> weights(shared_bytes + p.weight_at);
  // A weight of T is always staged.
  const bool is_staged = kIsHeld && (sizeof(W) == sizeof(T) || p.stages_weight);
  if constexpr (kIsHeld) {
    for (int i = 0; i < Rows::kRows; ++i) {
      OPWRIGHT_UNROLL
      for (int k = 0; k < kPacks; ++k) staged.copy(k, is_there[k], i < count);
      staged.next();
    }
    if (is_staged && threadIdx.y == 0) {
      OPWRIGHT_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        const W* const from =
            p.weight.data ? p.weight.data + whole.first + k * whole.step : nullptr;
        weights.copy(k, is_there[k] ? from : nullptr);
      }
    }
  }
  __syncthreads();

  const S per_n = S(1) / S(p.n);
  for (int i = 0; i < p.rounds; ++i) {
    const int64_t row = first + i * teams;
    const bool is_row = i < count;
    if constexpr (kIsHeld) staged.wait();
    const auto read = [&](int tensor, const RowsOf<const T>& of, int k, Index column, S(&to)[N]) {
      if constexpr (kIsHeld)
        staged.read(tensor, k, to);
      else
        whole.values(of.row(row), column, to);
    };
    const auto weigh = [&](int k, Index column, S(&g)[N]) {
      S w[N];
      if (is_staged) {
        weights.read(k, w);
      } else {
        if (!p.weight.data || (kIsHeld && !is_there[k])) return;
        whole.values(p.weight, column, w);
      }
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) g[j] = rounded_product<kIsExact>(g[j], w[j]);
    };
    // Calls body(x - origin, gradient with the weight) for the elements; both are 0 behind the end.
    const auto each_element = [&](S origin, const auto& body) {
      each(is_row, [&](int k, Index column) {
        S x[N], g[N];
        read(0, p.input, k, column, x);
        read(1, p.grad_output, k, column, g);
        weigh(k, column, g);
        const int here = kIsHeld ? N : whole.count(column);
        const S from = kIsHeld && !is_there[k] ? S(0) : origin;
        OPWRIGHT_UNROLL
        for (int j = 0; j < N; ++j) body(!kIsLayer || j < here ? x[j] - from : S(0), g[j]);
      });
    };
    S mean = 0, mean_grad = 0;
    // The sums of the squares of the differences to the mean, and of their products with the
    // gradient.
    S squares, products;
    if constexpr (kTakesDifferences) {
      S origin = 0;
      if constexpr (kIsHeld)
        origin = staged.origin();
      else if (is_row)
        origin = p.n > 2 ? median_of_three(p.input.row(row)) : S(*p.input.row(row));
      for (bool is_again = false;; is_again = true) {
        S all[4] = {};
        each_element(origin, [&](S d, S g) {
          all[0] += d * d, all[1] += d * g;
          all[2] += d, all[3] += g;
        });
        team.add_up(all);
        const S shift = all[2] * per_n;
        const bool is_infinite = isinf(all[3]);
        mean = origin + shift, mean_grad = all[3] * per_n;
        squares = all[0] - all[2] * shift;
        products = is_infinite ? all[1] : all[1] - all[3] * shift;
        // Products with an infinite weight have the sign of the difference to the mean itself.
        if (is_again || !__any_sync(0xffffffffu, is_infinite)) break;
        if (is_infinite) origin = mean;
      }
    } else {
      if constexpr (kIsLayer) {
        S means[2] = {};
        each_element(S(0), [&](S x, S g) { means[0] += x, means[1] += g; });
        team.add_up(means);
        mean = means[0] / S(p.n), mean_grad = means[1] / S(p.n);
      }
      S both[2] = {};
      each_element(mean, [&](S d, S g) { both[0] += d * d, both[1] += d * g; });
      team.add_up(both);
      squares = both[0], products = both[1];
    }
    const S variance = squares * per_n + p.eps;
    S scale;
    if constexpr (sizeof(T) == 2)
      scale = rsqrtf(variance);
    else
      scale = S(1) / S(sqrt(variance));
    if (!is_row) scale = 0;  // of zeros, it may be infinite
    if (!kIsHeld && p.moments && team.id() == 0) {
      p.moments[2 * row] = mean, p.moments[2 * row + 1] = scale;
    }
    const S slope = products * scale * per_n;
    each(is_row, [&](int k, Index column) {
      S x[N], g[N], to_input[N];
      read(0, p.input, k, column, x);
      read(1, p.grad_output, k, column, g);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) to_input[j] = g[j];
      weigh(k, column, to_input);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) {
        x[j] = (kIsLayer ? x[j] - mean : x[j]) * scale;
        to_input[j] = ((kIsLayer ? to_input[j] - mean_grad : to_input[j]) - x[j] * slope) * scale;
      }
      if constexpr (kNorm == Norm::add_rms) {
        S other[N];
        read(2, p.grad_sum, k, column, other);
        OPWRIGHT_UNROLL
        for (int j = 0; j < N; ++j) to_input[j] += other[j];
      }
      if constexpr (kIsHeld) {
        staged.write(k, to_input, is_there[k] && is_row);
        staged.copy(k, is_there[k], i + Rows::kRows < count);
        OPWRIGHT_UNROLL
        for (int j = 0; j < N; ++j) {
          weight_sums[k][j] += g[j] * x[j];
          if (kIsLayer) bias_sums[k][j] += g[j];
        }
      } else {
        whole.store(p.grad_input.row(row), column, to_input);
        if (!has_sums) return;
        OPWRIGHT_UNROLL
        for (int j = 0; j < N; ++j) {
          S* to =
              sums[(k * kQuads + j / Quad<S>::kCount) * threads + thread].of + j % Quad<S>::kCount;
          *to += g[j] * x[j];
          if (kIsLayer) to[int64_t{held} * kQuads * threads * Quad<S>::kCount] += g[j];
        }
      }
    });
    if constexpr (kIsHeld) staged.next(), staged.next_result();
  }
  if (!has_sums) return;
  if constexpr (kIsHeld) {
    opwright::wait_for_copies();
    __syncthreads();  // the sums take the place of the rows
    OPWRIGHT_UNROLL
    for (int k = 0; k < kPacks; ++k) {
      OPWRIGHT_UNROLL
      for (int q = 0; q < kQuads; ++q) {
        Quad<S> weight, bias;
        OPWRIGHT_UNROLL
        for (int j = 0; j < Quad<S>::kCount; ++j) {
          weight.of[j] = weight_sums[k][q * Quad<S>::kCount + j];
          if (kIsLayer) bias.of[j] = bias_sums[kIsLayer ? k : 0][q * Quad<S>::kCount + j];
        }
        sums[(k * kQuads + q) * threads + thread] = weight;
        if (kIsLayer) sums[((kPacks + k) * kQuads + q) * threads + thread] = bias;
      }
    }
  }
  __syncthreads();
  opwright::let_next_start();
  // The teams of the block, added up: each does so for some of the quads.
  const int slabs = kKinds * held * kQuads;
  Quad<S>* const partial =
      reinterpret_cast<Quad<S>*>(p.partial) + group * slabs * team.size() + team.id();
  for (int slab = threadIdx.y; slab < slabs; slab += blockDim.y) {
    const Quad<S>* const from = sums + slab * threads + threadIdx.x;
    Quad<S> sum = *from;
    for (int y = 1; y < static_cast<int>(blockDim.y); ++y) sum.add(from[y * blockDim.x]);
    partial[static_cast<int64_t>(slab) * team.size()] = sum;
  }
}

// The gradients of weight and bias where rows do not fit: one thread for each column, over the rows
// of a part.
template <typename T, typename W>
__global__ void __launch_bounds__(256)
    column_gradient_kernel(Backward<T, W> p, int kinds, int64_t pitch, int64_t rows) {
  using S = compute_t<T>;
  opwright::wait_for_previous();
  const int64_t column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= pitch) return;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * rows;
  const int64_t last = first + rows < p.rows ? first + rows : p.rows;
  const int64_t end = column < p.n ? last : first;  // zeros behind the end
  S weight = 0, bias = 0;
  for (int64_t row = first; row < end; ++row) {
    const S g = p.grad_output.row(row)[column];
    const S x = p.input.row(row)[column];
    weight += g * ((x - p.moments[2 * row]) * p.moments[2 * row + 1]);
    bias += g;
  }
  S* to = p.partial + static_cast<int64_t>(blockIdx.y) * kinds * pitch + column;
  to[0] = weight;
  if (kinds == 2) to[pitch] = bias;
}

// weight[c] and bias[c]: the sums of column c over all groups, each in a fixed order.
inline constexpr int kSumThreads = 512, kSumQuads = 16;  // of a block
template <typename S, typename W>
__global__ void __launch_bounds__(kSumThreads)
    gradient_sum_kernel(ColumnSums<S> p, int64_t n, W* weight, int64_t weight_stride, W* bias,
                        int64_t bias_stride) {
  constexpr int kCount = Quad<S>::kCount, kDown = kSumThreads / kSumQuads, kAtOnce = 4;
  __shared__ Quad<S> shared[kDown][kSumQuads];
  const int x = threadIdx.x % kSumQuads, y = threadIdx.x / kSumQuads;
  const int64_t across = int64_t{p.kinds} * p.packs * p.quads * p.size;
  const int64_t quad = int64_t{blockIdx.x} * kSumQuads + x;
  Quad<S> sum{};
  opwright::let_next_start();  // waits for the kernel in front, too
  if (quad < across) {
    for (int32_t group = y; group < p.groups; group += kAtOnce * kDown) {
      Quad<S> some[kAtOnce];
      OPWRIGHT_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t at = group + i * kDown;
        some[i] = at < p.groups ? p.partial[at * across + quad] : Quad<S>{};
      }
      OPWRIGHT_UNROLL
      for (int i = 0; i < kAtOnce; ++i) sum.add(some[i]);
    }
  }
  shared[y][x] = sum;
  __syncthreads();
  if (threadIdx.x >= kSumQuads * kCount) return;
  // A thread for each element of the quads.
  const int of = threadIdx.x / kCount, j = threadIdx.x % kCount;
  S total = 0;
  OPWRIGHT_UNROLL
  for (int i = 0; i < kDown; ++i) total += shared[i][of].of[j];
  const int64_t at = int64_t{blockIdx.x} * kSumQuads + of, id = at % p.size;
  const int slab = static_cast<int>(at / p.size), per_kind = p.packs * p.quads;
  const int kind = slab / per_kind, k = slab % per_kind / p.quads, q = slab % p.quads;
  const int64_t column = ((id + k * p.size) * p.quads + q) * kCount + j;
  W* to = kind == 0 ? weight : bias;
  if (at < across && column < n && to) {
    to[column * (kind == 0 ? weight_stride : bias_stride)] = W(total);
  }
}

template <Norm kNorm, typename T, typename W>
void norm_backward(Backward<T, W> p, bool is_aligned, View<W, 1> grad_weight, View<W, 1> grad_bias,
                   cudaStream_t stream,
                   const opwright::Device& device = opwright::current_device()) {
  using S = compute_t<T>;
  constexpr int N = kPackWidth<T>, kPacks = kBackwardPacks, kCount = Quad<S>::kCount;
  constexpr int kKinds = kNorm == Norm::layer ? 2 : 1, kSums = kIsOnePass<T, kNorm> ? 4 : 2;
  const int64_t packs = (p.n + N - 1) / N;
  const bool has_sums = grad_weight.defined() || grad_bias.defined();
  ColumnSums<S> left{.kinds = kKinds};
  // Starts a kernel for rows of a cluster, in as many teams as shared memory has room for, and
  // returns true if that is one at least.
  const auto start = [&]<int kHeld, bool kIsHeld, bool kIsCluster>(int cluster, int threads,
                                                                   int teams) {
    // Rows, the weight and what teams send each other; the sums take the place of rows and weight.
    const auto bytes_of = [&](bool stages_weight) {
      using Rows = Staged<T, W, kNorm, kHeld>;
      p.weight_at = kIsHeld ? Rows::bytes(threads * teams) : 0;
      const int of_weight = stages_weight ? StagedWeight<W, kHeld, N>::bytes(threads) : 0;
      const int of_sums = has_sums ? kKinds * N * kHeld * threads * teams * int{sizeof(S)} : 0;
      const int before = static_cast<int>(p.weight_at) + of_weight;
      p.team_at = before > of_sums ? before : of_sums;
      return static_cast<int>(p.team_at) +
             Team<S, kIsCluster, kSums>::bytes(threads * teams, cluster);
    };
    p.stages_weight = kIsHeld && (p.weight.data || sizeof(W) == sizeof(T));
    const int whole_warp = threads < kWarp ? kWarp / threads : 1;  // of teams
    while (teams > whole_warp && bytes_of(p.stages_weight) > device.shared_bytes) {
      teams -= whole_warp;
    }
    if (sizeof(W) > sizeof(T) && bytes_of(p.stages_weight) > device.shared_bytes) {
      p.stages_weight = false;
    }
    const int bytes = bytes_of(p.stages_weight);
    if (bytes > device.shared_bytes) return false;
    const int64_t wanted = (p.rows + teams - 1) / teams;
    int64_t groups = opwright::clusters_within(device, cluster);
    // No more than share the rows evenly: a last round for a few would take as long as the others.
    p.rounds = static_cast<int32_t>(groups > 0 ? (wanted + groups - 1) / groups : wanted);
    groups = (wanted + p.rounds - 1) / p.rounds;
    left.groups = static_cast<int32_t>(groups), left.packs = kHeld, left.quads = N / kCount;
    left.size = threads * cluster;
    if (has_sums) p.partial = opwright::scratch<S>(groups * kKinds * kHeld * N * left.size);
    p.held = kHeld, p.cluster = cluster;
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
    p.cluster = p.rounds = 1, p.team_at = 0;
    if (has_sums) p.moments = opwright::scratch<S>(2 * p.rows);
    constexpr int kThreads = backward_threads(0);
    launch(norm_backward_kernel<T, W, kNorm, 0, false>, p.rows, dim3(kThreads), 1,
           Team<S, false, kSums>::bytes(kThreads, 1), stream, p);
    if (!has_sums) return;
    const int64_t across = (p.n + 255) / 256, depth = 64;
    const int64_t most = (p.rows + depth - 1) / depth, parts = most < 65535 ? most : 65535;
    left.groups = static_cast<int32_t>(parts), left.packs = left.quads = 1;
    left.size = (p.n + kCount - 1) / kCount;
    p.partial = opwright::scratch<S>(parts * kKinds * left.size * kCount);
    opwright::launch_behind(column_gradient_kernel<T, W>, dim3(unsigned(across), unsigned(parts)),
                            dim3(256), 0, stream, p, kKinds, left.size * kCount,
                            (p.rows + parts - 1) / parts);
  }
  if (!has_sums) return;
  left.partial = reinterpret_cast<const Quad<S>*>(p.partial);
  const auto data = [](const View<W, 1>& view) { return view.defined() ? view.data() : nullptr; };
  const int64_t quads = kKinds * int64_t{left.packs} * left.quads * left.size;
  opwright::launch_behind(gradient_sum_kernel<S, W>,
                          dim3(unsigned((quads + kSumQuads - 1) / kSumQuads)), dim3(kSumThreads), 0,
                          stream, left, p.n, data(grad_weight),
                          grad_weight.defined() ? grad_weight.stride(0) : 0, data(grad_bias),
                          grad_bias.defined() ? grad_bias.stride(0) : 0);
}

}  // namespace opwright_ops
