// The few names of the CUDA driver that a caller meets, declared by hand: no CUDA header is needed.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace opwright::triton {

using Stream = CUstream_st*;  // cudaStream_t, CUstream

// The size of a launch in programs. It may be given as {x}, {x, y} or {x, y, z}.
struct Grid {
  uint32_t x = 1, y = 1, z = 1;
};

inline constexpr uint32_t cdiv(int64_t a, int64_t b) { return static_cast<uint32_t>((a + b - 1) / b); }

}  // namespace opwright::triton
