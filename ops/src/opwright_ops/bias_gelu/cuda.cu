// GELU(input + bias) and its gradients on a GPU, each in one pass. The formulas are
// opwright/math.h's; NOTES.md has the layout and the measurements behind the constants.
#include <opwright/copy.cuh>
#include <opwright/kernel.h>
#include <opwright/launch.cuh>
#include <opwright/math.h>
#include <opwright/reduce.cuh>
#include <opwright/rows.cuh>
#include <opwright/scratch.h>
#include <opwright/vector.cuh>

#include <algorithm>

using opwright::compute_t;
using opwright::kPackWidth;
using opwright::kThreads;
using opwright::Lot;
using opwright::Pack;
using opwright::Partials;
using opwright::Plane;
using opwright::Rows;
using opwright::View;

// The constants below are the best of those tried on an NVIDIA H200 (torch 2.11.0+cu130,
// nvcc 13.0); NOTES.md has what the others cost.
//
// Whether the backward's packs come through shared memory, and how many of a tensor a thread has on
// their way or in use.
template <int N, bool kIsAligned>
constexpr bool kIsStaged = N > 1 && kIsAligned;
constexpr int kStages = 4;
// Packs that a thread loads before it computes, forward and backward (there from two tensors, and
// unaligned ones of 16-bit types take more registers); of single elements (N = 1) more, since each
// brings fewer bytes.
template <typename T, int N>
constexpr int kForwardAtOnce = N > 1 || sizeof(T) > 4 ? 4 : 8;
template <typename T, int N, bool kIsAligned>
constexpr int kBackwardAtOnce = kIsStaged<N, kIsAligned> || (!kIsAligned && sizeof(T) == 2) ? 1
                                : N > 1 || sizeof(T) > 4                                    ? 2
                                                                                            : 4;
// Panels that a thread of the backward goes through and sums up: each block leaves a row of sums,
// which is to be written and read again.
template <int N>
constexpr int kBackwardDeep = N > 1 ? 16 : 64;
// Threads of the backward side by side: the fewer, the more rows a block sums up by itself. Single
// elements need more of them, or a row is read in pieces of 64 bytes.
template <int N>
constexpr int kBackwardAcross = N > 1 ? 32 : 256;
// Blocks that a multiprocessor holds at once (it limits the registers of a thread to 48 and 64);
// the backward is cut into that many at least.
constexpr int kForwardBlocks = 5, kBackwardBlocks = 4;

template <typename T, Approximate kApproximate>
__device__ OPWRIGHT_INLINE compute_t<T> gelu(compute_t<T> v) {
  if constexpr (kApproximate == Approximate::none)
    return opwright::gelu_none<T>(v);
  else if constexpr (kApproximate == Approximate::tanh)
    return opwright::gelu_tanh<T>(v);
  else
    return opwright::gelu_quick<T>(v);
}

template <typename T, Approximate kApproximate>
__device__ OPWRIGHT_INLINE compute_t<T> d_gelu(compute_t<T> v) {
  if constexpr (kApproximate == Approximate::none)
    return opwright::d_gelu_none<T>(v);
  else if constexpr (kApproximate == Approximate::tanh)
    return opwright::d_gelu_tanh<T>(v);
  else
    return opwright::d_gelu_quick<T>(v);
}

// Calls call.template operator()<kApproximate>(). In the kernels, and not around them: one branch
// for some ten packs costs nothing, and a third of the kernels is to be compiled.
template <typename Call>
__device__ OPWRIGHT_INLINE void choose(Approximate approximate, const Call& call) {
  if (approximate == Approximate::tanh)
    call.template operator()<Approximate::tanh>();
  else if (approximate == Approximate::none)
    call.template operator()<Approximate::none>();
  else
    call.template operator()<Approximate::quick>();
}

// The bias of a thread's columns.
template <typename T>
struct Bias {
  const T* data;
  int64_t stride;
  bool is_packed;  // adjacent, aligned, and rows are whole packs

  // The bias of column `column` of a row; what is beyond its end is in the next row.
  __device__ OPWRIGHT_INLINE T at(int64_t n, int64_t column) const {
    while (column >= n) column -= n;
    return data[column * stride];
  }

  template <int N>
  __device__ OPWRIGHT_INLINE Pack<T, N> load(const Rows& rows, const Lot<N>& lot) const {
    int64_t column = lot.rest < rows.n ? lot.rest : 0;
    if (is_packed) return opwright::load_pack<N>(data + column);
    Pack<T, N> pack;
    OPWRIGHT_UNROLL
    for (int i = 0; i < N; ++i) {
      pack.elements[i] = data[column * stride];
      if (++column == rows.n) column = 0;
    }
    return pack;
  }
};

template <typename T>
Bias<T> bias_of(const View<const T, 1>& bias, int pack) {
  const bool is_packed =
      bias.is_contiguous() && bias.size(0) % pack == 0 && opwright::is_aligned(bias.data(), pack);
  return {bias.data(), bias.stride(0), is_packed};
}

template <int N, bool kIsAligned, typename T>
__device__ OPWRIGHT_INLINE Pack<T, N> load(const T* at) {
  if constexpr (kIsAligned)
    return opwright::load_pack<N>(at);
  else
    return opwright::load_unaligned<N>(at);
}

template <typename T, int N, bool kIsAligned>
__global__ void __launch_bounds__(kThreads, kForwardBlocks)
    bias_gelu_kernel(Rows rows, int32_t depth, Plane<const T> input, Bias<T> bias,
                     Approximate approximate, Plane<T> output) {
  using S = compute_t<T>;
  constexpr int kAtOnce = kForwardAtOnce<T, N>;  // and no more: tiled so
  const Lot<N> lot(rows, depth);
  opwright::let_next_start();  // waits for the kernel in front, too
  const T* from = input.at(lot);
  T* to = output.at(lot);
  const int64_t from_step = lot.step * input.panel, to_step = lot.step * output.panel;
  Pack<T, N> packs[kAtOnce];
  const int left = lot.end - lot.first;
  const auto load_one = [&](int i) { packs[i] = load<N, kIsAligned>(from + i * from_step); };
  // Aligned packs: 6 % faster in bfloat16 than asking once. Single elements: twice as slow.
  if constexpr (N > 1 && kIsAligned)
    opwright::for_each_panel_alone<kAtOnce>(lot, left, load_one);
  else
    opwright::for_each_panel<kAtOnce>(lot, left, load_one);
  if constexpr (!kIsAligned) {
    const int here = opwright::columns_here(rows, lot);
    if (here < N && input.gap != 0) {
      opwright::for_each_panel<kAtOnce>(lot, left, [&](int i) {
        const auto rest = load<N, false>(from + i * from_step + input.gap);
        packs[i] = opwright::joined(packs[i], rest, here);
      });
    }
  }
  S biases[N];
  opwright::unpack(bias.load(rows, lot), biases);
  choose(approximate, [&]<Approximate kApproximate>() {
    OPWRIGHT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      S values[N];
      opwright::unpack(packs[i], values);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) values[j] = gelu<T, kApproximate>(values[j] + biases[j]);
      packs[i] = opwright::pack_of<T>(values);
    }
  });
  opwright::for_each_panel<kAtOnce>(
      lot, left, [&](int i) { opwright::store_pack(to + i * to_step, packs[i]); });
  if constexpr (N > 1) {
    const int64_t whole = left;
#pragma unroll 1
    for (int i = 0; i < lot.partial; ++i) {
      const S v = S(from[whole * input.panel + i]) + S(bias.at(rows.n, lot.rest + i));
      T* at = to + whole * output.panel + i;
      choose(approximate, [&]<Approximate kApproximate>() { *at = T(gelu<T, kApproximate>(v)); });
    }
  }
}

// grad_input = grad_output * gelu'(input + bias), and its column sums.
template <typename T, int N, bool kIsAligned>
__global__ void __launch_bounds__(kThreads, kBackwardBlocks)
    bias_gelu_backward_kernel(Rows rows, int32_t depth, Plane<const T> grad_output,
                              Plane<const T> input, Bias<T> bias, Approximate approximate,
                              Plane<T> grad_input, Partials<compute_t<T>> partials, T* grad_bias,
                              int64_t grad_bias_stride) {
  using S = compute_t<T>;
  constexpr int kAtOnce = kBackwardAtOnce<T, N, kIsAligned>;
  const Lot<N> lot(rows, depth);
  opwright::wait_for_previous();
  S biases[N], sums[N] = {};
  // First, while few registers are in use.
  if constexpr (N > 1) {
    const int64_t whole = lot.end - lot.first;
#pragma unroll 1
    for (int i = 0; i < lot.partial; ++i) {
      const S v = S(input.at(lot)[whole * input.panel + i]) + S(bias.at(rows.n, lot.rest + i));
      S product = grad_output.at(lot)[whole * grad_output.panel + i];
      choose(approximate,
             [&]<Approximate kApproximate>() { product *= d_gelu<T, kApproximate>(v); });
      grad_input.at(lot)[whole * grad_input.panel + i] = T(product);
      OPWRIGHT_UNROLL
      for (int j = 0; j < N; ++j) sums[j] += i == j ? product : S(0);
    }
  }
  const T* grad = grad_output.at(lot);
  const T* from = input.at(lot);
  T* to = grad_input.at(lot);
  const int64_t grad_step = lot.step * grad_output.panel;
  const int64_t from_step = lot.step * input.panel, to_step = lot.step * grad_input.panel;
  // For each stage of this thread a gradient and an input; those of all threads lie side by side.
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  Pack<T, N>* const staged =
      reinterpret_cast<Pack<T, N>*>(shared_bytes) + threadIdx.y * blockDim.x + threadIdx.x;
  const auto slot = [&](int stage, int tensor) { return staged + (stage * 2 + tensor) * kThreads; };
  // Starts to copy the next panel, if that many are left, to a stage.
  const auto fetch = [&](int left, int stage) {
    if (left > 0) {
      opwright::copy_async(slot(stage, 0), grad);
      opwright::copy_async(slot(stage, 1), from);
    }
    opwright::end_copies();
    grad += grad_step;
    from += from_step;
  };
  const int all = lot.end - lot.first;
  if constexpr (kIsStaged<N, kIsAligned>) {
    for (int i = 0; i < kStages - 1; ++i) fetch(all - i * lot.step, i);
  }
  opwright::unpack(bias.load(rows, lot), biases);
  int stage = 0;
  for (int left = all; left > 0; left -= kAtOnce * lot.step) {
    Pack<T, N> grads[kAtOnce], packs[kAtOnce];
    if constexpr (kIsStaged<N, kIsAligned>) {
      fetch(left - (kStages - 1) * lot.step, (stage + kStages - 1) % kStages);
      opwright::wait_for_copies<kStages - 1>();
      grads[0] = *slot(stage, 0), packs[0] = *slot(stage, 1);
      stage = (stage + 1) % kStages;
    } else {
      opwright::for_each_panel<kAtOnce>(lot, left, [&](int i) {
        grads[i] = load<N, kIsAligned>(grad + i * grad_step);
        packs[i] = load<N, kIsAligned>(from + i * from_step);
      });
    }
    if constexpr (!kIsAligned) {
      const int here = opwright::columns_here(rows, lot);
      if (here < N && (grad_output.gap != 0 || input.gap != 0)) {
        opwright::for_each_panel<kAtOnce>(lot, left, [&](int i) {
          const auto rest_grads = load<N, false>(grad + i * grad_step + grad_output.gap);
          const auto rest = load<N, false>(from + i * from_step + input.gap);
          grads[i] = opwright::joined(grads[i], rest_grads, here);
          packs[i] = opwright::joined(packs[i], rest, here);
        });
      }
    }
    choose(approximate, [&]<Approximate kApproximate>() {
      OPWRIGHT_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        S values[N], slopes[N];
        opwright::unpack(grads[i], values);
        opwright::unpack(packs[i], slopes);
        OPWRIGHT_UNROLL
        for (int j = 0; j < N; ++j) {
          values[j] *= d_gelu<T, kApproximate>(slopes[j] + biases[j]);
          if (i * lot.step < left) sums[j] += values[j];
        }
        packs[i] = opwright::pack_of<T>(values);
      }
    });
    opwright::for_each_panel<kAtOnce>(
        lot, left, [&](int i) { opwright::store_pack(to + i * to_step, packs[i]); });
    if constexpr (!kIsStaged<N, kIsAligned>) {
      grad += kAtOnce * grad_step;
      from += kAtOnce * from_step;
    }
    to += kAtOnce * to_step;
  }
  if constexpr (kIsStaged<N, kIsAligned>) {
    opwright::wait_for_copies();
    __syncthreads();  // the sums take the place of the packs
  }
  // Not at the start: the waiting blocks of the next kernel would take the place of this one's.
  opwright::let_next_start();
  opwright::write_column_sums<T, S, N>(sums, rows, partials, grad_bias, grad_bias_stride);
}

#include "gpu_transposed.cuh"

// Calls call.template operator()<N, kIsAligned>(height_step) for packs of N elements.
template <typename T, typename Call>
void with_packs(opwright::Packing packing, const Call& call) {
  if (packing.width == 1)
    call.template operator()<1, true>(1);
  else if (packing.is_aligned)
    call.template operator()<kPackWidth<T>, true>(packing.height_step);
  else if constexpr (sizeof(T) < 8) {
    call.template operator()<kPackWidth<T>, false>(packing.height_step);
  }
}

template <typename T>
void bias_gelu(View<const T, 2> input, View<const T, 1> bias, Approximate approximate,
               View<T, 2> output, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {
    if (are_transposed(output, input))
      return bias_gelu_transposed(input, bias, approximate, output, stream);
  }
  with_packs<T>(opwright::packing_of(output, input), [&]<int N, bool kIsAligned>(int height_step) {
    const Rows rows = opwright::cut_rows(input.size(0), input.size(1), N, height_step);
    const auto tiling = opwright::tile(rows, {.pack = N, .deep = kForwardAtOnce<T, N>});
    opwright::launch_behind(bias_gelu_kernel<T, N, kIsAligned>, tiling.grid, tiling.block, 0,
                            stream, rows, tiling.depth, plane_of(rows, input), bias_of(bias, N),
                            approximate, plane_of(rows, output));
  });
}

template <typename T>
void bias_gelu_backward(View<const T, 2> grad_output, View<const T, 2> input, View<const T, 1> bias,
                        Approximate approximate, View<T, 2> grad_input, View<T, 1> grad_bias,
                        cudaStream_t stream) {
  using S = compute_t<T>;
  if constexpr (sizeof(T) < 8) {
    if (are_transposed(grad_input, grad_output, input))
      return bias_gelu_transposed_backward(grad_output, input, bias, approximate, grad_input,
                                           grad_bias, stream);
  }
  const auto packing = opwright::packing_of(grad_input, grad_output, input);
  with_packs<T>(packing, [&]<int N, bool kIsAligned>(int height_step) {
    const Rows rows = opwright::cut_rows(input.size(0), input.size(1), N, height_step);
    const auto tiling = opwright::tile(
        rows, {.pack = N,
               .deep = kBackwardDeep<N>,
               .across = kBackwardAcross<N>,
               .blocks = opwright::current_device().multiprocessors * kBackwardBlocks});
    const auto partials = opwright::partials_of<S>(rows, tiling, N);
    constexpr size_t kStaged =
        kIsStaged<N, kIsAligned> ? kStages * 2 * kThreads * sizeof(Pack<T, N>) : 0;
    const size_t bytes = std::max(kStaged, opwright::column_sums_bytes<S, N>(tiling.block));
    opwright::launch_behind(
        bias_gelu_backward_kernel<T, N, kIsAligned>, tiling.grid, tiling.block, bytes, stream, rows,
        tiling.depth, plane_of(rows, grad_output), plane_of(rows, input), bias_of(bias, N),
        approximate, plane_of(rows, grad_input), partials, grad_bias.data(), grad_bias.stride(0));
    opwright::sum_partials(partials, rows.n, grad_bias, stream);
  });
}

OPWRIGHT_KERNEL(bias_gelu, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(bias_gelu_backward, float, double, opwright::half, opwright::bfloat16)
