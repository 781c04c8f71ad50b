// Blocks of a cluster, which write into each other's shared memory: from compute capability 9.0 on.
#pragma once

#include <cstdint>

#include "opwright/copy.cuh"
#include "opwright/types.h"

namespace opwright {

// This block among those of its cluster.
__device__ inline uint32_t cluster_rank() {
  uint32_t rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// The same place in the shared memory of the block `rank` of the cluster.
__device__ inline uint32_t in_block(uint32_t address, uint32_t rank) {
  uint32_t there = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
#endif
  return there;
}

// A barrier of all threads of the cluster.
__device__ inline void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// A barrier in shared memory that is passed when this block has announced some bytes and they have
// come, from blocks of its cluster. Its phases are 0, 1, 0 and so on.
struct Arrivals {
  uint64_t word;

  // By one thread; the cluster waits before anything is sent.
  __device__ void prepare() {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(
            shared_address(this))
        : "memory");
#endif
  }
  // By one thread, once for each phase; others may send before.
  __device__ void announce(uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
#endif
  }
  __device__ void wait(uint32_t phase) {
#if __CUDA_ARCH__ >= 900
    uint32_t is_done = 0;
    while (!is_done)
      asm volatile(
          "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
          "selp.u32 %0, 1, 0, p;}"
          : "=r"(is_done)
          : "r"(shared_address(this)), "r"(phase)
          : "memory");
#endif
  }
  // Writes 4, 8 or 16 bytes to the same place in the block `rank`, which counts what comes.
  template <typename V>
  __device__ void send(V* to, const V& value, uint32_t rank) {
    static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16);
#if __CUDA_ARCH__ >= 900
    const uint32_t there = in_block(shared_address(to), rank),
                   counts = in_block(shared_address(this), rank);
    if constexpr (sizeof(V) == 4) {
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];" ::"r"(
              there),
          "r"(counts), "r"(__builtin_bit_cast(uint32_t, value))
          : "memory");
    } else if constexpr (sizeof(V) == 8) {
      const auto words = __builtin_bit_cast(uint2, value);
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2, %3}, "
          "[%1];" ::"r"(there),
          "r"(counts), "r"(words.x), "r"(words.y)
          : "memory");
    } else {
      const auto words = __builtin_bit_cast(uint4, value);
      asm volatile(
          "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, "
          "%5}, [%1];" ::"r"(there),
          "r"(counts), "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
          : "memory");
    }
#endif
  }
};

}  // namespace opwright
