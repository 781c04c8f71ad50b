// The adapter of DLPack: its own layout, and any struct that has DLTensor's members.
#include <opwright/triton/dlpack.h>

#include "check.h"

// As dlpack.h has it, with enums for numbers.
typedef enum : int {
  kDLCPU = 1,
  kDLCUDA = 2,
  kDLCUDAHost = 3,
  kDLROCM = 10,
  kDLCUDAManaged = 13
} DLDeviceType;
typedef struct {
  DLDeviceType device_type;
  int32_t device_id;
} DLDevice;
typedef struct {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;

namespace ot = opwright::triton;
using ot::DType;

static ot::Pointer pointer_to(int code, int bits, int lanes = 1) {
  ot::dlpack::Tensor tensor{};
  tensor.dtype = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits),
                  static_cast<uint16_t>(lanes)};
  tensor.device = {kDLCUDA, 0};
  return ot::as_pointer<ot::dlpack::Tensor>::get(tensor);
}

int main() {
  const struct {
    int code, bits;
    DType dtype;
  } known[] = {{0, 8, DType::i8},     {0, 16, DType::i16},      {0, 32, DType::i32},
               {0, 64, DType::i64},   {1, 8, DType::u8},        {1, 16, DType::u16},
               {1, 32, DType::u32},   {1, 64, DType::u64},      {2, 16, DType::fp16},
               {2, 32, DType::fp32},  {2, 64, DType::fp64},     {4, 16, DType::bf16},
               {6, 8, DType::u1},     {10, 8, DType::fp8e4nv},  {11, 8, DType::fp8e4b8},
               {12, 8, DType::fp8e5}, {13, 8, DType::fp8e5b16}, {1, 1, DType::u1}};
  for (const auto& row : known) EXPECT(pointer_to(row.code, row.bits).dtype == row.dtype);
  EXPECT(refuses([] { pointer_to(5, 64); }, "given     complex of 64 bits, 1 lanes (code 5)"));
  EXPECT(refuses([] { pointer_to(2, 32, 4); }, "float of 32 bits, 4 lanes"));
  EXPECT(refuses([] { pointer_to(14, 8); }, "float8_e8m0fnu"));
  EXPECT(refuses([] { pointer_to(99, 8); }, "an unknown code of 8 bits"));

  float memory[4];
  DLTensor tensor{memory, {kDLCUDA, 3}, 0, {2, 32, 1}, nullptr, nullptr, 8};
  static_assert(sizeof(DLTensor) == sizeof(ot::dlpack::Tensor));
  EXPECT(is_same(ot::as_pointer<DLTensor>::get(tensor), {memory + 2, DType::fp32, 3}));
  const DLTensor* pointer = &tensor;
  EXPECT(is_same(ot::as_pointer<const DLTensor*>::get(pointer), {memory + 2, DType::fp32, 3}));
  EXPECT(is_same(ot::as_pointer<const DLTensor*>::get(nullptr), {}));
  const auto device_of = [&](DLDeviceType type) {
    tensor.device.device_type = type;
    return ot::as_pointer<DLTensor*>::get(&tensor).device;
  };
  EXPECT(device_of(kDLCUDAManaged) == ot::kUnknownDevice);
  for (const DLDeviceType type : {kDLCPU, kDLCUDAHost, kDLROCM})
    EXPECT(device_of(type) == ot::kHostDevice);

  // In a call: a class of its own for each dtype, and the address with its offset.
  tensor.device = {kDLCUDA, 0};
  ot::detail::Capture<DLTensor, DLTensor*> capture(tensor, &tensor);
  EXPECT(capture.slots[0] == reinterpret_cast<uint64_t>(memory + 2) &&
         capture.slots[1] == capture.slots[0]);
  EXPECT(capture.call.devices == 1);
}
