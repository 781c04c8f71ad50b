// The two 16-bit scalar types of PyTorch that C++ lacks, as storage: arithmetic is done in float.
#pragma once

#include <cstdint>

// Before a function that kernels on a GPU may call too.
#if defined(__CUDACC__)
#define OPWRIGHT_HOST_DEVICE __host__ __device__
#else
#define OPWRIGHT_HOST_DEVICE
#endif

namespace opwright {

namespace detail {

OPWRIGHT_HOST_DEVICE inline uint32_t bits_of(float value) {
  return __builtin_bit_cast(uint32_t, value);
}
OPWRIGHT_HOST_DEVICE inline float float_of(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

// binary32 -> bfloat16, to nearest even; a NaN stays a (quiet) NaN.
OPWRIGHT_HOST_DEVICE inline uint16_t bfloat16_bits(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint16_t narrow;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
  return narrow;
#else
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>(value == value ? rounded : quiet);
#endif
}

#if defined(__CUDA_ARCH__)
OPWRIGHT_HOST_DEVICE inline uint16_t half_bits(float value) {
  uint16_t narrow;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
  return narrow;
}
OPWRIGHT_HOST_DEVICE inline float half_value(uint16_t bits) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
  return wide;
}
#elif defined(__FLT16_MAX__) && !defined(__CUDACC__)
#if defined(__aarch64__)
using Binary16 = __fp16;  // of C++, GCC has _Float16 there since 13
#else
using Binary16 = _Float16;
#endif
inline uint16_t half_bits(float value) {
  return __builtin_bit_cast(uint16_t, static_cast<Binary16>(value));
}
inline float half_value(uint16_t bits) {
  return static_cast<float>(__builtin_bit_cast(Binary16, bits));
}
#else
// Compilers without _Float16 (nvcc is one on the host). Scaling by a power of two lets the float
// unit do the rounding of subnormals; the magic addition aligns the mantissa of normals.
OPWRIGHT_HOST_DEVICE inline uint16_t half_bits(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // below the smallest normal half, 2^-14
    const uint32_t sum = bits_of(float_of(magnitude) + 0.5f);
    return static_cast<uint16_t>(sign | (sum - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return static_cast<uint16_t>(sign | (rounded >> 13));
}
OPWRIGHT_HOST_DEVICE inline float half_value(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) return float_of(sign | (magnitude + 0x70000000u));  // inf, nan
  const float scaled = float_of(magnitude) * 0x1p112f;
  return float_of(sign | bits_of(scaled));
}
#endif

}  // namespace detail

struct bfloat16 {
  uint16_t bits;
  bfloat16() = default;
  OPWRIGHT_HOST_DEVICE bfloat16(float value) : bits(detail::bfloat16_bits(value)) {}
  OPWRIGHT_HOST_DEVICE operator float() const {
    return detail::float_of(static_cast<uint32_t>(bits) << 16);
  }
};

struct half {
  uint16_t bits;
  half() = default;
  OPWRIGHT_HOST_DEVICE half(float value) : bits(detail::half_bits(value)) {}
  OPWRIGHT_HOST_DEVICE operator float() const { return detail::half_value(bits); }
};

namespace detail {
template <typename T>
struct Compute {
  using type = T;
};
template <>
struct Compute<half> {
  using type = float;
};
template <>
struct Compute<bfloat16> {
  using type = float;
};
}  // namespace detail

// The type to compute in for elements of type T: float for the 16-bit types, else T itself.
template <typename T>
using compute_t = typename detail::Compute<T>::type;

namespace detail {
// PyTorch's number for each element type (c10::ScalarType); part of its stable ABI.
template <typename T>
inline constexpr int kScalarType = -1;
template <>
inline constexpr int kScalarType<uint8_t> = 0;
template <>
inline constexpr int kScalarType<int8_t> = 1;
template <>
inline constexpr int kScalarType<int16_t> = 2;
template <>
inline constexpr int kScalarType<int32_t> = 3;
template <>
inline constexpr int kScalarType<int64_t> = 4;
template <>
inline constexpr int kScalarType<half> = 5;
template <>
inline constexpr int kScalarType<float> = 6;
template <>
inline constexpr int kScalarType<double> = 7;
template <>
inline constexpr int kScalarType<bool> = 11;
template <>
inline constexpr int kScalarType<bfloat16> = 15;
}  // namespace detail

}  // namespace opwright
