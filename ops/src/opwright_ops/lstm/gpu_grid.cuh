// All steps of an LSTM in one launch: each block keeps the rows of weight_hh of its units on the
// chip, and h goes from block to block through the second-level cache.
#pragma once

#include "gpu_forward.cuh"
#include "gpu_products.cuh"

namespace opwright_ops::gpu {

template <typename T>
struct GridSteps {
  using E = compute_t<T>;
  Layer<T> layer;
  State<T> state;  // c, h and operand: as they are before the steps, and then after them
  View<const T, 2> weight_hh;
  const E* from_input;          // [count, B, 4H], in the order of time
  const Moments<E>* moments_x;  // [count, B]: of its rows, where layers are normalised
  Chunk* chunks;                // as laid out by `chunks_for`, all 0
  int64_t first, after;         // times: of the first step, and of that after the last or -1
  int count;                    // steps
  int slices;                   // of a block's entries, 8 NT each
  bool reverse;
};

// SETS times kUnits units for each block, and perhaps half as many, 8 NT entries at a time; MOST
// and HELD are those of Rows. Fast: without options, and as wide as all warps have groups (near: no
// wider). Near: the blocks of a part are a cluster, and exchange h through shared memory; only they
// have layers that are normalised.
template <typename T, int KIND, int SETS, int NT, int MOST, int HELD>
struct Grid {
  using E = compute_t<T>;
  static constexpr bool kIsNear = KIND & kNear, kIsFast = KIND & kFast,
                        kIsNormalised = KIND & kNormalised;
  static constexpr bool kIsExact = KIND & kExact;
  static constexpr bool kHasHalf = KIND & kHalfMore;
  static constexpr int kTeams = KIND & kTwoTeams ? 2 : 1;
  // Of two tiles of rows a set has two gates of its units each; half a set has a tile of all gates.
  static constexpr int kTiles = 2 * SETS + kHasHalf;
  static constexpr int kWhole = SETS * kUnits, kBlockUnits = kWhole + (kHasHalf ? kUnits / 2 : 0);
  using Weights = Rows<T, kIsFast, kIsExact, kTiles, MOST, HELD, kTeams>;
  static constexpr int kEntries = 8 * NT;
  // Sets of 32 cells, one for each warp: of 8 units, for every other entry of 8; then of 4 units,
  // for 8 entries.
  static constexpr int kItems = kTiles * NT, kWholeItems = 2 * SETS * NT;
  static_assert(kItems <= kWarps);
  static_assert(!kIsNormalised ||
                (kIsNear && kTeams == 1 && kItems == kWarps && kEntries == Totals::kEntries));

  // Of columns. Near and fast, as many as all warps can have: those beyond the width stay 0.
  __host__ __device__ static int groups_for(int64_t width) {
    return kIsNear && kIsFast ? kWarps * MOST : static_cast<int>(groups_of(width, kPerChunk<T>));
  }

  // Of a team; two take turns where there is room.
  static constexpr int kTurns = kTeams > 1 ? 1 : 2;
  struct Sums {
    float4 of[kTurns][kWarps][kItems][32];
  };
  static int64_t shared_bytes(int slices, int64_t width) {
    const int64_t near =
        slices * (sizeof(NearSlice) + 2 * groups_for(width) * kEntries * 4 * sizeof(Chunk));
    return (kIsNormalised ? sizeof(Totals) : 0) + (kIsNear ? near : 0) + kTeams * sizeof(Sums) +
           int64_t{slices} * kItems * 32 * (sizeof(E) + sizeof(T)) +
           Weights::shared_bytes(groups_for(width));
  }
  static bool is_for(const Layer<T>& layer) {
    constexpr int64_t kWidth = int64_t{4} * kPerChunk<T> * kWarps * MOST;
    return (kIsNear ? layer.R <= kWidth : layer.R == kWidth) && layer.is_plain();
  }

  __device__ static void take(const GridSteps<T>& a) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Layer<T> layer = kIsFast ? plain(a.layer) : a.layer;
    const int H = static_cast<int>(layer.H), R = static_cast<int>(layer.R),
              B = static_cast<int>(layer.B);
    const int team = kTeams > 1 ? team_of_block() : 0,
              warp = (kTeams > 1 ? thread_of_team() : threadIdx.x) / 32, lane = threadIdx.x % 32;
    const int groups = groups_for(R);
    const int chunks = (R + kPerChunk<T> - 1) / kPerChunk<T>;
    const int unit_0 = blockIdx.x * kBlockUnits, entry_0 = blockIdx.y * a.slices * kEntries;
    const int per_step = groups * kEntries * 4, all = 2 * a.slices * per_step;
    Totals& totals = *reinterpret_cast<Totals*>(shared);
    NearSlice* near = reinterpret_cast<NearSlice*>(shared + (kIsNormalised ? sizeof(Totals) : 0));
    Chunk* const mine =
        kIsNear ? reinterpret_cast<Chunk*>(near + a.slices) : a.chunks + blockIdx.y * 2 * all;
    Sums* const all_sums =
        reinterpret_cast<Sums*>(kIsNear ? static_cast<void*>(mine + all) : shared);
    Sums& sums = all_sums[team];
    E* all_c = reinterpret_cast<E*>(all_sums + kTeams);
    T* all_h = reinterpret_cast<T*>(all_c + a.slices * kItems * 32);
    const auto buffer = [&](int step, int slice) {
      return mine + (slice * 2 + step % 2) * per_step;
    };

    const uint32_t bytes = chunks * kEntries * sizeof(Chunk);
    if (kIsNear && threadIdx.x == 0)
      for (int slice = 0; slice < a.slices; ++slice) near[slice].prepare(a.count, bytes);
    if (kIsNormalised && threadIdx.x == 0) totals.prepare();
    // h before the first step.
    const int fillers = kIsNear ? 1 : gridDim.x;
    constexpr int kAll = kTeams * kThreads;
    for (int i = (kIsNear ? 0 : blockIdx.x) * kAll + threadIdx.x; i < a.slices * per_step;
         i += fillers * kAll) {
      const int slice = i / per_step, at = i % per_step, chunk = at / (4 * kEntries) * 4 + at % 4;
      const int entry = entry_0 + slice * kEntries + at / 4 % kEntries;
      if (!kIsNear && chunk >= chunks) continue;
      const auto element = [&](int e) {
        const int unit = chunk * kPerChunk<T> + e;
        return entry < B && unit < R ? a.state.operand[entry * R + unit] : T(0.0f);
      };
      const Chunk first{{word_of<T, kIsExact>(0, element), word_of<T, kIsExact>(1, element),
                         word_of<T, kIsExact>(2, element), word_of<T, kIsExact>(3, element)}};
      if (kIsNear)
        buffer(0, slice)[at] = first, buffer(1, slice)[at] = {};
      else
        Tagged<T>(0, all).give(buffer(0, slice) + at, first);
    }
    // A block without units would give nothing that the others wait for, and they would run ahead
    // of it.
    if (!kIsNear && unit_0 >= H) return;
    Weights weights;
    weights.load(0, groups, chunks, all_h + a.slices * kItems * 32,
                 [&](int of_tile, int tile, int chunk, int word) {
                   const bool is_half = kHasHalf && tile == 2 * SETS;
                   const int gate = is_half ? of_tile / 4 : tile % 2 * 2 + of_tile / 8,
                             unit = unit_0 + (is_half ? kWhole + of_tile % 4
                                                      : tile / 2 * kUnits + of_tile % 8);
                   return word_of<T, kIsExact>(word, [&](int e) {
                     const int column = chunk * kPerChunk<T> + e;
                     return unit < H && column < R ? a.weight_hh(gate * H + unit, column) : T(0.0f);
                   });
                 });

    // This thread's cell of each slice.
    const bool has_cells = warp < kItems;
    const bool is_half = kHasHalf && warp >= kWholeItems;
    const int set = warp / (2 * NT),
              unit = unit_0 + (is_half ? kWhole + lane / 4 % 4 : set * kUnits + lane / 4);
    const int in_slice =
                  (is_half ? (warp - kWholeItems) * 8 + lane / 16 : warp / 2 % NT * 8 + warp % 2) +
                  2 * (lane % 4),
              entry_of_0 = entry_0 + in_slice;
    const auto is_real = [&](int slice) {
      return has_cells && unit < H && entry_of_0 + slice * kEntries < B;
    };
    const auto cell_of = [&](int slice) { return (slice * kItems + warp) * 32 + lane; };
    const int chunk = unit / kPerChunk<T>;
    const int give_to = chunk < chunks ? (chunk / 4 * kEntries + in_slice) * 4 + chunk % 4 : -1;
    const int of_chunk = unit % kPerChunk<T>;  // of the threads that have its units
    E bias[4] = {}, gain_x[4] = {}, gain_h[4] = {}, gain_c[2] = {};
    if constexpr (kIsNormalised) {
      for (int j = 0; j < 4 && unit < H; ++j)
        gain_x[j] = layer.norm_ih[j * H + unit], gain_h[j] = layer.norm_hh[j * H + unit];
      for (int j = 0; j < 2 && unit < H; ++j) gain_c[j] = static_cast<E>(layer.norm_c(j, unit));
    }
    for (int slice = team; slice < a.slices; slice += kTeams) {
      if (!is_real(slice)) continue;
      const int entry = entry_of_0 + slice * kEntries;
      all_c[cell_of(slice)] = a.state.c[entry * H + unit];
      all_h[cell_of(slice)] = a.state.h[entry * R + unit];
      for (int j = 0; j < 4; ++j) bias[j] = layer.bias[j * H + unit];
    }

    const int direction = a.reverse ? -1 : 1;
    const int64_t inputs = int64_t{B} * 4 * H;  // of a step
    const E* from_input = a.from_input + (a.reverse ? (a.count - 1) * inputs : 0) +
                          int64_t{entry_of_0} * 4 * H + unit;
    E x[4] = {};
    Moments<E> of_x = {};
    const Moments<E>* moments_x = a.moments_x + (a.reverse ? (a.count - 1) * B : 0) + entry_of_0;
    const auto fetch = [&](int slice) {
      if (!is_real(slice)) return;
      if (kIsNormalised) of_x = moments_x[slice * kEntries];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = __ldcs(from_input + slice * kEntries * 4 * H + j * H);
    };
    fetch(team);
    if (kIsNear) wait_for_cluster();
    int turn = 0;
    for (int step = 0; step < a.count; ++step) {
      const int64_t t = a.first + step * direction;
      const bool is_last = step + 1 == a.count;
      const int64_t next = is_last ? a.after : t + direction;
      for (int slice = team; slice < a.slices; slice += kTeams, turn = (turn + 1) % kTurns) {
        float found[kTiles][NT][4];
        if constexpr (kIsNear) {
          if (step > 0) near[slice].wait(step, a.count, bytes);
          weights.template multiply<NT>(buffer(step, slice), found, Near{});
        } else {
          weights.template multiply<NT>(buffer(step, slice), found, Tagged<T>(step, all));
        }
        if constexpr (kTurns == 1) wait_for_team<kTeams>();  // all have read the sums of before
#pragma unroll
        for (int s = 0; s < SETS; ++s)
#pragma unroll
          for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              sums.of[turn][warp][(s * NT + n) * 2 + i][lane] =
                  make_float4(found[2 * s][n][i], found[2 * s][n][2 + i], found[2 * s + 1][n][i],
                              found[2 * s + 1][n][2 + i]);
        if constexpr (kHasHalf) {
#pragma unroll
          for (int n = 0; n < NT; ++n)
            sums.of[turn][warp][kWholeItems + n][lane] = gates_of(found[2 * SETS][n]);
        }
        wait_for_team<kTeams>();
        const bool is_round = slice + kTeams >= a.slices;
        if (has_cells) {
          float4 sum = sums.of[turn][0][warp][lane];
#pragma unroll
          for (int w = 1; w < kWarps; ++w) {
            const float4 more = sums.of[turn][w][warp][lane];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
          }
          const E from_h[4] = {sum.x, sum.y, sum.z, sum.w};
          E z[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) z[j] = from_h[j] + x[j] + bias[j];
          const int reduction = step * a.slices + slice;
          if constexpr (kIsNormalised) {
            const auto of_h = totals.moments(0, reduction, in_slice, unit, H, from_h);
#pragma unroll
            for (int j = 0; j < 4; ++j)
              z[j] = (x[j] - of_x.mean) * of_x.scale * gain_x[j] +
                     (from_h[j] - of_h.mean) * of_h.scale * gain_h[j] + bias[j];
          }
          const int entry = entry_of_0 + slice * kEntries;
          const bool is_there = is_real(slice), is_active = is_there && layer.is_active(t, entry);
          E& c = all_c[cell_of(slice)];
          T& h = all_h[cell_of(slice)];
          T h_after = T(0.0f), operand = h_after;
          E c_after = 0;
          E before = 0, cell = 0;
          if (is_there) {
            before = layer.resets(t, entry) ? E(0) : c;
            cell = new_cell(layer, unit, z, before);
          }
          E normal = cell;  // as tanh takes it
          if constexpr (kIsNormalised) {
            const auto of_c = totals.moments(1, reduction, in_slice, unit, H, {cell});
            normal = (cell - of_c.mean) * of_c.scale * gain_c[0] + gain_c[1];
          }
          if (is_there) {
            const auto keeps = kept(layer.options, layer.seed, entry, unit, t);
            c_after = mix(keeps.c, before, cell);
            const E out = static_cast<E>(new_out(layer, z[3], normal));
            h_after = h;
            if (is_active) take_h(layer, t, entry, out, keeps.h, h_after);
            operand = operand_of(layer, next, entry, unit, h_after);
          }
          if (!is_last) {
            const Chunk out = chunk_of(operand);
            Chunk* const to = buffer(step + 1, slice) + give_to;
            if (give_to < 0)
              ;
            else if constexpr (kIsNear)
              near[slice].give(step + 1, to, out, of_chunk, kPerChunk<T>);
            else if (of_chunk == 0)
              Tagged<T>(step + 1, all).give(to, out);
          }
          if (is_there) {
            if (is_last) a.state.operand[entry * R + unit] = operand;
            if (is_active) h = h_after, c = c_after;
            leave_h(a.state, t, entry, unit, is_active, h_after);
            leave_cell(a.state, t, entry, unit, is_active, c_after);
            if constexpr (kIsNormalised)
              leave_gates(a.state, t, entry, unit, H, is_active, from_h);
            else
              leave_gates(a.state, t, entry, unit, H, is_active, z);
          }
        }
        if (is_round) from_input += direction * inputs, moments_x += direction * B;
        if (!is_last || !is_round) fetch(is_round ? team : slice + kTeams);
      }
    }
    for (int slice = team; slice < a.slices; slice += kTeams) {
      if (!is_real(slice)) continue;
      const int entry = entry_of_0 + slice * kEntries;
      a.state.c[entry * H + unit] = all_c[cell_of(slice)];
      a.state.h[entry * R + unit] = all_h[cell_of(slice)];
    }
    if (kIsNear) wait_for_cluster();  // none ends before what it sent has come
  }

  // Half a set: lanes below 16 have two gates of two entries, those above the other two; each gets
  // the four gates of one entry.
  __device__ static float4 gates_of(const float (&sums)[4]) {
    const bool is_second = threadIdx.x & 16;
    const float own[2] = {is_second ? sums[1] : sums[0], is_second ? sums[3] : sums[2]};
    const float other[2] = {__shfl_xor_sync(~0u, is_second ? sums[0] : sums[1], 16),
                            __shfl_xor_sync(~0u, is_second ? sums[2] : sums[3], 16)};
    return is_second ? make_float4(other[0], own[0], other[1], own[1])
                     : make_float4(own[0], other[0], own[1], other[1]);
  }

  // Lanes row * 4 + i have units `row` of one entry for each i, of half a set also lanes 16 + row *
  // 4 + i; those of a chunk are put together, for all of them.
  __device__ static Chunk chunk_of(T value) {
    const uint32_t own = operand_bits<T, kIsExact>(value), lane = threadIdx.x % 32;
    Chunk out;
    if constexpr (kIsNarrow<T>) {
      const uint32_t other = __shfl_xor_sync(~0u, own, 4);
      const uint32_t pair = lane & 4 ? other | own << 16 : own | other << 16;
#pragma unroll
      for (int j = 0; j < 4; ++j) out.word[j] = __shfl_sync(~0u, pair, 8 * j + lane % 4);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        out.word[j] = __shfl_sync(~0u, own, lane / 16 * 16 + 4 * j + lane % 4);
    }
    return out;
  }
};

template <typename T, int KIND, int SETS, int NT, int MOST, int HELD>
__global__ void __launch_bounds__(kThreads*(KIND& kTwoTeams ? 2 : 1), 1)
    take_in_grid(GridSteps<T> steps) {
#if __CUDA_ARCH__ >= 900
  Grid<T, KIND, SETS, NT, MOST, HELD>::take(steps);
#endif
}

}  // namespace opwright_ops::gpu
