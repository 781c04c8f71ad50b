// The example of docs/reference/headers.md.
#include <opwright/along.h>
#include <opwright/kernel.h>
#include <opwright/tensor.h>
using namespace opwright;

template <typename T>
void unit_rows(View<const T, 2> input, View<T, 2> output) {
  using S = compute_t<T>;
  input = with_adjacent_columns(input);  // `from + i` below
  const int64_t n = input.size(1);
  parallel_for(input.size(0), grain_of(n), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = input.data() + row * input.stride(0);
      T* to = output.data() + row * n;
      S squares[1];
      sums_along<T>(n, squares, [&]<typename R>(int64_t i, R(&sum)[1]) {
        const R x = read<R>(from + i);
        sum[0] += x * x;
      });
      const S scale = 1 / std::sqrt(squares[0] / S(n));
      along<T>(n, [&]<typename R>(R, int64_t i) { write(to + i, read<R>(from + i) * scale); });
    }
  });
}
OPWRIGHT_KERNEL(unit_rows, float, double, opwright::bfloat16)
