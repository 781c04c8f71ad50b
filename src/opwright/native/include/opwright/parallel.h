// Loops on PyTorch's own thread pool: they obey torch.set_num_threads and never oversubscribe.
#pragma once

#include <cstdint>

#include "opwright/entry.h"

// Defined by the generated glue. Zero on success.
extern "C" int opwright_parallel_for(int64_t begin, int64_t end, int64_t grain,
                                     void (*body)(int64_t, int64_t, void*), void* context);
extern "C" int opwright_num_threads(void);
// How many steps a chunk has at most; 0: as many as suit the threads. `opwright verify` sets it, so
// that the boundaries of chunks fall everywhere.
extern "C" int64_t opwright_chunk_steps;

namespace opwright {

// Elements of work below which handing a chunk to another thread costs more than it saves: waking a
// thread takes a few microseconds, about the time one core needs for this many simple elements.
inline constexpr int64_t kGrainElements = 16384;

// The grain for a loop whose every step touches `elements_per_step` elements.
inline int64_t grain_of(int64_t elements_per_step) {
  const int64_t steps = kGrainElements / (elements_per_step > 0 ? elements_per_step : 1);
  return steps > 0 ? steps : 1;
}

namespace detail {

// The first exception among threads that work at the same time; its text is raised when all are
// done.
class Failure {
 public:
  // Keeps the exception that is being handled. True for the first.
  bool keep() noexcept {
    if (__atomic_exchange_n(&is_kept_, 1, __ATOMIC_ACQ_REL)) return false;
    try {
      throw;
    } catch (const std::exception& error) {
      copy_text(text_, error.what());
    } catch (...) {
      copy_text(text_, "the kernel threw something that is not a std::exception");
    }
    return true;
  }
  void raise() const {
    if (is_kept_) detail::raise(text_);
  }

 private:
  int is_kept_ = 0;
  char text_[512] = "";
};

template <typename Body>
struct Loop {
  const Body& body;
  Failure failure;
};

}  // namespace detail

// Calls body(begin, end) on chunks that cover 0..count. With fewer than `grain` steps a chunk is
// not worth another thread, so there is one when count <= grain, in the calling thread. But a chunk
// may begin and end anywhere, and `opwright verify` makes much smaller ones. When chunks throw, the
// others go on, and the first exception is thrown here as Error.
template <typename Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (count <= grain && !opwright_chunk_steps) return body(int64_t{0}, count);
  detail::Loop<Body> loop{body, {}};
  const int failed = opwright_parallel_for(
      0, count, grain,
      [](int64_t begin, int64_t end, void* context) {
        auto* loop = static_cast<detail::Loop<Body>*>(context);
        try {
          loop->body(begin, end);
        } catch (...) {
          loop->failure.keep();
        }
      },
      &loop);
  loop.failure.raise();
  check(!failed, "a parallel loop failed");
}

template <typename Body>
void parallel_for(int64_t count, const Body& body) {
  parallel_for(count, 1, body);
}

// Threads that parallel_for may use.
inline int num_threads() { return opwright_num_threads(); }

}  // namespace opwright
