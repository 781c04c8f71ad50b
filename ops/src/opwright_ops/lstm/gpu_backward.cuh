// The steps of the backward of an LSTM on a GPU, from the last to the first, and the sums at its
// end.
#pragma once

#include <opwright/launch.cuh>

#include "gpu_past.cuh"

namespace opwright_ops::gpu {

constexpr int kParts = 4;  // of a product, one for each gate

// The gradients that go from step to step, and what the steps leave behind.
template <typename T>
struct Sweep {
  using E = compute_t<T>;
  View<const T, 3> grad_output, grad_cells;
  E *grad_h, *grad_c;       // [B, R], [B, H]
  E* to_h;                  // [B, R]: the product of the gates' gradients with weight_hh,
  bool is_in_parts;         // or [kParts, B, R], which add up to it
  E* of_mask;               // [B, R]: the gradient of h_mask; null without one
  E* of_peephole;           // [3, B, H]; null without
  T* gates;                 // [T, B, 4H]: gradients of what weight_hh gave
  E* before_norm;           // [T, B, 4H]: where layers are normalised, those of the gates
  E *normal, *normal_unit;  // [T, B, H]: those of the normalised cell, and times it
  T* projected;             // [T, B, R]: those of what the projection gave
  T* cell_out;              // [T, B, H]: what it took
  E* to_cell_out;           // [B, H]
  const Moments<E>*moments_h, *moments_c;
  const E* from_h;  // [T, B, 4H]
};

// What weight_hh gave for h.
template <typename T>
__device__ compute_t<T> through_gates(const Layer<T>& layer, const Sweep<T>& sweep, int64_t i) {
  compute_t<T> sum = sweep.to_h[i];
  if (sweep.is_in_parts) {
#pragma unroll
    for (int part = 1; part < kParts; ++part) sum += sweep.to_h[part * layer.B * layer.R + i];
  }
  return sum;
}

// The gradient of h before step `after`, for which weight_hh gave `more`; of the last h if that is
// -1. `grad`: what went past the step.
template <typename T>
__device__ compute_t<T> absorb(const Layer<T>& layer, const Past<T>& past, const Sweep<T>& sweep,
                               int64_t after, int64_t entry, int64_t unit, compute_t<T> grad,
                               compute_t<T> more) {
  using E = compute_t<T>;
  if (after < 0 || !layer.is_active(after, entry)) return grad;
  if (sweep.of_mask) {
    sweep.of_mask[entry * layer.R + unit] +=
        more * static_cast<E>(past.h_before(layer, after, entry, unit));
    more *= static_cast<E>(layer.h_mask(entry, unit));
  }
  return layer.resets(after, entry) ? E(0) : grad + more;
}

// The gradient of the new h of step t; `grad`, that of h after it, becomes what of it goes past the
// step.
template <typename T>
__device__ compute_t<T> take_grad_h(const Layer<T>& layer, bool is_active, compute_t<T> grad_output,
                                    compute_t<T> keeps, compute_t<T>& grad) {
  if (!is_active) return 0;
  const compute_t<T> all = grad + grad_output;
  grad = all * keeps;
  return all - grad;
}

// From the gradients of the output gate before its activation, of the cell through the output, and
// of c after the step to those of the four gates; returns what goes on to c before the step.
template <typename T>
__device__ compute_t<T> gates_back(const Layer<T>& layer, const Sweep<T>& sweep, const Gates<T>& x,
                                   int64_t t, int64_t entry, int64_t unit, compute_t<T> grad_o,
                                   compute_t<T> through_output, compute_t<T> keeps,
                                   compute_t<T> of_c, compute_t<T> (&grad)[4]) {
  using E = compute_t<T>;
  const auto& options = layer.options;
  if (sweep.grad_cells.defined()) of_c += static_cast<E>(sweep.grad_cells(t, entry, unit));
  E goes_past = of_c * keeps;
  E of_cell = of_c - goes_past + through_output;
  const bool peeps = layer.peephole.defined();
  if (peeps) of_cell += static_cast<E>(layer.peephole(2, unit)) * grad_o;
  const E to_f = of_cell * x.before;
  grad[0] =
      options.through_sigmoid(of_cell * x.g - (options.is_coupled ? to_f : E(0)), x.z[0], x.i);
  grad[1] = options.is_coupled ? E(0) : options.through_sigmoid(to_f, x.z[1], x.f);
  grad[2] = options.through_clip(options.through_tanh(of_cell * x.i, options.clipped(x.z[2]), x.g),
                                 x.z[2]);
  grad[3] = grad_o;
  goes_past += of_cell * x.f;
  if (peeps) {
    goes_past += static_cast<E>(layer.peephole(0, unit)) * grad[0] +
                 static_cast<E>(layer.peephole(1, unit)) * grad[1];
    const int64_t i = entry * layer.H + unit, all = layer.B * layer.H;
    sweep.of_peephole[i] += grad[0] * x.before;
    sweep.of_peephole[all + i] += grad[1] * x.before;
    sweep.of_peephole[2 * all + i] += grad_o * x.cell;
  }
  return layer.resets(t, entry) ? E(0) : goes_past;
}

// The gradient of the new h of step t, where each step is a launch.
template <typename T>
__device__ compute_t<T> step_back_h(const Layer<T>& layer, const Past<T>& past,
                                    const Sweep<T>& sweep, int64_t t, int64_t after, int64_t entry,
                                    int64_t unit, compute_t<T> keeps) {
  using E = compute_t<T>;
  const int64_t i = entry * layer.R + unit;
  E grad = absorb(layer, past, sweep, after, entry, unit, sweep.grad_h[i],
                  through_gates(layer, sweep, i));
  const E result = take_grad_h(layer, layer.is_active(t, entry),
                               static_cast<E>(sweep.grad_output(t, entry, unit)), keeps, grad);
  sweep.grad_h[i] = grad;
  return result;
}

template <typename T>
__global__ void project_back(Layer<T> layer, Past<T> past, Sweep<T> sweep, int64_t t,
                             int64_t after) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= layer.B * layer.R) return;
  const int64_t entry = i / layer.R, unit = i % layer.R;
  const auto keeps = kept(layer.options, layer.seed, entry, unit, t);
  sweep.projected[t * layer.B * layer.R + i] =
      static_cast<T>(step_back_h(layer, past, sweep, t, after, entry, unit, keeps.h));
}

template <typename T, bool kIsNormalised, bool kIsProjected>
__global__ void __launch_bounds__(kThreads)
    step_back(Layer<T> layer, Past<T> past, Sweep<T> sweep, int64_t t, int64_t after) {
  using E = compute_t<T>;
  opwright::let_next_start();  // waits for the kernel in front, too
  __shared__ E shared[32];
  const int64_t H = layer.H;
  const auto& options = layer.options;
  const auto of_h = [&](int64_t entry, int64_t unit, E keeps) {
    return kIsProjected ? sweep.to_cell_out[entry * H + unit]
                        : step_back_h(layer, past, sweep, t, after, entry, unit, keeps);
  };
  if constexpr (!kIsNormalised) {
    const int64_t index = blockIdx.x * int64_t{kThreads} + threadIdx.x;
    if (index >= layer.B * H) return;
    const int64_t entry = index / H, unit = index % H, row = t * layer.B + entry;
    const auto keeps = kept(options, layer.seed, entry, unit, t);
    const bool is_active = layer.is_active(t, entry);
    Gates<T> x;
    if (is_active) x.read(layer, past, t, entry, unit);  // before anything is written
    const E grad_h = of_h(entry, unit, keeps.h);
    E grad[4] = {};
    T out = T(0.0f);
    if (is_active) {
      x.complete(options);
      out = static_cast<T>(x.o * x.squashed);
      sweep.grad_c[index] = gates_back(layer, sweep, x, t, entry, unit,
                                       options.through_sigmoid(grad_h * x.squashed, x.z[3], x.o),
                                       options.through_tanh(grad_h * x.o, x.cell, x.squashed),
                                       keeps.c, sweep.grad_c[index], grad);
    }
    if (kIsProjected) sweep.cell_out[row * H + unit] = out;
    for (int j = 0; j < 4; ++j) sweep.gates[row * 4 * H + j * H + unit] = static_cast<T>(grad[j]);
  } else {
    const int64_t entry = blockIdx.x, row = t * layer.B + entry;
    const bool is_active = layer.is_active(t, entry);
    E* normals = sweep.normal + row * H;
    E* units = sweep.normal_unit + row * H;
    E* outer = sweep.before_norm + row * 4 * H;
    const auto of_cell = sweep.moments_c[row];
    E sum = 0, product = 0;
    for (int64_t unit = threadIdx.x; unit < H; unit += kThreads) {
      const auto keeps = kept(options, layer.seed, entry, unit, t);
      const E grad_h = of_h(entry, unit, keeps.h);
      E grad_normal = 0, grad_o = 0, scaled = 0;
      T out = T(0.0f);
      if (is_active) {
        const Gates<T> x(layer, past, t, entry, unit);
        const E gain = static_cast<E>(layer.norm_c(0, unit)),
                value = (x.cell - of_cell.mean) * of_cell.scale;
        const E normal = value * gain + static_cast<E>(layer.norm_c(1, unit)),
                squashed = options.tanh(normal);
        out = static_cast<T>(x.o * squashed);
        grad_o = options.through_sigmoid(grad_h * squashed, x.z[3], x.o);
        grad_normal = options.through_tanh(grad_h * x.o, normal, squashed);
        scaled = grad_normal * value;
        sum += grad_normal * gain, product += scaled * gain;
      }
      normals[unit] = grad_normal, units[unit] = scaled, outer[3 * H + unit] = grad_o;
      if (kIsProjected) sweep.cell_out[row * H + unit] = out;
    }
    sum = sum_over_block(sum, shared) / static_cast<E>(H),
    product = sum_over_block(product, shared) / static_cast<E>(H);
    const auto moments = sweep.moments_h[row];
    E sum_h = 0, product_h = 0;
    for (int64_t unit = threadIdx.x; unit < H; unit += kThreads) {
      E grad[4] = {};
      if (is_active) {
        const Gates<T> x(layer, past, t, entry, unit);
        const E value = (x.cell - of_cell.mean) * of_cell.scale;
        const E through = of_cell.scale * (normals[unit] * static_cast<E>(layer.norm_c(0, unit)) -
                                           sum - value * product);
        E& of_c = sweep.grad_c[entry * H + unit];
        of_c = gates_back(layer, sweep, x, t, entry, unit, outer[3 * H + unit], through,
                          kept(options, layer.seed, entry, unit, t).c, of_c, grad);
      }
      for (int j = 0; j < 4; ++j) {
        const int64_t i = j * H + unit;
        outer[i] = grad[j];
        const E gained = grad[j] * layer.norm_hh[i];
        sum_h += gained,
            product_h += gained * (sweep.from_h[row * 4 * H + i] - moments.mean) * moments.scale;
      }
    }
    sum_h = sum_over_block(sum_h, shared) / static_cast<E>(4 * H),
    product_h = sum_over_block(product_h, shared) / static_cast<E>(4 * H);
    for (int64_t i = threadIdx.x; i < 4 * H; i += kThreads) {
      const E value = (sweep.from_h[row * 4 * H + i] - moments.mean) * moments.scale;
      sweep.gates[row * 4 * H + i] =
          static_cast<T>(moments.scale * (outer[i] * layer.norm_hh[i] - sum_h - value * product_h));
    }
  }
}

// The same without options, N units for each thread: the address of a row is computed once for all.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    step_back_plain(Layer<T> given, Past<T> past, Sweep<T> sweep, int64_t t, int64_t after) {
  using E = compute_t<T>;
  opwright::let_next_start();  // waits for the kernel in front, too
  const Layer<T> layer = plain(given);
  const unsigned H = static_cast<unsigned>(layer.H), B = static_cast<unsigned>(layer.B);
  const auto [entry, unit] = units_of_thread<N>(H);
  if (entry >= B) return;
  const size_t at = size_t{entry} * H + unit, all = size_t{B} * H, step = t * all + at;
  const size_t row = (size_t(t) * B + entry) * 4 * H + unit;
  E z[4][N], before[N], of_output[N], of_c[N], of_h[N];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (past.saved.defined())
      read_once(past.saved.data() + row + j * H, z[j]);
    else
      read_once(past.z + row + j * H, z[j]);
  }
  read_once(past.c_before + step, before);
  read_once(&sweep.grad_output(t, entry, unit), of_output);
  read_all(sweep.grad_c + at, of_c);
  read_all((after < 0 ? sweep.grad_h : sweep.to_h) + at, of_h);
  if (after < 0) {  // from here on all that goes to h comes from the gates
    const E none[N] = {};
    write_all(sweep.grad_h + at, none);
  } else if (sweep.is_in_parts) {
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      E more[N];
      read_all(sweep.to_h + part * all + at, more);
#pragma unroll
      for (int k = 0; k < N; ++k) of_h[k] += more[k];
    }
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    Gates<T> x;
#pragma unroll
    for (int j = 0; j < 4; ++j) x.z[j] = z[j][k];
    x.before = before[k];
    x.complete(layer.options);
    const E grad_h = of_h[k] + of_output[k];
    E grad[4];
    of_c[k] = gates_back(layer, sweep, x, t, entry, unit + k,
                         layer.options.through_sigmoid(grad_h * x.squashed, x.z[3], x.o),
                         layer.options.through_tanh(grad_h * x.o, x.cell, x.squashed), E(0),
                         of_c[k], grad);
#pragma unroll
    for (int j = 0; j < 4; ++j) z[j][k] = grad[j];
  }
  write_all(sweep.grad_c + at, of_c);
#pragma unroll
  for (int j = 0; j < 4; ++j) write_all(sweep.gates + row + j * H, z[j]);
}

// Back through the normalisation of the inputs.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    normalise_back(const compute_t<T>* grads, const compute_t<T>* rows,
                   const Moments<compute_t<T>>* of, const compute_t<T>* gain, int64_t width,
                   T* to) {
  using E = compute_t<T>;
  __shared__ E shared[32];
  const int64_t first = blockIdx.x * width;
  const auto moments = of[blockIdx.x];
  E sum = 0, product = 0;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    const E gained = grads[first + i] * gain[i];
    sum += gained, product += gained * (rows[first + i] - moments.mean) * moments.scale;
  }
  sum = sum_over_block(sum, shared) / static_cast<E>(width),
  product = sum_over_block(product, shared) / static_cast<E>(width);
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    const E value = (rows[first + i] - moments.mean) * moments.scale;
    to[first + i] =
        static_cast<T>(moments.scale * (grads[first + i] * gain[i] - sum - value * product));
  }
}

// Sums of columns over each of gridDim.y parts of the rows, in an order that is always the same.
// Times the normalised rows, if there are any.
// A lane has PER columns that follow each other; `width` is a multiple of them.
template <int PER, typename E, typename S>
__global__ void __launch_bounds__(kThreads)
    sum_columns(const S* from, const E* rows, const Moments<E>* of, int64_t count, int64_t width,
                E* to) {
  struct alignas(PER * sizeof(S)) Columns {
    S of[PER];
  };
  __shared__ E shared[8][32 * PER];
  const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
  const int64_t column = (blockIdx.x * int64_t{32} + lane) * PER;
  const int64_t end = (blockIdx.y + 1) * count / gridDim.y;
  E sums[PER] = {};
#pragma unroll 8
  for (int64_t row = blockIdx.y * count / gridDim.y + part; column < width && row < end; row += 8) {
    const int64_t at = row * width + column;
    const Columns columns = *reinterpret_cast<const Columns*>(from + at);
#pragma unroll
    for (int i = 0; i < PER; ++i) {
      const E value = static_cast<E>(columns.of[i]);
      sums[i] += rows ? value * (rows[at + i] - of[row].mean) * of[row].scale : value;
    }
  }
#pragma unroll
  for (int i = 0; i < PER; ++i) shared[part][i * 32 + lane] = sums[i];
  __syncthreads();
  if (part || column >= width) return;
#pragma unroll
  for (int i = 0; i < PER; ++i) {
    for (int k = 1; k < 8; ++k) sums[i] += shared[k][i * 32 + lane];
    to[blockIdx.y * width + column + i] = sums[i];
  }
}
template <typename T>
__global__ void join_sums(const compute_t<T>* sums, int parts, int64_t width, T* a, T* b) {
  using E = compute_t<T>;
  const int64_t column = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (column >= width) return;
  E sum = 0;
#pragma unroll 8
  for (int i = 0; i < parts; ++i) sum += sums[i * width + column];
  if (a) a[column] = static_cast<T>(sum);
  if (b) b[column] = static_cast<T>(sum);
}

template <typename T>
__global__ void begin_back(Layer<T> layer, Sweep<T> sweep, View<const T, 2> grad_h_n,
                           View<const T, 2> grad_c_n, Fill fill) {
  using E = compute_t<T>;
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  fill.run();
  if (i < layer.B * layer.R) {
    sweep.grad_h[i] =
        grad_h_n.defined() ? static_cast<E>(grad_h_n(i / layer.R, i % layer.R)) : E(0);
    if (sweep.of_mask) sweep.of_mask[i] = 0;
  }
  if (i < layer.B * layer.H) {
    sweep.grad_c[i] = static_cast<E>(grad_c_n(i / layer.H, i % layer.H));
    for (int k = 0; sweep.of_peephole && k < 3; ++k)
      sweep.of_peephole[k * layer.B * layer.H + i] = 0;
  }
}
template <typename T>
__global__ void finish_back(Layer<T> layer, Past<T> past, Sweep<T> sweep, int64_t last,
                            View<T, 2> grad_h_0, View<T, 2> grad_c_0, View<T, 2> grad_h_mask) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < layer.B * layer.R) {
    const int64_t entry = i / layer.R, unit = i % layer.R;
    const auto grad = absorb(layer, past, sweep, last, entry, unit, sweep.grad_h[i],
                             through_gates(layer, sweep, i));
    if (grad_h_0.numel()) grad_h_0(entry, unit) = static_cast<T>(grad);
    if (sweep.of_mask) grad_h_mask(entry, unit) = static_cast<T>(sweep.of_mask[i]);
  }
  if (i < layer.B * layer.H && grad_c_0.numel())
    grad_c_0(i / layer.H, i % layer.H) = static_cast<T>(sweep.grad_c[i]);
}

}  // namespace opwright_ops::gpu
