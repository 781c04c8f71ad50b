// From a compiled kernel's parameters to the steps that fill them from a call's values.
#include <cmath>
#include <cstring>

#include "opwright/triton/error.h"
#include "opwright/types.h"
#include "state.h"

namespace opwright::triton::detail {
namespace {

const Node* node_at(const std::vector<Node>& nodes, const std::vector<int>& path) {
  const std::vector<Node>* level = &nodes;
  const Node* node = nullptr;
  for (const int index : path) {
    if (index < 0 || static_cast<size_t>(index) >= level->size()) return nullptr;
    node = &(*level)[static_cast<size_t>(index)];
    level = &node->items;
  }
  return node;
}

bool is_number(uint8_t kind) { return kind >= kI32 && kind <= kFloat; }

// How a number becomes a parameter of a type; false if it does not.
bool plan_number(const Node& node, const std::string& type, Step& step) {
  const uint8_t kind = node.code & kKindBits;
  step.is_integer = kind != kFloat;
  using From = Step::From;
  if (type == "fp32" || type == "f32") {
    step.from = kind == kFloat ? From::kSlot : From::kFloat32;
  } else if (type == "fp64") {
    step.from = kind == kFloat ? From::kSlot : From::kFloat64;
    step.slot += kind == kFloat;
  } else if (type == "fp16") {
    step.from = From::kFloat16;
  } else if (type == "bf16") {
    step.from = From::kBFloat16;
  } else if (kind == kFloat) {
    return false;
  } else if (type == "u1" || type == "i1") {
    step.from = kind == kU1 ? From::kSlot : From::kBool;
  } else {
    step.from = From::kSlot;
  }
  return true;
}

uint64_t literal_bits(const Value& value, const std::string& type) {
  if (type == "fp64") return __builtin_bit_cast(uint64_t, value.as_double());
  if (type == "fp32" || type == "f32")
    return __builtin_bit_cast(uint32_t, static_cast<float>(value.as_double()));
  if (type == "fp16")
    return __builtin_bit_cast(uint16_t, static_cast<opwright::detail::Binary16>(value.as_double()));
  if (type == "bf16")
    return __builtin_bit_cast(uint32_t, static_cast<float>(value.as_double())) >> 16;
  if (type == "u1" || type == "i1") return value.truth();
  return static_cast<uint64_t>(value.integer);
}

// A part of a host descriptor: the map itself, or pointer, shape and strides where the GPU has no
// TMA unit.
bool plan_descriptor(const CubinParameter& parameter, uint16_t recipe, Step& step) {
  using From = Step::From;
  step.recipe = recipe;
  step.dimension = static_cast<uint8_t>(parameter.dimension);
  if (parameter.field == "tma" && parameter.size == 128) {
    step.from = From::kTma;
  } else if (parameter.field == "base" && parameter.size == 8) {
    step.from = From::kTma;  // of 8 bytes: the address
  } else if (parameter.size > 8) {
    return false;
  } else if (parameter.field == "shape") {
    step.from = From::kShape;
  } else if (parameter.field == "stride") {
    step.from = From::kStride;
  } else if (parameter.field == "nan") {
    step.from = From::kNan;
  } else if (parameter.field == "tf32") {
    step.from = From::kTf32;
  } else {
    return false;
  }
  return true;
}

}  // namespace

void plan_parameters(Entry& entry, const Compiled& compiled, const std::vector<Node>& nodes,
                     int slot_count, const std::string& subject) {
  using From = Step::From;
  const auto refuse = [&](size_t index) {
    return Error(Cause::kPack, subject + ": the cubin's parameter " + std::to_string(index) +
                                   " fits no argument of the call\n\n  kernel  " + compiled.key +
                                   "\n  pack    " + compiled.pack->name() +
                                   "\n\nhint: build the pack again.");
  };
  std::vector<const Node*> descriptors;
  for (size_t i = 0; i < compiled.parameters.size(); ++i) {
    const CubinParameter& parameter = compiled.parameters[i];
    Step step;
    step.offset = static_cast<uint16_t>(parameter.offset);
    step.size = static_cast<uint8_t>(parameter.size);
    if (parameter.source != CubinParameter::Source::kArgument) {
      if (parameter.size != 8) throw refuse(i);
      const bool is_profile = parameter.source == CubinParameter::Source::kProfileScratch;
      const uint64_t bytes = is_profile ? compiled.profile_bytes : compiled.scratch_bytes;
      step.slot = static_cast<uint16_t>(slot_count + is_profile);  // a zero of the call's
      if (bytes > 0) step.from = is_profile ? From::kProfileScratch : From::kScratch;
    } else {
      const Node* node = node_at(nodes, parameter.path);
      if (!node) throw refuse(i);
      const uint8_t kind = node->code & kKindBits;
      step.slot = static_cast<uint16_t>(node->slot);
      const bool is_pointer = parameter.type.starts_with("*") && parameter.field.empty();
      bool fits = parameter.size <= 8 || kind == kDescriptor;
      if (kind == kDescriptor) {
        if (descriptors.empty() || descriptors.back() != node) descriptors.push_back(node);
        fits =
            fits && plan_descriptor(parameter, static_cast<uint16_t>(descriptors.size() - 1), step);
        if (step.from == From::kTma && step.size == 128)
          fits = fits && step.recipe < compiled.recipes.size();
      } else if (kind >= kPointer) {
        fits = fits && is_pointer && parameter.size == 8;
      } else if (!is_number(kind) || is_pointer) {
        fits = false;
      } else if (node->slot < 0) {
        step.from = From::kLiteral;
        step.literal = literal_bits(node->literal, parameter.type);
      } else {
        fits = fits && plan_number(*node, parameter.type, step);
      }
      if (!fits) throw refuse(i);
    }
    entry.is_special |= step.from != From::kSlot;
    entry.buffer_size = parameter.offset + parameter.size;
    entry.steps.push_back(step);
  }
  entry.is_special |= entry.buffer_size > 4096;
  entry.step_count = static_cast<uint16_t>(entry.steps.size());
  entry.fast_steps = std::make_unique<FastStep[]>(entry.steps.size());
  for (size_t i = 0; i < entry.steps.size(); ++i)
    entry.fast_steps[i] = {entry.steps[i].slot, entry.steps[i].offset};
}

}  // namespace opwright::triton::detail
