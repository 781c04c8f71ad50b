// The backward of all steps of an LSTM in one launch. Blocks come in pairs (clusters): each has the columns of
// weight_hh of the units of both, for the gates of half of all units; gradients of gates go from block to block
// through the second-level cache, sums of the halves within the pair.
#pragma once

#include "gpu_backward.cuh"
#include "gpu_exchange.cuh"

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

// How gradients of gates are exchanged: four buffers take turns, and are all ones where nothing has come yet. A
// chunk is written over with ones when all have read it, before the same thread's next but one.
struct Marked {
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
  __device__ static void clear(Chunk* to) { store_chunk(to, {{kNone, kNone, kNone, kNone}}); }
};

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
// The same place in the shared memory of the block `rank` of the cluster.
__device__ inline uint32_t in_block(uint32_t address, uint32_t rank) {
  uint32_t there = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
// A barrier that is passed when this block has announced `bytes` and they have come.
struct Arrivals {
  uint64_t word;
  __device__ void prepare() {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(
                     shared_address(this))
                 : "memory");
#endif
  }
  __device__ void announce(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                 : "memory");
#endif
  }
  __device__ void wait(uint32_t phase) {
#if __CUDA_ARCH__ >= 900
    uint32_t is_done = 0;
    while (!is_done)
      asm volatile(
          "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
          "selp.u32 %0, 1, 0, p;}"
          : "=r"(is_done)
          : "r"(shared_address(this)), "r"(phase)
          : "memory");
#endif
  }
  // Writes to the same place in another block, which counts what comes.
  __device__ void send(float2* to, float2 value, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%2, %3}, [%1];" ::"r"(
            in_block(shared_address(to), rank)),
        "r"(in_block(shared_address(this), rank)), "f"(value.x), "f"(value.y)
        : "memory");
#endif
  }
};

template <typename T, int SETS, int NT, int MOST, int HELD>
struct GridBack {
  using E = compute_t<T>;
  using Weights = Rows<T, SETS, MOST, HELD>;
  static constexpr int kRanks = 2, kEntries = 8 * NT, kBlockUnits = 8 * SETS;
  static constexpr int kSums = SETS * kRanks * NT * 32, kOwn = kSums / kRanks;  // of a cluster, of a block; pairs
  static constexpr int kCells = kBlockUnits * kEntries, kSteps = (kCells + kThreads - 1) / kThreads;
  static constexpr int kUnitsInChunk = kPerChunk<T> / 4;

  struct alignas(16) Slice {
    float2 come[2][kRanks][kOwn];
    Arrivals arrivals[2];
    E grad_h[kCells], grad_c[kCells];
  };
  struct Partial {
    float2 of[kWarps][kSums];
  };
  static int groups(int64_t H) { return static_cast<int>((H + 4 * kUnitsInChunk - 1) / (4 * kUnitsInChunk)); }
  static int64_t shared_bytes(int slices, int64_t H) {
    return sizeof(Partial) + slices * sizeof(Slice) + Weights::shared_bytes((groups(H) + 1) / kRanks);
  }

  __device__ static void sweep(const GridSweep<T>& a) {
    extern __shared__ __align__(16) unsigned char shared[];
    Partial& partial = *reinterpret_cast<Partial*>(shared);
    Slice* slices = reinterpret_cast<Slice*>(shared + sizeof(Partial));
    const auto& layer = a.layer;
    const int64_t H = layer.H, R = layer.R, B = layer.B;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int rank = blockIdx.x % kRanks;
    const int groups = static_cast<int>((H + 4 * kUnitsInChunk - 1) / (4 * kUnitsInChunk));
    const int64_t entry_0 = int64_t{blockIdx.y} * a.slices * kEntries;
    const int64_t unit = int64_t{blockIdx.x} * kBlockUnits + thread % kBlockUnits;
    const int64_t buffer = int64_t{groups} * kEntries * 4;
    Chunk* const mine = a.chunks + blockIdx.y * a.slices * Marked::kBuffers * buffer;
    const auto buffer_of = [&](int step, int slice) {
      return mine + (slice * Marked::kBuffers + step % Marked::kBuffers) * buffer;
    };
    Weights weights;
    const int from = rank * groups / kRanks, until = (rank + 1) * groups / kRanks;
    weights.load(from, until - from, 4 * groups, slices + a.slices, [&](int of_tile, int tile, int chunk, int word) {
      const int64_t to = int64_t{blockIdx.x - rank} * kBlockUnits + tile * 16 + of_tile;
      return word_of<T>(word, [&](int e) {
        const int64_t of = int64_t{chunk} * kUnitsInChunk + e / 4;
        return of < H && to < R ? a.weight_hh(e % 4 * H + of, to) : T(0.0f);
      });
    });
    if (thread < 2 * a.slices) slices[thread / 2].arrivals[thread % 2].prepare();
    const auto each_cell = [&](int slice, const auto& visit) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int cell = thread + i * kThreads, entry = cell / kBlockUnits;
        if (cell < kCells) visit(i, cell, entry, entry_0 + slice * kEntries + entry);
      }
    };
    for (int slice = 0; slice < a.slices; ++slice)
      each_cell(slice, [&](int, int cell, int, int64_t entry) {
        const bool is_real = entry < B && unit < H;
        slices[slice].grad_h[cell] = is_real ? a.sweep.grad_h[entry * R + unit] : E(0);
        slices[slice].grad_c[cell] = is_real ? a.sweep.grad_c[entry * H + unit] : E(0);
      });
    Gates<T> gates[kSteps];
    E grad_output[kSteps];
    const auto fetch = [&](int64_t t, int slice) {
      each_cell(slice, [&](int i, int, int, int64_t entry) {
        if (entry >= B || unit >= H) return;
        gates[i] = Gates<T>::raw(layer, a.past, t, entry, unit);
        grad_output[i] = static_cast<E>(a.sweep.grad_output(t, entry, unit));
      });
    };
    const int steps = static_cast<int>(a.past.steps);
    const auto time_of = [&](int step) -> int64_t { return a.past.reverse ? step : steps - 1 - step; };
    fetch(time_of(0), 0);
    wait_for_cluster();
    for (int step = 0; step <= steps; ++step) {
      const int64_t t = time_of(step), after = step ? time_of(step - 1) : -1;
      const bool is_end = step == steps;
      for (int slice = 0; slice < a.slices; ++slice) {
        Slice& here = slices[slice];
        const int parity = step % 2;
        E to_h[kSteps] = {};
        if (step > 0) {
          float found[SETS][NT][4];
          weights.template multiply<NT>(buffer_of(step, slice), found, Marked{});
#pragma unroll
          for (int tile = 0; tile < SETS; ++tile)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
              for (int i = 0; i < 2; ++i)
                partial.of[warp][((2 * tile + i) * NT + n) * 32 + lane] =
                    make_float2(found[tile][n][2 * i], found[tile][n][2 * i + 1]);
          __syncthreads();
          if (thread == 0) here.arrivals[parity].announce(kSums * sizeof(float2));
#pragma unroll
          for (int i = 0; i < (kSums + kThreads - 1) / kThreads; ++i) {
            const int at = i * kThreads + thread;
            if (at >= kSums) break;
            float2 sum = partial.of[0][at];
#pragma unroll
            for (int w = 1; w < kWarps; ++w) {
              const float2 more = partial.of[w][at];
              sum.x += more.x, sum.y += more.y;
            }
            here.arrivals[parity].send(&here.come[parity][rank][at % kOwn], sum, at / kOwn);
          }
          // What was cleared in the step before is so for all before what follows; meanwhile sums travel.
          __threadfence();
        }
        if (!is_end) {
#pragma unroll
          for (int i = 0; i < kSteps; ++i) gates[i].complete(layer.options);
        }
        if (step > 0) {
          here.arrivals[parity].wait((step - 1) / 2 % 2);
          __syncthreads();  // all have read the partial sums
          each_cell(slice, [&](int i, int cell, int entry, int64_t) {
            const int u = cell % kBlockUnits, at = ((u / 8 * NT + entry / 8) * 32 + u % 8 * 4 + entry % 8 / 2);
#pragma unroll
            for (int r = 0; r < kRanks; ++r) {
              const float2 sum = here.come[parity][r][at];
              to_h[i] += entry % 2 ? sum.y : sum.x;
            }
          });
        }
        each_cell(slice, [&](int i, int cell, int in_slice, int64_t entry) {
          const bool is_real = entry < B && unit < H;
          E& grad_h = here.grad_h[cell];
          E& grad_c = here.grad_c[cell];
          if (is_end) {
            if (!is_real) return;
            a.sweep.to_h[entry * R + unit] = to_h[i];
            a.sweep.grad_h[entry * R + unit] = grad_h;
            a.sweep.grad_c[entry * H + unit] = grad_c;
            return;
          }
          E grad[4] = {};
          if (is_real) {
            const auto keeps = kept(layer.options, layer.seed, entry, unit, t);
            const bool is_active = layer.is_active(t, entry);
            grad_h = absorb(layer, a.past, a.sweep, after, entry, unit, grad_h, to_h[i]);
            const E to_new = take_grad_h(layer, is_active, grad_output[i], keeps.h, grad_h);
            if (is_active) {
              const auto& x = gates[i];
              grad_c = gates_back(layer, a.sweep, x, t, entry, unit,
                                  layer.options.through_sigmoid(to_new * x.squashed, x.z[3], x.o),
                                  layer.options.through_tanh(to_new * x.o, x.cell, x.squashed), keeps.c, grad_c, grad);
            }
          }
          T narrow[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) narrow[j] = static_cast<T>(grad[j]);
          give(narrow, buffer_of(step + 1, slice), step > 1 ? buffer_of(step - 1, slice) : nullptr, unit, groups,
               in_slice);
          if (is_real) {
            T* to = a.sweep.gates + (t * B + entry) * 4 * H + unit;
#pragma unroll
            for (int j = 0; j < 4; ++j) to[j * H] = narrow[j];
          }
        });
        const bool is_round = slice + 1 == a.slices;
        const int next = step + is_round;
        if (next < steps) fetch(time_of(next), is_round ? 0 : slice + 1);
      }
    }
    wait_for_cluster();
  }

  // Lanes that follow each other have units that do.
  __device__ static void give(const T (&grads)[4], Chunk* to, Chunk* cleared, int64_t unit, int groups, int entry) {
    Chunk out;
    bool is_writer = true;
    if constexpr (kIsNarrow<T>) {
      out.word[0] = word_of<T>(0, [&](int e) { return grads[e]; });
      out.word[1] = word_of<T>(1, [&](int e) { return grads[e]; });
      out.word[2] = __shfl_down_sync(~0u, out.word[0], 1);
      out.word[3] = __shfl_down_sync(~0u, out.word[1], 1);
      is_writer = unit % 2 == 0;
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) out.word[j] = operand_bits<T>(grads[j]);
    }
    const int64_t chunk = unit / kUnitsInChunk, at = (chunk / 4 * kEntries + entry) * 4 + chunk % 4;
    if (!is_writer || chunk >= 4 * groups) return;
    Marked::give(to + at, out);
    if (cleared) Marked::clear(cleared + at);
  }
};

template <typename T, int SETS, int NT, int MOST, int HELD>
__global__ void __launch_bounds__(kThreads, 1) sweep_in_grid(GridSweep<T> sweep) {
#if __CUDA_ARCH__ >= 900
  GridBack<T, SETS, NT, MOST, HELD>::sweep(sweep);
#endif
}

}  // namespace opwright_ops::gpu
