// RMS norm, RMS norm behind a residual sum, layer norm and their gradients on the CPU. A row is
// read from memory once; it comes from the caches for the second and third pass.
#include <opwright/along.h>
#include <opwright/kernel.h>
#include <opwright/tensor.h>

using opwright::along;
using opwright::compute_t;
using opwright::read;
using opwright::sums_along;
using opwright::View;
using opwright::with_adjacent_columns;
using opwright::write;

enum class Norm { rms, layer };

// Rows whose column sums are added up one after another; parts of them are then added in pairs.
// From the shape alone, so that the bits do not depend on the threads.
constexpr int64_t kMaxParts = 64;
constexpr int64_t kPartElements = 4 * opwright::kGrainElements;

// What is subtracted from each element of a row before it is squared.
template <Norm kNorm, typename T>
OPWRIGHT_INLINE compute_t<T> mean_of(const T* row, int64_t n) {
  compute_t<T> total[1] = {};
  if constexpr (kNorm == Norm::layer) {
    sums_along<T>(n, total, [&]<typename R>(int64_t i, R(&to)[1]) { to[0] += read<R>(row + i); });
  }
  return total[0] / compute_t<T>(n);
}

template <typename S>
S scale_of(S squares, int64_t n, double eps) {
  return S(1) / S(__builtin_sqrt(squares / S(n) + S(eps)));
}

// A weight or bias as adjacent elements that are read beside those of T; null where there is none.
template <typename C, typename W>
const C* copy_of(const View<const W, 1>& view) {
  if (!view.defined()) return nullptr;
  C* copy = opwright::scratch<C>(view.size(0));
  for (int64_t i = 0; i < view.size(0); ++i) copy[i] = C(view(i));
  return copy;
}
template <typename T, typename W>
const auto* columns_of(const View<const W, 1>& view) {
  if constexpr (sizeof(T) == sizeof(double) && sizeof(W) < sizeof(double))
    return copy_of<double>(view);
  else
    return view.is_contiguous() ? view.data() : copy_of<W>(view);
}

template <Norm kNorm, typename T, typename W>
void forward(View<const T, 2> input, View<const T, 2> residual, View<const W, 1> weight,
             View<const W, 1> bias, double eps, View<T, 2> output, View<T, 2> sum) {
  using S = compute_t<T>;
  const int64_t n = input.size(1);
  input = with_adjacent_columns(input);
  if (residual.defined()) residual = with_adjacent_columns(residual);
  const auto *weights = columns_of<T>(weight), *biases = columns_of<T>(bias);
  opwright::parallel_for(input.size(0), opwright::grain_of(n), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = input.data() + row * input.stride(0);
      if (residual.defined()) {
        const T* other = residual.data() + row * residual.stride(0);
        T* to = sum.data() + row * n;
        along<T>(n, [&]<typename R>(R, int64_t i) {
          write(to + i, read<R>(from + i) + read<R>(other + i));
        });
        from = to;
      }
      S mean = mean_of<kNorm>(from, n);
      S totals[2];  // of the squares, and of the differences
      sums_along<T>(n, totals, [&]<typename R>(int64_t i, R(&to)[2]) {
        const R d = read<R>(from + i) - mean;
        to[0] += d * d;
        if constexpr (kNorm == Norm::layer) to[1] += d;
      });
      const S shift = kNorm == Norm::layer ? totals[1] / S(n) : S(0);  // what the mean was off by
      mean += shift;
      const S scale = scale_of(totals[0] - totals[1] * shift, n, eps);
      T* to = output.data() + row * n;
      const auto normalise = [&](const auto& finish) {
        along<T>(n, [&]<typename R>(R, int64_t i) {
          write(to + i, finish((read<R>(from + i) - mean) * scale, i));
        });
      };
      if (weights && biases)
        normalise([&]<typename R>(R y, int64_t i) {
          return y * read<R>(weights + i) + read<R>(biases + i);
        });
      else if (weights)
        normalise([&]<typename R>(R y, int64_t i) { return y * read<R>(weights + i); });
      else if (biases)
        normalise([&]<typename R>(R y, int64_t i) { return y + read<R>(biases + i); });
      else
        normalise([&]<typename R>(R y, int64_t) { return y; });
    }
  });
}

// Adds the rows of a count x n matrix in pairs, and writes them to `to`.
template <typename S, typename W>
void write_sums(S* sums, int64_t count, int64_t pitch, const View<W, 1>& to) {
  if (!to.defined()) return;
  opwright::parallel_for(to.size(0), opwright::grain_of(count), [&](int64_t begin, int64_t end) {
    for (int64_t step = 1; step < count; step *= 2) {
      for (int64_t i = 0; i + step < count; i += 2 * step) {
        auto *into = sums + i * pitch, *from = sums + (i + step) * pitch;
        for (int64_t c = begin; c < end; ++c) into[c] += from[c];
      }
    }
    for (int64_t c = begin; c < end; ++c) to(c) = W(sums[c]);
  });
}

template <Norm kNorm, typename T, typename W>
void backward(View<const T, 2> grad_output, View<const T, 2> grad_sum, View<const T, 2> input,
              View<const W, 1> weight, double eps, View<T, 2> grad_input, View<W, 1> grad_weight,
              View<W, 1> grad_bias) {
  using S = compute_t<T>;
  const int64_t rows = input.size(0), n = input.size(1);
  input = with_adjacent_columns(input), grad_output = with_adjacent_columns(grad_output);
  if (grad_sum.defined()) grad_sum = with_adjacent_columns(grad_sum);
  const auto* weights = columns_of<T>(weight);
  int64_t parts = rows * n / kPartElements;
  parts = parts < 1 ? 1 : parts > kMaxParts ? kMaxParts : parts;
  if (parts > rows) parts = rows;
  const int64_t part_rows = (rows + parts - 1) / parts;
  parts = (rows + part_rows - 1) / part_rows;
  // Of the weight and the bias, for each part.
  S* sums = opwright::scratch<S>(2 * parts * n);
  opwright::parallel_for(parts, opwright::grain_of(part_rows * n), [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      S *weight_sums = sums + part * n, *bias_sums = weight_sums + parts * n;
      for (int64_t c = 0; c < n; ++c) weight_sums[c] = bias_sums[c] = 0;
      const int64_t last = (part + 1) * part_rows < rows ? (part + 1) * part_rows : rows;
      for (int64_t row = part * part_rows; row < last; ++row) {
        const T* from = input.data() + row * input.stride(0);
        const T* grads = grad_output.data() + row * grad_output.stride(0);
        const S mean = mean_of<kNorm>(from, n);
        const auto weighted = [&]<typename R>(R, int64_t i) {
          const R g = read<R>(grads + i);
          return weights ? g * read<R>(weights + i) : g;
        };
        S totals[3];  // of the squares, and of the gradient with and without the value
        sums_along<T>(n, totals, [&]<typename R>(int64_t i, R(&to)[3]) {
          const R d = read<R>(from + i) - mean, g = weighted(R{}, i);
          to[0] += d * d;
          to[1] += d * g;
          if constexpr (kNorm == Norm::layer) to[2] += g;
        });
        const S scale = scale_of(totals[0], n, eps);
        const S mean_grad = kNorm == Norm::layer ? totals[2] / S(n) : S(0);
        const S slope = totals[1] * scale / S(n);
        T* to = grad_input.data() + row * n;
        const T* others = grad_sum.defined() ? grad_sum.data() + row * grad_sum.stride(0) : nullptr;
        along<T>(n, [&]<typename R>(R, int64_t i) {
          const R g = read<R>(grads + i), y = (read<R>(from + i) - mean) * scale;
          R d = (weighted(R{}, i) - mean_grad - y * slope) * scale;
          if (others) d += read<R>(others + i);
          write(to + i, d);
          write(weight_sums + i, read<R>(weight_sums + i) + g * y);
          if constexpr (kNorm == Norm::layer) write(bias_sums + i, read<R>(bias_sums + i) + g);
        });
      }
    }
  });
  write_sums(sums, parts, n, grad_weight);
  write_sums(sums + parts * n, parts, n, grad_bias);
}

template <typename T, typename W = T>
void rms_norm(View<const T, 2> input, View<const W, 1> weight, double eps, View<T, 2> output) {
  forward<Norm::rms>(input, View<const T, 2>{}, weight, View<const W, 1>{}, eps, output,
                     View<T, 2>{});
}

template <typename T, typename W = T>
void rms_norm_backward(View<const T, 2> grad_output, View<const T, 2> input,
                       View<const W, 1> weight, double eps, View<T, 2> grad_input,
                       View<W, 1> grad_weight) {
  backward<Norm::rms>(grad_output, View<const T, 2>{}, input, weight, eps, grad_input, grad_weight,
                      View<W, 1>{});
}

template <typename T, typename W = T>
void add_rms_norm(View<const T, 2> input, View<const T, 2> residual, View<const W, 1> weight,
                  double eps, View<T, 2> output, View<T, 2> sum) {
  forward<Norm::rms>(input, residual, weight, View<const W, 1>{}, eps, output, sum);
}

template <typename T, typename W = T>
void add_rms_norm_backward(View<const T, 2> grad_output, View<const T, 2> grad_sum,
                           View<const W, 1> weight, View<const T, 2> sum, double eps,
                           View<T, 2> grad_input, View<W, 1> grad_weight) {
  backward<Norm::rms>(grad_output, grad_sum, sum, weight, eps, grad_input, grad_weight,
                      View<W, 1>{});
}

template <typename T, typename W = T>
void layer_norm(View<const T, 2> input, View<const W, 1> weight, View<const W, 1> bias, double eps,
                View<T, 2> output) {
  forward<Norm::layer>(input, View<const T, 2>{}, weight, bias, eps, output, View<T, 2>{});
}

template <typename T, typename W = T>
void layer_norm_backward(View<const T, 2> grad_output, View<const T, 2> input,
                         View<const W, 1> weight, View<const W, 1>, double eps,
                         View<T, 2> grad_input, View<W, 1> grad_weight, View<W, 1> grad_bias) {
  backward<Norm::layer>(grad_output, View<const T, 2>{}, input, weight, eps, grad_input,
                        grad_weight, grad_bias);
}

OPWRIGHT_KERNEL(rms_norm, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(rms_norm_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(add_rms_norm, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(add_rms_norm_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(layer_norm, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(layer_norm_backward, float, double, opwright::half, opwright::bfloat16)

// The same with a weight and a bias of float.
template <typename T>
constexpr auto& rms_norm_float32_weight = rms_norm<T, float>;
template <typename T>
constexpr auto& rms_norm_float32_weight_backward = rms_norm_backward<T, float>;
template <typename T>
constexpr auto& add_rms_norm_float32_weight = add_rms_norm<T, float>;
template <typename T>
constexpr auto& add_rms_norm_float32_weight_backward = add_rms_norm_backward<T, float>;
template <typename T>
constexpr auto& layer_norm_float32_weight = layer_norm<T, float>;
template <typename T>
constexpr auto& layer_norm_float32_weight_backward = layer_norm_backward<T, float>;

OPWRIGHT_KERNEL(rms_norm_float32_weight, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(rms_norm_float32_weight_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(add_rms_norm_float32_weight, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(add_rms_norm_float32_weight_backward, float, double, opwright::half,
                opwright::bfloat16)
OPWRIGHT_KERNEL(layer_norm_float32_weight, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(layer_norm_float32_weight_backward, float, double, opwright::half,
                opwright::bfloat16)
