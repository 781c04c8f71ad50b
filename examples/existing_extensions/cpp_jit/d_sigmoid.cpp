// d_sigmoid(z) = sigmoid'(z) and its gradient, on the CPU.
#include <torch/extension.h>

#include <cmath>

namespace {

// Fewer elements than this are not worth a second thread.
constexpr int64_t kGrain = 4096;

// s (1 - s) with s = sigmoid(z), without the difference, which is 0 from z = 17 on in float.
template <typename T>
T slope(T z) {
  const T e = std::exp(-std::abs(z));
  return e / ((1 + e) * (1 + e));
}

at::Tensor d_sigmoid(const at::Tensor& z) {
  TORCH_CHECK_VALUE(z.device().is_cpu(), "d_sigmoid: z must be on the CPU, got ", z.device());
  const at::Tensor from = z.contiguous();
  at::Tensor output = at::empty_like(from);
  AT_DISPATCH_FLOATING_TYPES(z.scalar_type(), "d_sigmoid", [&] {
    const scalar_t* input = from.const_data_ptr<scalar_t>();
    scalar_t* result = output.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, from.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) result[i] = slope(input[i]);
    });
  });
  return output;
}

// d/dz s (1 - s) = s (1 - s) (1 - 2 s), and 1 - 2 s = -tanh(z / 2).
at::Tensor d_sigmoid_backward(const at::Tensor& grad_output, const at::Tensor& z) {
  TORCH_CHECK_VALUE(grad_output.sizes() == z.sizes() && grad_output.dtype() == z.dtype(),
                    "d_sigmoid_backward: grad_output must be like z");
  TORCH_CHECK_VALUE(z.device().is_cpu() && grad_output.device().is_cpu(),
                    "d_sigmoid_backward: z and grad_output must be on the CPU");
  const at::Tensor from = z.contiguous(), grad = grad_output.contiguous();
  at::Tensor output = at::empty_like(from);
  AT_DISPATCH_FLOATING_TYPES(z.scalar_type(), "d_sigmoid_backward", [&] {
    const scalar_t* input = from.const_data_ptr<scalar_t>();
    const scalar_t* factor = grad.const_data_ptr<scalar_t>();
    scalar_t* result = output.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, from.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        result[i] = -factor[i] * slope(input[i]) * std::tanh(input[i] / 2);
      }
    });
  });
  return output;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("d_sigmoid", &d_sigmoid, "sigmoid'(z)");
  m.def("d_sigmoid_backward", &d_sigmoid_backward, "grad_output * sigmoid''(z)");
}
