// d_sigmoid(z) = sigmoid'(z) and its gradient, grad_output * sigmoid''(z), on the CPU. The formulas
// are opwright/math.h's; NOTES.md derives them.
#include <opwright/kernel.h>
#include <opwright/math.h>

using opwright::compute_t;
using opwright::kLanes;
using opwright::Vec;
using opwright::View;

// Elements of a strided argument that are gathered into a stack buffer at a time: 4 KiB of float.
constexpr int64_t kBlock = 1024;

// A pointer to elements begin..begin + count side by side: those of the view, or a copy.
template <typename T>
const T* contiguous(View<const T, 1> view, int64_t begin, int64_t count, T* buffer) {
  const int64_t stride = view.stride(0);
  const T* from = view.data() + begin * stride;
  if (stride == 1) return from;
  for (int64_t i = 0; i < count; ++i) buffer[i] = from[i * stride];
  return buffer;
}

// Calls body(first, count) on blocks of 0..size, in parallel.
template <typename Body>
void for_each_block(int64_t size, const Body& body) {
  opwright::parallel_for(size, opwright::kGrainElements, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kBlock) body(begin, end - begin < kBlock ? end - begin : kBlock);
  });
}

template <typename T>
void d_sigmoid(View<const T, 1> z, View<T, 1> output) {
  for_each_block(z.size(0), [&](int64_t first, int64_t count) {
    T buffer[kBlock];
    const T* from = contiguous(z, first, count, buffer);
    T* to = output.data() + first;
    int64_t i = 0;
    for (; i + kLanes<T> <= count; i += kLanes<T>) {
      opwright::store(to + i, opwright::d_sigmoid<T>(opwright::load(from + i)));
    }
    if (const int rest = static_cast<int>(count - i)) {
      const auto v = opwright::load_partial(from + i, rest);
      opwright::store_partial(to + i, opwright::d_sigmoid<T>(v), rest);
    }
  });
}

template <typename T>
void d_sigmoid_backward(View<const T, 1> grad_output, View<const T, 1> z, View<T, 1> grad_z) {
  for_each_block(z.size(0), [&](int64_t first, int64_t count) {
    T z_buffer[kBlock], grad_buffer[kBlock];
    const T* from = contiguous(z, first, count, z_buffer);
    const T* grad = contiguous(grad_output, first, count, grad_buffer);
    T* to = grad_z.data() + first;
    int64_t i = 0;
    for (; i + kLanes<T> <= count; i += kLanes<T>) {
      const auto slope = opwright::d2_sigmoid<T>(opwright::load(from + i));
      opwright::store(to + i, opwright::load(grad + i) * slope);
    }
    if (const int rest = static_cast<int>(count - i)) {
      const auto slope = opwright::d2_sigmoid<T>(opwright::load_partial(from + i, rest));
      opwright::store_partial(to + i, opwright::load_partial(grad + i, rest) * slope, rest);
    }
  });
}

OPWRIGHT_KERNEL(d_sigmoid, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(d_sigmoid_backward, float, double, opwright::half, opwright::bfloat16)
