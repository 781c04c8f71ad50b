// d_sigmoid(z) = sigmoid'(z) and its gradient, on the CPU.
#include <opwright/kernel.h>

#include <cmath>

using opwright::compute_t;
using opwright::View;

// s (1 - s) with s = sigmoid(z), without the difference, which is 0 from z = 17 on in float.
template <typename T>
T slope(T z) {
  const T e = std::exp(-std::abs(z));
  return e / ((1 + e) * (1 + e));
}

template <typename T>
void d_sigmoid(View<const T, 1> z, View<T, 1> output) {
  opwright::parallel_for(z.size(0), opwright::kGrainElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) output(i) = T(slope(compute_t<T>(z(i))));
  });
}

// d/dz s (1 - s) = s (1 - s) (1 - 2 s), and 1 - 2 s = -tanh(z / 2).
template <typename T>
void d_sigmoid_backward(View<const T, 1> grad_output, View<const T, 1> z, View<T, 1> grad_z) {
  opwright::parallel_for(z.size(0), opwright::kGrainElements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const compute_t<T> value(z(i));
      grad_z(i) = T(-compute_t<T>(grad_output(i)) * slope(value) * std::tanh(value / 2));
    }
  });
}

OPWRIGHT_KERNEL(d_sigmoid, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(d_sigmoid_backward, float, double, opwright::half, opwright::bfloat16)
