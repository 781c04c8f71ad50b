// Products of weights that stay on the chip with what blocks hand each other: by the tensor cores,
// or by FMA.
#pragma once

#include "gpu_exchange.cuh"

namespace opwright_ops::gpu {

// An element as it is multiplied, in the low bits.
template <typename T, bool kIsExact>
__device__ inline uint32_t operand_bits(T value) {
  if constexpr (kIsNarrow<T>) {
    return __builtin_bit_cast(uint16_t, value);
  } else if constexpr (kIsExact) {
    return __float_as_uint(value);
  } else {
    uint32_t bits = 0;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
#endif
    return bits;
  }
}

// Word `at` of a row of which element(i) is an element.
template <typename T, bool kIsExact, typename Element>
__device__ inline uint32_t word_of(int at, const Element& element) {
  if constexpr (kIsNarrow<T>)
    return operand_bits<T, kIsExact>(element(2 * at)) |
           operand_bits<T, kIsExact>(element(2 * at + 1)) << 16;
  else
    return operand_bits<T, kIsExact>(element(at));
}

// Lanes without the bit get the sum of both lanes' `a`, those with it that of `b`.
__device__ inline float kept_of(float a, float b, int bit) {
  const bool is_second = threadIdx.x & bit;
  return (is_second ? b : a) + __shfl_xor_sync(~0u, is_second ? a : b, bit);
}

// sums += a b, of 16 rows and 8 entries, over two words of each lane.
template <typename T>
__device__ inline void multiply_tile(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                     uint32_t b1) {
#if __CUDA_ARCH__ >= 900
#define OPWRIGHT_MMA(SHAPE)                                                                       \
  asm volatile("mma.sync.aligned." SHAPE " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (!kIsNarrow<T>)
    OPWRIGHT_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
  else if constexpr (opwright::detail::kSame<T, opwright::bfloat16>)
    OPWRIGHT_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  else
    OPWRIGHT_MMA("m16n8k16.row.col.f32.f16.f16.f32");
#undef OPWRIGHT_MMA
#endif
}

// Part of a matrix in registers and shared memory, each warp with its columns, as the tensor cores
// take it: TILES times 16 rows, columns in chunks, of which a lane has one of four that follow each
// other (a group). A warp has at most MOST groups, or exactly if they are full; HELD of the steps,
// two for each group, are in registers. Turned: the tensor cores take 16 entries as their rows, and
// 8 rows of the matrix are a tile, one step for each group.
template <typename T, bool kIsFull, bool kIsExact, int TILES, int MOST, int HELD, int TEAMS = 1,
          bool kIsTurned = false>
struct Rows {
  static_assert(!(kIsTurned && kIsExact));
  static constexpr int kTiles = TILES, kRowsOfTile = kIsTurned ? 8 : 16;
  static constexpr int kSteps = kIsTurned ? 1 : 2;  // of a group
  template <int NT>
  static constexpr int kSums = kIsTurned ? 1 : NT;  // times four, of a tile
  static constexpr int kMostTiles = 2;              // of entries
  uint32_t held[HELD][TILES][4];
  uint4* more;
  float4* seen;  // exact: chunks that all lanes of the warp multiply with; two groups take turns
  int first, count;  // groups of this warp
  bool is_beyond;    // whether the last of them has no chunk for this lane

  static __host__ __device__ int first_of(int warp, int groups) { return warp * groups / kWarps; }
  // Steps that are in shared memory.
  static __host__ __device__ int steps_in_shared(int groups) {
    const int steps = kSteps * ((groups + kWarps - 1) / kWarps);
    return steps > HELD ? steps - HELD : 0;
  }
  static constexpr int kStaged =
      HELD * TILES < 4 ? HELD * TILES : 4;  // pieces on their way into registers
  static_assert(HELD * TILES % kStaged == 0);
  static int64_t shared_bytes(int groups) {
    const int turns = kIsExact ? 2 * kMostTiles * TEAMS : 0;
    return int64_t{steps_in_shared(groups) * TILES + kStaged + turns} * kWarps * 32 * sizeof(uint4);
  }

  // word(row of the tile, tile, chunk, word of the chunk) for `groups` groups from `from` on, which
  // end before `chunks`.
  template <typename Word>
  __device__ void load(int from, int groups, int chunks, void* shared, const Word& word) {
    const int warp = thread_of_team() / 32, lane = threadIdx.x % 32,
              steps = steps_in_shared(groups);
    first = first_of(warp, groups), count = first_of(warp + 1, groups) - first;
    first += from;
    is_beyond = 4 * (first + count - 1) + lane % 4 >= chunks;
    uint4* const staged = static_cast<uint4*>(shared) + warp * kStaged * 32 + lane;
    more = static_cast<uint4*>(shared) + (kStaged * kWarps + warp * steps * TILES) * 32 + lane;
    seen = static_cast<float4*>(shared) +
           ((kStaged + steps * TILES) * kWarps + threadIdx.x / 32 * 2 * kMostTiles) * 32;
    // A piece at a time, through shared memory: more would make this most of the kernel's code.
    const auto put = [&](uint4* to, int piece) {
      const int k = piece / TILES;
      uint32_t words[4] = {};
      if (k / kSteps < count) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          words[i] = word(lane / 4 + (kIsTurned ? 0 : (i & 1) * 8), piece % TILES,
                          4 * (first + k / kSteps) + lane % 4, kIsTurned ? i : 2 * (k % 2) + i / 2);
      }
      *to = make_uint4(words[0], words[1], words[2], words[3]);
    };
    // Teams have the same pieces, and read half of them each.
    const int team = TEAMS > 1 ? team_of_block() : 0;
    if constexpr (HELD < kSteps * MOST) {
#pragma unroll 1
      for (int piece = HELD * TILES + team; piece < kSteps * count * TILES; piece += TEAMS)
        put(more + (piece - HELD * TILES) * 32, piece);
    }
#pragma unroll
    for (int done = 0; done < HELD * TILES; done += kStaged) {
#pragma unroll 1
      for (int i = team; i < kStaged; i += TEAMS) put(staged + i * 32, done + i);
      if constexpr (TEAMS > 1) __syncthreads();
#pragma unroll
      for (int i = 0; i < kStaged; ++i) {
        const uint4 v = staged[i * 32];
        uint32_t (&to)[4] = held[(done + i) / TILES][(done + i) % TILES];
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
      }
      if constexpr (TEAMS > 1) __syncthreads();
    }
  }

  // sums = these rows times the chunks of 8 NT entries: chunk 4 j + i of entry b at from[(8 NT j +
  // b) * 4 + i]. Turned, a lane's sums are those of entries lane / 4 and 8 more, of two rows each.
  template <int NT, typename Exchange>
  __device__ void multiply(const Chunk* from, float (&sums)[TILES][kSums<NT>][4],
                           const Exchange& exchange) const {
    static_assert(!kIsTurned || NT == 2);
    constexpr int kAhead = (kIsExact     ? 8
                            : TILES == 3 ? 12
                                         : 16 / TEAMS) /
                           NT,
                  kWindow = MOST < kAhead ? MOST : kAhead;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int n = 0; n < kSums<NT>; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][n][i] = 0;
    if (!kIsFull && count == 0) return;
    Products<NT> products;
    from += first * NT * 32 + threadIdx.x % 32;
    const auto at = [&](int j, int n) { return from + (j * NT + n) * 32; };
    Chunk chunks[kWindow][NT];
    const auto wait = [&](int j, int n) {
      Chunk& chunk = chunks[j % kWindow][n];
      bool is_there = exchange.take(chunk) || (!kIsFull && is_beyond && j == count - 1);
      while (__any_sync(~0u, !is_there))
        if (!is_there) is_there = exchange.find(chunk, at(j, n));
    };
    // Waits for one chunk; reading all of them over and over would be in the way of those who
    // write.
    chunks[0][0] = exchange.load(from);
    wait(0, 0);
#pragma unroll
    for (int j = 0; j < kWindow; ++j)
#pragma unroll
      for (int n = 0; n < NT; ++n)
        if (j + n > 0 && (kIsFull || j < count)) chunks[j][n] = exchange.load(at(j, n));
#pragma unroll
    for (int j = 0; j < MOST; ++j) {
      if (!kIsFull && j >= count) break;
#pragma unroll
      for (int n = 0; n < NT; ++n)
        if (j + n > 0) wait(j, n);
      if constexpr (kIsExact) {
        float4* const turn = seen + j % 2 * kMostTiles * 32;
#pragma unroll
        for (int n = 0; n < NT; ++n)
          turn[n * 32 + threadIdx.x % 32] = __builtin_bit_cast(float4, chunks[j % kWindow][n]);
        __syncwarp();
        uint32_t a[TILES][2][4];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
          for (int e = 0; e < 2; ++e) piece(2 * j + e, tile, a[tile][e]);
        products.add(turn, a);
      } else if constexpr (kIsTurned) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const Chunk &low = chunks[j % kWindow][0], &high = chunks[j % kWindow][NT - 1];
          uint32_t b[4];
          piece(j, tile, b);
#pragma unroll
          for (int e = 0; e < 2; ++e)
            multiply_tile<T>(
                sums[tile][0],
                {low.word[2 * e], high.word[2 * e], low.word[2 * e + 1], high.word[2 * e + 1]},
                b[2 * e], b[2 * e + 1]);
        }
      } else {
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile) {
            uint32_t a[4];
            piece(2 * j + e, tile, a);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              const Chunk& chunk = chunks[j % kWindow][n];
              multiply_tile<T>(sums[tile][n], a, chunk.word[2 * e], chunk.word[2 * e + 1]);
            }
          }
      }
#pragma unroll
      for (int n = 0; n < NT; ++n)
        if (j + kWindow < MOST && (kIsFull || j + kWindow < count))
          chunks[j % kWindow][n] = exchange.load(at(j + kWindow, n));
    }
    if constexpr (kIsExact) products.finish(sums);
  }

  // What the tensor cores take of a tile in a step.
  __device__ void piece(int step, int tile, uint32_t (&a)[4]) const {
    if (step < HELD) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held[step < HELD ? step : 0][tile][i];
    } else {
      const uint4 v = more[((step - HELD) * TILES + tile) * 32];
      a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
  }

  // Sums of products of float: each lane has those of two rows of a tile with all entries, over the
  // columns of its chunks.
  template <int NT>
  struct Products {
    float of[TILES][NT][2][8] = {};

    // The pieces of both steps of a group, and its chunks, of all lanes.
    __device__ void add(const float4* chunks, const uint32_t (&a)[TILES][2][4]) {
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int entry = 0; entry < 8; ++entry) {
          const float4 chunk = chunks[n * 32 + entry * 4 + threadIdx.x % 4];
#pragma unroll
          for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int row = 0; row < 2; ++row) {
              float& sum = of[tile][n][row][entry];
              sum = fmaf(__uint_as_float(a[tile][0][row]), chunk.x, sum);
              sum = fmaf(__uint_as_float(a[tile][0][2 + row]), chunk.y, sum);
              sum = fmaf(__uint_as_float(a[tile][1][row]), chunk.z, sum);
              sum = fmaf(__uint_as_float(a[tile][1][2 + row]), chunk.w, sum);
            }
        }
    }
    // Over the four lanes of a row; each keeps two entries, where the tensor cores leave them.
    __device__ void finish(float (&sums)[TILES][NT][4]) const {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            float half[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
              half[i] = kept_of(of[tile][n][row][i], of[tile][n][row][4 + i], 2);
#pragma unroll
            for (int i = 0; i < 2; ++i)
              sums[tile][n][2 * row + i] = kept_of(half[i], half[2 + i], 1);
          }
    }
  };
};

}  // namespace opwright_ops::gpu
