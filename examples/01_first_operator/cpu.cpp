#include <cmath>
#include <opwright/kernel.h>
using opwright::View;

template <typename T>
void bias_silu(View<const T, 2> input, View<const T, 1> bias, View<T, 2> output) {
  const int64_t n = input.size(1);
  opwright::parallel_for(input.size(0), opwright::grain_of(n), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        const float x = float(input(i, j)) + float(bias(j));
        output(i, j) = T(x / (1 + std::exp(-x)));
      }
    }
  });
}
OPWRIGHT_KERNEL(bias_silu, float, opwright::bfloat16)
