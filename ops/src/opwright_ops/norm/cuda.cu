// RMS norm, RMS norm behind a residual sum, layer norm and their gradients on a GPU. NOTES.md has
// the layout and the measurements behind the constants.
#include "gpu_backward.cuh"

using namespace opwright_ops;

template <typename T, typename W = T>
void rms_norm(View<const T, 2> input, View<const W, 1> weight, double eps, View<T, 2> output,
              cudaStream_t stream) {
  input = with_adjacent_columns(input);
  Forward<T, W> p{.rows = input.size(0),
                  .n = input.size(1),
                  .input = rows_of(input),
                  .weight = columns_of(weight),
                  .eps = compute_t<T>(eps),
                  .output = rows_of(output)};
  norm_forward<Norm::rms>(p, are_aligned(input, output, weight), stream);
}

template <typename T, typename W = T>
void rms_norm_backward(View<const T, 2> grad_output, View<const T, 2> input,
                       View<const W, 1> weight, double eps, View<T, 2> grad_input,
                       View<W, 1> grad_weight, cudaStream_t stream) {
  input = with_adjacent_columns(input), grad_output = with_adjacent_columns(grad_output);
  Backward<T, W> p{.rows = input.size(0),
                   .n = input.size(1),
                   .grad_output = rows_of(grad_output),
                   .input = rows_of(input),
                   .weight = columns_of(weight),
                   .eps = compute_t<T>(eps),
                   .grad_input = rows_of(grad_input)};
  norm_backward<Norm::rms>(p, are_aligned(input, grad_output, grad_input, weight), grad_weight,
                           View<W, 1>{}, stream);
}

template <typename T, typename W = T>
void add_rms_norm(View<const T, 2> input, View<const T, 2> residual, View<const W, 1> weight,
                  double eps, View<T, 2> output, View<T, 2> sum, cudaStream_t stream) {
  input = with_adjacent_columns(input), residual = with_adjacent_columns(residual);
  Forward<T, W> p{.rows = input.size(0),
                  .n = input.size(1),
                  .input = rows_of(input),
                  .residual = rows_of(residual),
                  .weight = columns_of(weight),
                  .eps = compute_t<T>(eps),
                  .output = rows_of(output),
                  .sum = rows_of(sum)};
  norm_forward<Norm::add_rms>(p, are_aligned(input, residual, output, sum, weight), stream);
}

template <typename T, typename W = T>
void add_rms_norm_backward(View<const T, 2> grad_output, View<const T, 2> grad_sum,
                           View<const W, 1> weight, View<const T, 2> sum, double eps,
                           View<T, 2> grad_input, View<W, 1> grad_weight, cudaStream_t stream) {
  sum = with_adjacent_columns(sum), grad_output = with_adjacent_columns(grad_output);
  grad_sum = with_adjacent_columns(grad_sum);
  Backward<T, W> p{.rows = sum.size(0),
                   .n = sum.size(1),
                   .grad_output = rows_of(grad_output),
                   .grad_sum = rows_of(grad_sum),
                   .input = rows_of(sum),
                   .weight = columns_of(weight),
                   .eps = compute_t<T>(eps),
                   .grad_input = rows_of(grad_input)};
  norm_backward<Norm::add_rms>(p, are_aligned(sum, grad_output, grad_sum, grad_input, weight),
                               grad_weight, View<W, 1>{}, stream);
}

template <typename T, typename W = T>
void layer_norm(View<const T, 2> input, View<const W, 1> weight, View<const W, 1> bias, double eps,
                View<T, 2> output, cudaStream_t stream) {
  input = with_adjacent_columns(input);
  Forward<T, W> p{.rows = input.size(0),
                  .n = input.size(1),
                  .input = rows_of(input),
                  .weight = columns_of(weight),
                  .bias = columns_of(bias),
                  .eps = compute_t<T>(eps),
                  .output = rows_of(output)};
  norm_forward<Norm::layer>(p, are_aligned(input, output, weight, bias), stream);
}

template <typename T, typename W = T>
void layer_norm_backward(View<const T, 2> grad_output, View<const T, 2> input,
                         View<const W, 1> weight, View<const W, 1>, double eps,
                         View<T, 2> grad_input, View<W, 1> grad_weight, View<W, 1> grad_bias,
                         cudaStream_t stream) {
  input = with_adjacent_columns(input), grad_output = with_adjacent_columns(grad_output);
  Backward<T, W> p{.rows = input.size(0),
                   .n = input.size(1),
                   .grad_output = rows_of(grad_output),
                   .input = rows_of(input),
                   .weight = columns_of(weight),
                   .eps = compute_t<T>(eps),
                   .grad_input = rows_of(grad_input)};
  norm_backward<Norm::layer>(p, are_aligned(input, grad_output, grad_input, weight), grad_weight,
                             grad_bias, stream);
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
