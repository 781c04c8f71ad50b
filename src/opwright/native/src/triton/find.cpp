// The hot path: from a call's bytes to the launch. No lock, no memory of the heap, no string.
#include <algorithm>
#include <cstring>

#include "opwright/triton/error.h"
#include "special.h"
#include "state.h"

namespace opwright::triton::detail {
namespace {

inline uint64_t hash_words(const uint64_t* words, uint32_t count) {
  uint64_t hash = count;
  for (uint32_t i = 0; i < count; ++i) hash = mix(hash, words[i]);
  return hash;
}

inline bool same_words(const uint64_t* a, const uint64_t* b, uint32_t count) {
  uint64_t difference = 0;
  for (uint32_t i = 0; i < count; ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

// The most bytes of parameters that are filled in on the stack.
constexpr size_t kStackBytes = 4096;

}  // namespace

const Entry* find(const KernelState* kernel, Call& call) {
  const Description* description = kernel->description.load(std::memory_order_acquire);
  if (__builtin_expect(!description, 0)) return nullptr;
  // A call with names has its bytes in another order; it only gets more entries for one kernel.
  if (!call.name_count) {
    const size_t count = std::min<size_t>(call.code_words, description->keep.size());
    for (size_t i = 0; i < count; ++i) call.words[i] &= description->keep[i];
  }
  uint32_t count = call.word_count;
  if (__builtin_expect(description->is_decorated(), 0)) count = decorate(*description, call);
  call.full_word_count = count;
  Context context = nullptr;
  loaded_driver->context_get(&context);
  call.hash = mix(hash_words(call.words, count), reinterpret_cast<uint64_t>(context));
  const Table* table = kernel->table.load(std::memory_order_acquire);
  for (size_t at = call.hash & table->mask;; at = (at + 1) & table->mask) {
    const Entry* entry = table->slots[at].load(std::memory_order_acquire);
    if (!entry) return nullptr;
    if (entry->hash == call.hash && entry->context == context && entry->word_count == count &&
        same_words(entry->words.get(), call.words, count)) {
      return entry;
    }
  }
}

void launch(const KernelState* kernel, const Entry* entry, Call& call, Stream stream, Grid grid) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  // Negative or too large: one of the upper bits is set.
  const int64_t blocks = (grid.x & 0xffffffff) * entry->ctas;
  if (__builtin_expect((grid.x | grid.y | grid.z | blocks) >> 31 != 0, 0))
    refuse_grid(*kernel, grid);
  if (__builtin_expect((call.devices & entry->foreign_devices) != 0 || entry->is_special ||
                           watching.load(std::memory_order_relaxed) != 0,
                       0)) {
    launch_special(*kernel, *entry, call, stream, grid);
    return;
  }
  // Ascending offsets: the bytes that a small value writes too many belong to the next parameter.
  alignas(64) unsigned char buffer[kStackBytes + 8];
  for (uint32_t i = 0; i < entry->step_count; ++i) {
    const FastStep step = entry->fast_steps[i];
    std::memcpy(buffer + step.offset, call.slots + step.slot, 8);
  }
  size_t size = entry->buffer_size;
  void* extra[] = {kParamBuffer, buffer, kParamBufferSize, &size, nullptr};
  LaunchConfig config = entry->config;
  config.grid_x = static_cast<uint32_t>(grid.x) * entry->ctas;
  config.grid_y = static_cast<uint32_t>(grid.y);
  config.grid_z = static_cast<uint32_t>(grid.z);
  config.stream = stream;
  const Result result = loaded_driver->launch(&config, entry->function, nullptr, extra);
  if (__builtin_expect(result != kSuccess, 0)) launch_failed(*kernel, *entry, config, result);
}

}  // namespace opwright::triton::detail
