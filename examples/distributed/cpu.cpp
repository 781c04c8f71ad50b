#include <opwright/kernel.h>
using opwright::View;

template <typename T>
void scale_shift(View<const T, 2> input, View<const T, 1> scale, double shift, View<T, 2> output) {
  opwright::parallel_for(input.size(0), opwright::grain_of(input.size(1)),
                         [&](int64_t begin, int64_t end) {
                           for (int64_t i = begin; i < end; ++i)
                             for (int64_t j = 0; j < input.size(1); ++j)
                               output(i, j) = T(float(input(i, j)) * float(scale(j)) + shift);
                         });
}
OPWRIGHT_KERNEL(scale_shift, float, opwright::bfloat16)
