// Threads that share a row: what each holds of it, and sums over all of it.
//
// A row is cut into packs of 16 bytes, and pack p belongs to thread p % threads of its team. That
// follows from the length of the row alone, so a row has the same bits in every batch and layout.
#pragma once

#include <opwright/cluster.cuh>
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

// The threads of one row: those of a block with one threadIdx.y, or of all blocks of a cluster.
template <typename S, bool kIsCluster, int kMaxSums>
class Team {
 public:
  // Elements of shared memory that the teams of a block of so many threads need.
  OPWRIGHT_HOST_DEVICE static constexpr int slots(int threads) {
    return 2 * kMaxSums * (kIsCluster ? kMaxCluster : 1) * (threads / kWarp) +
           (kIsCluster ? 2 * kMaxClusterTeams * int{sizeof(Arrivals) / sizeof(S)} : 0);
  }

  // In a cluster, all its blocks wait for each other before the first sum. `slots`: at 16 bytes.
  __device__ Team(S* slots, int cluster) : cluster_(cluster) {
    rank_ = kIsCluster ? cluster_rank() : 0;
    if constexpr (kIsCluster) {
      arrivals_ = reinterpret_cast<Arrivals*>(slots) + 2 * threadIdx.y;
      slots += 2 * kMaxClusterTeams * (sizeof(Arrivals) / sizeof(S));
      if (threadIdx.x == 0) arrivals_[0].prepare(), arrivals_[1].prepare();
    }
    slots_ = slots + threadIdx.y * (2 * kMaxSums * (blockDim.x / kWarp) * cluster);
  }

  // Of this thread, among `size()`.
  __device__ int id() const { return rank_ * blockDim.x + threadIdx.x; }
  __device__ int size() const { return cluster_ * blockDim.x; }

  // Replaces the values of each thread by their sums over the team, the same in every thread.
  template <int kCount>
  __device__ OPWRIGHT_INLINE void add_up(S (&values)[kCount]) {
    static_assert(kCount <= kMaxSums);
    const int lanes = blockDim.x < kWarp ? blockDim.x : kWarp;
    OPWRIGHT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      for (int step = lanes / 2; step > 0; step /= 2) {
        values[i] += __shfl_xor_sync(0xffffffffu, values[i], step);
      }
    }
    const int warps = blockDim.x / kWarp, all = warps * cluster_;
    if (all <= 1) return;
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const auto at = [&](int i, int from) {
      return kIsCluster ? from * kCount + i : i * all + from;
    };
    // Two sets of slots in turn: who writes the next has passed the barrier behind this one's.
    S* slots = slots_ + parity_ * (kMaxSums * all);
    parity_ ^= 1;
    if constexpr (kIsCluster) {
      static_assert(kCount * sizeof(S) % sizeof(uint64_t) == 0);
      constexpr int kWords = kCount * sizeof(S) / sizeof(uint64_t), kPer = kCount / kWords;
      struct alignas(8) Word {
        S of[kPer];
      };
      Arrivals& arrivals = arrivals_[parity_];
      if (threadIdx.x == 0) arrivals.announce(all * kCount * int{sizeof(S)});
      if (lane < cluster_) {
        OPWRIGHT_UNROLL
        for (int i = 0; i < kWords; ++i) {
          Word word;
          OPWRIGHT_UNROLL
          for (int j = 0; j < kPer; ++j) word.of[j] = values[i * kPer + j];
          S* const to = slots + (rank_ * warps + warp) * kCount + i * kPer;
          arrivals.send(reinterpret_cast<Word*>(to), word, lane);
        }
      }
      arrivals.wait(phase_);
      phase_ ^= parity_ ^ 1;
    } else {
      if (lane < kCount) {
        S value = values[0];
        OPWRIGHT_UNROLL
        for (int i = 1; i < kCount; ++i) value = lane == i ? values[i] : value;
        slots[lane * all + warp] = value;
      }
      asm volatile("bar.sync %0, %1;" ::"r"(1 + threadIdx.y), "r"(blockDim.x) : "memory");
    }
    OPWRIGHT_UNROLL
    for (int i = 0; i < kCount; ++i) {
      S sum = 0;
      if (all <= kWarp / 2) {  // read by each lane: faster than shuffles
        for (int from = 0; from < all; ++from) sum += slots[at(i, from)];
        values[i] = sum;
      } else {
        for (int from = lane; from < all; from += kWarp) sum += slots[at(i, from)];
        values[i] = opwright::warp_sum(sum);
      }
    }
  }

 private:
  S* slots_;
  Arrivals* arrivals_ = nullptr;
  int cluster_, parity_ = 0, phase_ = 0;
  uint32_t rank_;
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

// Writes what nobody reads soon.
template <typename T, int N>
__device__ OPWRIGHT_INLINE void store_once(T* at, Pack<T, N> pack) {
  const auto words = opwright::bit_cast<uint4>(pack);
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
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

template <bool kFirst, typename A, typename B>
struct If {
  using type = A;
};
template <typename A, typename B>
struct If<false, A, B> {
  using type = B;
};

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
  // The values of a pack of a row: those of `packs`, or read now.
  __device__ OPWRIGHT_INLINE void values(const T* row, const Pack<T, N> (&packs)[kHeld], int k,
                                         Index column, S (&to)[N]) const {
    if constexpr (kIsHeld)
      opwright::unpack(packs[k], to);
    else
      opwright::unpack(load_tail<N>(row, column, n), to);
  }
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
  __device__ OPWRIGHT_INLINE void stream(T* row, Index column, const S (&values)[N]) const {
    const auto pack = opwright::pack_of<T>(values);
    if constexpr (kIsHeld)
      store_once(row + column, pack);
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
  if (bytes > 32 * 1024) {  // with what is declared in the kernel, 48 KiB go without
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(bytes));
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
