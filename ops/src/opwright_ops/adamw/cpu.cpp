// One step of AdamW over lists of tensors on the CPU.
#include <cmath>

#include "update.h"

using namespace opwright_ops;

// Elements that one thread takes at a time, and those of them that lie in buffers on the stack.
constexpr int64_t kChunk = 8192, kBlock = 512;

template <typename A, typename B>
inline constexpr bool kSame = opwright::detail::kSame<A, B>;

// Elements of a tensor in the type that is computed in: where they lie, or a copy.
template <typename C, typename T>
C* fetch(T* from, int64_t count, C* buffer) {
  if constexpr (kSame<T, C> || kSame<T, const C>) {
    return const_cast<C*>(from);
  } else {
    constexpr int64_t kLanes = opwright::kLanes<bfloat16>;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      opwright::store(buffer + i, opwright::load(from + i));
    }
    for (; i < count; ++i) buffer[i] = static_cast<C>(from[i]);
    return buffer;
  }
}

// Rounds values into a tensor, unless they lie there.
template <typename C, typename T>
void put(T* to, const C* values, int64_t count) {
  if constexpr (!kSame<T, C>) {
    constexpr int64_t kLanes = opwright::kLanes<bfloat16>;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      opwright::store(to + i, opwright::load(values + i));
    }
    for (; i < count; ++i) to[i] = T(values[i]);
  }
}

template <bool kHasMost, typename C>
void update(C* __restrict p, const C* __restrict g, C* __restrict m, C* __restrict v,
            C* __restrict most, int64_t count, const Factors<C>& f) {
  for (int64_t i = 0; i < count; ++i) {
    const C grad = g[i] * f.sign;
    m[i] += (grad - m[i]) * f.take1;
    v[i] = v[i] * f.keep2 + grad * f.take2 * grad;  // the square may have no room
    C square = v[i];
    if constexpr (kHasMost) {
      // A NaN stays, whichever of the two it is.
      square = most[i] > square || most[i] != most[i] ? most[i] : square;
      most[i] = square;
    }
    p[i] = p[i] * f.decay - f.size * (m[i] / (std::sqrt(square * f.correction2) + f.eps));
  }
}

template <typename T, typename S>
void step_block(const Entry<T, S>& e, int64_t begin, int64_t count, const Options& o,
                const Factors<compute_t<T>>& f, const RandomBits& random) {
  using C = compute_t<T>;
  constexpr bool kHasRandom = kSame<T, bfloat16> || kSame<S, bfloat16>;
  C buffers[5][kBlock];
  C* p = fetch(e.param + begin, count, buffers[0]);
  C* g = fetch(e.grad + begin, count, buffers[1]);
  C* m = fetch(e.exp_avg + begin, count, buffers[2]);
  C* v = fetch(e.exp_avg_sq + begin, count, buffers[3]);
  C* most = e.most ? fetch(e.most + begin, count, buffers[4]) : nullptr;
  if (most)
    update<true>(p, g, m, v, most, count, f);
  else
    update<false>(p, g, m, v, most, count, f);
  // `begin` is even, so a pair is never split between blocks.
  uint32_t of_pairs[kHasRandom ? kBlock / 2 : 1];
  for (int64_t i = 0; kHasRandom && o.stochastic_rounding && i < (count + 1) / 2; ++i) {
    of_pairs[i] = random.of_pair(begin / 2 + i);
  }
  const auto leave = [&]<typename P>(P* to, const C* values, Draw draw) {
    if constexpr (kSame<P, bfloat16>) {
      if (o.stochastic_rounding) {
        uint16_t bits[kBlock];
        for (int64_t i = 0; i < (count + 1) / 2; ++i) {
          const uint32_t word = random.word(of_pairs[i], draw);
          bits[2 * i] = static_cast<uint16_t>(word);
          bits[2 * i + 1] = static_cast<uint16_t>(word >> 16);
        }
        for (int64_t i = 0; i < count; ++i) to[begin + i].bits = round_by(values[i], bits[i]);
        return;
      }
    }
    put(to + begin, values, count);
  };
  leave(e.param, p, kParam);
  leave(e.exp_avg, m, kExpAvg);
  leave(e.exp_avg_sq, v, kExpAvgSq);
  if (most) leave(e.most, most, kMost);
}

template <typename T, typename S>
void step_all(const Lists<T, S>& lists, const View<const float, 0>& rate, const Options& o) {
  lists.check();
  const int64_t tensors = lists.params.size();
  auto* entries = opwright::scratch<Entry<T, S>>(tensors);
  auto* starts = opwright::scratch<int64_t>(tensors + 1);  // of the chunks of each tensor
  starts[0] = 0;
  auto copies = lists.make_room();
  for (int64_t i = 0; i < tensors; ++i) {
    const Entry<T, S> e = lists.gather(i, &copies);
    entries[i] = e;
    starts[i + 1] = starts[i] + (e.count + kChunk - 1) / kChunk;
  }
  opwright::parallel_for(
      starts[tensors], opwright::grain_of(kChunk), [&](int64_t chunk, int64_t end) {
        int64_t low = 0, high = tensors;  // the tensor with the first chunk is in low..high
        while (high - low > 1) {
          const int64_t middle = (low + high) / 2;
          (starts[middle] <= chunk ? low : high) = middle;
        }
        for (int64_t i = low; chunk < end; ++i) {
          const Entry<T, S>& e = entries[i];
          const double t = e.step ? static_cast<double>(*e.step) : static_cast<double>(o.step);
          const Factors<compute_t<T>> f(o,
                                        rate.defined() ? static_cast<double>(*rate.data()) : o.lr,
                                        1 - std::pow(o.beta1, t), 1 - std::pow(o.beta2, t));
          const uint32_t count = static_cast<uint32_t>(static_cast<int64_t>(t));
          const uint32_t place = static_cast<uint32_t>(o.first + i);
          const uint64_t seed = static_cast<uint64_t>(o.seed);
          const RandomBits random(seed, count, place);
          for (; chunk < end && chunk < starts[i + 1]; ++chunk) {
            const int64_t first = (chunk - starts[i]) * kChunk;
            const int64_t last = e.count < first + kChunk ? e.count : first + kChunk;
            for (int64_t at = first; at < last; at += kBlock) {
              step_block(e, at, last - at < kBlock ? last - at : kBlock, o, f, random);
            }
          }
        }
      });
  for (int64_t i = 0; i < tensors; ++i) lists.scatter(i, entries[i]);
}

OPWRIGHT_OPS_ADAMW(adamw_, T)
OPWRIGHT_OPS_ADAMW(adamw_float32_state_, float)
OPWRIGHT_OPS_ADAMW(adamw_bfloat16_state_, bfloat16)

OPWRIGHT_KERNEL(adamw_, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(adamw_float32_state_, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(adamw_bfloat16_state_, float)
