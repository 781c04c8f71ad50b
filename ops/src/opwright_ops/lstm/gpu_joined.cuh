// An LSTM whose h is projected, as one that has no projection. The gates take W_hh (W_hr h) = (W_hh
// W_hr) h: the product of the two weights, [4H, H], takes the place of weight_hh between the steps,
// and the projections of all steps are one product after them. So it is as long as nothing else
// happens to the projected h.
#pragma once

#include "gpu_past.cuh"

namespace opwright_ops::gpu {

// Matrices of a row-major scratch.
template <typename T>
View<const T, 2> matrix(const T* data, int64_t rows, int64_t columns) {
  return {data, {rows, columns}, {columns, 1}};
}
template <typename T>
View<T, 3> rows_of_steps(T* data, int64_t steps, int64_t B, int64_t width) {
  return {data, {steps, B, width}, {B * width, width, 1}};
}

// The steps that an entry takes part in begin at time `first` and end at `last`; none if `count` is
// 0.
struct Taken {
  int64_t count, first, last;
};
template <typename T>
__device__ Taken taken(const Layer<T>& layer, int64_t entry, int64_t steps, bool reverse) {
  const int64_t count =
      layer.lengths.defined() && layer.lengths(entry) < steps ? layer.lengths(entry) : steps;
  return {count, reverse ? count - 1 : 0, reverse ? 0 : count - 1};
}

// What h_0 gives in the first step of each entry: from_input[t - from] += of_h_0, for `steps_here`
// steps from time `from` on.
template <typename T>
__global__ void add_first(Layer<T> layer, const compute_t<T>* of_h_0, int64_t steps, bool reverse,
                          int64_t from, int64_t steps_here, compute_t<T>* from_input) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x, all = layer.B * 4 * layer.H;
  if (i >= all) return;
  const int64_t entry = i / (4 * layer.H);
  const Taken of = taken(layer, entry, steps, reverse);
  if (of.count < 1 || of.first < from || of.first >= from + steps_here ||
      layer.resets(of.first, entry))
    return;
  from_input[(of.first - from) * all + i] += of_h_0[i];
}

// h after the last step of each entry.
template <typename T>
__global__ void take_last(Layer<T> layer, View<const T, 2> h_0, View<T, 3> output, int64_t steps,
                          bool reverse, View<T, 2> h_n) {
  const int64_t R = h_n.size(1), i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= layer.B * R) return;
  const int64_t entry = i / R, unit = i % R;
  const Taken of = taken(layer, entry, steps, reverse);
  h_n(entry, unit) = of.count > 0    ? output(of.last, entry, unit)
                     : h_0.defined() ? h_0(entry, unit)
                                     : T(0.0f);
}

// The gradients of the outputs, with those of h_n: to[T, B, R].
template <typename T>
__global__ void grads_of_outputs(Layer<T> layer, View<const T, 3> grad_output,
                                 View<const T, 2> grad_h_n, bool reverse, T* to) {
  using E = compute_t<T>;
  const int64_t steps = grad_output.size(0), R = grad_output.size(2);
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= steps * layer.B * R) return;
  const int64_t t = i / R / layer.B, entry = i / R % layer.B, unit = i % R;
  E grad = layer.is_active(t, entry) ? static_cast<E>(grad_output(t, entry, unit)) : E(0);
  const Taken of = taken(layer, entry, steps, reverse);
  if (of.count > 0 && t == of.last) grad += static_cast<E>(grad_h_n(entry, unit));
  to[i] = static_cast<T>(grad);
}

// After the steps: the gradients of what the projection gave, of which `grads` has what comes from
// outside, and `through_gates` the products of the gates' gradients with weight_hh, at the time of
// the gates; and that of h_0.
template <typename T>
__global__ void grads_of_projected(Layer<T> layer, const compute_t<T>* through_gates,
                                   View<const T, 2> grad_h_n, int64_t steps, bool reverse, T* grads,
                                   View<T, 2> grad_h_0) {
  using E = compute_t<T>;
  const int64_t R = grad_h_n.size(1), i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t all = layer.B * R;
  if (i >= (steps > 0 ? steps : 1) * all) return;
  const int64_t t = i / all, entry = i / R % layer.B, unit = i % R, next = reverse ? t - 1 : t + 1;
  const Taken of = taken(layer, entry, steps, reverse);
  const auto through = [&](int64_t at) {
    return layer.resets(at, entry) ? E(0) : through_gates[at * all + i % all];
  };
  if (t < steps && layer.is_active(t, entry) && t != of.last)
    grads[i] = static_cast<T>(static_cast<E>(grads[i]) + through(next));
  if (t == 0 && grad_h_0.numel())
    grad_h_0(entry, unit) =
        of.count > 0 ? static_cast<T>(through(of.first)) : static_cast<T>(grad_h_n(entry, unit));
}

// What the projection took, o * tanh(c), 0 after the end of each entry: to[T, B, H].
template <typename T>
__global__ void cell_outs(Layer<T> layer, Past<T> past, T* to) {
  const int64_t H = layer.H, i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= past.steps * layer.B * H) return;
  const int64_t t = i / H / layer.B, entry = i / H % layer.B;
  T out = T(0.0f);
  if (layer.is_active(t, entry)) {
    const Gates<T> x(layer, past, t, entry, i % H);
    out = static_cast<T>(x.o * x.squashed);
  }
  to[i] = out;
}

}  // namespace opwright_ops::gpu
