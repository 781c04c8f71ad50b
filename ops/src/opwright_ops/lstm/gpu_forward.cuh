// The steps of an LSTM on a GPU: after the products of a step, a kernel for all its cells.
#pragma once

#include <opwright/launch.cuh>

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
  View<T, 3> output, cells, gates;  // the last two may be missing
};

// Before the first step; the sum of the biases is written to `bias`.
template <typename T>
__global__ void start(Layer<T> layer, State<T> state, View<const T, 2> h_0, View<const T, 2> c_0,
                      View<const T, 1> bias_ih, View<const T, 1> bias_hh, compute_t<T>* bias,
                      int64_t steps, bool reverse, Fill fill) {
  using E = compute_t<T>;
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  fill.run();
  if (i < 4 * layer.H) bias[i] = sum_of(bias_ih, bias_hh, i);
  if (i < layer.B * layer.H)
    state.c[i] = c_0.defined() ? static_cast<E>(c_0(i / layer.H, i % layer.H)) : E(0);
  if (i >= layer.B * layer.R) return;
  const int64_t entry = i / layer.R, unit = i % layer.R, t = reverse ? steps - 1 : 0;
  const T h = h_0.defined() ? h_0(entry, unit) : T(0.0f);
  state.h[i] = h;
  state.operand[i] = layer.resets(t, entry) ? T(0.0f) : layer.masked(h, entry, unit);
}

// The cell after a step, from `before`; z: the gates before their activations, to which peepholes
// add.
template <typename T>
__device__ compute_t<T> new_cell(const Layer<T>& layer, int64_t unit, compute_t<T> (&z)[4],
                                 compute_t<T> before) {
  using E = compute_t<T>;
  const auto& o = layer.options;
  if (layer.peephole.defined()) {
    z[0] += static_cast<E>(layer.peephole(0, unit)) * before;
    z[1] += static_cast<E>(layer.peephole(1, unit)) * before;
  }
  const E i = o.sigmoid(z[0]), f = o.is_coupled ? 1 - i : o.sigmoid(z[1]);
  const E cell = f * before + i * o.tanh(o.clipped(z[2]));
  if (layer.peephole.defined()) z[3] += static_cast<E>(layer.peephole(2, unit)) * cell;
  return cell;
}

// What goes into the projection, or is the new h. `normal`: the cell as tanh takes it.
template <typename T>
__device__ T new_out(const Layer<T>& layer, compute_t<T> z_o, compute_t<T> normal) {
  return static_cast<T>(layer.options.sigmoid(z_o) * layer.options.tanh(normal));
}

// Takes `h`, the state of an entry that takes part in step t, to that after it.
template <typename T>
__device__ void take_h(const Layer<T>& layer, int64_t t, int64_t entry, compute_t<T> h_new,
                       compute_t<T> keeps, T& h) {
  using E = compute_t<T>;
  const E before = layer.resets(t, entry) ? E(0) : static_cast<E>(h);
  h = static_cast<T>(mix(keeps, before, h_new));
}

// h as the product of the step at time `next` takes it; as it is if there is none (-1).
template <typename T>
__device__ T operand_of(const Layer<T>& layer, int64_t next, int64_t entry, int64_t unit, T h) {
  return next < 0 ? h : layer.resets(next, entry) ? T(0.0f) : layer.masked(h, entry, unit);
}

// Leaves what is returned of step t.
template <typename T>
__device__ void leave_h(const State<T>& state, int64_t t, int64_t entry, int64_t unit,
                        bool is_active, T h) {
  state.output(t, entry, unit) = is_active ? h : T(0.0f);
}
template <typename T>
__device__ void leave_cell(const State<T>& state, int64_t t, int64_t entry, int64_t unit,
                           bool is_active, compute_t<T> c) {
  if (state.cells.defined()) state.cells(t, entry, unit) = is_active ? static_cast<T>(c) : T(0.0f);
}
template <typename T>
__device__ void leave_gates(const State<T>& state, int64_t t, int64_t entry, int64_t unit,
                            int64_t H, bool is_active, const compute_t<T> (&gates)[4]) {
  if (!state.gates.defined()) return;
  T* const to = &state.gates(t, entry, unit);
  const int64_t apart = H * state.gates.stride(2);
#pragma unroll
  for (int j = 0; j < 4; ++j) to[j * apart] = is_active ? static_cast<T>(gates[j]) : T(0.0f);
}

// One step of all cells: `x` and `h` are the products with the input and with h, [B, 4H]. A block
// takes a row if layers are normalised, else kThreads elements.
template <typename T, bool kIsNormalised, bool kIsProjected>
__global__ void __launch_bounds__(kThreads)
    step(Layer<T> layer, State<T> state, const compute_t<T>* x, const compute_t<T>* h, int64_t t,
         int64_t next, compute_t<T>* row_of_cells) {
  using E = compute_t<T>;
  opwright::let_next_start();  // waits for the kernel in front, too
  __shared__ E shared[32];
  const int64_t H = layer.H;
  // `normal`: the cell as tanh takes it.
  const auto give = [&](int64_t entry, int64_t unit, E z_o, E before, E cell, E normal) {
    const int64_t i = entry * H + unit;
    const bool is_active = layer.is_active(t, entry);
    const auto keeps = kept(layer.options, layer.seed, entry, unit, t);
    const E c = mix(keeps.c, before, cell);
    if (is_active) state.c[i] = c;
    leave_cell(state, t, entry, unit, is_active, c);
    const T out = new_out(layer, z_o, normal);
    if constexpr (kIsProjected) {
      state.cell_out[i] = out;
    } else {
      T after = state.h[i];
      if (is_active) take_h(layer, t, entry, static_cast<E>(out), keeps.h, after);
      state.h[i] = after;
      leave_h(state, t, entry, unit, is_active, after);
      state.operand[i] = operand_of(layer, next, entry, unit, after);
    }
  };
  if constexpr (!kIsNormalised) {
    const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
    if (i >= layer.B * H) return;
    const int64_t entry = i / H, unit = i % H;
    E z[4];
    for (int j = 0; j < 4; ++j)
      z[j] = x[entry * 4 * H + j * H + unit] + h[entry * 4 * H + j * H + unit] +
             layer.bias[j * H + unit];
    const E before = layer.resets(t, entry) ? E(0) : state.c[i];
    const E cell = new_cell(layer, unit, z, before);
    leave_gates(state, t, entry, unit, H, layer.is_active(t, entry), z);
    give(entry, unit, z[3], before, cell, cell);
  } else {
    const int64_t entry = blockIdx.x;
    const bool is_active = layer.is_active(t, entry);
    const E *x_row = x + entry * 4 * H, *h_row = h + entry * 4 * H;
    const auto of_x = moments<E>(4 * H, shared, [&](int64_t i) { return x_row[i]; });
    const auto of_h = moments<E>(4 * H, shared, [&](int64_t i) { return h_row[i]; });
    E* cells = row_of_cells + entry * 3 * H;  // the cell, what it was before, the output gate
    for (int64_t unit = threadIdx.x; unit < H; unit += kThreads) {
      E z[4], from_h[4];
      for (int j = 0; j < 4; ++j) {
        const int64_t i = j * H + unit;
        from_h[j] = h_row[i];
        z[j] = (x_row[i] - of_x.mean) * of_x.scale * layer.norm_ih[i] +
               (h_row[i] - of_h.mean) * of_h.scale * layer.norm_hh[i] + layer.bias[i];
      }
      leave_gates(state, t, entry, unit, H, is_active, from_h);
      cells[H + unit] = layer.resets(t, entry) ? E(0) : state.c[entry * H + unit];
      cells[unit] = new_cell(layer, unit, z, cells[H + unit]);
      cells[2 * H + unit] = z[3];
    }
    const auto of_c = moments<E>(H, shared, [&](int64_t i) { return cells[i]; });
    for (int64_t unit = threadIdx.x; unit < H; unit += kThreads) {
      const E normal =
          (cells[unit] - of_c.mean) * of_c.scale * static_cast<E>(layer.norm_c(0, unit)) +
          static_cast<E>(layer.norm_c(1, unit));
      give(entry, unit, cells[2 * H + unit], cells[H + unit], cells[unit], normal);
    }
  }
}

// The same without options, N units for each thread: the address of a row is computed once for all.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    step_plain(Layer<T> given, State<T> state, const compute_t<T>* x, const compute_t<T>* h,
               int64_t t) {
  using E = compute_t<T>;
  opwright::let_next_start();  // waits for the kernel in front, too
  const Layer<T> layer = plain(given);
  const unsigned H = static_cast<unsigned>(layer.H), B = static_cast<unsigned>(layer.B);
  const auto [entry, unit] = units_of_thread<N>(H);
  if (entry >= B) return;
  const size_t at = size_t{entry} * H + unit, row = size_t{entry} * 4 * H + unit;
  E z[4][N], c[N], out[N];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    E from_h[N], bias[N];
    read_once(x + row + j * H, z[j]);
    read_all(h + row + j * H, from_h);
    read_all(layer.bias + j * H + unit, bias);
#pragma unroll
    for (int k = 0; k < N; ++k) z[j][k] = z[j][k] + from_h[k] + bias[k];
  }
  read_all(state.c + at, c);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    E of_unit[4] = {z[0][k], z[1][k], z[2][k], z[3][k]};
    c[k] = new_cell(layer, unit + k, of_unit, c[k]);
    out[k] = static_cast<E>(new_out(layer, of_unit[3], c[k]));
  }
  write_all(state.c + at, c);
  write_all(state.h + at, out);
  write_all(state.operand + at, out);
  write_once(&state.output(t, entry, unit), out);
  if (state.cells.defined()) write_once(&state.cells(t, entry, unit), c);
  if (!state.gates.defined()) return;
  T* const gates = &state.gates(t, entry, unit);
#pragma unroll
  for (int j = 0; j < 4; ++j) write_once(gates + j * H, z[j]);
}

// After the projection of a step: `h` is [B, R].
template <typename T>
__global__ void project(Layer<T> layer, State<T> state, const compute_t<T>* h, int64_t t,
                        int64_t next) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= layer.B * layer.R) return;
  const int64_t entry = i / layer.R, unit = i % layer.R;
  const bool is_active = layer.is_active(t, entry);
  if (is_active)
    take_h(layer, t, entry, h[i], kept(layer.options, layer.seed, entry, unit, t).h, state.h[i]);
  leave_h(state, t, entry, unit, is_active, state.h[i]);
  state.operand[i] = operand_of(layer, next, entry, unit, state.h[i]);
}

template <typename T>
__global__ void finish(Layer<T> layer, State<T> state, View<T, 2> h_n, View<T, 2> c_n) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (h_n.defined() && i < layer.B * layer.R) h_n(i / layer.R, i % layer.R) = state.h[i];
  if (i < layer.B * layer.H) c_n(i / layer.H, i % layer.H) = static_cast<T>(state.c[i]);
}

}  // namespace opwright_ops::gpu
