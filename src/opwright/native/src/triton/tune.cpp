// Measures the configurations of an autotuned kernel on the launch that asked for them.
#include <algorithm>
#include <cmath>

#include "opwright/triton/error.h"
#include "state.h"

namespace opwright::triton::detail {
namespace {

constexpr int kRounds = 5;
constexpr int kLaunchesPerRound = 4;
constexpr size_t kMaxListed = 16;  // of the configurations in an error

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

// "BLOCK=256, num_warps=2".
std::string text_of(const Configuration& configuration) {
  std::string text;
  for (const auto* values : {&configuration.constexprs, &configuration.options}) {
    for (const auto& [name, value] : *values)
      text += (text.empty() ? "" : ", ") + name + "=" + value;
  }
  return text;
}

// Throws: no candidate can be launched. Lists them, each with the rule that it broke, and shows the
// first error whole.
[[noreturn]] void refuse_all(const Description& description,
                             const std::vector<Candidate>& candidates) {
  const std::string subject = subject_of(description) + ": ";
  std::string rows;
  for (size_t i = 0; i < std::min(candidates.size(), kMaxListed); ++i) {
    std::string rule = candidates[i].failure->what();
    if (rule.starts_with(subject)) rule.erase(0, subject.size());
    rows += "  " + text_of(description.configurations[i]) + "\n    " +
            rule.substr(0, rule.find('\n')) + "\n";
  }
  if (candidates.size() > kMaxListed) {
    rows += "  and " + std::to_string(candidates.size() - kMaxListed) + " more\n";
  }
  const Error& first = *candidates.front().failure;
  throw Error(first.cause(), subject + "none of its configurations can be launched\n\n" + rows +
                                 "\nThe first error:\n\n" + first.what());
}

}  // namespace

size_t fastest(const KernelState& kernel, std::vector<Candidate>& candidates, Call& call,
               Stream stream, const GridOfCall& grid) {
  Timer timer(stream);
  std::vector<float> least(candidates.size(), HUGE_VALF);
  // In turns, so that a change of the clocks meets all of them; the first round warms up.
  for (int round = -1; round < kRounds; ++round) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      if (candidates[i].failure) continue;
      const Entry* entry = candidates[i].entry.get();
      try {
        const Grid extents = grid.compute(grid.given, &kernel, entry, call);
        const float elapsed = timer.milliseconds([&] {
          for (int j = 0; j < kLaunchesPerRound; ++j) launch(&kernel, entry, call, stream, extents);
        });
        if (round >= 0) least[i] = std::min(least[i], elapsed);
      } catch (const Error& error) {
        candidates[i].failure = error;  // this GPU refuses it
        least[i] = HUGE_VALF;
      }
    }
  }
  const auto best = std::min_element(least.begin(), least.end());
  const auto index = static_cast<size_t>(best - least.begin());
  if (candidates[index].failure)
    refuse_all(*kernel.description.load(std::memory_order_acquire), candidates);
  return index;
}

}  // namespace opwright::triton::detail
