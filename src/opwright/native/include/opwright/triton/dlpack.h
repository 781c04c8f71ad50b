// DLPack's tensors as arguments: a DLTensor, or a pointer to one, of any version of
// <dlpack/dlpack.h>.
//
// The header need not be there: whatever has DLTensor's members is one, such as dlpack::Tensor
// below, which has its layout and stands in for it.
#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>
#include <string>
#include <type_traits>

#include "opwright/triton/arguments.h"
#include "opwright/triton/error.h"

namespace opwright::triton {
namespace dlpack {

struct Device {
  int32_t device_type;  // kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLCUDAManaged = 13
  int32_t device_id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
// The layout of DLTensor.
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
static_assert(sizeof(void*) != 8 || sizeof(Tensor) == 48);

template <typename T>
concept Like = requires(const T& tensor) {
  { tensor.data } -> std::convertible_to<const void*>;
  { tensor.byte_offset } -> std::convertible_to<uint64_t>;
  { tensor.ndim } -> std::convertible_to<int32_t>;
  tensor.device.device_type;
  tensor.device.device_id;
  tensor.dtype.code;
  tensor.dtype.bits;
  tensor.dtype.lanes;
};

// DLDataTypeCode; DType::none: Triton has no such pointer.
constexpr DType find_dtype(int code, int bits, int lanes) {
  if (lanes != 1) return DType::none;
  const auto by_size = [bits](DType of8, DType of16, DType of32, DType of64) {
    return bits == 8    ? of8
           : bits == 16 ? of16
           : bits == 32 ? of32
           : bits == 64 ? of64
                        : DType::none;
  };
  switch (code) {
    case 0:
      return by_size(DType::i8, DType::i16, DType::i32, DType::i64);
    case 1:
      return bits == 1 ? DType::u1 : by_size(DType::u8, DType::u16, DType::u32, DType::u64);
    case 2:
      return by_size(DType::none, DType::fp16, DType::fp32, DType::fp64);
    case 4:
      return bits == 16 ? DType::bf16 : DType::none;
    case 6:
      return bits == 8 ? DType::u1 : DType::none;  // kDLBool
    case 10:
      return DType::fp8e4nv;  // kDLFloat8_e4m3fn
    case 11:
      return DType::fp8e4b8;  // kDLFloat8_e4m3fnuz
    case 12:
      return DType::fp8e5;  // kDLFloat8_e5m2
    case 13:
      return DType::fp8e5b16;  // kDLFloat8_e5m2fnuz
    default:
      return DType::none;
  }
}

[[noreturn]] inline __attribute__((noinline, cold)) void refuse(int code, int bits, int lanes) {
  constexpr const char* kCodes[] = {"int",
                                    "uint",
                                    "float",
                                    "opaque handle",
                                    "bfloat",
                                    "complex",
                                    "bool",
                                    "float8_e3m4",
                                    "float8_e4m3",
                                    "float8_e4m3b11fnuz",
                                    "float8_e4m3fn",
                                    "float8_e4m3fnuz",
                                    "float8_e5m2",
                                    "float8_e5m2fnuz",
                                    "float8_e8m0fnu",
                                    "float6_e2m3fn",
                                    "float6_e3m2fn",
                                    "float4_e2m1fn"};
  throw Error(Cause::kArgument,
              "Triton has no pointer to a DLPack tensor's dtype\n\n  given     " +
                  std::string(code < static_cast<int>(std::size(kCodes)) ? kCodes[code]
                                                                         : "an unknown code") +
                  " of " + std::to_string(bits) + " bits, " + std::to_string(lanes) +
                  " lanes (code " + std::to_string(code) +
                  ")\n  expected  floating point, an integer, or bool, of one lane\n\nhint: pass "
                  "opwright::triton::Pointer{address, DType::u8, device} and let the kernel read "
                  "the bits.");
}

}  // namespace dlpack

template <dlpack::Like T>
struct as_pointer<T> {
  static Pointer get(const T& tensor) {
    const int code = tensor.dtype.code, bits = tensor.dtype.bits, lanes = tensor.dtype.lanes;
    const DType dtype = dlpack::find_dtype(code, bits, lanes);
    if (__builtin_expect(dtype == DType::none, 0)) dlpack::refuse(code, bits, lanes);
    const int type = static_cast<int>(tensor.device.device_type);
    // kDLCUDAManaged is every GPU's; memory of another device is refused at the launch unless the
    // driver knows it.
    const int device = type == 2    ? tensor.device.device_id
                       : type == 13 ? kUnknownDevice
                                    : kHostDevice;
    return {static_cast<const char*>(tensor.data) + tensor.byte_offset, dtype, device};
  }
};
// No DLTensor is None.
template <dlpack::Like T>
struct as_pointer<T*> {
  static Pointer get(T* tensor) {
    return tensor ? as_pointer<std::remove_cv_t<T>>::get(*tensor) : Pointer{};
  }
};

}  // namespace opwright::triton
