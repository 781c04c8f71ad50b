// The backward of all steps of an LSTM in one launch. Blocks come in pairs (clusters): each has the
// columns of weight_hh of the units of both, for the gates of half of all units; gradients of gates
// go from block to block through the second-level cache, sums of the halves within the pair.
#pragma once

#include "gpu_backward.cuh"
#include "gpu_products.cuh"

namespace opwright_ops::gpu {

template <typename T>
struct GridSweep {
  Layer<T> layer;
  Past<T> past;
  Sweep<T> sweep;  // grad_h, grad_c and to_h: as they are after the steps, and then before them
  View<const T, 2> weight_hh;
  Chunk* chunks;  // all bits 1
  int slices;     // of a block's entries, 8 NT each
};

// How gradients of gates are exchanged: four buffers take turns, and are all ones where nothing has
// come yet. A chunk is written over with ones when all have read it, before the same thread's next
// but one.
struct Marked : InGlobal {
  static constexpr uint32_t kNone = 0xffffffffu;
  static constexpr int kBuffers = 4;
  __device__ bool take(const Chunk& chunk) const { return chunk.word[0] != kNone; }
  __device__ bool find(Chunk& chunk, const Chunk* from) const {
    chunk = load_chunk(from);
    return take(chunk);
  }
  __device__ static void give(Chunk* to, Chunk chunk) {
    if (chunk.word[0] == kNone) chunk.word[0] = 0x7fff7fffu;  // NaN as well
    store_chunk(to, chunk);
  }
  // Makes earlier clears visible to all blocks before later writes.
  __device__ static void order() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
  }
  __device__ static void clear(Chunk* to) { store_chunk(to, {{kNone, kNone, kNone, kNone}}); }
};

template <typename T, int KIND, int SETS, int NT, int MOST, int HELD>
struct GridBack {
  using E = compute_t<T>;
  static constexpr bool kIsNear = KIND & kNear, kIsFast = KIND & kFast,
                        kIsNormalised = KIND & kNormalised;
  static constexpr bool kIsExact = KIND & kExact;
  static constexpr int kRanks = kIsNear ? 1 : 2;  // blocks that share the units of all of them
  static constexpr bool kHasHalf = KIND & kHalfMore;
  static constexpr int kTeams = KIND & kTwoTeams ? 2 : 1;
  static constexpr int kEntries = 8 * NT, kBlockUnits = kUnits * SETS + (kHasHalf ? kUnits / 2 : 0);
  // With half a set in each block, a pair has 24 units: one and a half tiles of 16, or 3 of 8.
  using Weights = Rows<T, kIsFast, kIsExact, kBlockUnits * kRanks / (kHasHalf ? 8 : 16), MOST, HELD,
                       kTeams, kHasHalf>;
  // Of a cluster, of a block; pairs, of two entries or, with half a set, of two units.
  static constexpr int kSums = kBlockUnits * kRanks * kEntries / 2, kOwn = kSums / kRanks;
  static constexpr int kCells = kBlockUnits * kEntries;  // at most one for each thread
  static_assert(kCells <= kThreads && kSums <= kThreads);
  static_assert(!kIsNormalised ||
                (kIsNear && kTeams == 1 && kCells == kThreads && kBlockUnits == 32));

  struct alignas(16) Slice {
    float2 come[kIsNear ? 1 : 2][kRanks][kIsNear ? 1 : kOwn];
    Arrivals arrivals[2];
    NearSlice near;
    E grad_h[kCells], grad_c[kCells];
  };
  struct Partial {
    float2 of[kWarps][kSums];
  };
  // As in the forward.
  __host__ __device__ static int groups_for(int64_t H) {
    return kIsNear && kIsFast ? kWarps * MOST : static_cast<int>(groups_of(H, kUnitsOfChunk<T>));
  }
  static int64_t shared_bytes(int slices, int64_t H) {
    const int64_t near = slices * int64_t{2} * groups_for(H) * kEntries * 4 * sizeof(Chunk);
    return (kIsNormalised ? sizeof(Totals) : 0) + (kIsNear ? near : 0) + kTeams * sizeof(Partial) +
           slices * sizeof(Slice) + Weights::shared_bytes((groups_for(H) + kRanks - 1) / kRanks);
  }
  static bool is_for(const Layer<T>& layer) {
    constexpr int64_t kWidth = int64_t{4} * kUnitsOfChunk<T> * kWarps * kRanks * MOST;
    return (kIsNear ? layer.H <= kWidth : layer.H == kWidth) && layer.is_plain();
  }

  __device__ static void sweep(const GridSweep<T>& a) {
    extern __shared__ __align__(16) unsigned char shared[];
    Totals& totals = *reinterpret_cast<Totals*>(shared);
    const int team = kTeams > 1 ? team_of_block() : 0;
    Partial* const partials =
        reinterpret_cast<Partial*>(shared + (kIsNormalised ? sizeof(Totals) : 0));
    Partial& partial = partials[team];
    Slice* slices = reinterpret_cast<Slice*>(partials + kTeams);
    const Layer<T> layer = kIsFast ? plain(a.layer) : a.layer;
    const int H = static_cast<int>(layer.H), R = static_cast<int>(layer.R),
              B = static_cast<int>(layer.B);
    const int thread = kTeams > 1 ? thread_of_team() : threadIdx.x, warp = thread / 32,
              lane = thread % 32;
    const int rank = blockIdx.x % kRanks, groups = groups_for(H);
    const int per_step = groups * kEntries * 4,
              chunks = 4 * static_cast<int>(groups_of(H, kUnitsOfChunk<T>));
    constexpr int kBuffers = kIsNear ? 2 : Marked::kBuffers;
    Chunk* const near_chunks = reinterpret_cast<Chunk*>(slices + a.slices);
    Chunk* const mine =
        kIsNear ? near_chunks : a.chunks + blockIdx.y * a.slices * kBuffers * per_step;
    const auto buffer = [&](int step, int slice) {
      return mine + (slice * kBuffers + step % kBuffers) * per_step;
    };
    Weights weights;
    const int from = rank * groups / kRanks, until = (rank + 1) * groups / kRanks;
    void* const room = near_chunks + (kIsNear ? a.slices * kBuffers * per_step : 0);
    weights.load(
        from, until - from, 4 * groups, room, [&](int of_tile, int tile, int chunk, int word) {
          const int to = (blockIdx.x - rank) * kBlockUnits + tile * Weights::kRowsOfTile + of_tile;
          return word_of<T, kIsExact>(word, [&](int e) {
            const int of = chunk * kUnitsOfChunk<T> + e / 4;
            return of < H && to < R ? a.weight_hh(e % 4 * H + of, to) : T(0.0f);
          });
        });
    const int steps = static_cast<int>(a.past.steps);
    const uint32_t bytes = chunks * kEntries * sizeof(Chunk);
    for (int i = threadIdx.x; kIsNear && kIsFast && i < a.slices * kBuffers * per_step;
         i += kTeams * kThreads)
      near_chunks[i] = {};
    if (!kIsNear && threadIdx.x < 2 * a.slices)
      slices[threadIdx.x / 2].arrivals[threadIdx.x % 2].prepare();
    if (kIsNear && threadIdx.x < a.slices) slices[threadIdx.x].near.prepare(steps + 1, bytes);
    if (kIsNormalised && threadIdx.x == 0) totals.prepare();

    // This thread's cell of each slice.
    const bool has_cells = thread < kCells;
    const int cell = has_cells ? thread : 0, in_block = cell % kBlockUnits,
              in_slice = cell / kBlockUnits;
    const int unit = blockIdx.x * kBlockUnits + in_block;
    const int entry_of_0 = blockIdx.y * a.slices * kEntries + in_slice;
    const auto is_real = [&](int slice) {
      return has_cells && unit < H && entry_of_0 + slice * kEntries < B;
    };
    const int come_at =
        kHasHalf ? in_block / 2 * kEntries + in_slice
                 : (in_block / 8 * NT + in_slice / 8) * 32 + in_block % 8 * 4 + in_slice % 8 / 2;
    const bool is_second = (kHasHalf ? in_block : in_slice) % 2;  // of a pair
    // Where the sums go that this thread adds.
    const int of_pair = thread / 64 * 8 + lane % 4 * 2;  // the unit
    const int to_rank = kHasHalf ? of_pair / kBlockUnits : thread / kOwn,
              come_to = kHasHalf ? of_pair % kBlockUnits / 2 * kEntries + warp % 2 * 8 + lane / 4
                                 : thread % kOwn;
    const int chunk = unit / kUnitsOfChunk<T>;
    const int give_to =
        has_cells && chunk < chunks ? (chunk / 4 * kEntries + in_slice) * 4 + chunk % 4 : -1;
    const int of_chunk = unit % kUnitsOfChunk<T>;  // of the threads that have its units
    for (int slice = team; slice < a.slices && has_cells; slice += kTeams) {
      const int entry = entry_of_0 + slice * kEntries;
      slices[slice].grad_h[cell] = is_real(slice) ? a.sweep.grad_h[entry * R + unit] : E(0);
      slices[slice].grad_c[cell] = is_real(slice) ? a.sweep.grad_c[entry * H + unit] : E(0);
    }
    E gain_h[4] = {};
    for (int j = 0; kIsNormalised && j < 4 && unit < H; ++j)
      gain_h[j] = layer.norm_hh[j * H + unit];
    // What is read for the next turn.
    const bool is_saved = a.past.saved.defined();
    Read<T> saved[4] = {}, grad_output = {};
    E made[4] = {}, before = 0, of_h[4] = {};
    const T* const grad_outputs = &a.sweep.grad_output(0, entry_of_0, unit);
    Moments<E> moments_h = {}, moments_c = {};
    const auto fetch = [&](int64_t t, int slice) {
      if (!is_real(slice)) return;
      const int entry = entry_of_0 + slice * kEntries;
      const int64_t row = t * B + entry;
      const int64_t gates = row * 4 * H + unit;
      if (is_saved) {
#pragma unroll
        for (int j = 0; j < 4; ++j) saved[j] = read(a.past.saved.data()[gates + j * H]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) made[j] = a.past.z[gates + j * H];
      }
      if constexpr (kIsNormalised) {
#pragma unroll
        for (int j = 0; j < 4; ++j) of_h[j] = a.sweep.from_h[row * 4 * H + j * H + unit];
        moments_h = a.sweep.moments_h[row], moments_c = a.sweep.moments_c[row];
      }
      before = a.past.c_before[row * H + unit];
      grad_output = read(grad_outputs[t * a.sweep.grad_output.stride(0) +
                                      slice * kEntries * a.sweep.grad_output.stride(1)]);
    };
    const auto time_of = [&](int step) -> int64_t {
      return a.past.reverse ? step : steps - 1 - step;
    };
    fetch(time_of(0), team);
    wait_for_cluster();
    // Sums of the products of a slice, from the second step on, on their way to the blocks of the
    // units.
    const auto multiply = [&](int step, int slice) {
      Slice& here = slices[slice];
      const int parity = step % 2;
      constexpr int kTiles = Weights::kTiles, kOfTile = Weights::template kSums<NT>;
      float found[kTiles][kOfTile][4];
      if constexpr (kIsNear) {
        here.near.wait(step, steps + 1, bytes);
        weights.template multiply<NT>(buffer(step, slice), found, Near{});
      } else {
        if (slice == team) Marked::order();
        weights.template multiply<NT>(buffer(step, slice), found, Marked{});
      }
      wait_for_team<kTeams>();  // all have read the sums of before
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int n = 0; n < kOfTile; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            partial.of[warp][((2 * tile + i) * kOfTile + n) * 32 + lane] =
                make_float2(found[tile][n][2 * i], found[tile][n][2 * i + 1]);
      wait_for_team<kTeams>();
      if (kIsNear) return;
      if (thread == 0) here.arrivals[parity].announce(kSums * sizeof(float2));
      if (thread >= kSums) return;
      float2 sum = partial.of[0][thread];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        const float2 more = partial.of[w][thread];
        sum.x += more.x, sum.y += more.y;
      }
      here.arrivals[parity].send(&here.come[parity][rank][come_to], sum, to_rank);
    };
    // The cells of a slice.
    const auto finish = [&](int step, int slice) {
      Slice& here = slices[slice];
      const int64_t t = time_of(step), after = step ? time_of(step - 1) : -1;
      const bool is_end = step == steps;
      const int parity = step % 2;
      // While sums travel.
      Gates<T> x;
      const E of_output = grad_output.value();
      E from_h[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) from_h[j] = of_h[j];
      const Moments<E> now_h = moments_h, now_c = moments_c;
      if (!is_end) {
#pragma unroll
        for (int j = 0; j < 4; ++j) x.z[j] = is_saved ? saved[j].value() : made[j];
        x.before = before;
        x.complete(layer.options);
        const bool is_round = slice + kTeams >= a.slices;
        const int next = step + is_round;
        if (next < steps) fetch(time_of(next), is_round ? team : slice + kTeams);
      }
      E to_h = 0;
      if (step > 0) {
        if (!kIsNear) here.arrivals[parity].wait((step - 1) / 2 % 2);
#pragma unroll
        for (int r = 0; r < (kIsNear ? kWarps : kRanks); ++r) {
          const float2 sum = kIsNear ? partial.of[r][come_at]
                                     : here.come[kIsNear ? 0 : parity][kIsNear ? 0 : r][come_at];
          to_h += is_second ? sum.y : sum.x;
        }
      }
      if (!has_cells) return;
      const int entry = entry_of_0 + slice * kEntries;
      const bool is_there = is_real(slice);
      E& grad_h = here.grad_h[cell];
      E& grad_c = here.grad_c[cell];
      if (is_end) {
        if (!is_there) return;
        a.sweep.to_h[entry * R + unit] = to_h;
        a.sweep.grad_h[entry * R + unit] = grad_h;
        a.sweep.grad_c[entry * H + unit] = grad_c;
        return;
      }
      E grad[4] = {}, to_new = 0, value = 0, gain_c = 1, normal = x.cell;
      const auto keeps = kept(layer.options, layer.seed, is_there ? entry : 0, unit, t);
      const bool is_active = is_there && layer.is_active(t, entry);
      if (is_there) {
        E left = absorb(layer, a.past, a.sweep, after, entry, unit, grad_h, to_h);
        to_new = take_grad_h(layer, is_active, of_output, keeps.h, left);
        grad_h = left;
      }
      if (kIsNormalised && is_active) {
        gain_c = static_cast<E>(layer.norm_c(0, unit)), value = (x.cell - now_c.mean) * now_c.scale;
        normal = value * gain_c + static_cast<E>(layer.norm_c(1, unit)),
        x.squashed = layer.options.tanh(normal);
      }
      const E grad_o = layer.options.through_sigmoid(to_new * x.squashed, x.z[3], x.o);
      E to_cell = layer.options.through_tanh(to_new * x.o, normal, x.squashed);
      const int64_t row = t * B + entry;
      const int reduction = step * a.slices + slice;
      if constexpr (kIsNormalised) {
        if (!is_active) to_cell = 0;
        if (is_there)
          a.sweep.normal[row * H + unit] = to_cell,
                                   a.sweep.normal_unit[row * H + unit] = to_cell * value;
        to_cell *= gain_c;
        const float2 sums =
            totals.sums(0, reduction, in_slice, make_float2(to_cell, to_cell * value));
        to_cell = now_c.scale * (to_cell - (sums.x + value * sums.y) / H);
      }
      if (is_active)
        grad_c =
            gates_back(layer, a.sweep, x, t, entry, unit, grad_o, to_cell, keeps.c, grad_c, grad);
      if constexpr (kIsNormalised) {
        E values[4];
        float2 mine = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          values[j] = (from_h[j] - now_h.mean) * now_h.scale;
          if (is_there) a.sweep.before_norm[row * 4 * H + j * H + unit] = grad[j];
          grad[j] *= gain_h[j];
          mine.x += grad[j], mine.y += grad[j] * values[j];
        }
        const float2 sums = totals.sums(1, reduction, in_slice, mine);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          grad[j] =
              is_there ? now_h.scale * (grad[j] - (sums.x + values[j] * sums.y) / (4 * H)) : 0;
      }
      T narrow[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) narrow[j] = static_cast<T>(grad[j]);
      const Chunk out = chunk_of(narrow);
      if (give_to < 0) {
      } else if constexpr (kIsNear) {
        here.near.give(step + 1, buffer(step + 1, slice) + give_to, out, of_chunk,
                       kUnitsOfChunk<T>);
      } else if (of_chunk == 0) {
        Marked::give(buffer(step + 1, slice) + give_to, out);
        if (step > 1) Marked::clear(buffer(step - 1, slice) + give_to);
      }
      if (is_there) {
        T* to = a.sweep.gates + row * 4 * H + unit;
#pragma unroll
        for (int j = 0; j < 4; ++j) to[j * H] = narrow[j];
      }
    };
    // Where there are several slices, the sums of one travel while the next is multiplied.
    struct Turn {
      int step, slice;
    } ahead{0, team}, turn{0, team};
    const auto advance = [&](Turn& of) {
      of.slice += kTeams;
      if (of.slice >= a.slices) of.slice = team, ++of.step;
    };
    if (!kIsNear && team + kTeams < a.slices) advance(ahead);
    for (; turn.step <= steps; advance(ahead), advance(turn)) {
      if (ahead.step > 0 && ahead.step <= steps) multiply(ahead.step, ahead.slice);
      finish(turn.step, turn.slice);
    }
    wait_for_cluster();
  }

  // Lanes that follow each other have units that do; those of a chunk are put together, for both.
  __device__ static Chunk chunk_of(const T (&grads)[4]) {
    Chunk out;
    if constexpr (kIsNarrow<T>) {
      const bool is_second = threadIdx.x % 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t own = word_of<T, kIsExact>(i, [&](int e) { return grads[e]; });
        const uint32_t other = __shfl_xor_sync(~0u, own, 1);
        out.word[i] = is_second ? other : own, out.word[2 + i] = is_second ? own : other;
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) out.word[j] = operand_bits<T, kIsExact>(grads[j]);
    }
    return out;
  }
};

template <typename T, int KIND, int SETS, int NT, int MOST, int HELD>
__global__ void __launch_bounds__(kThreads*(KIND& kTwoTeams ? 2 : 1), 1)
    sweep_in_grid(GridSweep<T> sweep) {
#if __CUDA_ARCH__ >= 900
  GridBack<T, KIND, SETS, NT, MOST, HELD>::sweep(sweep);
#endif
}

}  // namespace opwright_ops::gpu
