// Explicit SIMD without <immintrin.h> (which costs a quarter of a second in every compile): the
// vector types of GCC (>= 11) and Clang (>= 14), as wide as the target allows.
//
//   Vec<float> v = load(p);        from float, double, half or bfloat16: the 16-bit types widen
//   store(p, v * 2.0f + w);        to float and narrow to nearest even
//   load_partial(p, n)             n < kLanes<T> elements, zeros after them; store_partial(p, v, n)
//   select(a < b, x, y)            lane by lane; any comparison is a mask
//
// + - * / < and v[i] are the compiler's own. What is named here (fma, min, ...) exists for float
// and double too, so one template serves scalars, vectors and, under nvcc, device code.
#pragma once

#include <cstdint>

#include "opwright/types.h"

#if defined(__CUDACC__)
#define OPWRIGHT_INLINE __forceinline__
#define OPWRIGHT_UNROLL _Pragma("unroll")
#else
#define OPWRIGHT_INLINE inline __attribute__((always_inline))
#define OPWRIGHT_UNROLL _Pragma("GCC unroll 16")
#endif

#if defined(__CUDACC__) || defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
#define OPWRIGHT_HAS_FMA 1
#else
#define OPWRIGHT_HAS_FMA 0
#endif

namespace opwright {

// Whether 2^x and 1/x in float are instructions, right to 2^-22 and with denormals as 0.
#if defined(__CUDA_ARCH__)
inline constexpr bool kHasSpecialUnit = true;
#else
inline constexpr bool kHasSpecialUnit = false;
#endif

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

namespace detail {

template <typename V>
struct LaneOf {
  using type = V;
};
template <typename T>
struct VecOf;

#if !defined(__CUDACC__)
// Vectors of the width of a Vec<float> (32-bit lanes) or of a Vec<double> (64-bit lanes).
typedef float FloatVec __attribute__((vector_size(kVectorBytes)));
typedef int32_t Int32Vec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t UInt32Vec __attribute__((vector_size(kVectorBytes)));
typedef uint16_t UInt16HalfVec __attribute__((vector_size(kVectorBytes / 2)));
typedef double DoubleVec __attribute__((vector_size(kVectorBytes)));
typedef int64_t Int64Vec __attribute__((vector_size(kVectorBytes)));
typedef uint64_t UInt64Vec __attribute__((vector_size(kVectorBytes)));

template <>
struct VecOf<float> {
  using type = FloatVec;
};
template <>
struct VecOf<double> {
  using type = DoubleVec;
};
template <>
struct LaneOf<FloatVec> {
  using type = float;
};
template <>
struct LaneOf<DoubleVec> {
  using type = double;
};
#endif

// The integers that hold the bits of V.
template <typename V>
struct BitsOf;
template <>
struct BitsOf<float> {
  using type = uint32_t;
};
template <>
struct BitsOf<double> {
  using type = uint64_t;
};
#if !defined(__CUDACC__)
template <>
struct BitsOf<FloatVec> {
  using type = UInt32Vec;
};
template <>
struct BitsOf<DoubleVec> {
  using type = UInt64Vec;
};
#endif

template <typename S>
struct FloatFormat;
template <>
struct FloatFormat<float> {
  static constexpr int kMantissaBits = 23;
  static constexpr int kBias = 127;
  static constexpr uint32_t kMagnitude = 0x7fffffffu;
  // Added to a value below 2^22 it rounds the value to an integer, in the low bits of the sum.
  static constexpr float kRounder = 0x1.8p23f;
};
template <>
struct FloatFormat<double> {
  static constexpr int kMantissaBits = 52;
  static constexpr int kBias = 1023;
  static constexpr uint64_t kMagnitude = 0x7fffffffffffffffull;
  static constexpr double kRounder = 0x1.8p52;
};

}  // namespace detail

// The lane type of a vector; a scalar is its own.
template <typename V>
using Lane = typename detail::LaneOf<V>::type;

// Every lane set to `value`. (Subtracting +0 changes no value, -0 and NaN included, so the compiler
// folds it.)
template <typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V splat(Lane<V> value) {
  return value - V{};
}

template <typename To, typename From>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE To bit_cast(From value) {
  return __builtin_bit_cast(To, value);
}

template <typename Mask, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V select(Mask mask, V if_true, V if_false) {
  return mask ? if_true : if_false;
}

template <typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V abs(V value) {
#if defined(__CUDA_ARCH__)
  return ::fabs(value);  // an operand modifier: no instruction
#else
  using Bits = typename detail::BitsOf<V>::type;
  return bit_cast<V>(bit_cast<Bits>(value) & detail::FloatFormat<Lane<V>>::kMagnitude);
#endif
}

// a * b + c, rounded once where the target has the instruction (OPWRIGHT_HAS_FMA), else twice.
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE float fma(float a, float b, float c) {
#if defined(__CUDACC__)
  return ::fmaf(a, b, c);
#elif OPWRIGHT_HAS_FMA
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE double fma(double a, double b, double c) {
#if defined(__CUDACC__)
  return ::fma(a, b, c);
#elif OPWRIGHT_HAS_FMA
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// The smaller and the larger of a value and a limit; a NaN in `value` stays.
template <typename S>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE S min(S value, S limit) {
  return limit < value ? limit : value;
}
template <typename S>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE S max(S value, S limit) {
  return limit > value ? limit : value;
}

#if defined(__CUDACC__)
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE float min(float value, float limit) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(limit));
  return value;
#else
  return limit < value ? limit : value;
#endif
}
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE float max(float value, float limit) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(value) : "f"(limit));
  return value;
#else
  return limit > value ? limit : value;
#endif
}
#endif

// min(|value|, limit); a NaN becomes NaN or the limit.
template <typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V min_abs(V value, V limit) {
  return min(abs(value), limit);
}

// 1/value to 1 ulp, for a normal value whose reciprocal is normal too.
template <typename S>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE S reciprocal(S value) {
  return 1 / value;
}
// 1/value to 2^-14 or better, same domain.
template <typename S>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE S rough_reciprocal(S value) {
  return 1 / value;
}

#if defined(__CUDA_ARCH__)
// 2^power; a denormal result is 0.
__device__ OPWRIGHT_INLINE float exp2_instruction(float power) {
  asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(power));
  return power;
}
// 2^power, denormal results included (three instructions more).
__device__ OPWRIGHT_INLINE float exp2_instruction_all(float power) {
  asm("ex2.approx.f32 %0, %0;" : "+f"(power));
  return power;
}
__device__ OPWRIGHT_INLINE float rough_reciprocal(float value) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(value));
  return value;
}
// One step of Newton's doubles the 22 bits; the division that / stands for has a slow path.
__device__ OPWRIGHT_INLINE float reciprocal(float value) {
  const float rough = rough_reciprocal(value);
  return ::fmaf(::fmaf(-value, rough, 1.0f), rough, rough);
}
// 20 bits, 40, 80.
__device__ OPWRIGHT_INLINE double reciprocal(double value) {
  double r;
  asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(r) : "d"(value));
  r = ::fma(::fma(-value, r, 1.0), r, r);
  return ::fma(::fma(-value, r, 1.0), r, r);
}
#endif

// 2^(power + shift) for an integer-valued power; the result must be a normal number.
template <int kShift = 0, typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V exp2_integer(V power) {
  using Format = detail::FloatFormat<Lane<V>>;
  using Bits = typename detail::BitsOf<V>::type;
  const V shifted = power + (Format::kRounder + (Format::kBias + kShift));
  return bit_cast<V>(bit_cast<Bits>(shifted) << Format::kMantissaBits);
}

// value * 2^power for an integer-valued power, rounded once: right for denormal results and for
// overflow. |power| below twice the format's exponent range; |value| near 1.
template <typename V>
OPWRIGHT_HOST_DEVICE OPWRIGHT_INLINE V scale(V value, V power) {
  constexpr Lane<V> kRounder = detail::FloatFormat<Lane<V>>::kRounder;
  const V half = (power * Lane<V>(0.5) + kRounder) - kRounder;
  return value * exp2_integer(half) * exp2_integer(power - half);
}

}  // namespace opwright

#if !defined(__CUDACC__)
#include "opwright/vec_simd.h"
#endif
