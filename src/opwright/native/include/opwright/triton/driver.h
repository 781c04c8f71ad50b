// The few names of the CUDA driver that a caller meets, declared by hand: no CUDA header is needed.
#pragma once

#include <cstdint>
#include <string>

#include "opwright/triton/error.h"

struct CUstream_st;

namespace opwright::triton {

using Stream = CUstream_st*;  // cudaStream_t, CUstream

// The size of a launch in programs. It may be given as {x}, {x, y} or {x, y, z}; a launch checks
// that each lies between 0 and 2^31 - 1. With a size of 0 nothing is launched.
struct Grid {
  int64_t x = 1, y = 1, z = 1;
};

// a / b, rounded up, for a positive b. Throws Error for any other.
inline constexpr int64_t cdiv(int64_t a, int64_t b) {
  if (b <= 0)
    throw Error(Cause::kArgument, "`cdiv(a, b)`: b must be positive\n\n  b  " + std::to_string(b));
  return a / b + (a % b > 0);
}

}  // namespace opwright::triton
