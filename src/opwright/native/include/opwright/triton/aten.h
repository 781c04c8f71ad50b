// at::Tensor as an argument: kernel(current_stream(x), grid, x, y, out, n).
//
// A tensor is passed by its address, without touching its reference count; the copy of a lazily
// copied one is made, because the kernel may write to it (see read_only). An undefined tensor is
// None, as is an empty std::optional. Compiles with and without a torch with CUDA and without
// CUDA's headers.
#pragma once

#include <optional>

#include <ATen/core/TensorBase.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "opwright/triton/arguments.h"
#include "opwright/triton/runtime.h"
#include "opwright/triton/torch_dtype.h"

// Of libtorch_cuda; weak, so that what is built without CUDA is loaded with it and the reverse.
extern "C" {
struct CUDAStreamGuardOpaque;
[[gnu::weak]] int32_t aoti_torch_create_cuda_stream_guard(void* stream, int32_t device,
                                                          CUDAStreamGuardOpaque** guard);
[[gnu::weak]] int32_t aoti_torch_delete_cuda_stream_guard(CUDAStreamGuardOpaque* guard);
}

namespace opwright::triton {
namespace detail {

inline int device_of(const at::TensorBase& tensor) {
  const c10::Device device = tensor.device();
  return device.is_cuda() ? device.index() : kHostDevice;
}

}  // namespace detail

template <>
struct as_pointer<at::TensorBase> {
  static Pointer get(const at::TensorBase& tensor) {
    if (!tensor.defined()) return {};
    return {tensor.mutable_data_ptr(),
            detail::checked_dtype(static_cast<int>(tensor.scalar_type())),
            detail::device_of(tensor)};
  }
};
template <>
struct as_pointer<at::Tensor> : as_pointer<at::TensorBase> {};

// A tensor that the kernel does not write to: a lazily copied one stays shared.
inline Pointer read_only(const at::TensorBase& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr(), detail::checked_dtype(static_cast<int>(tensor.scalar_type())),
          detail::device_of(tensor)};
}

// PyTorch's current stream on a device, which must be a GPU for there to be one; else the null
// stream. The device must be current at the launch: `const at::DeviceGuard
// guard(tensor.device());`.
inline Stream current_stream(c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  const c10::impl::DeviceGuardImplInterface* guard = c10::impl::getDeviceGuardImpl(device.type());
  return static_cast<Stream>(guard->getStreamNativeHandle(guard->getStream(device)));
}
inline Stream current_stream(const at::TensorBase& tensor) {
  return current_stream(tensor.device());
}

// Scratch memory of kernels from PyTorch's caching allocator:
// set_scratch_allocator(caching_allocator()).
inline ScratchAllocator caching_allocator() {
  const auto allocate = [](size_t bytes, size_t, Stream stream, void*) -> void* {
    const c10::Device device = c10::impl::getDeviceGuardImpl(c10::kCUDA)->getDevice();
    c10::Allocator* const allocator = c10::GetAllocator(c10::kCUDA);
    if (current_stream(device) == stream) return allocator->raw_allocate(bytes);
    // The allocator gives memory to the current stream: it is the launch's for the moment.
    CUDAStreamGuardOpaque* guard = nullptr;
    if (!aoti_torch_create_cuda_stream_guard ||
        aoti_torch_create_cuda_stream_guard(stream, device.index(), &guard) != 0) {
      return nullptr;
    }
    void* memory = nullptr;
    try {
      memory = allocator->raw_allocate(bytes);
    } catch (...) {
      aoti_torch_delete_cuda_stream_guard(guard);
      throw;
    }
    aoti_torch_delete_cuda_stream_guard(guard);
    return memory;
  };
  const auto release = [](void* memory, Stream, void*) {
    c10::GetAllocator(c10::kCUDA)->raw_deallocate(memory);
  };
  return {allocate, release, nullptr};
}

}  // namespace opwright::triton
