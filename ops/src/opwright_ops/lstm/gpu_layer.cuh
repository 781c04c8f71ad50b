// What the kernels of an LSTM on a GPU read: options, masks, parameters; sums over a block.
#pragma once

#include <opwright/copy.cuh>
#include <opwright/kernel.h>
#include <opwright/math.h>
#include <opwright/tensor.h>
#include <opwright/vector.cuh>

namespace opwright_ops::gpu {

using opwright::compute_t;
using opwright::View;

constexpr int kThreads = 256;

template <typename T>
constexpr bool kIsNarrow = sizeof(T) == 2;

// An element as it was read, in a register of its own: to convert it, or to put two together, would
// be to wait for it.
template <typename T, bool = kIsNarrow<T>>
struct Read {
  T bits;
  __device__ compute_t<T> value() const { return bits; }
};
template <typename T>
struct Read<T, true> {
  uint32_t bits;
  __device__ float value() const {
    return static_cast<float>(__builtin_bit_cast(T, static_cast<uint16_t>(bits)));
  }
};
template <typename T>
__device__ Read<T> read(const T& from) {
  if constexpr (kIsNarrow<T>)
    return {reinterpret_cast<const uint16_t&>(from)};
  else
    return {from};
}

// N adjacent elements, as they are computed with. What is read or written once is the first to
// leave the cache: the weights are to stay there.
template <int BYTES>
struct Word {
  using type = uint4;
};
template <>
struct Word<2> {
  using type = unsigned short;
};
template <>
struct Word<4> {
  using type = unsigned;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <int N, typename T>
__device__ void read_all(const T* from, compute_t<T> (&to)[N]) {
  using W = typename Word<N * sizeof(T)>::type;
  unpack(__builtin_bit_cast(opwright::Pack<T, N>, *reinterpret_cast<const W*>(from)), to);
}
template <int N, typename T>
__device__ void read_once(const T* from, compute_t<T> (&to)[N]) {
  using W = typename Word<N * sizeof(T)>::type;
  unpack(__builtin_bit_cast(opwright::Pack<T, N>, __ldcs(reinterpret_cast<const W*>(from))), to);
}
template <int N, typename T>
__device__ void write_all(T* to, const compute_t<T> (&from)[N]) {
  using W = typename Word<N * sizeof(T)>::type;
  *reinterpret_cast<W*>(to) = __builtin_bit_cast(W, opwright::pack_of<T>(from));
}
template <int N, typename T>
__device__ void write_once(T* to, const compute_t<T> (&from)[N]) {
  using W = typename Word<N * sizeof(T)>::type;
  __stcs(reinterpret_cast<W*>(to), __builtin_bit_cast(W, opwright::pack_of<T>(from)));
}

// The first of N adjacent units that a thread of the grid has of an entry; N divides H.
struct Units {
  unsigned entry, unit;
};
template <int N>
__device__ Units units_of_thread(unsigned H) {
  const unsigned i = blockIdx.x * kThreads + threadIdx.x;
  return {i / (H / N), i % (H / N) * N};
}

// Whether N elements of each row of a tensor can be read or written at once.
template <int N, typename T>
bool has_adjacent(const View<T, 3>& view) {
  return !view.defined() || (view.stride(2) == 1 && view.stride(0) % N == 0 &&
                             view.stride(1) % N == 0 && opwright::is_aligned(view.data(), N));
}

// What an element of a cell needs to know; the order of the gates is i, f, g, o.
template <typename T>
struct Options {
  using E = compute_t<T>;
  bool has_hard_sigmoid, has_hard_tanh, is_coupled, draws;
  E slope, clip, zoneout_h, zoneout_c;
  uint32_t threshold_h, threshold_c;

  __device__ E clipped(E z) const {
    return clip == 0 ? z : z < -clip ? -clip : z > clip ? clip : z;
  }
  __device__ E sigmoid(E z) const {
    z = clipped(z);
    if (!has_hard_sigmoid) return opwright::sigmoid<T>(z);
    const E v = E(0.5) + slope * z;
    return v < 0 ? E(0) : v > 1 ? E(1) : v;
  }
  __device__ E tanh(E z) const {
    if (!has_hard_tanh) return opwright::tanh<T>(z);
    return z < -1 ? E(-1) : z > 1 ? E(1) : z;
  }

  // A gradient through each of them at z, where its value is known.
  __device__ E through_clip(E grad, E z) const {
    return clip == 0 || abs_of(z) <= clip ? grad : E(0);
  }
  __device__ E through_sigmoid(E grad, E z, E value) const {
    if (!has_hard_sigmoid) return through_clip(grad * (value * (1 - value)), z);
    return abs_of(E(0.5) + slope * clipped(z) - E(0.5)) <= E(0.5) ? through_clip(slope * grad, z)
                                                                  : E(0);
  }
  __device__ E through_tanh(E grad, E z, E value) const {
    return has_hard_tanh ? (abs_of(z) <= 1 ? grad : E(0)) : grad * (1 - value * value);
  }
  __device__ static E abs_of(E z) { return z < 0 ? -z : z; }
};

// `keeps` of what was, the rest of what is new.
template <typename E>
__device__ E mix(E keeps, E before, E after) {
  return keeps == 0 ? after : keeps * before + (1 - keeps) * after;
}

// The part of h and of c that zoneout leaves as it was: 0 or 1 by chance, or the expectation.
template <typename E>
struct Kept {
  E h, c;
};
template <typename T>
__device__ Kept<compute_t<T>> kept(const Options<T>& options, const View<const int64_t, 1>& seed,
                                   int64_t entry, int64_t unit, int64_t t) {
  if (!options.draws) return {options.zoneout_h, options.zoneout_c};
  // Philox2x32-7; NOTES.md names the source.
  uint32_t key = static_cast<uint32_t>(seed(entry)), a = static_cast<uint32_t>(unit),
           b = static_cast<uint32_t>(t);
  for (int round = 0; round < 7; ++round, key += 0x9E3779B9u) {
    const uint64_t product = uint64_t{a} * 0xD256D193u;
    a = static_cast<uint32_t>(product >> 32) ^ key ^ b;
    b = static_cast<uint32_t>(product);
  }
  using E = compute_t<T>;
  return {E(b < options.threshold_h), E(a < options.threshold_c)};
}

// One direction of a layer: what all its kernels read.
template <typename T>
struct Layer {
  using E = compute_t<T>;
  int64_t B, H, R;
  Options<T> options;
  View<const T, 2> peephole, norm_c, h_mask;
  View<const int64_t, 1> lengths, seed;
  View<const bool, 2> reset;
  const E *bias, *norm_ih, *norm_hh;  // [4H]; norms null where there are none

  bool is_plain() const {
    const auto& o = options;
    return !(o.has_hard_sigmoid || o.has_hard_tanh || o.is_coupled || o.draws || o.clip ||
             o.zoneout_h || o.zoneout_c || peephole.defined() || norm_c.defined() ||
             h_mask.defined() || lengths.defined() || reset.defined());
  }
  __device__ bool is_active(int64_t t, int64_t entry) const {
    return !lengths.defined() || t < lengths(entry);
  }
  // Whether the state is set to 0 before an active step.
  __device__ bool resets(int64_t t, int64_t entry) const {
    return reset.defined() && is_active(t, entry) && reset(t, entry);
  }
  __device__ T masked(T h, int64_t entry, int64_t unit) const {
    if (!h_mask.defined()) return h;
    return static_cast<T>(static_cast<E>(h) * static_cast<E>(h_mask(entry, unit)));
  }
};

// The same where there are no options, masks and lengths; what depends on them is then left out of
// a kernel.
template <typename T>
__host__ __device__ Layer<T> plain(Layer<T> layer) {
  layer.options = {};
  layer.peephole = layer.norm_c = layer.h_mask = {};
  layer.lengths = layer.seed = {};
  layer.reset = {};
  return layer;
}

template <typename S, typename F>
__device__ inline S sum_over_block(S value, F* shared) {
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : S(0);
  for (int offset = 16; offset; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
  return value;
}

template <typename E>
struct Moments {
  E mean, scale;
};

// Of `count` elements, by the threads of a block; value(i).
template <typename E, typename Value>
__device__ Moments<E> moments(int64_t count, E* shared, const Value& value) {
  E sum = 0, squares = 0;
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) sum += value(i);
  const E mean = sum_over_block(sum, shared) / static_cast<E>(count);
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x)
    squares += (value(i) - mean) * (value(i) - mean);
  return {mean, E(1) / sqrt(sum_over_block(squares, shared) / static_cast<E>(count) + E(1e-5))};
}

// Memory for as long as the call; the caching allocator knows the stream. Small pieces share one of
// its blocks.
class Scratch {
 public:
  template <typename S>
  S* take(int64_t count) {
    constexpr int64_t kBlock = 512 * 1024, kAligned = 256;
    const int64_t bytes = (count * int64_t{sizeof(S)} + kAligned - 1) / kAligned * kAligned;
    if (bytes > kBlock / 4) return reinterpret_cast<S*>(more(bytes));
    if (bytes > left_) block_ = more(kBlock), left_ = kBlock;
    char* const piece = block_;
    block_ += bytes, left_ -= bytes;
    return reinterpret_cast<S*>(piece);
  }

 private:
  char* more(int64_t bytes) {
    opwright::check(held_ < kMost, "too many pieces of scratch memory");
    pieces_[held_] = opwright::Tensor::empty<uint8_t>({bytes});
    return reinterpret_cast<char*>(pieces_[held_++].data<uint8_t>());
  }

  static constexpr int kMost = 40;
  opwright::Tensor pieces_[kMost];
  int held_ = 0;
  char* block_ = nullptr;
  int64_t left_ = 0;
};

// Memory that a kernel fills besides its own work: `count` times 16 bytes of `bits`.
struct Fill {
  uint4* at;
  int64_t count;
  uint32_t bits;
  __device__ void run() const {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
         i += int64_t{gridDim.x} * blockDim.x)
      at[i] = make_uint4(bits, bits, bits, bits);
  }
};

// Both biases, and the gains of the norms, as the kernels read them.
template <typename T>
__device__ compute_t<T> sum_of(const View<const T, 1>& a, const View<const T, 1>& b, int64_t i) {
  using E = compute_t<T>;
  return (a.defined() ? static_cast<E>(a(i)) : E(0)) + (b.defined() ? static_cast<E>(b(i)) : E(0));
}
template <typename T>
__global__ void sum_biases(View<const T, 1> a, View<const T, 1> b, int64_t count,
                           compute_t<T>* to) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < count) to[i] = sum_of(a, b, i);
}

inline dim3 blocks_for(int64_t count) {
  return dim3(static_cast<unsigned>((count + kThreads - 1) / kThreads));
}

// Of the random words, those below are `probability` of all.
inline uint32_t threshold(double probability) {
  const double scaled = probability * 4294967296.0;
  return scaled >= 4294967295.0 ? 4294967295u : static_cast<uint32_t>(scaled);
}

// `bias` is what the sum of the biases is in, or will be.
template <typename T, typename Activation>
Layer<T> layer_of(Scratch& scratch, int64_t B, int64_t H, int64_t R, compute_t<T>* bias,
                  View<const T, 2> peephole, View<const T, 1> norm_ih, View<const T, 1> norm_hh,
                  View<const T, 2> norm_c, View<const T, 2> h_mask, View<const int64_t, 1> lengths,
                  View<const bool, 2> reset, View<const int64_t, 1> seed, Activation activation,
                  double slope, bool coupled, double clip, double zoneout_h, double zoneout_c,
                  cudaStream_t stream) {
  using E = compute_t<T>;
  const int norms = norm_ih.defined() + norm_hh.defined() + norm_c.defined();
  opwright::check(norms == 0 || norms == 3, "`norm_ih`, `norm_hh` and `norm_c` come together");
  const auto widened = [&](View<const T, 1> gain) {
    E* to = scratch.take<E>(4 * H);
    sum_biases<T><<<blocks_for(4 * H), kThreads, 0, stream>>>(gain, {}, 4 * H, to);
    return to;
  };
  const Options<T> options{activation == Activation::hard || activation == Activation::hard_sigmoid,
                           activation == Activation::hard || activation == Activation::hard_tanh,
                           coupled,
                           seed.defined() && (zoneout_h || zoneout_c),
                           static_cast<E>(slope),
                           static_cast<E>(clip),
                           static_cast<E>(zoneout_h),
                           static_cast<E>(zoneout_c),
                           threshold(zoneout_h),
                           threshold(zoneout_c)};
  return {B,
          H,
          R,
          options,
          peephole,
          norm_c,
          h_mask,
          lengths,
          seed,
          reset,
          bias,
          norms ? widened(norm_ih) : nullptr,
          norms ? widened(norm_hh) : nullptr};
}

// out = a b, with sums and results in the type of sums.
template <typename T>
void multiply(compute_t<T>* out, const opwright::Tensor& a, const opwright::Tensor& b) {
  const auto to = opwright::borrow(out, {a.size(0), b.size(1)});
  if constexpr (kIsNarrow<T>)
    opwright::call("aten::mm.dtype_out", a, b, opwright::detail::kScalarType<float>, to);
  else
    opwright::call("aten::mm.out", a, b, to);
}

// The same of 16-bit types as `parts` products that add up to it, each of a share of the columns of
// a: out is [parts, rows of a, columns of b].
template <typename T>
void multiply_in_parts(compute_t<T>* out, const opwright::Tensor& a, const opwright::Tensor& b,
                       int64_t parts) {
  const int64_t m = a.size(0), k = a.size(1) / parts, n = b.size(1);
  opwright::call("aten::bmm.dtype_out",
                 a.view({parts, m, k}, {k * a.stride(1), a.stride(0), a.stride(1)}),
                 b.view({parts, k, n}, {k * b.stride(0), b.stride(0), b.stride(1)}),
                 opwright::detail::kScalarType<float>, opwright::borrow(out, {parts, m, n}));
}

// out = a b^T of float32, with factors rounded to 11 bits (TF32). Of PyTorch's products, only
// convolutions take that as an argument; else it is an option of the process.
inline void multiply_tf32(float* out, const opwright::Tensor& a, const opwright::Tensor& b) {
  const auto image = [](const opwright::Tensor& of) {
    return of.view({of.size(0), of.size(1), 1, 1}, {of.stride(0), of.stride(1), 1, 1});
  };
  const opwright::Ints none{0, 0}, one{1, 1};
  opwright::call("aten::cudnn_convolution.out", image(a), image(b), none, one, one, int64_t{1},
                 false, true, true, opwright::borrow(out, {a.size(0), b.size(0), 1, 1}));
}

}  // namespace opwright_ops::gpu
