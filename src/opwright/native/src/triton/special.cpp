#include "special.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "opwright/triton/error.h"
#include "opwright/triton/runtime.h"
#include "opwright/types.h"
#include "process_settings.h"

namespace opwright::triton::detail {
namespace {

std::string dimensions(int64_t x, int64_t y, int64_t z) {
  return std::to_string(x) + " x " + std::to_string(y) + " x " + std::to_string(z);
}

// Memory of one launch, given back in the stream's order.
class Scratch {
 public:
  Scratch(uint64_t bytes_each, unsigned __int128 programs, uint64_t alignment, Stream stream,
          const Description& description)
      : allocator_(scratch_allocator()), stream_(stream) {
    if (bytes_each == 0) return;
    const unsigned __int128 all = bytes_each * programs;  // a grid has fewer than 2^93 programs
    const auto bytes = static_cast<uint64_t>(all);
    if (bytes == all) memory_ = allocator_.allocate(bytes, alignment, stream, allocator_.data);
    if (!memory_) {
      throw Error(
          Cause::kDriver,
          subject_of(description) + ": no scratch memory\n\n  needed  " +
              (bytes == all ? std::to_string(bytes) : "more than 2^64") +
              " bytes\n\nhint: opwright::triton::set_scratch_allocator takes them from elsewhere.");
    }
  }
  ~Scratch() {
    if (memory_) allocator_.release(memory_, stream_, allocator_.data);
  }
  Scratch(const Scratch&) = delete;
  uint64_t address() const { return reinterpret_cast<uint64_t>(memory_); }

 private:
  ScratchAllocator allocator_;
  Stream stream_;
  void* memory_ = nullptr;
};

// Triton's launchers round a double to binary16 at once, and cut bfloat16 off a float.
uint64_t half_of(double value) {
  return __builtin_bit_cast(uint16_t, static_cast<opwright::detail::Binary16>(value));
}
uint64_t bfloat16_of(double value) {
  return __builtin_bit_cast(uint32_t, static_cast<float>(value)) >> 16;
}

double number_of(const Step& step, const uint64_t* slots) {
  if (step.is_integer) return static_cast<double>(static_cast<int64_t>(slots[step.slot]));
  double value;
  std::memcpy(&value, slots + step.slot + 1, 8);
  return value;
}

int64_t extent_of(const TensorDescriptor& descriptor, const std::vector<int64_t>& extents,
                  uint8_t dimension) {
  if (dimension < extents.size()) return extents[dimension];
  throw Error(Cause::kArgument, "the TMA descriptor " + descriptor_text(descriptor) +
                                    " has fewer sizes or strides than its block\n\n  expected  " +
                                    std::to_string(descriptor.block.size()) + "\n  given     " +
                                    std::to_string(extents.size()));
}

uint64_t value_of(const Step& step, const Call& call, const Scratch& scratch,
                  const Scratch& profile) {
  using From = Step::From;
  const auto descriptor = [&]() -> const TensorDescriptor& {
    return *reinterpret_cast<const TensorDescriptor*>(call.slots[step.slot]);
  };
  switch (step.from) {
    case From::kSlot:
      return call.slots[step.slot];
    case From::kLiteral:
      return step.literal;
    case From::kScratch:
      return scratch.address();
    case From::kProfileScratch:
      return profile.address();
    case From::kBool:
      return call.slots[step.slot] != 0;
    case From::kFloat32: {
      return __builtin_bit_cast(uint32_t, static_cast<float>(number_of(step, call.slots)));
    }
    case From::kFloat64:
      return __builtin_bit_cast(uint64_t, number_of(step, call.slots));
    case From::kFloat16:
      return half_of(number_of(step, call.slots));
    case From::kBFloat16:
      return bfloat16_of(number_of(step, call.slots));
    case From::kShape:
      return static_cast<uint64_t>(extent_of(descriptor(), descriptor().shape, step.dimension));
    case From::kStride:
      return static_cast<uint64_t>(extent_of(descriptor(), descriptor().strides, step.dimension));
    case From::kTf32:
      return descriptor().rounds_to_tf32;
    case From::kNan:
      return descriptor().pads_with_nan;
    case From::kTma:
      break;
  }
  return reinterpret_cast<uint64_t>(descriptor().base.address);
}

// Calls visit(argument, address) for every pointer of a call, those in tuples and descriptors too.
template <typename Visit>
void visit_pointers(const std::vector<Node>& nodes, const Call& call, const Visit& visit,
                    int argument = -1) {
  for (size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = nodes[i];
    const uint8_t kind = node.code & kKindBits;
    const int top = argument < 0 ? static_cast<int>(i) : argument;
    if (kind == kTuple) {
      visit_pointers(node.items, call, visit, top);
    } else if (node.slot >= 0 && kind == kDescriptor) {
      visit(top,
            reinterpret_cast<Address>(
                reinterpret_cast<const TensorDescriptor*>(call.slots[node.slot])->base.address));
    } else if (node.slot >= 0 && kind >= kPointer) {
      visit(top, call.slots[node.slot]);
    }
  }
}

[[noreturn]] void refuse_pointer(const Description& description, const Entry& entry, int argument,
                                 const std::string& rule, const std::string& expected,
                                 const std::string& given, const std::string& hint) {
  const auto index = static_cast<size_t>(argument);
  throw Error(Cause::kArgument, subject_of(description) + ": argument " +
                                    std::to_string(argument + 1) + " `" +
                                    description.parameters[index].name + "` " + rule +
                                    "\n\n  expected  " + shown(entry.nodes[index]) + ", " +
                                    expected + "\n  given     " + given + "\n\nhint: " + hint);
}

// Some tensor of the call says that it is not on the launch's GPU: finds out which, by asking the
// driver.
void check_devices(const KernelState& kernel, const Entry& entry, const Call& call) {
  if (!(call.devices & entry.foreign_devices)) return;
  const Description& description = *kernel.description.load(std::memory_order_acquire);
  int unknown = -1;
  visit_pointers(entry.nodes, call, [&](int argument, Address address) {
    if (address == 0) return;  // an empty tensor is on every GPU
    int device = -1;
    if (loaded_driver->pointer_attribute(&device, kPointerDevice, address) != kSuccess) {
      if (unknown < 0) unknown = argument;
    } else if (device != entry.device) {
      refuse_pointer(description, entry, argument, "is not on the launch's GPU",
                     "cuda:" + std::to_string(entry.device), "cuda:" + std::to_string(device),
                     "move the tensor, or make its device the current one.");
    }
  });
  if (unknown >= 0) {
    refuse_pointer(description, entry, unknown, "is not on the launch's GPU",
                   "cuda:" + std::to_string(entry.device),
                   "an address that the driver does not know: host memory?",
                   "move the tensor to the GPU, or pin its memory.");
  }
}

std::string hex_text(Address address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

void check_pointers(const KernelState& kernel, const Entry& entry, const Call& call) {
  const Description& description = *kernel.description.load(std::memory_order_acquire);
  visit_pointers(entry.nodes, call, [&](int argument, Address address) {
    uint64_t found = 0;
    if (address == 0 ||
        loaded_driver->pointer_attribute(&found, kPointerDeviceAddress, address) == kSuccess)
      return;
    refuse_pointer(description, entry, argument, "is not a GPU address",
                   "memory that the driver knows", hex_text(address),
                   "memory of the host that is not pinned, or memory that was freed.");
  });
}

bool holds_pointer(const Value& value) {
  for (const Value& item : value.items) {
    if (holds_pointer(item)) return true;
  }
  return value.type == Value::Type::kPointer;
}

}  // namespace

Value evaluate_heuristic(const Description& description, const Heuristic& heuristic,
                         const Expression::Lookup& lookup) {
  try {
    Value value = heuristic.expression->evaluate(lookup);
    if (holds_pointer(value)) throw std::runtime_error("it gives a pointer");
    return value;
  } catch (const std::runtime_error& error) {
    throw Error(Cause::kKernelFile, subject_of(description) + ": the heuristic for `" +
                                        heuristic.name + "` failed: " + error.what() +
                                        "\n\nhint: pass `" + heuristic.name +
                                        "` as an argument, with cx.");
  }
}

uint32_t decorate(const Description& description, Call& call) {
  const std::vector<Node> nodes = read_call(description, call, {});
  uint64_t* const extra = call.words + call.word_count;
  size_t count = 0;
  const auto push = [&](const Value& value) {
    if (count == kExtraWords) {
      throw Error(Cause::kArgument, subject_of(description) + ": more than " +
                                        std::to_string(kExtraWords) +
                                        " heuristics and autotune keys");
    }
    const bool is_text = value.type == Value::Type::kString || value.type == Value::Type::kTuple ||
                         value.type == Value::Type::kLargeInt;
    const uint64_t bits = value.type == Value::Type::kFloat
                              ? __builtin_bit_cast(uint64_t, value.number)
                          : is_text ? hash_text(value_text_of(value))
                                    : static_cast<uint64_t>(value.integer);
    extra[count++] = mix(static_cast<uint64_t>(value.type), 0) ^ bits;
  };
  for (const std::string& name : description.tuning_key) {
    const int index = description.index_of(name);
    push(index < 0 ? Value() : node_value(nodes[index], call.slots));
  }
  // A heuristic may read what a configuration decides: then resolve evaluates it, and the words of
  // the arguments that it reads stand for its value here.
  for (const Heuristic& heuristic : description.heuristics) {
    if (!heuristic.expression) {
      throw Error(Cause::kKernelFile,
                  subject_of(description) + ": the heuristic for `" + heuristic.name +
                      "` cannot be translated: " + heuristic.error + "\n\nhint: pass `" +
                      heuristic.name + "` as an argument, with cx.");
    }
    std::vector<std::string> names;
    heuristic.expression->names(names);
    bool is_complete = true;
    for (const std::string& name : names) {
      const int index = description.index_of(name);
      if (index < 0 || nodes[index].code == kAbsent) is_complete = false;
    }
    if (is_complete) {
      push(evaluate_heuristic(description, heuristic, [&](std::string_view name) {
        return node_value(nodes[description.index_of(name)], call.slots);
      }));
      continue;
    }
    for (const std::string& name : names) {
      const int index = description.index_of(name);
      if (index >= 0 && nodes[index].code != kAbsent) push(node_value(nodes[index], call.slots));
    }
  }
  return call.word_count + static_cast<uint32_t>(count);
}

void launch_special(const KernelState& kernel, const Entry& entry, Call& call, Stream stream,
                    Grid grid) {
  const Description& description = *kernel.description.load(std::memory_order_acquire);
  const Compiled& compiled = *entry.compiled;
  const bool checks = watching.load(std::memory_order_relaxed) & kWatchesPointers;
  check_devices(kernel, entry, call);
  if (checks) check_pointers(kernel, entry, call);

  const auto programs = static_cast<unsigned __int128>(grid.x * entry.ctas) *
                        static_cast<uint64_t>(grid.y) * static_cast<uint64_t>(grid.z);
  const Scratch scratch(compiled.scratch_bytes, programs, compiled.scratch_alignment, stream,
                        description);
  const Scratch profile(compiled.profile_bytes, programs, compiled.profile_alignment, stream,
                        description);
  std::vector<uint64_t> memory(entry.buffer_size / 8 + 24);
  const auto misaligned = reinterpret_cast<uintptr_t>(memory.data()) % 64;
  auto* buffer =
      reinterpret_cast<unsigned char*>(memory.data()) + (misaligned ? 64 - misaligned : 0);
  for (const Step& step : entry.steps) {
    if (step.from == Step::From::kTma && step.size == 128) {
      const auto& descriptor = *reinterpret_cast<const TensorDescriptor*>(call.slots[step.slot]);
      std::memcpy(buffer + step.offset,
                  tma_map(descriptor, compiled.recipes[step.recipe], description), 128);
      continue;
    }
    const uint64_t value = value_of(step, call, scratch, profile);
    std::memcpy(buffer + step.offset, &value, step.size);
  }
  size_t size = entry.buffer_size;
  void* extra[] = {kParamBuffer, buffer, kParamBufferSize, &size, nullptr};
  LaunchConfig config = entry.config;
  config.grid_x = static_cast<uint32_t>(grid.x) * entry.ctas;
  config.grid_y = static_cast<uint32_t>(grid.y);
  config.grid_z = static_cast<uint32_t>(grid.z);
  config.stream = stream;

  const LaunchHooks* hooks = launch_hooks();
  const LaunchInfo info{description.function.c_str(),
                        compiled.key.c_str(),
                        grid,
                        config.block_x,
                        config.shared_bytes,
                        stream,
                        entry.function};
  if (hooks && hooks->enter) hooks->enter(info, hooks->data);
  Result result = loaded_driver->launch(&config, entry.function, nullptr, extra);
  if (result == kSuccess && checks) result = loaded_driver->stream_synchronize(stream);
  if (hooks && hooks->exit) hooks->exit(info, hooks->data);
  if (result != kSuccess) launch_failed(kernel, entry, config, result);
}

void refuse_grid(const KernelState& kernel, const Grid& grid) {
  throw Error(Cause::kArgument,
              subject_of(*kernel.description.load(std::memory_order_acquire)) +
                  ": the grid has a size outside the valid range\n\n  expected  0 to 2147483647 "
                  "each, the cluster's size included\n  given     " +
                  dimensions(grid.x, grid.y, grid.z));
}

void launch_failed(const KernelState& kernel, const Entry& entry, const LaunchConfig& config,
                   Result result) {
  const Description& description = *kernel.description.load(std::memory_order_acquire);
  throw Error(Cause::kDriver,
              subject_of(description) + ": the launch failed: " + describe_result(result) +
                  "\n\n  grid    " + dimensions(config.grid_x, config.grid_y, config.grid_z) +
                  "\n  block   " + std::to_string(config.block_x) + " threads\n  shared  " +
                  std::to_string(config.shared_bytes) + " bytes\n  kernel  " + entry.compiled->key);
}

Value node_value(const Node& node, const uint64_t* slots) {
  const uint8_t kind = node.code & kKindBits;
  if (node.slot < 0 && kind != kTuple) return node.literal;
  switch (kind) {
    case kI32:
    case kI64:
      return Value::of_int(static_cast<int64_t>(slots[node.slot]));
    case kU1:
      return Value::of_bool(slots[node.slot] != 0);
    case kFloat:
      return Value::of_float(__builtin_bit_cast(double, slots[node.slot + 1]));
    case kTuple: {
      Value value;
      value.type = Value::Type::kTuple;
      for (const Node& item : node.items) value.items.push_back(node_value(item, slots));
      return value;
    }
    case kConstInt:
      return Value::of_int(static_cast<int64_t>(node.payload));
    case kConstUnsigned:
      return parse_value(unsigned_text(node.payload));
    case kConstBool:
      return Value::of_bool(node.payload != 0);
    case kConstFloat:
      return Value::of_float(__builtin_bit_cast(double, node.payload));
    default:
      break;
  }
  if (kind >= kPointer || kind == kDescriptor || kind == kU64) {
    Value value;
    value.type = kind == kU64 ? Value::Type::kLargeInt : Value::Type::kPointer;
    if (kind == kU64) value.text = unsigned_text(slots[node.slot]);
    return value;
  }
  return node.text.empty() ? Value() : parse_value(node.text);
}

}  // namespace opwright::triton::detail
