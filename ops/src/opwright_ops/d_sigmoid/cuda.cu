// d_sigmoid(z) = sigmoid'(z) and its gradient, grad_output * sigmoid''(z), on a GPU. The formulas
// are opwright/math.h's; NOTES.md derives them.
#include <opwright/kernel.h>
#include <opwright/launch.cuh>
#include <opwright/math.h>
#include <opwright/rows.cuh>
#include <opwright/vector.cuh>

using opwright::compute_t;
using opwright::kPackWidth;
using opwright::kThreads;
using opwright::Lot;
using opwright::Pack;
using opwright::Rows;
using opwright::View;

// Packs that a thread loads before it computes: two, or as many single elements as are 32 bytes.
template <typename T, int N>
constexpr int kAtOnce = N > 1 ? 2 : 32 / sizeof(T);

// A tensor of rank 1, cut into panels as wide as a block.
template <typename T>
struct Line {
  T* data;
  int64_t stride;
};

template <typename T>
__device__ OPWRIGHT_INLINE compute_t<T> value(bool is_backward, compute_t<T> grad, compute_t<T> z) {
  return is_backward ? grad * opwright::d2_sigmoid<T>(z) : opwright::d_sigmoid<T>(z);
}

// What is known of is_backward when a kernel is compiled. Single elements decide when they run:
// fewer kernels to compile.
enum class Known { no, forward, backward };

// d_sigmoid(z), or its gradient.
template <typename T, int N, Known kKnown>
__global__ void __launch_bounds__(kThreads)
    d_sigmoid_kernel(Rows rows, int32_t depth, bool is_backward, Line<const T> grad_output,
                     Line<const T> z, Line<T> output) {
  if (kKnown != Known::no) is_backward = kKnown == Known::backward;
  const Lot<N> lot(rows, depth);
  opwright::let_next_start();  // waits for the kernel in front, too
  const int64_t at = lot.first * rows.width + lot.column;
  const int64_t step = lot.step * rows.width;
  Pack<T, N> packs[kAtOnce<T, N>], grads[kAtOnce<T, N>];
  const int left = lot.end - lot.first;
  opwright::for_each_panel<kAtOnce<T, N>>(lot, left, [&](int i) {
    packs[i] = opwright::load_pack<N>(z.data + (at + i * step) * z.stride);
    grads[i] = packs[i];
    if (is_backward) {
      grads[i] = opwright::load_pack<N>(grad_output.data + (at + i * step) * grad_output.stride);
    }
  });
  OPWRIGHT_UNROLL
  for (int i = 0; i < kAtOnce<T, N>; ++i) {
    compute_t<T> values[N], gradients[N];
    opwright::unpack(packs[i], values);
    opwright::unpack(grads[i], gradients);
    OPWRIGHT_UNROLL
    for (int j = 0; j < N; ++j) values[j] = value<T>(is_backward, gradients[j], values[j]);
    packs[i] = opwright::pack_of<T>(values);
  }
  opwright::for_each_panel<kAtOnce<T, N>>(lot, left, [&](int i) {
    opwright::store_pack(output.data + (at + i * step) * output.stride, packs[i]);
  });
  if constexpr (N > 1) {
    const int64_t end = lot.end * rows.width + lot.column;
#pragma unroll 1
    for (int i = 0; i < lot.partial; ++i) {
      output.data[end + i] = T(value<T>(is_backward, grad_output.data[end + i], z.data[end + i]));
    }
  }
}

template <typename T, int N, Known kKnown>
void launch(bool is_backward, const View<const T, 1>& grad_output, const View<const T, 1>& z,
            const View<T, 1>& output, cudaStream_t stream) {
  const Rows rows = opwright::cut_flat(z.size(0), N);
  const auto tiling = opwright::tile(rows, {.pack = N, .deep = kAtOnce<T, N>});
  opwright::launch_behind(
      d_sigmoid_kernel<T, N, kKnown>, tiling.grid, tiling.block, 0, stream, rows, tiling.depth,
      is_backward, Line<const T>{grad_output.data(), grad_output.stride(0)},
      Line<const T>{z.data(), z.stride(0)}, Line<T>{output.data(), output.stride(0)});
}

template <typename T, bool kIsBackward>
void run(const View<const T, 1>& grad_output, const View<const T, 1>& z, const View<T, 1>& output,
         cudaStream_t stream) {
  constexpr int kWidth = kPackWidth<T>;
  const auto is_packed = [](const auto& view) {
    return view.is_contiguous() && opwright::is_aligned(view.data(), kWidth);
  };
  if (is_packed(grad_output) && is_packed(z) && is_packed(output)) {
    constexpr Known kKnown = kIsBackward ? Known::backward : Known::forward;
    launch<T, kWidth, kKnown>(kIsBackward, grad_output, z, output, stream);
  } else {
    launch<T, 1, Known::no>(kIsBackward, grad_output, z, output, stream);
  }
}

template <typename T>
void d_sigmoid(View<const T, 1> z, View<T, 1> output, cudaStream_t stream) {
  run<T, false>(z, z, output, stream);
}

template <typename T>
void d_sigmoid_backward(View<const T, 1> grad_output, View<const T, 1> z, View<T, 1> grad_z,
                        cudaStream_t stream) {
  run<T, true>(grad_output, z, grad_z, stream);
}

OPWRIGHT_KERNEL(d_sigmoid, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(d_sigmoid_backward, float, double, opwright::half, opwright::bfloat16)
