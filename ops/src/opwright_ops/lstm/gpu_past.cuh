// What the backward of an LSTM needs of its forward: gates, cells, operands, moments.
#pragma once

#include "gpu_layer.cuh"

namespace opwright_ops::gpu {

// What the forward went through.
template <typename T>
struct Past {
  using E = compute_t<T>;
  View<const T, 2> h_0;
  View<const T, 3> output;
  View<const T, 3> saved;  // the gates before their activations, if they were kept; contiguous
  E* z;                    // [T, B, 4H]: the same, otherwise
  E* c_before;             // [T, B, H]: the cells before each step
  int64_t steps;
  bool reverse;

  __device__ T h_before(const Layer<T>& layer, int64_t t, int64_t entry, int64_t unit) const {
    if (!layer.is_active(t, entry) || layer.resets(t, entry)) return T(0.0f);
    const bool is_first = reverse ? t + 1 == steps || !layer.is_active(t + 1, entry) : t == 0;
    if (is_first) return h_0.defined() ? h_0(entry, unit) : T(0.0f);
    return output(reverse ? t + 1 : t - 1, entry, unit);
  }
};

template <typename T>
struct Gates {
  using E = compute_t<T>;
  E z[4], before, i, f, g, o, cell, squashed;

  __device__ Gates() {}
  __device__ Gates(const Layer<T>& layer, const Past<T>& past, int64_t t, int64_t entry,
                   int64_t unit) {
    read(layer, past, t, entry, unit);
    complete(layer.options);
  }
  __device__ void read(const Layer<T>& layer, const Past<T>& past, int64_t t, int64_t entry,
                       int64_t unit) {
    const int64_t row = t * layer.B + entry, H = layer.H;
    for (int j = 0; j < 4; ++j) {
      z[j] = past.saved.defined() ? static_cast<E>(past.saved(t, entry, j * H + unit))
                                  : past.z[row * 4 * H + j * H + unit];
    }
    before = past.c_before[row * H + unit];
  }
  __device__ void complete(const Options<T>& options) {
    activate(options);
    o = options.sigmoid(z[3]), squashed = options.tanh(cell);
  }
  __device__ void activate(const Options<T>& options) {
    i = options.sigmoid(z[0]), f = options.is_coupled ? 1 - i : options.sigmoid(z[1]);
    g = options.tanh(options.clipped(z[2]));
    cell = f * before + i * g;
  }
};

// h as the products took it, and the input, with 0 after the end of each entry.
template <typename T>
__global__ void operand_rows(Layer<T> layer, Past<T> past, T* to) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= past.steps * layer.B * layer.R) return;
  const int64_t row = i / layer.R, t = row / layer.B, entry = row % layer.B, unit = i % layer.R;
  to[i] = layer.masked(past.h_before(layer, t, entry, unit), entry, unit);
}
template <typename T>
__global__ void input_rows(Layer<T> layer, View<const T, 3> input, T* to) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x, width = input.size(2);
  if (i >= input.size(0) * layer.B * width) return;
  const int64_t row = i / width, t = row / layer.B, entry = row % layer.B;
  to[i] = layer.is_active(t, entry) ? input(t, entry, i % width) : T(0.0f);
}
template <typename T>
__global__ void widen(View<const T, 3> from, compute_t<T>* to) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x, width = from.size(2);
  if (i >= from.size(0) * from.size(1) * width) return;
  const int64_t row = i / width;
  to[i] = static_cast<compute_t<T>>(from(row / from.size(1), row % from.size(1), i % width));
}

template <typename E>
__global__ void __launch_bounds__(kThreads)
    row_moments(const E* rows, int64_t width, Moments<E>* to) {
  __shared__ E shared[32];
  const E* row = rows + blockIdx.x * width;
  const auto found = moments<E>(width, shared, [&](int64_t i) { return row[i]; });
  if (threadIdx.x == 0) to[blockIdx.x] = found;
}
template <typename T>
__global__ void __launch_bounds__(kThreads)
    cell_moments(Layer<T> layer, Past<T> past, Moments<compute_t<T>>* to) {
  using E = compute_t<T>;
  __shared__ E shared[32];
  const int64_t t = blockIdx.x / layer.B, entry = blockIdx.x % layer.B;
  const auto found = moments<E>(layer.H, shared,
                                [&](int64_t i) { return Gates<T>(layer, past, t, entry, i).cell; });
  if (threadIdx.x == 0) to[blockIdx.x] = found;
}

// The cells of a thread where the gates were kept, without options: the readings of the next steps,
// and the activations of AHEAD of them, which do not wait for each other, are done before their
// cells.
template <int AHEAD, typename T>
__device__ void scan_saved(const Layer<T>& layer, const Past<T>& past, int64_t entry, int64_t unit,
                           compute_t<T> c) {
  using E = compute_t<T>;
  const int64_t H = layer.H, steps = past.steps, direction = past.reverse ? -1 : 1;
  const int64_t start = past.reverse ? steps - 1 : 0;
  Read<T> next[AHEAD][4];
  const auto fetch = [&](int64_t first) {
#pragma unroll
    for (int a = 0; a < AHEAD; ++a)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t step = first + a < steps ? first + a : steps - 1;
        next[a][j] = read(past.saved(start + step * direction, entry, j * H + unit));
      }
  };
  fetch(0);
  for (int64_t first = 0; first < steps; first += AHEAD) {
    Gates<T> x[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a)
#pragma unroll
      for (int j = 0; j < 4; ++j) x[a].z[j] = next[a][j].value();
    if (first + AHEAD < steps) fetch(first + AHEAD);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) x[a].before = 0, x[a].activate(layer.options);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if (first + a >= steps) break;
      past.c_before[((start + (first + a) * direction) * layer.B + entry) * H + unit] = c;
      c = x[a].f * c + x[a].i * x[a].g;
    }
  }
}

// The cells before each step, from the first to the last; gates that were not kept get what the
// cells add.
template <typename T, bool kIsNormalised, bool kIsPlain>
__global__ void scan(Layer<T> given, Past<T> past, View<const T, 2> c_0,
                     const compute_t<T>* from_input, const compute_t<T>* from_h,
                     const Moments<compute_t<T>>* moments_x,
                     const Moments<compute_t<T>>* moments_h) {
  using E = compute_t<T>;
  constexpr int kAhead = 8;  // steps that are read before the first of them is taken
  const Layer<T> layer = kIsPlain ? plain(given) : given;
  const int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x, H = layer.H;
  if (index >= layer.B * H) return;
  const int64_t entry = index / H, unit = index % H;
  const bool is_saved = past.saved.defined();
  const auto time_of = [&](int64_t step) { return past.reverse ? past.steps - 1 - step : step; };
  E c = c_0.defined() ? static_cast<E>(c_0(entry, unit)) : E(0);
  if (kIsPlain && is_saved) return scan_saved<kAhead>(layer, past, entry, unit, c);
  for (int64_t first = 0; first < past.steps; first += kAhead) {
    // No branch among the readings: one that waits would hold up the others.
    Read<T> saved[kAhead][4] = {};
    if (is_saved) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          saved[a][j] = read(
              past.saved(time_of(first + a < past.steps ? first + a : first), entry, j * H + unit));
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (first + a >= past.steps) break;
      const int64_t t = time_of(first + a), row = t * layer.B + entry;
      Gates<T> x;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t i = j * H + unit, at = row * 4 * H + i;
        if (is_saved)
          x.z[j] = saved[a][j].value();
        else if (kIsNormalised)
          x.z[j] =
              (from_input[at] - moments_x[row].mean) * moments_x[row].scale * layer.norm_ih[i] +
              (from_h[at] - moments_h[row].mean) * moments_h[row].scale * layer.norm_hh[i] +
              layer.bias[i];
        else
          x.z[j] = from_input[at] + from_h[at] + layer.bias[i];
      }
      const bool is_active = layer.is_active(t, entry);
      if (layer.resets(t, entry)) c = 0;
      past.c_before[row * H + unit] = is_active ? c : E(0);
      x.before = c;
      if (!is_saved && layer.peephole.defined())
        for (int j = 0; j < 2; ++j) x.z[j] += static_cast<E>(layer.peephole(j, unit)) * c;
      x.activate(layer.options);
      if (!is_saved) {
        if (layer.peephole.defined()) x.z[3] += static_cast<E>(layer.peephole(2, unit)) * x.cell;
        for (int j = 0; j < 4; ++j) past.z[row * 4 * H + j * H + unit] = is_active ? x.z[j] : E(0);
      }
      const E keeps = kept(layer.options, layer.seed, entry, unit, t).c;
      if (is_active) c = mix(keeps, c, x.cell);
    }
  }
}

}  // namespace opwright_ops::gpu
