// Scratch memory for a kernel, on the device of its arguments.
#pragma once

#include <cstdint>

#include "opwright/entry.h"

// Defined by the generated glue. Aligned to 16 bytes; null when memory is out.
extern "C" void* opwright_scratch(int64_t bytes);

namespace opwright {

// Room for `count` elements, not initialised. It is valid until the work that the kernel has queued
// on its stream is done (on a CPU: until the kernel returns); nobody frees it.
template <typename S>
S* scratch(int64_t count) {
  constexpr int64_t kSize = sizeof(S);
  check(count >= 0, "scratch: the number of elements is negative");
  void* memory = count <= INT64_MAX / kSize ? opwright_scratch(count * kSize) : nullptr;
  check(memory != nullptr, "out of memory for scratch space");
  return static_cast<S*>(memory);
}

}  // namespace opwright
