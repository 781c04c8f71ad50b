// The vector half of vec.h: what a Vec can do, by target. Include vec.h.
#pragma once

namespace opwright {

// A SIMD register of float or double.
template <typename T>
using Vec = typename detail::VecOf<T>::type;

// Elements of T that one load brings: the lanes of the Vec that T is computed in.
template <typename T>
inline constexpr int kLanes = kVectorBytes / sizeof(compute_t<T>);

#define OPWRIGHT_SIMD_FMA(V, BUILTIN, ...) \
  OPWRIGHT_INLINE V fma(V a, V b, V c) { return BUILTIN(a, b, c __VA_OPT__(, ) __VA_ARGS__); }

#if defined(__AVX512F__)
// Builtins take a mask of lanes (-1: all) and a rounding mode (4: the current one).
OPWRIGHT_SIMD_FMA(detail::FloatVec, __builtin_ia32_vfmaddps512_mask, -1, 4)
OPWRIGHT_SIMD_FMA(detail::DoubleVec, __builtin_ia32_vfmaddpd512_mask, -1, 4)
#elif defined(__clang__) && __has_builtin(__builtin_elementwise_fma)
OPWRIGHT_SIMD_FMA(detail::FloatVec, __builtin_elementwise_fma)
OPWRIGHT_SIMD_FMA(detail::DoubleVec, __builtin_elementwise_fma)
#elif defined(__AVX2__) && defined(__FMA__)
OPWRIGHT_SIMD_FMA(detail::FloatVec, __builtin_ia32_vfmaddps256)
OPWRIGHT_SIMD_FMA(detail::DoubleVec, __builtin_ia32_vfmaddpd256)
#elif OPWRIGHT_HAS_FMA
// No name for the instruction that all compilers share (aarch64, x86 with FMA but 16-byte vectors):
// the loop over lanes is straight-line code that they turn into it.
template <typename V>
OPWRIGHT_INLINE V fma_lanes(V a, V b, V c) {
  V result;
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(Lane<V>)); ++i) {
    result[i] =
        fma(static_cast<Lane<V>>(a[i]), static_cast<Lane<V>>(b[i]), static_cast<Lane<V>>(c[i]));
  }
  return result;
}
OPWRIGHT_SIMD_FMA(detail::FloatVec, fma_lanes)
OPWRIGHT_SIMD_FMA(detail::DoubleVec, fma_lanes)
#else
OPWRIGHT_INLINE detail::FloatVec fma(detail::FloatVec a, detail::FloatVec b, detail::FloatVec c) {
  return a * b + c;
}
OPWRIGHT_INLINE detail::DoubleVec fma(detail::DoubleVec a, detail::DoubleVec b,
                                      detail::DoubleVec c) {
  return a * b + c;
}
#endif
#undef OPWRIGHT_SIMD_FMA

#if defined(__AVX512F__)

#if !defined(__clang__)
// Clang makes these instructions of the comparisons in vec.h.
OPWRIGHT_INLINE detail::FloatVec min(detail::FloatVec value, detail::FloatVec limit) {
  return __builtin_ia32_minps512_mask(limit, value, value, -1, 4);
}
OPWRIGHT_INLINE detail::FloatVec max(detail::FloatVec value, detail::FloatVec limit) {
  return __builtin_ia32_maxps512_mask(limit, value, value, -1, 4);
}
OPWRIGHT_INLINE detail::DoubleVec min(detail::DoubleVec value, detail::DoubleVec limit) {
  return __builtin_ia32_minpd512_mask(limit, value, value, -1, 4);
}
OPWRIGHT_INLINE detail::DoubleVec max(detail::DoubleVec value, detail::DoubleVec limit) {
  return __builtin_ia32_maxpd512_mask(limit, value, value, -1, 4);
}
#endif

#if defined(__AVX512DQ__)
// vrange, selecting the smaller magnitude (2) with a cleared sign (2 << 2).
OPWRIGHT_INLINE detail::FloatVec min_abs(detail::FloatVec value, detail::FloatVec limit) {
  return __builtin_ia32_rangeps512_mask(value, limit, 10, value, -1, 4);
}
OPWRIGHT_INLINE detail::DoubleVec min_abs(detail::DoubleVec value, detail::DoubleVec limit) {
  return __builtin_ia32_rangepd512_mask(value, limit, 10, value, -1, 4);
}
#endif

// scalef multiplies by 2^floor(power) for any power, and rounds once.
OPWRIGHT_INLINE detail::FloatVec scale(detail::FloatVec value, detail::FloatVec power) {
  return __builtin_ia32_scalefps512_mask(value, power, value, -1, 4);
}
OPWRIGHT_INLINE detail::DoubleVec scale(detail::DoubleVec value, detail::DoubleVec power) {
  return __builtin_ia32_scalefpd512_mask(value, power, value, -1, 4);
}

OPWRIGHT_INLINE detail::FloatVec rough_reciprocal(detail::FloatVec value) {
  return __builtin_ia32_rcp14ps512_mask(value, value, -1);
}

// A division occupies the divider for 16 cycles (24 for double); Newton's steps from the 14-bit
// estimate take a third of that from the multipliers. The error squares with each step: 2^-14,
// 2^-28, 2^-56; the last rounding leaves below 0.6 ulp.
OPWRIGHT_INLINE detail::FloatVec reciprocal(detail::FloatVec value) {
  const detail::FloatVec estimate = rough_reciprocal(value);
  const detail::FloatVec error = fma(-value, estimate, splat<detail::FloatVec>(1.0f));
  return fma(estimate, error, estimate);
}
OPWRIGHT_INLINE detail::DoubleVec reciprocal(detail::DoubleVec value) {
  const detail::DoubleVec one = splat<detail::DoubleVec>(1.0);
  detail::DoubleVec estimate = __builtin_ia32_rcp14pd512_mask(value, value, -1);
  estimate = fma(estimate, fma(-value, estimate, one), estimate);
  return fma(estimate, fma(-value, estimate, one), estimate);
}

#else

OPWRIGHT_INLINE detail::FloatVec reciprocal(detail::FloatVec value) { return 1.0f / value; }
OPWRIGHT_INLINE detail::DoubleVec reciprocal(detail::DoubleVec value) { return 1.0 / value; }

#endif

OPWRIGHT_INLINE Vec<float> load(const float* from) {
  Vec<float> v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
OPWRIGHT_INLINE Vec<double> load(const double* from) {
  Vec<double> v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
OPWRIGHT_INLINE void store(float* to, Vec<float> v) { __builtin_memcpy(to, &v, sizeof v); }
OPWRIGHT_INLINE void store(double* to, Vec<double> v) { __builtin_memcpy(to, &v, sizeof v); }

namespace detail {

// Between the 16-bit integers of a half vector and the high halves of 32-bit lanes. GCC expands the
// portable form to three times the instructions.
#if defined(__AVX512BW__) && !defined(__clang__)
typedef int16_t Int16x16 __attribute__((vector_size(32)));
typedef int32_t Int32x16 __attribute__((vector_size(64)));
typedef uint16_t UInt16x32 __attribute__((vector_size(64)));

OPWRIGHT_INLINE UInt32Vec high_halves(UInt16HalfVec bits) {
  const auto wide = __builtin_ia32_pmovzxwd512_mask(bit_cast<Int16x16>(bits), Int32x16{}, -1);
  return bit_cast<UInt32Vec>(wide) << 16;
}
OPWRIGHT_INLINE UInt16HalfVec take_high_halves(UInt32Vec bits) {
  const UInt16x32 odd = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const UInt16x32 words = __builtin_shuffle(bit_cast<UInt16x32>(bits), odd);
  UInt16HalfVec low;
  __builtin_memcpy(&low, &words, sizeof low);
  return low;
}
#else
OPWRIGHT_INLINE UInt32Vec high_halves(UInt16HalfVec bits) {
  return __builtin_convertvector(bits, UInt32Vec) << 16;
}
OPWRIGHT_INLINE UInt16HalfVec take_high_halves(UInt32Vec bits) {
  return __builtin_convertvector(bits >> 16, UInt16HalfVec);
}
#endif

}  // namespace detail

OPWRIGHT_INLINE Vec<float> load(const bfloat16* from) {
  detail::UInt16HalfVec bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return bit_cast<Vec<float>>(detail::high_halves(bits));
}

// In integers: the AVX512_BF16 instruction flushes denormals to zero.
OPWRIGHT_INLINE void store(bfloat16* to, Vec<float> v) {
  const detail::UInt32Vec bits = bit_cast<detail::UInt32Vec>(v);
  const detail::UInt32Vec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const detail::UInt32Vec quiet = bits | 0x400000u;
  const detail::UInt16HalfVec narrow = detail::take_high_halves((v == v) ? rounded : quiet);
  __builtin_memcpy(to, &narrow, sizeof narrow);
}

#if defined(__AVX512F__)
OPWRIGHT_INLINE Vec<float> load(const half* from) {
  typedef int16_t Int16x16 __attribute__((vector_size(32)));
  Int16x16 bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return __builtin_ia32_vcvtph2ps512_mask(bits, Vec<float>{}, -1, 4);
}
OPWRIGHT_INLINE void store(half* to, Vec<float> v) {
  typedef int16_t Int16x16 __attribute__((vector_size(32)));
  const Int16x16 bits = __builtin_ia32_vcvtps2ph512_mask(v, 4, Int16x16{}, -1);
  __builtin_memcpy(to, &bits, sizeof bits);
}
#elif defined(__AVX2__) && defined(__F16C__)
OPWRIGHT_INLINE Vec<float> load(const half* from) {
  typedef int16_t Int16x8 __attribute__((vector_size(16)));
  Int16x8 bits;
  __builtin_memcpy(&bits, from, sizeof bits);
#if __has_builtin(__builtin_ia32_vcvtph2ps256)
  return __builtin_ia32_vcvtph2ps256(bits);
#else
  typedef _Float16 Float16x8 __attribute__((vector_size(16)));
  return __builtin_convertvector(bit_cast<Float16x8>(bits), Vec<float>);
#endif
}
OPWRIGHT_INLINE void store(half* to, Vec<float> v) {
  typedef int16_t Int16x8 __attribute__((vector_size(16)));
  const Int16x8 bits = __builtin_ia32_vcvtps2ph256(v, 4);
  __builtin_memcpy(to, &bits, sizeof bits);
}
#else
OPWRIGHT_INLINE Vec<float> load(const half* from) {
  Vec<float> v;
  for (int i = 0; i < kLanes<half>; ++i) v[i] = from[i];
  return v;
}
OPWRIGHT_INLINE void store(half* to, Vec<float> v) {
  for (int i = 0; i < kLanes<half>; ++i) to[i] = half(v[i]);
}
#endif

// Through a copy of full width, so that nothing outside from[0..count) is touched.
template <typename T>
inline Vec<compute_t<T>> load_partial(const T* from, int count) {
  T lanes[kLanes<T>] = {};
  __builtin_memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}
template <typename T>
inline void store_partial(T* to, Vec<compute_t<T>> v, int count) {
  T lanes[kLanes<T>];
  store(lanes, v);
  __builtin_memcpy(to, lanes, count * sizeof(T));
}

}  // namespace opwright
