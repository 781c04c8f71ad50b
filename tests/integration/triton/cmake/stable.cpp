// The adapter of torch::stable::Tensor, which asks PyTorch through the C functions of its stable
// ABI.
#include <chrono>
#include <cstring>

#include <opwright/triton/stable.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "check.h"

namespace ot = opwright::triton;
using ot::DType;

static ot::Pointer pointer_to(const torch::stable::Tensor& tensor) {
  return ot::as_pointer<torch::stable::Tensor>::get(tensor);
}

static torch::stable::Tensor make_tensor(int32_t dtype) {
  const int64_t size = 64, stride = 1;
  AtenTensorHandle handle = nullptr;
  EXPECT(aoti_torch_empty_strided(1, &size, &stride, dtype, aoti_torch_device_type_cpu(), 0,
                                  &handle) == 0);
  return torch::stable::Tensor(handle);
}

int main(int argc, char** argv) {
  const torch::stable::Tensor x = make_tensor(aoti_torch_dtype_float32());
  if (argc > 1 && std::strcmp(argv[1], "--measure") == 0) {
    double least = 1e9;
    for (int sample = 0; sample < 20; ++sample) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < 300'000; ++i) {
        const ot::Pointer pointer = pointer_to(x);
        asm volatile("" : : "m"(pointer) : "memory");
      }
      const std::chrono::duration<double, std::nano> taken =
          std::chrono::steady_clock::now() - start;
      least = std::min(least, taken.count() / 300'000);
    }
    std::printf("a tensor: %.1f ns\n", least);
    return 0;
  }
  const struct {
    int32_t type;
    DType dtype;
  } known[] = {{aoti_torch_dtype_float32(), DType::fp32},
               {aoti_torch_dtype_float16(), DType::fp16},
               {aoti_torch_dtype_bfloat16(), DType::bf16},
               {aoti_torch_dtype_float64(), DType::fp64},
               {aoti_torch_dtype_int8(), DType::i8},
               {aoti_torch_dtype_int16(), DType::i16},
               {aoti_torch_dtype_int32(), DType::i32},
               {aoti_torch_dtype_int64(), DType::i64},
               {aoti_torch_dtype_uint8(), DType::u8},
               {aoti_torch_dtype_uint16(), DType::u16},
               {aoti_torch_dtype_uint32(), DType::u32},
               {aoti_torch_dtype_uint64(), DType::u64},
               {aoti_torch_dtype_bool(), DType::u1},
               {aoti_torch_dtype_float8_e4m3fn(), DType::fp8e4nv},
               {aoti_torch_dtype_float8_e5m2(), DType::fp8e5},
               {aoti_torch_dtype_float8_e4m3fnuz(), DType::fp8e4b8},
               {aoti_torch_dtype_float8_e5m2fnuz(), DType::fp8e5b16}};
  for (const auto& row : known) {
    const torch::stable::Tensor tensor = make_tensor(row.type);
    EXPECT(is_same(pointer_to(tensor), {tensor.data_ptr(), row.dtype, ot::kHostDevice}));
  }
  EXPECT(refuses([] { pointer_to(make_tensor(aoti_torch_dtype_complex64())); },
                 "given     ComplexFloat"));

  torch::stable::Tensor moved = x;
  const torch::stable::Tensor kept = std::move(moved);
  EXPECT(is_same(pointer_to(moved), {}));
  EXPECT(is_same(pointer_to(torch::stable::Tensor()), {}));
  EXPECT(ot::current_stream(x) == nullptr);
  EXPECT(ot::current_stream(torch::stable::Tensor()) == nullptr);
  EXPECT(ot::current_stream(make_tensor(aoti_torch_dtype_complex64())) == nullptr);

  const ot::Kernel add(KERNEL_FILE, "add_kernel");
  const std::optional<torch::stable::Tensor> some = x;
  add(ot::current_stream(x), 5, x, some, x, 64, ot::cx(64));
}
