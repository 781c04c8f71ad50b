// The element types of pointers, by Triton's names.
#pragma once

#include <cstdint>
#include <type_traits>

// CUDA's 8- and 16-bit types, so that pointers to them carry their element type without CUDA's
// headers.
struct __half;
struct __nv_bfloat16;
struct __nv_fp8_e4m3;
struct __nv_fp8_e5m2;

namespace opwright {
struct half;
struct bfloat16;
}  // namespace opwright

namespace opwright::triton {

enum class DType : uint8_t {
  fp16,
  bf16,
  fp32,
  fp64,
  fp8e4nv,
  fp8e5,
  fp8e4b8,
  fp8e5b16,
  i8,
  i16,
  i32,
  i64,
  u8,
  u16,
  u32,
  u64,
  u1,
  none,  // what an undefined tensor has: it is passed as None
};

inline constexpr int kDTypeCount = static_cast<int>(DType::none);
inline constexpr const char* kDTypeNames[] = {
    "fp16", "bf16", "fp32", "fp64", "fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16", "i8",
    "i16",  "i32",  "i64",  "u8",   "u16",     "u32",   "u64",     "u1",       "none"};

// The element type of a C++ type; specialise it for 16-bit and 8-bit types of your own.
template <typename T>
struct dtype_of {
  static_assert(std::is_arithmetic_v<T>,
                "a pointer to this type has no Triton dtype: specialise opwright::triton::dtype_of "
                "for it, or pass opwright::triton::Pointer{address, DType::bf16}");
  static constexpr DType pick() {
    if (std::is_same_v<T, bool>) return DType::u1;
    if (std::is_floating_point_v<T>) return sizeof(T) == 4 ? DType::fp32 : DType::fp64;
    const DType of_int[] = {DType::i8, DType::i16, DType::i32, DType::i64};
    const DType of_unsigned[] = {DType::u8, DType::u16, DType::u32, DType::u64};
    const int index = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 1 : sizeof(T) == 4 ? 2 : 3;
    return std::is_signed_v<T> ? of_int[index] : of_unsigned[index];
  }
  static constexpr DType value = pick();
};
template <>
struct dtype_of<__half> {
  static constexpr DType value = DType::fp16;
};
template <>
struct dtype_of<__nv_bfloat16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<__nv_fp8_e4m3> {
  static constexpr DType value = DType::fp8e4nv;
};
template <>
struct dtype_of<__nv_fp8_e5m2> {
  static constexpr DType value = DType::fp8e5;
};
template <>
struct dtype_of<opwright::half> {
  static constexpr DType value = DType::fp16;
};
template <>
struct dtype_of<opwright::bfloat16> {
  static constexpr DType value = DType::bf16;
};

}  // namespace opwright::triton
