// Measures the configurations of an autotuned kernel on the launch that asked for them.
#include <algorithm>
#include <cmath>

#include "opwright/triton/error.h"
#include "state.h"

namespace opwright::triton::detail {
namespace {

constexpr int kRounds = 5;
constexpr int kLaunchesPerRound = 4;

class Timer {
 public:
  explicit Timer(Stream stream) : stream_(stream) {
    check(driver().event_create(&start_, 0), "cuEventCreate");
    check(driver().event_create(&end_, 0), "cuEventCreate");
  }
  ~Timer() {
    driver().event_destroy(start_);
    driver().event_destroy(end_);
  }
  Timer(const Timer&) = delete;

  template <typename Run>
  float milliseconds(const Run& run) {
    check(driver().event_record(start_, stream_), "cuEventRecord");
    run();
    check(driver().event_record(end_, stream_), "cuEventRecord");
    check(driver().event_synchronize(end_), "cuEventSynchronize");
    float elapsed = 0;
    check(driver().event_elapsed(&elapsed, start_, end_), "cuEventElapsedTime");
    return elapsed;
  }

 private:
  Stream stream_;
  Event start_ = nullptr, end_ = nullptr;
};

}  // namespace

size_t fastest(const KernelState& kernel, const std::vector<std::unique_ptr<Entry>>& entries, Call& call,
               Stream stream, const GridOfCall& grid) {
  Timer timer(stream);
  std::vector<float> least(entries.size(), HUGE_VALF);
  std::vector<bool> runs(entries.size(), true);
  // In turns, so that a change of the clocks meets all of them; the first round warms up.
  for (int round = -1; round < kRounds; ++round) {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (!entries[i] || !runs[i]) continue;
      try {
        const Grid extents = grid.compute(grid.given, &kernel, entries[i].get(), call);
        const float elapsed = timer.milliseconds([&] {
          for (int j = 0; j < kLaunchesPerRound; ++j) launch(&kernel, entries[i].get(), call, stream, extents);
        });
        if (round >= 0) least[i] = std::min(least[i], elapsed);
      } catch (const Error&) {
        runs[i] = false;  // this GPU refuses it; if it refuses all, the launch proper says why
      }
    }
  }
  return static_cast<size_t>(std::min_element(least.begin(), least.end()) - least.begin());
}

}  // namespace opwright::triton::detail
