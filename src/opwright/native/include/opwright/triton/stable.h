// torch::stable::Tensor as an argument: extensions of PyTorch's stable ABI, one binary for many
// versions.
//
// As in aten.h: passed by its address, and an undefined tensor is None.
#pragma once

#include <string>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include "opwright/triton/arguments.h"
#include "opwright/triton/driver.h"
#include "opwright/triton/error.h"
#include "opwright/triton/torch_dtype.h"

// Of libtorch_cuda; weak, so that what is built without CUDA is loaded with it and the reverse.
extern "C" [[gnu::weak]] AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                           void** stream);

namespace opwright::triton {
namespace detail {

[[noreturn]] inline __attribute__((noinline, cold)) void refuse_stable_tensor() {
  throw Error(Cause::kArgument,
              "PyTorch refused to show a tensor's address, dtype or device\n\nhint: a tensor "
              "of a subclass or of FakeTensor has no memory.");
}

inline int device_of(AtenTensorHandle handle) {
  int32_t type = 0, device = 0;
  if (aoti_torch_get_device_type(handle, &type) != 0 ||
      aoti_torch_get_device_index(handle, &device) != 0) {
    refuse_stable_tensor();
  }
  return type == static_cast<int32_t>(c10::DeviceType::CUDA) ? device : kHostDevice;
}

inline bool is_defined(AtenTensorHandle handle) {
  bool found = false;
  return handle && aoti_torch_is_defined(handle, &found) == 0 && found;
}

}  // namespace detail

template <>
struct as_pointer<torch::stable::Tensor> {
  // The functions of the ABI themselves: the members of Tensor convert dtypes one by one.
  static Pointer get(const torch::stable::Tensor& tensor) {
    const AtenTensorHandle handle = tensor.get();
    if (!detail::is_defined(handle)) return {};
    void* address = nullptr;
    int32_t type = 0;
    if (aoti_torch_get_data_ptr(handle, &address) != 0 ||
        aoti_torch_get_dtype(handle, &type) != 0) {
      detail::refuse_stable_tensor();
    }
    return {address, detail::checked_dtype(type), detail::device_of(handle)};
  }
};

// PyTorch's current stream on the GPU of a tensor, the null stream for one that is on none. The
// device must be current at the launch: `torch::stable::accelerator::DeviceGuard
// guard(tensor.get_device_index());`.
inline Stream current_stream(const torch::stable::Tensor& tensor) {
  const int device =
      detail::is_defined(tensor.get()) ? detail::device_of(tensor.get()) : kHostDevice;
  if (device < 0) return nullptr;
  void* stream = nullptr;
  if (!aoti_torch_get_current_cuda_stream ||
      aoti_torch_get_current_cuda_stream(device, &stream) != 0) {
    throw Error(Cause::kDriver, "PyTorch has no current stream for cuda:" + std::to_string(device));
  }
  return static_cast<Stream>(stream);
}

}  // namespace opwright::triton
