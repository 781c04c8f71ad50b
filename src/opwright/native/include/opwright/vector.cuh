// Elements of a tensor in device code, 16 bytes at a time.
//
//   Pack<float, 4> pack = load_pack<4>(at);       one load, `at` aligned to the pack's size
//   float x[4]; unpack(pack, x);                  16-bit types widen to float
//   store_pack(to, pack_of<float>(x));            and narrow to nearest even
//   load_unaligned<4>(at);                        `at` anywhere, in four or five loads
#pragma once

#include <cstdint>

#include "opwright/entry.h"
#include "opwright/types.h"
#include "opwright/vec.h"
#include "opwright/view.h"

namespace opwright {

// Elements of T in the longest load there is.
template <typename T>
inline constexpr int kPackWidth = 16 / sizeof(T);

// N adjacent elements as they lie in memory.
template <typename T, int N>
struct alignas(N * sizeof(T)) Pack {
  T elements[N];
};

template <typename T>
bool is_aligned(const T* at, int width) {
  return reinterpret_cast<uintptr_t>(at) % (width * sizeof(T)) == 0;
}

// The rows of a matrix whose elements are adjacent in each of them.
template <typename T>
struct RowsOf {
  T* data;
  int64_t stride;
  __device__ T* row(int64_t i) const { return data + i * stride; }
};
// One row has the stride 0.
template <typename T>
RowsOf<T> rows_of(const View<T, 2>& view) {
  return {view.data(), view.size(0) == 1 ? 0 : view.stride(0)};
}

template <int N, typename T>
__device__ OPWRIGHT_INLINE Pack<T, N> load_pack(const T* at) {
  if constexpr (N * sizeof(T) == 16) {
    return bit_cast<Pack<T, N>>(*reinterpret_cast<const uint4*>(at));
  } else {
    static_assert(N == 1, "a pack is 16 bytes or one element");
    return {*at};
  }
}

template <typename T, int N>
__device__ OPWRIGHT_INLINE void store_pack(T* at, Pack<T, N> pack) {
  if constexpr (N * sizeof(T) == 16) {
    *reinterpret_cast<uint4*>(at) = bit_cast<uint4>(pack);
  } else {
    *at = pack.elements[0];
  }
}

namespace detail {

// Two 16-bit elements in one register, the first in its low half.
template <typename T>
__device__ OPWRIGHT_INLINE void unpack_pair(uint32_t pair, float& low, float& high) {
  if constexpr (kSame<T, bfloat16>) {
    low = float_of(pair << 16);
    high = float_of(pair & 0xffff0000u);
  } else {
    low = half_value(static_cast<uint16_t>(pair));
    high = half_value(static_cast<uint16_t>(pair >> 16));
  }
}
template <typename T>
__device__ OPWRIGHT_INLINE uint32_t pair_of(float low, float high) {
  uint32_t pair;
#if __CUDA_ARCH__ >= 800
  if constexpr (kSame<T, bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
#else
  pair = T(low).bits | static_cast<uint32_t>(T(high).bits) << 16;
#endif
  return pair;
}

template <int N>
struct Words {
  uint32_t words[N];
};

}  // namespace detail

// N adjacent elements at any address. 16-bit ones are shifted out of the aligned pairs that hold
// them, in nine instructions for eight; nothing behind the last one is read.
template <int N, typename T>
__device__ OPWRIGHT_INLINE Pack<T, N> load_unaligned(const T* at) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    const int before = reinterpret_cast<uintptr_t>(at) / 2 % 2;  // elements of the first pair
    const uint32_t* words = reinterpret_cast<const uint32_t*>(at - before);
    detail::Words<N / 2> pairs;
    uint32_t low = words[0];
    OPWRIGHT_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      const bool is_last = i + 1 == N / 2;
      const uint32_t high = !is_last ? words[i + 1] : before ? (at - before)[N].bits : 0;
      pairs.words[i] = __funnelshift_r(low, high, 16 * before);
      low = high;
    }
    return bit_cast<Pack<T, N>>(pairs);
  } else {
    Pack<T, N> pack;
    OPWRIGHT_UNROLL
    for (int i = 0; i < N; ++i) pack.elements[i] = at[i];
    return pack;
  }
}

// The first `count` elements of one pack and the others of another.
template <typename T, int N>
__device__ OPWRIGHT_INLINE Pack<T, N> joined(Pack<T, N> first, Pack<T, N> others, int count) {
  constexpr int kWords = N * sizeof(T) / 4;
  auto words = bit_cast<detail::Words<kWords>>(first);
  const auto from = bit_cast<detail::Words<kWords>>(others);
  OPWRIGHT_UNROLL
  for (int i = 0; i < kWords; ++i) {
    const int bytes = count * static_cast<int>(sizeof(T)) - 4 * i;
    const uint32_t mask = bytes >= 4 ? 0xffffffffu : bytes > 0 ? 0xffffu : 0;
    words.words[i] = (words.words[i] & mask) | (from.words[i] & ~mask);
  }
  return bit_cast<Pack<T, N>>(words);
}

// The values of a pack, in the type that is computed in.
template <typename T, int N>
__device__ OPWRIGHT_INLINE void unpack(Pack<T, N> pack, compute_t<T> (&values)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    const auto pairs = bit_cast<detail::Words<N / 2>>(pack);
    OPWRIGHT_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      detail::unpack_pair<T>(pairs.words[i], values[2 * i], values[2 * i + 1]);
    }
  } else {
    OPWRIGHT_UNROLL
    for (int i = 0; i < N; ++i) values[i] = pack.elements[i];
  }
}

template <typename T, int N>
__device__ OPWRIGHT_INLINE Pack<T, N> pack_of(const compute_t<T> (&values)[N]) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    detail::Words<N / 2> pairs;
    OPWRIGHT_UNROLL
    for (int i = 0; i < N / 2; ++i) {
      pairs.words[i] = detail::pair_of<T>(values[2 * i], values[2 * i + 1]);
    }
    return bit_cast<Pack<T, N>>(pairs);
  } else {
    Pack<T, N> pack;
    OPWRIGHT_UNROLL
    for (int i = 0; i < N; ++i) pack.elements[i] = T(values[i]);
    return pack;
  }
}

}  // namespace opwright
