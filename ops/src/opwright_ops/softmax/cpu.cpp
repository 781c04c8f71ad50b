// Softmax over the last axis and its gradient on the CPU. A row is read from memory once; the
// second and third pass find it in the caches.
#include <vector>

#include <opwright/along.h>
#include <opwright/kernel.h>
#include <opwright/math.h>
#include <opwright/tensor.h>

using opwright::along;
using opwright::compute_t;
using opwright::read;
using opwright::View;
using opwright::write;

template <typename T>
void softmax(View<const T, 2> input, View<T, 2> output) {
  using S = compute_t<T>;
  const int64_t n = input.size(1);
  input = opwright::with_adjacent_columns(input);
  // Exponentials in the type that is computed in: the output holds those that are not rounded.
  constexpr bool kIsShort = sizeof(T) == 2;
  opwright::parallel_for(input.size(0), opwright::grain_of(4 * n), [&](int64_t begin, int64_t end) {
    std::vector<S> exponentials(kIsShort ? n : 0);
    for (int64_t row = begin; row < end; ++row) {
      const T* from = input.data() + row * input.stride(0);
      T* to = output.data() + row * n;
      S* values;
      if constexpr (kIsShort)
        values = exponentials.data();
      else
        values = to;
      const S largest = opwright::largest_along(from, n);
      S sum[1];
      opwright::sums_along<T>(n, sum, [&]<typename R>(int64_t i, R(&into)[1]) {
        const R value = opwright::exp<T>(read<R>(from + i) - largest);
        into[0] += value;
        write(values + i, value);
      });
      const S scale = S(1) / sum[0];
      along<T>(n, [&]<typename R>(R, int64_t i) { write(to + i, read<R>(values + i) * scale); });
    }
  });
}

template <typename T>
void softmax_backward(View<const T, 2> grad_output, View<const T, 2> output,
                      View<T, 2> grad_input) {
  const int64_t n = output.size(1);
  output = opwright::with_adjacent_columns(output);
  grad_output = opwright::with_adjacent_columns(grad_output);
  opwright::parallel_for(output.size(0), opwright::grain_of(n), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* values = output.data() + row * output.stride(0);
      const T* grads = grad_output.data() + row * grad_output.stride(0);
      T* to = grad_input.data() + row * n;
      compute_t<T> sum[1];
      opwright::sums_along<T>(n, sum, [&]<typename R>(int64_t i, R(&into)[1]) {
        into[0] += read<R>(grads + i) * read<R>(values + i);
      });
      along<T>(n, [&]<typename R>(R, int64_t i) {
        write(to + i, read<R>(values + i) * (read<R>(grads + i) - sum[0]));
      });
    }
  });
}

OPWRIGHT_KERNEL(softmax, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(softmax_backward, float, double, opwright::half, opwright::bfloat16)
