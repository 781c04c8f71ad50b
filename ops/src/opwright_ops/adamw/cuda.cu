// One step of AdamW over lists of tensors on a GPU: all of them in one launch. NOTES.md has the
// layout.
#include <opwright/launch.cuh>
#include <opwright/vector.cuh>

#include "update.h"

using namespace opwright_ops;
using opwright::kPackWidth;
using opwright::Pack;

template <typename A, typename B>
inline constexpr bool kSame = opwright::detail::kSame<A, B>;

constexpr int kThreads = 256;
// Tensors in one launch: the parameters of a kernel take at most 32,764 bytes.
constexpr int kMaxTensors = 500;
// Rounds of a block through its tensor: more for long lists, so that fewer blocks look for theirs,
// but enough blocks for every multiprocessor.
constexpr int kMaxRounds = 8, kBlocksOfMultiprocessor = 32;

template <typename T, typename S>
struct Batch {
  Entry<T, S> entries[kMaxTensors];
  uint32_t first_block[kMaxTensors + 1];
  uint8_t has_packs[kMaxTensors];
  int tensors, rounds;
  const float* rate;  // null where it is an option
  double log_beta1, log_beta2;
  Options options;
  Factors<compute_t<T>> factors;  // of options.step and options.lr
};

static_assert(sizeof(Batch<double, double>) <= 32764);

// Elements that a thread takes at a time: a pack of the narrower type.
template <typename T, typename S>
inline constexpr int kWidth = kPackWidth<T> > kPackWidth<S> ? kPackWidth<T> : kPackWidth<S>;

// The random bits of N elements; those of an odd place are the second of a pair.
template <int N>
struct Bits {
  const RandomBits* source;  // null where values are rounded to nearest
  uint32_t of_pairs[(N + 1) / 2];
  bool is_odd;

  __device__ OPWRIGHT_INLINE Bits(const RandomBits* source, int64_t at)
      : source(source), is_odd(N == 1 && at % 2) {
    OPWRIGHT_UNROLL
    for (int i = 0; source && i < (N + 1) / 2; ++i) of_pairs[i] = source->of_pair(at / 2 + i);
  }
};

template <int N, typename T>
struct Packs {
  static constexpr int kWidth = kPackWidth<T> < N ? kPackWidth<T> : N;
  Pack<T, kWidth> packs[N / kWidth];

  __device__ OPWRIGHT_INLINE void load(const T* at) {
    OPWRIGHT_UNROLL
    for (int i = 0; i < N / kWidth; ++i) packs[i] = opwright::load_pack<kWidth>(at + i * kWidth);
  }
  __device__ OPWRIGHT_INLINE void store(T* at) const {
    OPWRIGHT_UNROLL
    for (int i = 0; i < N / kWidth; ++i) opwright::store_pack(at + i * kWidth, packs[i]);
  }
  __device__ OPWRIGHT_INLINE T& operator[](int i) { return packs[i / kWidth].elements[i % kWidth]; }
  __device__ OPWRIGHT_INLINE void unpack(compute_t<T> (&values)[N]) const {
    OPWRIGHT_UNROLL
    for (int i = 0; i < N / kWidth; ++i) {
      compute_t<T> part[kWidth];
      opwright::unpack(packs[i], part);
      OPWRIGHT_UNROLL
      for (int j = 0; j < kWidth; ++j) values[i * kWidth + j] = part[j];
    }
  }
  // Rounds to nearest, or by random bits.
  __device__ OPWRIGHT_INLINE void pack(const compute_t<T> (&values)[N], const Bits<N>& random,
                                       Draw draw) {
    if constexpr (kSame<T, bfloat16>) {
      if (random.source) {
        OPWRIGHT_UNROLL
        for (int i = 0; i < N; i += 2) {
          const uint32_t word = random.source->word(random.of_pairs[i / 2], draw);
          (*this)[i].bits = round_by(values[i], random.is_odd ? word >> 16 : word & 0xffffu);
          if (i + 1 < N) (*this)[i + 1].bits = round_by(values[i + 1], word >> 16);
        }
        return;
      }
    }
    OPWRIGHT_UNROLL
    for (int i = 0; i < N / kWidth; ++i) {
      compute_t<T> part[kWidth];
      OPWRIGHT_UNROLL
      for (int j = 0; j < kWidth; ++j) part[j] = values[i * kWidth + j];
      packs[i] = opwright::pack_of<T>(part);
    }
  }
};

// m / (sqrt(square) + eps). Results in 16 bits take the instructions of the special function unit,
// which are right to 2^-22.
template <typename T>
__device__ OPWRIGHT_INLINE compute_t<T> ratio(compute_t<T> m, compute_t<T> square,
                                              compute_t<T> eps) {
  if constexpr (sizeof(T) == 2) {
    float root;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(square));
    return __fdividef(m, root + eps);
  } else {
    return m / (sqrt(square) + eps);
  }
}

// 1 - beta^t from log(beta).
__device__ OPWRIGHT_INLINE double bias_of(double log_beta, float t) {
  return log_beta == -INFINITY ? 1.0 : -expm1(log_beta * t);
}

// N elements of all tensors at one place of the lists.
template <typename T, typename S, int N>
struct Elements {
  Packs<N, T> params, grads;
  Packs<N, S> exp_avgs, exp_avg_sqs, mosts;

  __device__ OPWRIGHT_INLINE void load(const Entry<T, S>& e, int64_t at) {
    params.load(e.param + at);
    grads.load(e.grad + at);
    exp_avgs.load(e.exp_avg + at);
    exp_avg_sqs.load(e.exp_avg_sq + at);
    if (e.most) mosts.load(e.most + at);
  }

  // Computes, rounds and stores.
  __device__ OPWRIGHT_INLINE void step(const Entry<T, S>& e, int64_t at,
                                       const Factors<compute_t<T>>& f, const RandomBits* source) {
    using C = compute_t<T>;
    C p[N], g[N], m[N], v[N], most[N];
    params.unpack(p), grads.unpack(g), exp_avgs.unpack(m), exp_avg_sqs.unpack(v);
    if (e.most) mosts.unpack(most);
    OPWRIGHT_UNROLL
    for (int i = 0; i < N; ++i) {
      const C grad = g[i] * f.sign;
      m[i] += (grad - m[i]) * f.take1;
      v[i] = v[i] * f.keep2 + grad * f.take2 * grad;  // the square may have no room
      C square = v[i];
      if (e.most) {
        // A NaN stays, whichever of the two it is.
        square = most[i] > square || most[i] != most[i] ? most[i] : square;
        most[i] = square;
      }
      p[i] = p[i] * f.decay - f.size * ratio<T>(m[i], square * f.correction2, f.eps);
    }
    const Bits<N> random(source, at);
    params.pack(p, random, kParam);
    exp_avgs.pack(m, random, kExpAvg);
    exp_avg_sqs.pack(v, random, kExpAvgSq);
    params.store(e.param + at);
    exp_avgs.store(e.exp_avg + at);
    exp_avg_sqs.store(e.exp_avg_sq + at);
    if (e.most) {
      mosts.pack(most, random, kMost);
      mosts.store(e.most + at);
    }
  }
};

template <typename T, typename S>
__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ Batch<T, S> p) {
  constexpr int N = kWidth<T, S>;
  constexpr bool kHasRandom = kSame<T, bfloat16> || kSame<S, bfloat16>;
  opwright::let_next_start();  // waits for the kernel in front, too
  int tensor = 0;
  for (int end = p.tensors; end - tensor > 1;) {  // the tensor of this block is in tensor..end
    const int middle = (tensor + end) / 2;
    (p.first_block[middle] <= blockIdx.x ? tensor : end) = middle;
  }
  const Entry<T, S>& e = p.entries[tensor];
  Factors<compute_t<T>> f = p.factors;
  uint32_t count = static_cast<uint32_t>(p.options.step);
  if (e.step || p.rate) {
    // Doubles cost some microseconds on small GPUs, but floats would lose digits of 1 - 0.999^t.
    __shared__ Factors<compute_t<T>> shared;
    if (threadIdx.x == 0) {
      const float t = e.step ? *e.step : static_cast<float>(p.options.step);
      shared =
          Factors<compute_t<T>>(p.options, p.rate ? static_cast<double>(*p.rate) : p.options.lr,
                                bias_of(p.log_beta1, t), bias_of(p.log_beta2, t));
    }
    __syncthreads();
    f = shared;
    if (e.step) count = static_cast<uint32_t>(*e.step);
  }
  const bool is_random = kHasRandom && p.options.stochastic_rounding;
  RandomBits source;
  if (is_random) {
    source = RandomBits(static_cast<uint64_t>(p.options.seed), count,
                        static_cast<uint32_t>(p.options.first + tensor));
  }
  const RandomBits* const random = is_random ? &source : nullptr;
  const int64_t block = blockIdx.x - p.first_block[tensor];
  const int64_t step = kThreads * N, behind = (block + 1) * p.rounds * step;
  const int64_t end = behind < e.count ? behind : e.count;
  int64_t at = block * p.rounds * step + threadIdx.x * N;
  if (p.has_packs[tensor]) {
    Elements<T, S, N> ahead;
    if (at + N <= end) ahead.load(e, at);
#pragma unroll 1
    for (; at + N <= end; at += step) {
      Elements<T, S, N> now = ahead;
      if (at + step + N <= end) ahead.load(e, at + step);
      now.step(e, at, f, random);
    }
  }
#pragma unroll 1
  for (; at < end; at += step) {
    const int64_t last = at + N < end ? at + N : end;
#pragma unroll 1
    for (int64_t i = at; i < last; ++i) {
      Elements<T, S, 1> one;
      one.load(e, i);
      one.step(e, i, f, random);
    }
  }
}

template <typename T, typename S>
void step_all(const Lists<T, S>& lists, const View<const float, 0>& rate, const Options& options,
              cudaStream_t stream) {
  lists.check();
  const int64_t tensors = lists.params.size();
  constexpr int N = kWidth<T, S>;
  const auto blocks_of = [](int64_t count, int64_t rounds) {
    return (count + kThreads * N * rounds - 1) / (kThreads * N * rounds);
  };
  int64_t all = 0;
  for (const auto& param : lists.params) all += blocks_of(param.size(0), 1);
  const int64_t most = all / (opwright::current_device().multiprocessors * kBlocksOfMultiprocessor);
  const int rounds = most < 1 ? 1 : most > kMaxRounds ? kMaxRounds : static_cast<int>(most);
  const double t = static_cast<double>(options.step);
  const Factors<compute_t<T>> factors(options, options.lr, 1 - pow(options.beta1, t),
                                      1 - pow(options.beta2, t));
  auto copies = lists.make_room();
  for (int64_t start = 0; start < tensors;) {
    Batch<T, S> batch;  // 30 KB on the stack; only the entries in use are written
    batch.tensors = 0, batch.rounds = rounds, batch.rate = rate.data();
    batch.log_beta1 = log(options.beta1), batch.log_beta2 = log(options.beta2);
    batch.options = options, batch.factors = factors;
    batch.options.first += start;
    int64_t blocks = 0;
    const int64_t begin = start;
    for (; start < tensors && batch.tensors < kMaxTensors; ++start) {
      const int64_t more = blocks_of(lists.params[start].size(0), rounds);
      opwright::check(more < int64_t{1} << 31,
                      "a tensor has more elements than a launch has blocks for");
      if (blocks + more >= int64_t{1} << 31) break;
      const Entry<T, S> e = lists.gather(start, &copies);
      constexpr int kT = kPackWidth<T>, kS = kPackWidth<S>;
      batch.has_packs[batch.tensors] =
          opwright::is_aligned(e.param, kT) && opwright::is_aligned(e.grad, kT) &&
          opwright::is_aligned(e.exp_avg, kS) && opwright::is_aligned(e.exp_avg_sq, kS) &&
          opwright::is_aligned(e.most, kS);
      batch.entries[batch.tensors] = e;
      batch.first_block[batch.tensors++] = static_cast<uint32_t>(blocks);
      blocks += more;
    }
    batch.first_block[batch.tensors] = static_cast<uint32_t>(blocks);
    if (blocks == 0) continue;
    opwright::launch_behind(adamw_kernel<T, S>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                            0, stream, batch);
    for (int64_t i = begin; i < start; ++i) lists.scatter(i, batch.entries[i - begin]);
  }
}

OPWRIGHT_OPS_ADAMW(adamw_, T, stream)
OPWRIGHT_OPS_ADAMW(adamw_float32_state_, float, stream)
OPWRIGHT_OPS_ADAMW(adamw_bfloat16_state_, bfloat16, stream)

OPWRIGHT_KERNEL(adamw_, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(adamw_float32_state_, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(adamw_bfloat16_state_, float)
