// Log-sum-exp and cross-entropy of rows, and their gradients, on a GPU.
#include <opwright/kernel.h>
#include <opwright/tensor.h>

#include "gpu_rows.cuh"

using namespace opwright_ops;
using opwright::with_adjacent_columns;

namespace {

// The loss of a row and its normalizer, or the normalizer alone where `loss` is not defined.
template <bool kIsSmoothed>
struct Loss {
  static constexpr bool kHasElements = kIsSmoothed, kSkipsRows = false;
  int64_t n;
  View<const int64_t, 1> target;
  int64_t ignore_index;
  double label_smoothing, z_loss;
  View<double, 1> loss, normalizer;

  template <typename T>
  __device__ OPWRIGHT_INLINE void operator()(int64_t row, const T* from, double value,
                                             double elements) const {
    normalizer(row) = value;
    if (!loss.defined()) return;
    const int64_t at = target(row);
    double found = 0;
    if (at != ignore_index) {
      assert(0 <= at && at < n && "a target is neither a class nor ignore_index");
      found = value - (1 - label_smoothing) * double(compute_t<T>(from[at]));
      if constexpr (kIsSmoothed) found -= label_smoothing * (elements / double(n));
      if (z_loss != 0) found += z_loss * value * value;
    }
    loss(row) = found;
  }
};

// Without a target, the gradient of the normalizer.
template <typename S>
struct LossGradient {
  static constexpr int kColumns = 1;
  static constexpr bool kSkipsRows = false;
  View<const double, 1> grad, normalizer;
  View<const int64_t, 1> target;
  int64_t ignore_index;
  S shift, at_target;
  double z_loss;
  __device__ OPWRIGHT_INLINE RowGradient<S> of(int64_t row) const {
    const double value = normalizer(row);
    const int64_t at = target.defined() ? target(row) : -1;
    return {.normalizer = value,
            .grad = S(grad(row)),
            .slope = z_loss != 0 ? S(1 + 2 * z_loss * value) : S(1),
            .shift = shift,
            .at = {at},
            .minus = {at_target},
            .is_zero = target.defined() && at == ignore_index};
  }
};

constexpr int kTotalThreads = 1024;

// The sum of a row of losses, or their mean over those that have a target, in a fixed order.
__global__ void __launch_bounds__(kTotalThreads)
    total_kernel(View<const double, 2> loss, View<const int64_t, 2> target, int64_t ignore_index,
                 bool is_mean, double* total, double* weight) {
  __shared__ double parts[2][kTotalThreads / kWarp];
  opwright::let_next_start();  // waits for the kernel in front, too
  const int64_t i = blockIdx.x;
  double sum = 0, count = 0;
  for (int64_t row = threadIdx.x; row < loss.size(1); row += kTotalThreads) {
    sum += loss(i, row);
    count += target(i, row) != ignore_index;
  }
  sum = opwright::warp_sum(sum), count = opwright::warp_sum(count);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if (lane == 0) parts[0][warp] = sum, parts[1][warp] = count;
  __syncthreads();
  if (warp != 0) return;
  sum = opwright::warp_sum(parts[0][lane]), count = opwright::warp_sum(parts[1][lane]);
  if (lane != 0) return;
  total[i] = is_mean ? sum / count : sum;
  weight[i] = is_mean ? 1 / count : 1;
}

__global__ void __launch_bounds__(kThreads)
    spread_kernel(View<const double, 1> grad_total, View<const double, 1> weight, int64_t n,
                  int64_t count, double* grad_loss) {
  opwright::let_next_start();  // waits for the kernel in front, too
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at < count) grad_loss[at] = grad_total(at / n) * weight(at / n);
}

}  // namespace

template <typename T>
void row_logsumexp(View<const T, 2> input, View<double, 1> output, cudaStream_t stream) {
  launch_forward(with_adjacent_columns(input), Loss<false>{.normalizer = output}, stream);
}

template <typename T>
void row_logsumexp_backward(View<const double, 1> grad_output, View<const T, 2> input,
                            View<const double, 1> output, View<T, 2> grad_input,
                            cudaStream_t stream) {
  launch_backward(with_adjacent_columns(input), grad_input,
                  LossGradient<compute_t<T>>{.grad = grad_output, .normalizer = output}, stream);
}

template <typename T>
void row_cross_entropy(View<const T, 2> logits, View<const int64_t, 1> target, int64_t ignore_index,
                       double label_smoothing, double z_loss, View<double, 1> loss,
                       View<double, 1> normalizer, cudaStream_t stream) {
  const auto start = [&]<bool kIsSmoothed>() {
    launch_forward(with_adjacent_columns(logits),
                   Loss<kIsSmoothed>{.n = logits.size(1),
                                     .target = target,
                                     .ignore_index = ignore_index,
                                     .label_smoothing = label_smoothing,
                                     .z_loss = z_loss,
                                     .loss = loss,
                                     .normalizer = normalizer},
                   stream);
  };
  label_smoothing != 0 ? start.template operator()<true>() : start.template operator()<false>();
}

template <typename T>
void row_cross_entropy_backward(View<const double, 1> grad_loss, View<const T, 2> logits,
                                View<const int64_t, 1> target, View<const double, 1> normalizer,
                                int64_t ignore_index, double label_smoothing, double z_loss,
                                View<T, 2> grad_logits, cudaStream_t stream) {
  using S = compute_t<T>;
  const double evenly = label_smoothing / double(logits.size(1));
  launch_backward(with_adjacent_columns(logits), grad_logits,
                  LossGradient<S>{.grad = grad_loss,
                                  .normalizer = normalizer,
                                  .target = target,
                                  .ignore_index = ignore_index,
                                  .shift = S(evenly),
                                  .at_target = S(evenly + 1 - label_smoothing),
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
