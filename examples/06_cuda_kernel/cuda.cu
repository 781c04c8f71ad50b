#include <opwright/kernel.h>
using opwright::compute_t;
using opwright::View;

template <typename T>
__global__ void scale_shift_kernel(View<const T, 2> input, View<const T, 1> scale,
                                   compute_t<T> shift, View<T, 2> output) {
  for (int64_t i = blockIdx.x; i < input.size(0); i += gridDim.x) {
    for (int64_t j = threadIdx.x; j < input.size(1); j += blockDim.x) {
      output(i, j) = T(compute_t<T>(input(i, j)) * compute_t<T>(scale(j)) + shift);
    }
  }
}

template <typename T>
void scale_shift(View<const T, 2> input, View<const T, 1> scale, double shift, View<T, 2> output,
                 cudaStream_t stream) {
  const int64_t rows = input.size(0);
  const unsigned blocks = rows < 65535 ? unsigned(rows) : 65535;
  scale_shift_kernel<T><<<blocks, 256, 0, stream>>>(input, scale, compute_t<T>(shift), output);
}
OPWRIGHT_KERNEL(scale_shift, float, double, opwright::half, opwright::bfloat16)
