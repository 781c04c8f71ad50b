// Log-sum-exp and cross-entropy of rows, and their gradients, on the CPU.
#include <opwright/along.h>
#include <opwright/kernel.h>
#include <opwright/math.h>
#include <opwright/scratch.h>
#include <opwright/tensor.h>

using opwright::along;
using opwright::compute_t;
using opwright::read;
using opwright::View;
using opwright::write;

// Elements of a row that one piece of work covers: they stay in the first-level cache between its
// two passes. From n alone, so that a row has the same bits in every batch.
constexpr int64_t kPart = 4096;

// The sum of exp(x - origin) over a part of a row, where origin is its largest element, and the sum
// of the elements themselves.
template <typename S>
struct Part {
  S origin, exponentials, elements;
};

template <typename S>
constexpr S kLargest = sizeof(S) == 8 ? S(0x1.fffffffffffffp1023) : S(0x1.fffffep127f);

template <bool kHasElements, typename T>
Part<compute_t<T>> part_of(const T* row, int64_t n) {
  using S = compute_t<T>;
  // Not infinite: exp(inf - origin) is still inf, and exp(-inf - origin) is 0.
  S origin = opwright::largest_along(row, n);
  origin = origin > kLargest<S> ? kLargest<S> : origin < -kLargest<S> ? -kLargest<S> : origin;
  S sums[2];
  opwright::sums_along<T>(n, sums, [&]<typename R>(int64_t at, R(&to)[2]) {
    const R x = read<R>(row + at);
    to[0] += opwright::exp(x - origin);
    if constexpr (kHasElements) to[1] += x;
  });
  return {origin, sums[0], sums[1]};
}

// Calls finish(row, log-sum-exp, sum of the elements) for each row.
template <bool kHasElements, typename T, typename Finish>
void over_rows(const View<const T, 2>& rows, const Finish& finish) {
  using S = compute_t<T>;
  const int64_t n = rows.size(1), parts = (n + kPart - 1) / kPart;
  auto* all = opwright::scratch<Part<S>>(rows.size(0) * parts);
  const int64_t grain = opwright::grain_of(4 * (n < kPart ? n : kPart));
  opwright::parallel_for(rows.size(0) * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, first = i % parts * kPart;
      all[i] = part_of<kHasElements>(rows.data() + row * rows.stride(0) + first,
                                     n - first < kPart ? n - first : kPart);
    }
  });
  opwright::parallel_for(
      rows.size(0), opwright::grain_of(8 * parts), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          const Part<S>* of_row = all + row * parts;
          double origin = -kLargest<double>, exponentials = 0, elements = 0;
          for (int64_t p = 0; p < parts; ++p)
            origin = of_row[p].origin > origin ? of_row[p].origin : origin;
          for (int64_t p = 0; p < parts; ++p) {
            exponentials += of_row[p].exponentials * opwright::exp(of_row[p].origin - origin);
            if constexpr (kHasElements) elements += of_row[p].elements;
          }
          finish(row, origin + __builtin_log(exponentials), elements);
        }
      });
}

template <typename T>
void row_logsumexp(View<const T, 2> input, View<double, 1> output) {
  over_rows<false>(opwright::with_adjacent_columns(input),
                   [&](int64_t row, double value, double) { output(row) = value; });
}

// The gradient of a row x is grad * (slope * exp(x[j] - normalizer) - shift), where `at_target`
// more is subtracted at the target.
struct RowGradient {
  double grad = 0, slope = 1, shift = 0, at_target = 0;
  int64_t target = -1;
  bool is_zero = false;
};

// Accurate to half for bfloat16, too: label smoothing subtracts what may be nearly as large.
template <typename T, typename V>
OPWRIGHT_INLINE V exp_of(V x) {
  if constexpr (sizeof(T) == 2)
    return opwright::exp<opwright::half>(x);
  else
    return opwright::exp(x);
}

template <typename T, typename GradientOf>
void write_gradients(const View<const T, 2>& rows, const View<const double, 1>& normalizer,
                     const View<T, 2>& output, const GradientOf& gradient_of) {
  using S = compute_t<T>;
  const int64_t n = rows.size(1), parts = (n + kPart - 1) / kPart;
  const int64_t grain = opwright::grain_of(4 * (n < kPart ? n : kPart));
  opwright::parallel_for(rows.size(0) * parts, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, first = i % parts * kPart;
      const int64_t count = n - first < kPart ? n - first : kPart;
      const T* from = rows.data() + row * rows.stride(0) + first;
      T* to = output.data() + row * output.stride(0) + first;
      const RowGradient gradient = gradient_of(row);
      if (gradient.is_zero) {
        for (int64_t j = 0; j < count; ++j) to[j] = T(S(0));
        continue;
      }
      // In two parts: x - normalizer loses no bit of float64.
      const S high = S(normalizer(row)), low = high - high == 0 ? S(normalizer(row) - high) : S(0);
      const S grad = S(gradient.grad), slope = S(gradient.slope), shift = S(gradient.shift);
      const auto softmax = [&](auto x) { return exp_of<T>((x - high) - low); };
      const int64_t at = gradient.target - first;
      const S value = 0 <= at && at < count ? softmax(S(from[at])) : S(0);
      along<T>(count, [&]<typename R>(R, int64_t j) {
        write(to + j, (softmax(read<R>(from + j)) * slope - shift) * grad);
      });
      if (0 <= at && at < count) {
        to[at] = T((value * slope - (shift + S(gradient.at_target))) * grad);
      }
    }
  });
}

template <typename T>
void row_logsumexp_backward(View<const double, 1> grad_output, View<const T, 2> input,
                            View<const double, 1> output, View<T, 2> grad_input) {
  write_gradients(opwright::with_adjacent_columns(input), output, grad_input,
                  [&](int64_t row) { return RowGradient{.grad = grad_output(row)}; });
}

inline void check_targets(const View<const int64_t, 1>& target, int64_t ignore_index, int64_t n) {
  for (int64_t row = 0; row < target.size(0); ++row) {
    const int64_t t = target(row);
    opwright::check(t == ignore_index || (0 <= t && t < n),
                    "IndexError: a target is neither a class, from 0 to n - 1, nor ignore_index");
  }
}

template <typename T>
void row_cross_entropy(View<const T, 2> logits, View<const int64_t, 1> target, int64_t ignore_index,
                       double label_smoothing, double z_loss, View<double, 1> loss,
                       View<double, 1> normalizer) {
  const int64_t n = logits.size(1);
  check_targets(target, ignore_index, n);
  const auto finish = [&](int64_t row, double value, double elements) {
    const int64_t t = target(row);
    normalizer(row) = value;
    double sum = 0;
    if (t != ignore_index) {
      sum = value - (1 - label_smoothing) * double(compute_t<T>(logits(row, t)));
      if (label_smoothing != 0) sum -= label_smoothing * (elements / double(n));
      if (z_loss != 0) sum += z_loss * value * value;
    }
    loss(row) = sum;
  };
  const auto rows = opwright::with_adjacent_columns(logits);
  if (label_smoothing != 0)
    over_rows<true>(rows, finish);
  else
    over_rows<false>(rows, finish);
}

template <typename T>
void row_cross_entropy_backward(View<const double, 1> grad_loss, View<const T, 2> logits,
                                View<const int64_t, 1> target, View<const double, 1> normalizer,
                                int64_t ignore_index, double label_smoothing, double z_loss,
                                View<T, 2> grad_logits) {
  check_targets(target, ignore_index, logits.size(1));
  const double evenly = label_smoothing / double(logits.size(1));
  write_gradients(
      opwright::with_adjacent_columns(logits), normalizer, grad_logits, [&](int64_t row) {
        const double slope = z_loss != 0 ? 1 + 2 * z_loss * normalizer(row) : 1;
        return RowGradient{grad_loss(row),      slope,       evenly,
                           1 - label_smoothing, target(row), target(row) == ignore_index};
      });
}

template <typename T>
void row_cross_entropy_gradient_(View<T, 2> logits, View<const double, 1> grad_loss,
                                 View<const int64_t, 1> target, View<const double, 1> normalizer,
                                 int64_t ignore_index, double label_smoothing, double z_loss) {
  opwright::in_adjacent_columns(logits, [&](const View<const T, 2>& from, const View<T, 2>& to) {
    row_cross_entropy_backward<T>(grad_loss, from, target, normalizer, ignore_index,
                                  label_smoothing, z_loss, to);
  });
}

void total_loss(View<const double, 2> loss, View<const int64_t, 2> target, int64_t ignore_index,
                bool is_mean, View<double, 1> total, View<double, 1> weight) {
  const int64_t n = loss.size(1);
  opwright::parallel_for(loss.size(0), opwright::grain_of(n), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double sum = 0, count = 0;
      for (int64_t row = 0; row < n; ++row) {
        sum += loss(i, row);
        count += target(i, row) != ignore_index;
      }
      total(i) = is_mean ? sum / count : sum;
      weight(i) = is_mean ? 1 / count : 1;
    }
  });
}

void total_loss_backward(View<const double, 1> grad_total, View<const int64_t, 2>,
                         View<const double, 1> weight, View<double, 2> grad_loss) {
  for (int64_t i = 0; i < grad_loss.size(0); ++i) {
    for (int64_t row = 0; row < grad_loss.size(1); ++row)
      grad_loss(i, row) = grad_total(i) * weight(i);
  }
}

OPWRIGHT_KERNEL(row_logsumexp, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(row_logsumexp_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(row_cross_entropy, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(row_cross_entropy_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(row_cross_entropy_gradient_, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(total_loss)
OPWRIGHT_KERNEL(total_loss_backward)
