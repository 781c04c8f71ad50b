// Log-sum-exp and cross-entropy of rows, and their gradients, on a GPU.
#include <opwright/kernel.h>
#include <opwright/tensor.h>

#include "gpu_rows.cuh"

using namespace opwright_ops;
using opwright::with_adjacent_columns;

template <typename T>
void row_logsumexp(View<const T, 2> input, View<double, 1> output, cudaStream_t stream) {
  launch_forward(Forward<T>{.rows = input.size(0),
                            .n = input.size(1),
                            .input = rows_of(with_adjacent_columns(input)),
                            .normalizer = output.data()},
                 stream);
}

template <typename T>
void row_logsumexp_backward(View<const double, 1> grad_output, View<const T, 2> input,
                            View<const double, 1> output, View<T, 2> grad_input,
                            cudaStream_t stream) {
  launch_backward(Backward<T>{.rows = input.size(0),
                              .n = input.size(1),
                              .input = rows_of(with_adjacent_columns(input)),
                              .output = rows_of(grad_input),
                              .grad = grad_output,
                              .normalizer = output},
                  stream);
}

template <typename T>
void row_cross_entropy(View<const T, 2> logits, View<const int64_t, 1> target, int64_t ignore_index,
                       double label_smoothing, double z_loss, View<double, 1> loss,
                       View<double, 1> normalizer, cudaStream_t stream) {
  launch_forward(Forward<T>{.rows = logits.size(0),
                            .n = logits.size(1),
                            .input = rows_of(with_adjacent_columns(logits)),
                            .normalizer = normalizer.data(),
                            .loss = loss.data(),
                            .target = target.data(),
                            .target_stride = target.stride(0),
                            .ignore_index = ignore_index,
                            .label_smoothing = label_smoothing,
                            .z_loss = z_loss},
                 stream);
}

template <typename T>
void row_cross_entropy_backward(View<const double, 1> grad_loss, View<const T, 2> logits,
                                View<const int64_t, 1> target, View<const double, 1> normalizer,
                                int64_t ignore_index, double label_smoothing, double z_loss,
                                View<T, 2> grad_logits, cudaStream_t stream) {
  const double evenly = label_smoothing / double(logits.size(1));
  launch_backward(Backward<T>{.rows = logits.size(0),
                              .n = logits.size(1),
                              .input = rows_of(with_adjacent_columns(logits)),
                              .output = rows_of(grad_logits),
                              .grad = grad_loss,
                              .normalizer = normalizer,
                              .target = target.data(),
                              .target_stride = target.stride(0),
                              .ignore_index = ignore_index,
                              .shift = compute_t<T>(evenly),
                              .at_target = compute_t<T>(evenly + 1 - label_smoothing),
                              .z_loss = z_loss},
                  stream);
}

template <typename T>
void row_cross_entropy_gradient_(View<T, 2> logits, View<const double, 1> grad_loss,
                                 View<const int64_t, 1> target, View<const double, 1> normalizer,
                                 int64_t ignore_index, double label_smoothing, double z_loss,
                                 cudaStream_t stream) {
  opwright::in_adjacent_columns(logits, [&](const View<const T, 2>& from, const View<T, 2>& to) {
    row_cross_entropy_backward<T>(grad_loss, from, target, normalizer, ignore_index,
                                  label_smoothing, z_loss, to, stream);
  });
}

void total_loss(View<const double, 2> loss, View<const int64_t, 2> target, int64_t ignore_index,
                bool is_mean, View<double, 1> total, View<double, 1> weight, cudaStream_t stream) {
  opwright::launch_behind(total_kernel, dim3(static_cast<unsigned>(loss.size(0))),
                          dim3(kTotalThreads), 0, stream, loss, target, ignore_index, is_mean,
                          total.data(), weight.data());
}

void total_loss_backward(View<const double, 1> grad_total, View<const int64_t, 2>,
                         View<const double, 1> weight, View<double, 2> grad_loss,
                         cudaStream_t stream) {
  const int64_t count = grad_loss.numel();
  opwright::launch_behind(
      spread_kernel, dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads)), dim3(kThreads),
      0, stream, grad_total, weight, grad_loss.size(1), count, grad_loss.data());
}

OPWRIGHT_KERNEL(row_logsumexp, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(row_logsumexp_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(row_cross_entropy, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(row_cross_entropy_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(row_cross_entropy_gradient_, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(total_loss)
OPWRIGHT_KERNEL(total_loss_backward)
