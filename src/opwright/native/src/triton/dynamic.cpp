#include "opwright/triton/dynamic.h"

#include "state.h"

namespace opwright::triton {
namespace detail {

// A call whose argument types are known at run time: the same bytes and values that Capture writes.
struct DynamicLaunch {
  std::vector<uint8_t> codes;
  std::vector<uint64_t> words, slots;
  std::vector<std::string> texts;
  std::vector<std::string_view> names;
  uint64_t devices = 0;

  uint8_t add(const Argument& argument) {
    using Type = Argument::Type;
    uint64_t payload[1];
    uint64_t slot[2];
    Cursor at{slot, payload, devices};
    uint8_t code = kNone;
    switch (argument.type) {
      case Type::kNone:
        code = encode(nullptr, at);
        break;
      case Type::kPointer:
        code = encode(argument.pointer, at);
        break;
      case Type::kInt:
        code = encode(argument.integer, at);
        break;
      case Type::kUnsigned:
        code = encode(static_cast<uint64_t>(argument.integer), at);
        break;
      case Type::kFloat:
        code = encode(argument.number, at);
        break;
      case Type::kBool:
        code = encode(argument.integer != 0, at);
        break;
      case Type::kDescriptor:
        code = encode(argument.descriptor, at);
        texts.push_back(descriptor_text(argument.descriptor));
        break;
      case Type::kConstexpr:
        code = add_constexpr(argument.text, at);
        break;
      case Type::kTuple:
        return add_tuple(argument.items);
    }
    devices = at.devices;
    slots.insert(slots.end(), slot, at.slot);
    words.insert(words.end(), payload, at.payload);
    return code;
  }

  uint8_t add_constexpr(const std::string& text, Cursor& at) {
    texts.push_back(text);
    *at.slot++ = 0;
    const Value value = parse_value(text);
    // Plain values are kept, so that heuristics and grids can read them.
    if (value.type == Value::Type::kInt)
      return *at.payload++ = static_cast<uint64_t>(value.integer), kConstInt;
    if (value.type == Value::Type::kBool)
      return *at.payload++ = static_cast<uint64_t>(value.integer), kConstBool;
    if (value.type == Value::Type::kFloat) {
      return *at.payload++ = __builtin_bit_cast(uint64_t, value.number), kConstFloat;
    }
    *at.payload++ = hash_text(text);
    return kConstDynamic;
  }

  uint8_t add_tuple(const std::vector<Argument>& items) {
    // The elements' bytes come before their payloads, as Capture has it.
    const size_t first = words.size();
    const size_t word_count = items.size() / 8 + 1;
    words.resize(first + word_count);
    std::vector<uint8_t> inner(8 * word_count);
    for (size_t i = 0; i < items.size(); ++i) inner[i] = add(items[i]);
    inner[items.size()] = kTupleEnd;
    std::memcpy(words.data() + first, inner.data(), inner.size());
    return kTuple;
  }

  explicit DynamicLaunch(std::span<const Argument> arguments) {
    for (const Argument& argument : arguments) {
      codes.push_back(add(argument));
      if (argument.name.empty() && !names.empty()) {
        throw Error(Cause::kArgument,
                    "an argument by position comes after `" + std::string(names.back()) +
                        "`, which is given by name\n\nhint: named arguments come last.");
      }
      if (!argument.name.empty()) names.push_back(argument.name);
    }
    if (!names.empty()) {
      uint64_t order = names.size();
      for (const std::string_view name : names) order = mix(order, hash_text(name));
      words.push_back(order);
    }
    codes.resize((codes.size() + 7) / 8 * 8);
    std::vector<uint64_t> key(codes.size() / 8);
    if (!codes.empty()) std::memcpy(key.data(), codes.data(), codes.size());
    code_words = key.size();
    key.insert(key.end(), words.begin(), words.end());
    word_count = key.size();
    key.resize(key.size() + kExtraWords);
    words = std::move(key);
    slot_count = slots.size();
    slots.resize(slots.size() + 2);
  }

  template <typename G>
  void run(const Kernel& kernel, size_t argument_count, Stream stream, const G& grid) {
    KernelState* state = kernel.state_;
    Call call = {words.data(),
                 slots.data(),
                 devices,
                 static_cast<uint16_t>(code_words),
                 static_cast<uint16_t>(word_count),
                 static_cast<uint16_t>(argument_count),
                 static_cast<uint16_t>(slot_count),
                 names.data(),
                 static_cast<uint16_t>(names.size()),
                 0,
                 0};
    const Entry* entry = find(state, call);
    const auto compute = [](const void* given, const KernelState* known, const Entry* found,
                            const Call& made) {
      return grid_of(*static_cast<const G*>(given), known, found, made);
    };
    if (!entry) entry = detail::resolve(state, call, texts, stream, {&grid, compute});
    detail::launch(state, entry, call, stream, grid_of(grid, state, entry, call));
  }

  size_t code_words = 0, word_count = 0, slot_count = 0;
};

}  // namespace detail

void launch(const Kernel& kernel, Stream stream, Grid grid, std::span<const Argument> arguments) {
  detail::DynamicLaunch(arguments).run(kernel, arguments.size(), stream, grid);
}

void launch(const Kernel& kernel, Stream stream, GridFunction grid,
            std::span<const Argument> arguments) {
  detail::DynamicLaunch(arguments).run(kernel, arguments.size(), stream, grid);
}

}  // namespace opwright::triton
