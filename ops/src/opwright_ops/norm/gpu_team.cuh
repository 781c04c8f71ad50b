// Threads that share a row: what each holds of it, and sums over all of it.
//
// A row is cut into packs of 16 bytes, and pack p belongs to thread p % threads of its team. That
// follows from the length of the row alone, so a row has the same bits in every batch and layout.
#pragma once

#include <opwright/cluster.cuh>
#include <opwright/copy.cuh>
#include <opwright/launch.cuh>
#include <opwright/reduce.cuh>
#include <opwright/tensor.h>
#include <opwright/vector.cuh>

namespace opwright_ops {

using opwright::Arrivals;
using opwright::cluster_rank;
using opwright::compute_t;
using opwright::kPackWidth;
using opwright::kWarp;
using opwright::Pack;
using opwright::rows_of;
using opwright::RowsOf;
using opwright::View;
using opwright::wait_for_cluster;
using opwright::with_adjacent_columns;

inline constexpr int kMaxThreads = 1024;  // of a block
inline constexpr int kMaxWarps = kMaxThreads / kWarp;
inline constexpr int kMaxCluster = 8;
// Teams of several warps in a block: each has a barrier of its own beside that of the block.
inline constexpr int kMaxTeams = 15, kMaxClusterTeams = 4;

// A weight or a bias: one value for each column, or none.
template <typename W>
struct Columns {
  const W* data;
  int64_t stride;
};

template <bool kFirst, typename A, typename B>
struct If {
  using type = A;
};
template <typename A, typename B>
struct If<false, A, B> {
  using type = B;
};

// A product that is rounded before anything is added to it: so all kernels of a row have the same
// bits, and equal products cancel. An exact product, of two 16-bit numbers, is the same either way.
template <bool kIsExact = false>
__device__ OPWRIGHT_INLINE float rounded_product(float a, float b) {
  return kIsExact ? a * b : __fmul_rn(a, b);
}
template <bool kIsExact = false>
__device__ OPWRIGHT_INLINE double rounded_product(double a, double b) {
  return __dmul_rn(a, b);
}

// The sums of kCount values over a warp: a lane gets that of value lane / (kWarp / kCount).
template <typename S, int kCount>
__device__ OPWRIGHT_INLINE S scattered_sum(const S (&values)[kCount]) {
  S left[kCount];
  OPWRIGHT_UNROLL
  for (int i = 0; i < kCount; ++i) left[i] = values[i];
  int step = kWarp / 2;
  // Half of the values go to the other half of the lanes, and so on until one is left.
  OPWRIGHT_UNROLL
  for (int half = kCount / 2; half > 0; half /= 2, step /= 2) {
    const bool is_upper = threadIdx.x & step;
    OPWRIGHT_UNROLL
    for (int i = 0; i < half; ++i) {
      const S kept = is_upper ? left[i + half] : left[i];
      const S sent = is_upper ? left[i] : left[i + half];
      left[i] = kept + __shfl_xor_sync(0xffffffffu, sent, step);
    }
  }
  OPWRIGHT_UNROLL
  for (; step > 0; step /= 2) left[0] += __shfl_xor_sync(0xffffffffu, left[0], step);
  return left[0];
}

// The threads of one row: those of a block with one threadIdx.y, or of all blocks of a cluster.
template <typename S, bool kIsCluster, int kMaxSums>
class Team {
 public:
  // Shared memory for the teams of a block of so many threads, at 16 bytes.
  OPWRIGHT_HOST_DEVICE static constexpr int bytes(int threads, int cluster) {
    return (kIsCluster ? 2 * kMaxClusterTeams * int{sizeof(Arrivals)} : 0) +
           2 * kMaxSums * int{sizeof(S)} * cluster * (threads < kWarp ? 1 : threads / kWarp);
  }

  // In a cluster, its blocks wait for each other before the first sum: the barriers must be ready.
  __device__ Team(void* memory, int cluster) : cluster_(cluster) {
    rank_ = kIsCluster ? cluster_rank() : 0;
    if constexpr (kIsCluster) {
      arrivals_ = static_cast<Arrivals*>(memory) + 2 * threadIdx.y;
      if (threadIdx.x == 0) arrivals_[0].prepare(), arrivals_[1].prepare();
      memory = static_cast<Arrivals*>(memory) + 2 * kMaxClusterTeams;
    }
    slots_ =
        static_cast<S*>(memory) + threadIdx.y * (2 * kMaxSums * (blockDim.x / kWarp) * cluster);
  }

  // Of this thread, among `size()`.
  __device__ int id() const { return rank_ * blockDim.x + threadIdx.x; }
  __device__ int size() const { return cluster_ * blockDim.x; }

  // Replaces the values of each thread by their sums over the team, the same in every thread.
  template <int kCount>
  __device__ OPWRIGHT_INLINE void add_up(S (&values)[kCount]) {
    static_assert(kCount <= kMaxSums);
    if (blockDim.x < kWarp) {
      OPWRIGHT_UNROLL
      for (int i = 0; i < kCount; ++i) {
        for (int step = blockDim.x / 2; step > 0; step /= 2) {
          values[i] += __shfl_xor_sync(0xffffffffu, values[i], step);
        }
      }
      return;
    }
    constexpr int kLanes = kWarp / kCount;  // that have one sum
    static_assert(!kIsCluster || kLanes >= kMaxCluster);
    const int warps = blockDim.x / kWarp, all = warps * cluster_, lane = threadIdx.x % kWarp;
    S sum = scattered_sum(values);
    if (all > 1) {
      // Two sets of slots in turn: who writes the next has passed the barrier behind this one's.
      auto* const slots = reinterpret_cast<Sums<kCount>*>(slots_ + (is_odd_ ? kMaxSums * all : 0));
      S& mine = slots[rank_ * warps + threadIdx.x / kWarp].of[lane / kLanes];
      const int to = lane % kLanes;
      if constexpr (kIsCluster) {
        Arrivals& arrivals = arrivals_[is_odd_];
        if (threadIdx.x == 0) arrivals.announce(all * kCount * int{sizeof(S)});
        if (to < cluster_) arrivals.send(&mine, sum, to);
        arrivals.wait(phase_);
        phase_ ^= is_odd_;
      } else {
        if (to == 0) mine = sum;
        asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "r"(blockDim.x) : "memory");
      }
      is_odd_ = !is_odd_;
      Sums<kCount> total{};
      if (all <= kMaxRead) {
#pragma unroll 1
        for (int from = 0; from < all; from += 4) {
          Sums<kCount> some[4];
          OPWRIGHT_UNROLL
          for (int i = 0; i < 4; ++i)
            some[i] = from + i < all ? load(slots[from + i]) : Sums<kCount>{};
          OPWRIGHT_UNROLL
          for (int i = 0; i < 4; ++i) total.add(some[i]);
        }
        OPWRIGHT_UNROLL
        for (int i = 0; i < kCount; ++i) values[i] = total.of[i];
        return;
      }
#pragma unroll 1
      for (int from = lane; from < all; from += kWarp) total.add(load(slots[from]));
      sum = scattered_sum(total.of);
    }
    OPWRIGHT_UNROLL
    for (int i = 0; i < kCount; ++i) values[i] = __shfl_sync(0xffffffffu, sum, i * kLanes);
  }

 private:
  // Up to so many warps, each lane reads all sums; of more, every 32nd, and the lanes add those up.
  static constexpr int kMaxRead = 8;

  // Those of a warp.
  template <int kCount>
  struct alignas(kCount * sizeof(S)) Sums {
    S of[kCount];
    __device__ OPWRIGHT_INLINE void add(const Sums& other) {
      OPWRIGHT_UNROLL
      for (int i = 0; i < kCount; ++i) of[i] += other.of[i];
    }
  };
  template <int kCount>
  __device__ OPWRIGHT_INLINE static Sums<kCount> load(const Sums<kCount>& slot) {
    using Words = typename If<sizeof(slot) == 16, uint4,
                              typename If<sizeof(slot) == 8, uint2, uint32_t>::type>::type;
    return opwright::bit_cast<Sums<kCount>>(*reinterpret_cast<const Words*>(&slot));
  }

  S* slots_;
  Arrivals* arrivals_ = nullptr;
  int cluster_;
  bool is_odd_ = false;
  uint32_t rank_, phase_ = 0;
};

// Reads past the first-level cache: what is read once must not displace what is read by every row.
template <int N, typename T>
__device__ OPWRIGHT_INLINE Pack<T, N> load_once(const T* at) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(at));
  return opwright::bit_cast<Pack<T, N>>(words);
}

// Writes what nobody reads soon, or nothing.
template <typename T, int N>
__device__ OPWRIGHT_INLINE void store_once(T* at, Pack<T, N> pack, bool is_wanted) {
  const auto words = opwright::bit_cast<uint4>(pack);
  asm volatile(
      "{.reg .pred p; setp.ne.s32 p, %5, 0; @p st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};}" ::"l"(
          at),
      "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w), "r"(int{is_wanted})
      : "memory");
}

// Elements column..column + N of a row of n, 0 behind its end.
template <int N, typename T>
__device__ OPWRIGHT_INLINE Pack<T, N> load_tail(const T* row, int64_t column, int64_t n,
                                                int64_t stride = 1) {
  if (stride == 1 && column + N <= n) return opwright::load_unaligned<N>(row + column);
  Pack<T, N> pack;
  OPWRIGHT_UNROLL
  for (int j = 0; j < N; ++j) {
    pack.elements[j] = column + j < n ? row[(column + j) * stride] : T(0.0f);
  }
  return pack;
}
template <typename T, int N>
__device__ OPWRIGHT_INLINE void store_tail(T* row, int64_t column, int64_t n,
                                           const Pack<T, N>& pack) {
  OPWRIGHT_UNROLL
  for (int j = 0; j < N; ++j) {
    if (column + j < n) row[column + j] = pack.elements[j];
  }
}

// What a thread does with its packs of a row of n elements. kPacks of them fit in registers, in
// rows that are whole packs at 16 bytes; where kPacks is 0 any row will do, and packs are read each
// time.
template <typename T, int kPacks>
struct Slice {
  using S = compute_t<T>;
  static constexpr int N = kPackWidth<T>;
  static constexpr bool kIsHeld = kPacks > 0;
  static constexpr int kHeld = kIsHeld ? kPacks : 1;
  // Rows that are held are short.
  using Index = typename If<kIsHeld, int32_t, int64_t>::type;
  Index n, first, step;  // in elements

  template <typename Group>
  __device__ Slice(int64_t n_, const Group& team)
      : n(static_cast<Index>(n_)), first(Index{team.id()} * N), step(Index{team.size()} * N) {}

  // Reads the packs that are kept.
  __device__ OPWRIGHT_INLINE void fetch(const T* row, Pack<T, N> (&packs)[kHeld]) const {
    if constexpr (kIsHeld) {
      OPWRIGHT_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        if (first + k * step < n) packs[k] = load_once<N>(row + first + k * step);
      }
    }
  }
  // The values of a pack of a row.
  __device__ OPWRIGHT_INLINE void values(const T* row, Index column, S (&to)[N]) const {
    if constexpr (kIsHeld)
      opwright::unpack(load_once<N>(row + column), to);
    else
      opwright::unpack(load_tail<N>(row, column, n), to);
  }
  template <typename W>
  __device__ OPWRIGHT_INLINE void values(const Columns<W>& of, Index column, S (&to)[N]) const {
    constexpr int M = kPackWidth<W> < N ? kPackWidth<W> : N;
    OPWRIGHT_UNROLL
    for (int i = 0; i < N; i += M) {
      compute_t<W> values[M];
      if constexpr (kIsHeld)
        opwright::unpack(opwright::load_pack<M>(of.data + column + i), values);
      else
        opwright::unpack(load_tail<M>(of.data, column + i, n, of.stride), values);
      OPWRIGHT_UNROLL
      for (int j = 0; j < M; ++j) to[i + j] = values[j];
    }
  }
  __device__ OPWRIGHT_INLINE void store(T* row, Index column, const S (&values)[N]) const {
    const auto pack = opwright::pack_of<T>(values);
    if constexpr (kIsHeld)
      opwright::store_pack(row + column, pack);
    else
      store_tail(row, column, n, pack);
  }
  // How many elements of a pack are in the row.
  __device__ OPWRIGHT_INLINE int count(Index column) const {
    return kIsHeld || n - column >= N ? N : static_cast<int>(n - column);
  }

  // Calls body(k, column) for the packs of this thread, k counting them.
  template <typename Body>
  __device__ OPWRIGHT_INLINE void each(const Body& body) const {
    if constexpr (kIsHeld) {
      OPWRIGHT_UNROLL
      for (int k = 0; k < kPacks; ++k) {
        if (first + k * step < n) body(k, first + k * step);
      }
    } else {
      int k = 0;
#pragma unroll 1
      for (Index column = first; column < n; column += step) body(k++, column);
    }
  }
};

inline int whole_warps(int64_t threads) {
  return static_cast<int>((threads + kWarp - 1) / kWarp * kWarp);
}
// Teams of so many threads in a block of `most` threads.
inline int teams_in(int most, int threads) {
  const int teams = most / threads;
  return teams < 1 ? 1 : threads > kWarp && teams > kMaxTeams ? kMaxTeams : teams;
}
inline int power_of_two(int64_t least) {
  int power = 1;
  while (power < least) power *= 2;
  return power;
}

// Whether packs of 16 bytes begin at 16 bytes in every row.
template <typename T>
bool is_aligned(const View<T, 2>& view) {
  constexpr int N = kPackWidth<T>;
  return opwright::is_aligned(view.data(), N) && view.size(1) % N == 0 &&
         (view.size(0) == 1 || view.stride(0) % N == 0);
}
// The same of a weight or bias, if there is one.
template <typename T>
bool is_aligned(const View<T, 1>& view) {
  return !view.defined() ||
         (opwright::is_aligned(view.data(), kPackWidth<T>) && view.is_contiguous());
}
template <typename... Views>
bool are_aligned(const Views&... views) {
  return (is_aligned(views) && ...);
}

template <typename W>
Columns<W> columns_of(const View<const W, 1>& view) {
  return {view.data(), view.stride(0)};
}

// kernel(arguments...) behind the kernel in front, with clusters of blocks where a team has more
// than one.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, dim3 block, int cluster, size_t bytes,
            cudaStream_t stream, Arguments... arguments) {
  // 48 KiB need no permission, with what the kernel declares itself (less than 8 KiB). More is
  // asked for in every call alike, since other threads may start the same kernel with other sizes.
  if (bytes > 40 * 1024) {
    cudaFuncAttributes declared = {};
    (void)cudaFuncGetAttributes(&declared, kernel);
    const int most = opwright::current_device().shared_bytes;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         most - static_cast<int>(declared.sharedSizeBytes));
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = block;
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = opwright::current_device().capability < 90 ? 0 : cluster > 1 ? 2 : 1;
  (void)cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace opwright_ops
