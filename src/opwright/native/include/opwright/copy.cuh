// Copies from global to shared memory that a thread starts now and waits for later. They occupy no
// registers, so a thread can have more of them in flight than loads. GPUs before compute capability
// 8.0 copy at once.
#pragma once

#include <cstdint>
#include <cstring>

#include "opwright/vec.h"

namespace opwright {

// An address in shared memory as assembly takes it.
__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Starts to copy kBytes (4, 8 or 16), or to write zeros where there is nothing to copy. Both
// addresses must be multiples of kBytes, even where is_there is false.
template <int kBytes = 16>
__device__ OPWRIGHT_INLINE void copy_async(void* shared, const void* from, bool is_there = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "4, 8 or 16 bytes");
#if __CUDA_ARCH__ >= 800
  if constexpr (kBytes == 16) {  // past the first-level cache
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(shared)),
                 "l"(from), "n"(kBytes), "r"(is_there ? kBytes : 0)
                 : "memory");
  }
#else
  if (is_there)
    memcpy(shared, from, kBytes);
  else
    memset(shared, 0, kBytes);
#endif
}

// Ends a group: the copies that this thread has started since the group before.
__device__ OPWRIGHT_INLINE void end_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most the kLater most recent groups of this thread are pending; 0 also waits for
// copies in no group. A barrier must follow before other threads read what was copied.
template <int kLater = 0>
__device__ OPWRIGHT_INLINE void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  if constexpr (kLater == 0)
    asm volatile("cp.async.wait_all;" ::: "memory");
  else
    asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
#endif
}

}  // namespace opwright
