// What the blocks of a grid hand each other at each step, through the second-level cache or the
// shared memory of a cluster.
#pragma once

#include <opwright/cluster.cuh>

#include "gpu_layer.cuh"

namespace opwright_ops::gpu {

constexpr int kWarps = kThreads / 32;  // of a team

// A block has one team of kThreads threads, or two.
__device__ inline int team_of_block() { return threadIdx.x / kThreads; }
__device__ inline int thread_of_team() { return threadIdx.x % kThreads; }
template <int kTeams>
__device__ inline void wait_for_team() {
  if constexpr (kTeams == 1) {
    __syncthreads();
  } else {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team_of_block()), "n"(kThreads) : "memory");
  }
}
constexpr int kUnits = 8;  // a set: two tiles of 16 rows, of two gates each

// What a kernel of all steps is for, as bits. Fast: for cells without options, of certain widths.
// Near: its blocks are a cluster. Exact: its products are those of float, not of the tensor cores.
// Two teams share the slices of a block, and one multiplies while the other waits. Half more: a
// block has half a set of units besides its sets.
// (nvcc takes no structures here.)
constexpr int kNear = 1, kFast = 2, kNormalised = 4, kExact = 8, kTwoTeams = 16, kHalfMore = 32;

// What is written and read at once: elements that follow each other, of one entry of the batch.
struct alignas(16) Chunk {
  uint32_t word[4];
};
template <typename T>
constexpr int kPerChunk = 16 / sizeof(T);
// Units whose four gates are a chunk.
template <typename T>
constexpr int kUnitsOfChunk = sizeof(T) < 4 ? 2 : 1;
// Groups of four chunks that hold so many elements.
__host__ __device__ inline int64_t groups_of(int64_t elements, int per_chunk) {
  return (elements + 4 * per_chunk - 1) / (4 * per_chunk);
}

__device__ inline Chunk load_chunk(const Chunk* from) {
  Chunk c{};
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b128 r; .reg .b64 a, b; ld.relaxed.gpu.global.b128 r, [%4]; mov.b128 {a, b}, r; "
      "mov.b64 {%0, %1}, a; mov.b64 {%2, %3}, b;}"
      : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
      : "l"(from)
      : "memory");
#endif
  return c;
}
__device__ inline void store_chunk(Chunk* to, const Chunk& c) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b128 r; .reg .b64 a, b; mov.b64 a, {%1, %2}; mov.b64 b, {%3, %4}; mov.b128 r, {a, "
      "b}; "
      "st.relaxed.gpu.global.b128 [%0], r;}" ::"l"(to),
      "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3])
      : "memory");
#endif
}

using opwright::Arrivals;
using opwright::shared_address;
using opwright::wait_for_cluster;

// Where the chunks of an exchange are.
struct InGlobal {
  __device__ static Chunk load(const Chunk* from) { return load_chunk(from); }
};

// Chunks in the shared memory of all blocks of a cluster; that they have come is known before.
struct Near {
  __device__ static Chunk load(const Chunk* from) {
    Chunk c{};
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3])
                 : "r"(shared_address(from))
                 : "memory");
#endif
    return c;
  }
  __device__ static bool take(const Chunk&) { return true; }
  __device__ static bool find(Chunk&, const Chunk*) { return true; }
};

// The buffers of such an exchange, for one slice; two take turns.
struct NearSlice {
  Arrivals arrivals[2];
  // Before the first step; `steps` of them, each of which gets `bytes`.
  __device__ void prepare(int steps, uint32_t bytes) {
    for (int i = 0; i < 2; ++i) arrivals[i].prepare();
    for (int step = 1; step < 3 && step < steps; ++step) arrivals[step % 2].announce(bytes);
  }
  // Waits for the chunks of `step`, from the second on.
  __device__ void wait(int step, int steps, uint32_t bytes) {
    arrivals[step % 2].wait((step - 1) / 2 % 2);
    if (thread_of_team() == 0 && step + 2 < steps) arrivals[step % 2].announce(bytes);
  }
  // To all blocks of the cluster; of the `many` threads that have a chunk, each to its share of
  // them.
  __device__ void give(int step, Chunk* to, const Chunk& chunk, int one, int many) {
    for (int rank = one; rank < gridDim.x; rank += many) arrivals[step % 2].send(to, chunk, rank);
  }
};

// How h is exchanged. |h| < 2 leaves the highest bit of each exponent 0: in word 0 that bit says in
// which step the chunk was written, in word 1 that the chunk is elsewhere, because something in it
// is larger, or NaN.
template <typename T>
struct Tagged : InGlobal {
  static constexpr uint32_t kHigh = kIsNarrow<T> ? 0x40004000u : 0x40000000u;
  static constexpr uint32_t kTag = kIsNarrow<T> ? 0x4000u : 0x40000000u;
  static constexpr int kBuffers = 4;  // two, which take turns, and as many for what is elsewhere
  uint32_t tag;
  int64_t to_elsewhere;  // from a chunk to the place of those that do not fit

  // There are two buffers, which are 0 at first and take turns.
  __device__ Tagged(int step, int64_t to_elsewhere)
      : tag((step / 2) % 2 ? 0 : kTag), to_elsewhere(to_elsewhere) {}
  // Whether the chunk is that of this step; takes the tag off.
  __device__ bool take(Chunk& chunk) const {
    const bool is_there = (((chunk.word[0] ^ tag) & kTag) | (chunk.word[1] & kHigh)) == 0;
    chunk.word[0] &= ~kTag;
    return is_there;
  }
  __device__ bool find(Chunk& chunk, const Chunk* from) const {
    chunk = load_chunk(from);
    if ((chunk.word[0] ^ tag) & kTag) return false;
    if (chunk.word[1] & kHigh) {
      __threadfence();
      chunk = load_chunk(from + to_elsewhere);
    } else {
      chunk.word[0] &= ~kTag;
    }
    return true;
  }
  __device__ void give(Chunk* to, Chunk chunk) const {
    if ((chunk.word[0] | chunk.word[1] | chunk.word[2] | chunk.word[3]) & kHigh) {
      store_chunk(to + to_elsewhere, chunk);
      __threadfence();
      chunk = {{0, kHigh, 0, 0}};
    }
    chunk.word[0] |= tag;
    store_chunk(to, chunk);
  }
};

// Sums over all blocks of a cluster, two for each of 8 entries of the batch; two kinds of them take
// turns.
struct Totals {
  static constexpr int kMostBlocks = 16, kEntries = 8;
  Arrivals arrivals[2];
  float2 come[2][kMostBlocks][kEntries];
  float2 of_warps[2][kWarps][4];

  __device__ static uint32_t bytes() { return gridDim.x * kEntries * sizeof(float2); }
  __device__ void prepare() {
    for (auto& each : arrivals) each.prepare(), each.announce(bytes());
  }
  // By a thread for each entry and each of the blocks.
  __device__ void give(int kind, int entry, int rank, float2 value) {
    arrivals[kind].send(&come[kind][blockIdx.x][entry], value, rank);
  }
  // Waits for what was given in `turn`, counted for each kind; each thread of the block does.
  __device__ void wait(int kind, int turn) {
    arrivals[kind].wait(turn % 2);
    if (threadIdx.x == 0) arrivals[kind].announce(bytes());
  }
  // The sums of what the threads of a warp have, of one entry; in an order that is always the same.
  __device__ float2 sums(int kind, int turn, int entry, float2 value) {
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2)
      value.x += __shfl_xor_sync(~0u, value.x, lanes),
          value.y += __shfl_xor_sync(~0u, value.y, lanes);
    for (int rank = threadIdx.x % 32; rank < gridDim.x; rank += 32) give(kind, entry, rank, value);
    wait(kind, turn);
    float2 sum = {};
    for (int block = 0; block < gridDim.x; ++block)
      sum.x += come[kind][block][entry].x, sum.y += come[kind][block][entry].y;
    return sum;
  }
  // Moments of H times PER values of an entry, this thread has those of `unit`; lanes that
  // are 4 apart, and warps that are 2 apart, have the others of this block's 32 units, each warp
  // those of 8. From means and squares of distances to them: differences of large sums would leave
  // nothing of a small variance.
  template <int PER>
  __device__ Moments<float> moments(int kind, int turn, int entry, int unit, int H,
                                    const float (&values)[PER]) {
    const auto width = [&](int first, int units) {
      const int left = H - first;
      return static_cast<float>(PER * (left < 0 ? 0 : left < units ? left : units));
    };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * 32;
    const auto over_lanes = [](float sum) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
      return sum;
    };
    float sum = 0, squares = 0;
#pragma unroll
    for (int j = 0; j < PER; ++j) sum += unit < H ? values[j] : 0;
    const float count = width(first + warp / 2 * 8, 8),
                mean = over_lanes(sum) / (count ? count : 1);
#pragma unroll
    for (int j = 0; j < PER; ++j) squares += unit < H ? (values[j] - mean) * (values[j] - mean) : 0;
    squares = over_lanes(squares);
    if (lane < 4) of_warps[kind][warp][lane] = make_float2(mean, squares);
    __syncthreads();
    // parts: of(i) and count(i) of `many` of them.
    const auto join = [](int many, const auto& of, const auto& count) {
      float all = 0, mean = 0, squares = 0;
      for (int i = 0; i < many; ++i) all += count(i), mean += count(i) * of(i).x;
      mean /= all ? all : 1;
      for (int i = 0; i < many; ++i)
        squares += of(i).y + count(i) * (of(i).x - mean) * (of(i).x - mean);
      return make_float2(mean, squares);
    };
    if (threadIdx.x < gridDim.x * kEntries) {
      const int of_entry = threadIdx.x % kEntries;
      give(kind, of_entry, threadIdx.x / kEntries,
           join(
               4, [&](int set) { return of_warps[kind][2 * set + of_entry % 2][of_entry / 2]; },
               [&](int set) { return width(first + 8 * set, 8); }));
    }
    wait(kind, turn);
    const float2 all = join(
        gridDim.x, [&](int block) { return come[kind][block][entry]; },
        [&](int block) { return width(32 * block, 32); });
    return {all.x, rsqrtf(all.y / (PER * H) + 1e-5f)};
  }
};

}  // namespace opwright_ops::gpu
