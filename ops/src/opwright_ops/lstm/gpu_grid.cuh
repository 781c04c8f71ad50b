// All steps of an LSTM in one launch: each block keeps the rows of weight_hh of its units on the chip, and h goes
// from block to block through the second-level cache.
#pragma once

#include "gpu_exchange.cuh"
#include "gpu_forward.cuh"

namespace opwright_ops::gpu {

constexpr int kUnits = 8;  // of a set: two tiles of 16 rows, of two gates each

template <typename T>
struct GridSteps {
  using E = compute_t<T>;
  Layer<T> layer;
  State<T> state;  // c, h and operand: as they are before the steps, and then after them
  View<const T, 2> weight_hh;
  const E* from_input;    // [count, B, 4H], in the order of time
  Chunk* chunks;          // as laid out by `chunks_for`, all 0
  int64_t first, after;   // times: of the first step, and of that after the last or -1
  int count;              // steps
  int slices;             // of a block's entries, 8 NT each
  bool reverse;
};

// Chunks of one step of one slice; there are twice as many for steps that take turns, and twice as many
// again for what does not fit.
__host__ __device__ inline int64_t groups_of(int64_t elements, int per_chunk) {
  return (elements + 4 * per_chunk - 1) / (4 * per_chunk);
}

// SETS times kUnits units for each block, MOST groups of chunks for each warp, HELD steps of the tensor cores
// from registers.
template <typename T, int SETS, int NT, int MOST, int HELD>
struct Grid {
  using E = compute_t<T>;
  using Weights = Rows<T, 2 * SETS, MOST, HELD>;
  static constexpr int kEntries = 8 * NT, kItems = 2 * SETS * NT;  // items: 32 cells each
  static constexpr int kSteps = (kItems + kWarps - 1) / kWarps;

  struct Item {
    int set, entry;  // of the slice
    __device__ Item(int item)
        : set(item / (2 * NT)), entry(item / 2 % NT * 8 + 2 * (threadIdx.x % 4) + item % 2) {}
  };
  // In shared memory, from the start.
  struct Sums {
    float4 of[2][kWarps][kItems][32];
  };
  static int64_t shared_bytes(int slices, int64_t width) {
    return sizeof(Sums) + int64_t{slices} * kItems * 32 * (sizeof(E) + sizeof(T)) +
           Weights::shared_bytes(static_cast<int>(groups_of(width, kPerChunk<T>)));
  }

  __device__ static void take(const GridSteps<T>& a) {
    extern __shared__ __align__(16) unsigned char shared[];
    Sums& sums = *reinterpret_cast<Sums*>(shared);
    E* c = reinterpret_cast<E*>(shared + sizeof(Sums));
    T* h = reinterpret_cast<T*>(c + a.slices * kItems * 32);
    const int64_t H = a.layer.H, R = a.layer.R, B = a.layer.B;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
    const int groups = static_cast<int>(groups_of(R, kPerChunk<T>));
    const int all_chunks = static_cast<int>((R + kPerChunk<T> - 1) / kPerChunk<T>);
    const int64_t unit_0 = int64_t{blockIdx.x} * SETS * kUnits;
    const int64_t entry_0 = int64_t{blockIdx.y} * a.slices * kEntries;
    const int64_t per_step = int64_t{groups} * kEntries * 4, all = 2 * a.slices * per_step;
    Chunk* const mine = a.chunks + blockIdx.y * 2 * all;
    const auto buffer = [&](int step, int slice) { return mine + (slice * 2 + step % 2) * per_step; };

    // h before the first step.
    for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < a.slices * per_step;
         i += int64_t{gridDim.x} * kThreads) {
      const int slice = static_cast<int>(i / per_step);
      const int64_t at = i % per_step, chunk = at / (4 * kEntries) * 4 + at % 4;
      const int64_t entry = entry_0 + slice * kEntries + at / 4 % kEntries;
      if (chunk >= all_chunks) continue;
      const auto element = [&](int e) {
        const int64_t unit = chunk * kPerChunk<T> + e;
        return entry < B && unit < R ? a.state.operand[entry * R + unit] : T(0.0f);
      };
      Tagged<T>(0, all).give(buffer(0, slice) + at, {{word_of<T>(0, element), word_of<T>(1, element),
                                                      word_of<T>(2, element), word_of<T>(3, element)}});
    }
    Weights weights;
    weights.load(0, groups, all_chunks, h + a.slices * kItems * 32,
                 [&](int of_tile, int tile, int chunk, int word) {
                   const int64_t gate = tile % 2 * 2 + of_tile / 8, unit = unit_0 + tile / 2 * 8 + of_tile % 8;
                   return word_of<T>(word, [&](int e) {
                     const int64_t column = int64_t{chunk} * kPerChunk<T> + e;
                     return unit < H && column < R ? a.weight_hh(gate * H + unit, column) : T(0.0f);
                   });
                 });
    const auto each_item = [&](int slice, const auto& visit) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int number = warp + i * kWarps;
        if (number >= kItems) break;
        const Item item(number);
        visit(i, number, item, unit_0 + item.set * kUnits + row, entry_0 + slice * kEntries + item.entry);
      }
    };
    for (int slice = 0; slice < a.slices; ++slice)
      each_item(slice, [&](int, int number, const Item&, int64_t unit, int64_t entry) {
        const int at = (slice * kItems + number) * 32 + lane;
        const bool is_real = entry < B && unit < H;
        c[at] = is_real ? a.state.c[entry * H + unit] : E(0);
        h[at] = is_real ? a.state.h[entry * R + unit] : T(0.0f);
      });

    const int64_t direction = a.reverse ? -1 : 1, start = a.reverse ? a.first - (a.count - 1) : a.first;
    E x[kSteps][4] = {};
    const auto fetch = [&](int64_t t, int slice) {
      each_item(slice, [&](int i, int, const Item&, int64_t unit, int64_t entry) {
        if (entry >= B || unit >= H) return;
        const E* from = a.from_input + ((t - start) * B + entry) * 4 * H + unit;
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] = __ldcs(from + j * H);
      });
    };
    fetch(a.first, 0);
    int turn = 0;
    for (int step = 0; step < a.count; ++step) {
      const int64_t t = a.first + step * direction;
      const bool is_last = step + 1 == a.count;
      const int64_t next = is_last ? a.after : t + direction;
      for (int slice = 0; slice < a.slices; ++slice, turn ^= 1) {
        E bias[kSteps][4];
        each_item(slice, [&](int i, int, const Item&, int64_t unit, int64_t) {
#pragma unroll
          for (int j = 0; j < 4; ++j) bias[i][j] = unit < H ? a.layer.bias[j * H + unit] : E(0);
        });
        float found[2 * SETS][NT][4];
        weights.template multiply<NT>(buffer(step, slice), found, Tagged<T>(step, all));
#pragma unroll
        for (int set = 0; set < SETS; ++set)
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              sums.of[turn][warp][(set * NT + n) * 2 + i][lane] =
                  make_float4(found[2 * set][n][i], found[2 * set][n][2 + i], found[2 * set + 1][n][i],
                              found[2 * set + 1][n][2 + i]);
        __syncthreads();
        each_item(slice, [&](int i, int number, const Item& item, int64_t unit, int64_t entry) {
          float4 sum = sums.of[turn][0][number][lane];
#pragma unroll
          for (int w = 1; w < kWarps; ++w) {
            const float4 more = sums.of[turn][w][number][lane];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
          }
          const bool is_real = entry < B && unit < H;
          const int at = (slice * kItems + number) * 32 + lane;
          T operand = T(0.0f);
          if (is_real) {
            E z[4] = {sum.x + x[i][0] + bias[i][0], sum.y + x[i][1] + bias[i][1],
                      sum.z + x[i][2] + bias[i][2], sum.w + x[i][3] + bias[i][3]};
            const E before = a.layer.resets(t, entry) ? E(0) : c[at];
            const E cell = new_cell(a.layer, a.state, t, entry, unit, z, before, static_cast<const E*>(nullptr));
            const auto keeps = kept(a.layer.options, a.layer.seed, entry, unit, t);
            const T out = new_out(a.layer, a.state, t, entry, unit, z[3], before, cell, cell, keeps.c, c[at]);
            operand = leave(a.layer, a.state, t, next, entry, unit, static_cast<E>(out), keeps.h, h[at]);
          }
          if (is_last) {
            if (is_real) a.state.operand[entry * R + unit] = operand;
          } else {
            give(operand, Tagged<T>(step + 1, all), buffer(step + 1, slice),
                 (unit_0 + item.set * kUnits) / kPerChunk<T>, all_chunks, item.entry);
          }
        });
        const bool is_end = slice + 1 == a.slices;
        if (!is_last || !is_end) fetch(is_end ? next : t, is_end ? 0 : slice + 1);
      }
    }
    for (int slice = 0; slice < a.slices; ++slice)
      each_item(slice, [&](int, int number, const Item&, int64_t unit, int64_t entry) {
        const int at = (slice * kItems + number) * 32 + lane;
        if (entry >= B || unit >= H) return;
        a.state.c[entry * H + unit] = c[at];
        a.state.h[entry * R + unit] = h[at];
      });
  }

  // Lanes row * 4 + i have units `row` of one entry for each i; those of a chunk are put together.
  __device__ static void give(T value, const Tagged<T>& exchange, Chunk* to, int64_t chunk, int all_chunks,
                              int entry) {
    const int row = threadIdx.x % 32 / 4;
    const uint32_t own = operand_bits<T>(value);
    Chunk out;
    if constexpr (kIsNarrow<T>) {
      out.word[0] = own | __shfl_down_sync(~0u, own, 4) << 16;
      out.word[1] = __shfl_down_sync(~0u, out.word[0], 8);
      out.word[2] = __shfl_down_sync(~0u, out.word[0], 16);
      out.word[3] = __shfl_down_sync(~0u, out.word[1], 16);
    } else {
      out = {{own, __shfl_down_sync(~0u, own, 4), __shfl_down_sync(~0u, own, 8), __shfl_down_sync(~0u, own, 12)}};
      chunk += row / 4;
    }
    if (row % kPerChunk<T> == 0 && chunk < all_chunks)
      exchange.give(to + (chunk / 4 * kEntries + entry) * 4 + chunk % 4, out);
  }
};

template <typename T, int SETS, int NT, int MOST, int HELD>
__global__ void __launch_bounds__(kThreads, 1) take_in_grid(GridSteps<T> steps) {
#if __CUDA_ARCH__ >= 900
  Grid<T, SETS, NT, MOST, HELD>::take(steps);
#endif
}

}  // namespace opwright_ops::gpu
