// PyTorch's dtypes as Triton's, for aten.h and stable.h; needs PyTorch's header-only part alone.
#pragma once

#include <string>

#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Float8_e4m3fnuz.h>
#include <torch/headeronly/util/Float8_e5m2.h>
#include <torch/headeronly/util/Float8_e5m2fnuz.h>
#include <torch/headeronly/util/Half.h>

#include "opwright/triton/dtype.h"
#include "opwright/triton/error.h"

namespace opwright::triton {

template <>
struct dtype_of<c10::Half> {
  static constexpr DType value = DType::fp16;
};
template <>
struct dtype_of<c10::BFloat16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of<c10::Float8_e4m3fn> {
  static constexpr DType value = DType::fp8e4nv;
};
template <>
struct dtype_of<c10::Float8_e5m2> {
  static constexpr DType value = DType::fp8e5;
};
template <>
struct dtype_of<c10::Float8_e4m3fnuz> {
  static constexpr DType value = DType::fp8e4b8;
};
template <>
struct dtype_of<c10::Float8_e5m2fnuz> {
  static constexpr DType value = DType::fp8e5b16;
};

namespace detail {

// By the number of the dtype, which PyTorch never changes; DType::none: Triton has no such pointer.
struct TorchDTypes {
  DType of[64];
  constexpr TorchDTypes() : of() {
    for (DType& dtype : of) dtype = DType::none;
    const auto set = [this](c10::ScalarType type, DType dtype) {
      of[static_cast<int>(type)] = dtype;
    };
    set(c10::ScalarType::Half, DType::fp16);
    set(c10::ScalarType::BFloat16, DType::bf16);
    set(c10::ScalarType::Float, DType::fp32);
    set(c10::ScalarType::Double, DType::fp64);
    set(c10::ScalarType::Float8_e4m3fn, DType::fp8e4nv);
    set(c10::ScalarType::Float8_e5m2, DType::fp8e5);
    set(c10::ScalarType::Float8_e4m3fnuz, DType::fp8e4b8);
    set(c10::ScalarType::Float8_e5m2fnuz, DType::fp8e5b16);
    set(c10::ScalarType::Char, DType::i8);
    set(c10::ScalarType::Short, DType::i16);
    set(c10::ScalarType::Int, DType::i32);
    set(c10::ScalarType::Long, DType::i64);
    set(c10::ScalarType::Byte, DType::u8);
    set(c10::ScalarType::UInt16, DType::u16);
    set(c10::ScalarType::UInt32, DType::u32);
    set(c10::ScalarType::UInt64, DType::u64);
    set(c10::ScalarType::Bool, DType::u1);
  }
};
inline constexpr TorchDTypes kTorchDTypes;

[[noreturn]] inline __attribute__((noinline, cold)) void refuse_dtype(int type) {
  const bool is_small = type == static_cast<int>(c10::ScalarType::Float8_e8m0fnu) ||
                        type == static_cast<int>(c10::ScalarType::Float4_e2m1fn_x2);
  const bool is_complex = type >= static_cast<int>(c10::ScalarType::ComplexHalf) &&
                          type <= static_cast<int>(c10::ScalarType::ComplexDouble);
  throw Error(Cause::kArgument,
              std::string("Triton has no pointer to a tensor's dtype\n\n  given     ") +
                  c10::toString(static_cast<c10::ScalarType>(type)) +
                  "\n  expected  floating point, an integer, or bool\n\nhint: pass " +
                  (is_complex ? "`torch::view_as_real(tensor)`."
                   : is_small ? "`tensor.view(torch::kUInt8)`; the kernel reads the bits."
                              : "a tensor of another dtype."));
}

inline DType checked_dtype(int type) {
  const DType dtype = kTorchDTypes.of[type & 63];
  if (__builtin_expect(dtype == DType::none, 0)) refuse_dtype(type);
  return dtype;
}

}  // namespace detail

// Triton's dtype for PyTorch's: cx(to_dtype(tensor.scalar_type())). Throws Error if there is none.
inline DType to_dtype(c10::ScalarType type) {
  return detail::checked_dtype(static_cast<int>(type));
}

}  // namespace opwright::triton
