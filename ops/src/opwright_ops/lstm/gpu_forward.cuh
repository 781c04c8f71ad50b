// The steps of an LSTM on a GPU: after the products of a step, a kernel for all its cells.
#pragma once

#include "gpu_layer.cuh"

namespace opwright_ops::gpu {

// The state between steps, and what a step leaves.
template <typename T>
struct State {
  using E = compute_t<T>;
  E* c;                             // [B, H]
  T* h;                             // [B, R]
  T* operand;                       // [B, R]: h as the next product takes it
  T* cell_out;                      // [B, H]: o * tanh(c), before the projection
  View<T, 3> output, cells, gates;  // the last two may be empty
};

// Before the first step, at time `t`.
template <typename T>
__global__ void start(Layer<T> layer, State<T> state, View<const T, 2> h_0, View<const T, 2> c_0,
                      int64_t steps, bool reverse) {
  using E = compute_t<T>;
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < layer.B * layer.H)
    state.c[i] = c_0.defined() ? static_cast<E>(c_0(i / layer.H, i % layer.H)) : E(0);
  if (i >= layer.B * layer.R) return;
  const int64_t entry = i / layer.R, unit = i % layer.R, t = reverse ? steps - 1 : 0;
  const T h = h_0.defined() ? h_0(entry, unit) : T(0.0f);
  state.h[i] = h;
  state.operand[i] = layer.resets(t, entry) ? T(0.0f) : layer.masked(h, entry, unit);
}

// The new h of an entry that takes part in step t; `next` is the time of the step after it, or -1.
template <typename T>
__device__ void leave(const Layer<T>& layer, const State<T>& state, int64_t t, int64_t next, int64_t entry,
                      int64_t unit, compute_t<T> h_new, compute_t<T> keeps) {
  using E = compute_t<T>;
  const int64_t i = entry * layer.R + unit;
  T h = state.h[i];
  if (layer.is_active(t, entry)) {
    const E before = layer.resets(t, entry) ? E(0) : static_cast<E>(h);
    h = static_cast<T>(keeps * before + (1 - keeps) * h_new);
    state.h[i] = h;
    state.output(t, entry, unit) = h;
  } else {
    state.output(t, entry, unit) = T(0.0f);
  }
  if (next >= 0) state.operand[i] = layer.resets(next, entry) ? T(0.0f) : layer.masked(h, entry, unit);
}

// One step of all cells: `x` and `h` are the products with the input and with h, [B, 4H]. A block takes a
// row if layers are normalised, else kThreads elements.
template <typename T, bool kIsNormalised, bool kIsProjected>
__global__ void __launch_bounds__(kThreads)
    step(Layer<T> layer, State<T> state, const compute_t<T>* x, const compute_t<T>* h, int64_t t,
         int64_t next, compute_t<T>* row_of_cells) {
  using E = compute_t<T>;
  __shared__ E shared[32];
  const int64_t H = layer.H;
  const auto take = [&](int64_t entry, int64_t unit, E(&z)[4], E& before, E& cell) {
    const bool is_active = layer.is_active(t, entry);
    before = layer.resets(t, entry) ? E(0) : state.c[entry * H + unit];
    const auto& o = layer.options;
    if (layer.peephole.defined()) {
      z[0] += static_cast<E>(layer.peephole(0, unit)) * before;
      z[1] += static_cast<E>(layer.peephole(1, unit)) * before;
    }
    const E i = o.sigmoid(z[0]), f = o.is_coupled ? 1 - i : o.sigmoid(z[1]);
    cell = f * before + i * o.tanh(o.clipped(z[2]));
    if (layer.peephole.defined()) z[3] += static_cast<E>(layer.peephole(2, unit)) * cell;
    if (state.gates.numel()) {
      for (int j = 0; j < 4; ++j) {
        const E value = kIsNormalised ? h[entry * 4 * H + j * H + unit] : z[j];
        state.gates(t, entry, j * H + unit) = is_active ? static_cast<T>(value) : T(0.0f);
      }
    }
  };
  // `normal`: the cell as tanh takes it.
  const auto give = [&](int64_t entry, int64_t unit, E z_o, E before, E cell, E normal) {
    const bool is_active = layer.is_active(t, entry);
    const auto keeps = kept(layer.options, layer.seed, entry, unit, t);
    const E c = keeps.c * before + (1 - keeps.c) * cell;
    if (is_active) state.c[entry * H + unit] = c;
    if (state.cells.numel()) state.cells(t, entry, unit) = is_active ? static_cast<T>(c) : T(0.0f);
    const T out = static_cast<T>(layer.options.sigmoid(z_o) * layer.options.tanh(normal));
    if constexpr (kIsProjected)
      state.cell_out[entry * H + unit] = out;
    else
      leave(layer, state, t, next, entry, unit, static_cast<E>(out), keeps.h);
  };
  if constexpr (!kIsNormalised) {
    const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
    if (i >= layer.B * H) return;
    const int64_t entry = i / H, unit = i % H;
    E z[4], before, cell;
    for (int j = 0; j < 4; ++j)
      z[j] = x[entry * 4 * H + j * H + unit] + h[entry * 4 * H + j * H + unit] + layer.bias[j * H + unit];
    take(entry, unit, z, before, cell);
    give(entry, unit, z[3], before, cell, cell);
  } else {
    const int64_t entry = blockIdx.x;
    const E *x_row = x + entry * 4 * H, *h_row = h + entry * 4 * H;
    const auto of_x = moments<E>(4 * H, shared, [&](int64_t i) { return x_row[i]; });
    const auto of_h = moments<E>(4 * H, shared, [&](int64_t i) { return h_row[i]; });
    E* cells = row_of_cells + entry * 3 * H;  // the cell, what it was before, the output gate
    for (int64_t unit = threadIdx.x; unit < H; unit += kThreads) {
      E z[4];
      for (int j = 0; j < 4; ++j) {
        const int64_t i = j * H + unit;
        z[j] = (x_row[i] - of_x.mean) * of_x.scale * layer.norm_ih[i] +
               (h_row[i] - of_h.mean) * of_h.scale * layer.norm_hh[i] + layer.bias[i];
      }
      take(entry, unit, z, cells[H + unit], cells[unit]);
      cells[2 * H + unit] = z[3];
    }
    const auto of_c = moments<E>(H, shared, [&](int64_t i) { return cells[i]; });
    for (int64_t unit = threadIdx.x; unit < H; unit += kThreads) {
      const E normal = (cells[unit] - of_c.mean) * of_c.scale * static_cast<E>(layer.norm_c(0, unit)) +
                       static_cast<E>(layer.norm_c(1, unit));
      give(entry, unit, cells[2 * H + unit], cells[H + unit], cells[unit], normal);
    }
  }
}

// After the projection of a step: `h` is [B, R].
template <typename T>
__global__ void project(Layer<T> layer, State<T> state, const compute_t<T>* h, int64_t t, int64_t next) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= layer.B * layer.R) return;
  const int64_t entry = i / layer.R, unit = i % layer.R;
  leave(layer, state, t, next, entry, unit, h[i], kept(layer.options, layer.seed, entry, unit, t).h);
}

template <typename T>
__global__ void finish(Layer<T> layer, State<T> state, View<T, 2> h_n, View<T, 2> c_n) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < layer.B * layer.R) h_n(i / layer.R, i % layer.R) = state.h[i];
  if (i < layer.B * layer.H) c_n(i / layer.H, i % layer.H) = static_cast<T>(state.c[i]);
}

}  // namespace opwright_ops::gpu
