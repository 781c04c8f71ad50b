// Log-sum-exp and cross-entropy of rows, and their gradients, on the CPU.
#include <opwright/kernel.h>
#include <opwright/tensor.h>

#include "cpu_rows.h"

using namespace opwright_ops;

template <typename T>
void row_logsumexp(View<const T, 2> input, View<double, 1> output) {
  over_rows<false>(opwright::with_adjacent_columns(input),
                   [&](int64_t row, double value, double) { output(row) = value; });
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
  write_gradients(opwright::with_adjacent_columns(logits), normalizer, grad_logits,
                  [&](int64_t row) {
                    const double slope = z_loss != 0 ? 1 + 2 * z_loss * normalizer(row) : 1;
                    return RowGradient{.grad = grad_loss(row),
                                       .slope = slope,
                                       .shift = evenly,
                                       .columns = {{target(row), 1 - label_smoothing}},
                                       .is_zero = target(row) == ignore_index};
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
