// Loops on PyTorch's own thread pool: they obey torch.set_num_threads and never oversubscribe.
#pragma once

#include <cstdint>

#include "opwright/entry.h"

// Defined by the generated glue. Zero on success.
extern "C" int opwright_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                     void (*body)(int64_t, int64_t, void*), void* context);
extern "C" int opwright_num_threads(void);

namespace opwright {

// Elements of work below which handing a chunk to another thread costs more than it saves: waking a
// thread takes a few microseconds, about the time one core needs for this many simple elements.
inline constexpr int64_t kGrainElements = 16384;

// The grain for a loop whose every step touches `elements_per_step` elements.
inline int64_t grain_of(int64_t elements_per_step) {
  const int64_t steps = kGrainElements / (elements_per_step > 0 ? elements_per_step : 1);
  return steps > 0 ? steps : 1;
}

// Calls body(begin, end) on chunks that cover 0..count, each of at least `grain` steps. Runs in the
// calling thread when count <= grain.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (count <= grain) return body(int64_t{0}, count);
  const int failed = opwright_parallel_for(
      0, count, grain,
      [](int64_t begin, int64_t end, void* context) {
        (*static_cast<const Body*>(context))(begin, end);
      },
      const_cast<Body*>(&body));
  check(!failed, "a parallel loop failed");
}

template <typename Body>
void parallel_for(int64_t count, const Body& body) {
  parallel_for(count, 1, body);
}

// Threads that parallel_for may use.
inline int num_threads() { return opwright_num_threads(); }

}  // namespace opwright
