// What a launch needs to know of the device, and launches that overlap their predecessor.
#pragma once

#include <cuda_runtime.h>

#include "opwright/entry.h"

namespace opwright {

struct Device {
  int multiprocessors = 0;
  int capability = 0;    // 90 is compute capability 9.0
  int shared_bytes = 0;  // the most of a block, if its kernel asks for them
};

// The current device's properties, asked for once by each thread.
inline Device current_device() {
  constexpr int kDevices = 64;
  static thread_local Device known[kDevices];
  int index = 0;
  check(cudaGetDevice(&index) == cudaSuccess, "no current CUDA device");
  Device device = index < kDevices ? known[index] : Device{};
  if (device.capability == 0) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&device.multiprocessors, cudaDevAttrMultiProcessorCount, index);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
    cudaDeviceGetAttribute(&device.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    device.capability = major * 10 + minor;
    if (index < kDevices) known[index] = device;
  }
  return device;
}

// How many clusters of so many blocks run at once where each block takes a multiprocessor. A
// cluster must lie within one GPC, which has 16 or 18 multiprocessors; an H100, with 132 of them,
// runs 30 clusters of 4 blocks, 15 of 8 and 7 of 16.
inline int64_t clusters_within(const Device& device, int64_t blocks) {
  if (blocks <= 2) return device.multiprocessors / blocks;
  constexpr int64_t kBeside = 12;  // multiprocessors that larger clusters leave over
  const int64_t in_gpcs = device.multiprocessors / 16 * (16 / blocks);
  if (in_gpcs == 0) return 0;
  const int64_t all = (device.multiprocessors - kBeside) / blocks;
  return all < 1 ? 1 : all < in_gpcs ? all : in_gpcs;
}

// In a kernel launched with launch_behind, before it touches memory: waits until the kernel in
// front is done and its writes can be seen. No work where launches do not overlap.
//
// Every thread calls this, or let_next_start. A kernel is then done only after the kernel in front
// of it, so what follows the wait comes after all kernels further ahead, too.
__device__ inline void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// In a kernel launched with launch_behind: waits for the kernel in front, then lets the one behind
// start its blocks. That one may read what this kernel writes only after a wait of its own.
//
// Without the wait, the kernel behind could start beside the kernel in front of this one. Kernels
// of other libraries may read before they wait what the kernel in front of them does not write,
// such as weights.
__device__ inline void let_next_start() {
  wait_for_previous();
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...) that may start before the kernel in
// front of it is done (from compute capability 9.0 on), which hides the time a launch takes.
template <typename... Parameters, typename... Arguments>
void launch_behind(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = current_device().capability >= 90 ? 1 : 0;
  // An error stays for check_launch, which follows every kernel.
  (void)cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace opwright
