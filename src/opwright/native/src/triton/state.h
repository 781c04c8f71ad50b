// The state of a kernel: its description and the table of what is compiled, and who fills it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "compiled.h"
#include "cuda.h"
#include "description.h"
#include "opwright/triton/error.h"
#include "opwright/triton/kernel.h"

namespace opwright::triton::detail {

// One step of filling a kernel's parameters from a call's values.
struct Step {
  enum class From : uint8_t {
    kSlot,  // 8 bytes of a value; what is too much is overwritten by the next parameter
    kFloat32,
    kFloat64,
    kFloat16,
    kBFloat16,  // converted from an integer, or from the double
    kBool,
    kLiteral,  // a default
    kScratch,
    kProfileScratch,
    kTma,
    kShape,
    kStride,  // of a TMA descriptor
    kTf32,
    kNan,
  };
  From from = From::kSlot;
  bool is_integer = false;  // the value to convert is one
  uint8_t size = 8;
  uint8_t dimension = 0;
  uint16_t slot = 0;
  uint16_t offset = 0;
  uint16_t recipe = 0;
  uint64_t literal = 0;
};

struct FastStep {
  uint16_t slot, offset;
};

struct Entry {
  // What a hit reads, in this order.
  uint64_t hash = 0;
  Context context = nullptr;
  uint32_t word_count = 0;
  uint16_t step_count = 0;
  bool is_special = false;  // `steps` instead of `fast_steps`
  uint32_t ctas = 1;
  uint64_t foreign_devices = 0;  // bits of the devices that arguments must not be on
  Function_ function = nullptr;
  size_t buffer_size = 0;
  std::unique_ptr<uint64_t[]> words;
  std::unique_ptr<FastStep[]> fast_steps;
  LaunchConfig config = {};

  LaunchAttribute attributes[5] = {};
  std::vector<Step> steps;
  std::vector<Node> nodes;  // of the call that it was made for
  std::shared_ptr<Compiled> compiled;
  Device device = 0;
};

struct Table {
  explicit Table(size_t size) : mask(size - 1), slots(new std::atomic<const Entry*>[size]()) {}
  size_t mask;
  std::unique_ptr<std::atomic<const Entry*>[]> slots;
};

struct KernelState {
  std::string file, function;
  std::map<std::string, std::string> options;

  std::atomic<const Description*> description{nullptr};
  std::atomic<const Table*> table{nullptr};

  // Under the mutex of `shared()`.
  size_t entry_count = 0;
  std::map<std::string, std::shared_ptr<Compiled>> compiled;  // by arch and key
  std::map<std::string, size_t> tuned;  // what was measured here, by tuning_texts
};

// What all misses share, under one mutex that is held for moments only. A fork takes it, so that
// the child finds everything whole; work that takes longer is a name in `in_flight`, which the
// child forgets.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::unique_ptr<KernelState>, std::less<>>
      kernels;                                              // by file, function and options
  std::set<std::pair<const void*, std::string>> in_flight;  // the work's owner, and what it is
};
Shared& shared();

// Returns what `find` finds or `make` makes. One thread at a time makes what has this owner and
// name, and the others wait for it. `find` (which gives a std::optional) and `keep` run under the
// mutex of `shared()`.
template <typename Find, typename Make, typename Keep>
auto make_once(const void* owner, const std::string& name, const Find& find, const Make& make,
               const Keep& keep) {
  Shared& all = shared();
  struct Turn {
    Shared& all;
    std::unique_lock<std::mutex> lock;
    std::pair<const void*, std::string> work;
    bool is_mine = false;
    ~Turn() {
      if (!is_mine) return;
      if (!lock.owns_lock()) lock.lock();
      all.in_flight.erase(work);
      all.changed.notify_all();
    }
  } turn{all, std::unique_lock(all.mutex), {owner, name}};
  while (true) {
    if (auto known = find()) return *std::move(known);
    turn.is_mine = all.in_flight.insert(turn.work).second;
    if (turn.is_mine) break;
    all.changed.wait(turn.lock);
  }
  turn.lock.unlock();
  auto made = make();
  turn.lock.lock();
  keep(made);
  return made;
}

// Where a description and a compiled kernel come from: packs, the cache, the worker.
std::unique_ptr<Description> obtain_description(const std::string& file,
                                                const std::string& function);
std::shared_ptr<Compiled> obtain_compiled(const Description& description, const std::string& file,
                                          int arch, const std::vector<std::string>& classes,
                                          const std::map<std::string, std::string>& options,
                                          bool is_capturing);
// A configuration of an autotuned kernel, by its index.
struct Choice {
  size_t index = 0;
  bool is_exact = false;  // it was measured for this very key
};
// The texts by which a call is found in a table: the values of the decorator's key, then the
// pointers' dtypes.
std::vector<std::string> tuning_texts(const std::vector<Value>& key,
                                      const std::vector<Node>& nodes);
// The choice of the tables in the packs: exact, else the nearest that was measured, else the first.
Choice choose_configuration(const Description& description, int arch,
                            const std::vector<std::string>& texts);
// A configuration that is to be measured: its entry, or why it cannot be launched.
struct Candidate {
  std::unique_ptr<Entry> entry;
  std::optional<Error> failure;
};
// Measures candidates that launch the same call, one for each configuration; returns the fastest's
// index. Throws Error if none can be launched.
size_t fastest(const KernelState& kernel, std::vector<Candidate>& candidates, Call& call,
               Stream stream, const GridOfCall& grid);

// Writes the plan of a call's parameters. Throws Error(kPack) if record and call do not belong
// together.
void plan_parameters(Entry& entry, const Compiled& compiled, const std::vector<Node>& nodes,
                     int slot_count, const std::string& subject);

// The 128-byte map of a descriptor, by a small cache of the thread. Throws Error.
const void* tma_map(const TensorDescriptor& descriptor, const TmaRecipe& recipe,
                    const Description& description);

// A call's argument as a Python value, for grids and heuristics; None for pointers and what only
// Triton knows.
Value node_value(const Node& node, const uint64_t* slots);

// What every launch asks first: who must see it.
inline constexpr uint32_t kWatchesHooks = 1, kWatchesPointers = 2;
extern std::atomic<uint32_t> watching;

}  // namespace opwright::triton::detail
