// The few names of the CUDA driver that a caller meets, declared by hand: no CUDA header is needed.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace opwright::triton {

using Stream = CUstream_st*;  // cudaStream_t, CUstream

// The size of a launch in programs. It may be given as {x}, {x, y} or {x, y, z}; a launch checks that each
// lies between 0 and 2^31 - 1. With a size of 0 nothing is launched.
struct Grid {
  int64_t x = 1, y = 1, z = 1;
};

// a / b, rounded up.
inline constexpr int64_t cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace opwright::triton
