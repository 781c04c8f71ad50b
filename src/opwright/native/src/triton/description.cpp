#include "description.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "opwright/triton/error.h"

namespace opwright::triton::detail {

// ---- texts of values (declared in value.h)

std::string int_text(int64_t value) { return std::to_string(value); }
std::string unsigned_text(uint64_t value) { return std::to_string(value); }
std::string quoted(std::string_view text) { return json_quoted(text); }

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  // Python's repr: the shortest digits that read back, in scientific form below 1e-4 and from 1e16
  // on.
  char buffer[64];
  const double size = std::fabs(value);
  const bool is_scientific = value != 0 && (size < 1e-4 || size >= 1e16);
  const auto format = is_scientific ? std::chars_format::scientific : std::chars_format::fixed;
  std::string text(buffer, std::to_chars(buffer, buffer + sizeof buffer, value, format).ptr);
  if (!is_scientific && text.find('.') == std::string::npos) text += ".0";
  return text;
}

// ---- TMA descriptors (declared in arguments.h)

std::string descriptor_text(const TensorDescriptor& descriptor) {
  std::string text =
      std::string("tensordesc<") + kDTypeNames[static_cast<int>(descriptor.base.dtype)] + "[";
  for (size_t i = 0; i < descriptor.block.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(descriptor.block[i]);
  }
  return text + "]>";
}

uint64_t descriptor_payload(const TensorDescriptor& descriptor) {
  uint64_t hash = mix(descriptor.block.size(), static_cast<uint64_t>(descriptor.base.dtype));
  for (const int64_t extent : descriptor.block) hash = mix(hash, static_cast<uint64_t>(extent));
  return hash;
}

// ---- records

namespace {

std::map<std::string, std::string> texts_of(const Json& object) {
  std::map<std::string, std::string> texts;
  for (const auto& [name, value] : object.fields) {
    switch (value.type) {
      case Json::Type::kString:
        texts[name] = value.text;
        break;
      case Json::Type::kBool:
        texts[name] = value.integer ? "True" : "False";
        break;
      case Json::Type::kInt:
        texts[name] = int_text(value.integer);
        break;
      case Json::Type::kFloat:
        texts[name] = float_text(value.number);
        break;
      default:
        texts[name] = "None";
    }
    parse_value(texts[name]);  // throws here, not at the call that needs it
  }
  return texts;
}

std::vector<std::string> list_of(const Json& array) {
  std::vector<std::string> texts;
  for (const Json& item : array.items) texts.push_back(item.text);
  return texts;
}

std::unique_ptr<Expression> expression_of(const Json& record) {
  const Json& form = record["expression"];
  return form.is_null() && !record["error"].is_null() ? nullptr
                                                      : std::make_unique<Expression>(form);
}

bool is_float_type(std::string_view type) {
  return type.starts_with("fp") || type.starts_with("bf");
}

}  // namespace

std::unique_ptr<Description> read_description(const Json& record) {
  auto description = std::make_unique<Description>();
  description->file = record["file"].text;
  description->function = record["function"].text;
  description->line = static_cast<int>(record["line"].integer);
  if (record["params"].type != Json::Type::kArray) throw std::runtime_error("no description");
  for (const Json& item : record["params"].items) {
    Parameter parameter;
    parameter.name = item["name"].text;
    parameter.type = item["type"].text;
    parameter.default_value = item["default"].text;
    parse_value(parameter.default_value);  // throws here, not at the call that needs it
    parameter.is_constexpr = item["constexpr"].truth();
    parameter.specializes = item["specialize"].truth();
    parameter.specializes_alignment = item["align"].truth();
    description->parameters.push_back(std::move(parameter));
  }
  for (const Json& item : record["heuristics"].items) {
    description->heuristics.push_back({item["name"].text, expression_of(item), item["error"].text});
  }
  const Json& autotune = record["autotune"];
  description->tuning_key = list_of(autotune["key"]);
  description->reset_to_zero = list_of(autotune["reset_to_zero"]);
  description->restore_value = list_of(autotune["restore_value"]);
  for (const Json& item : autotune["configs"].items) {
    description->configurations.push_back(
        {texts_of(item["constexprs"]), texts_of(item["options"])});
  }
  for (const auto& [name, item] : record["grids"].fields) {
    description->grids[name] = {expression_of(item), item["error"].text};
  }
  description->keep.assign((description->parameters.size() + 7) / 8, ~0ull);
  auto* bytes = reinterpret_cast<unsigned char*>(description->keep.data());
  for (size_t i = 0; i < description->parameters.size(); ++i) {
    const Parameter& parameter = description->parameters[i];
    // A float's class has no suffix, and a constexpr's byte has no bits to remove.
    if (!parameter.specializes || is_float_type(parameter.type) || parameter.type == "u1") {
      bytes[i] = kKindBits;
    } else {
      if (!parameter.specializes_alignment) bytes[i] &= static_cast<unsigned char>(~kDivisible);
      if (!parameter.type.empty()) bytes[i] &= static_cast<unsigned char>(~kOne);
    }
  }
  return description;
}

int Description::index_of(std::string_view name) const {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

std::string subject_of(const Description& description) {
  return "`" + description.function + "` (" + description.file + ":" +
         std::to_string(description.line) + ")";
}

// ---- calls

namespace {

// Reads a call's arguments back, in the order in which the call site captured them.
class CallReader {
 public:
  CallReader(const Call& call, const std::vector<std::string>& texts)
      : payload_(call.words + call.code_words), texts_(texts) {}

  Node read(uint8_t code) {
    Node node;
    node.code = code;
    const uint8_t kind = code & kKindBits;
    if (kind == kTuple) {
      const auto* codes = reinterpret_cast<const unsigned char*>(payload_);
      size_t count = 0;
      while (codes[count] != kTupleEnd) ++count;
      payload_ += count / 8 + 1;
      for (size_t i = 0; i < count; ++i) node.items.push_back(read(codes[i]));
      return node;
    }
    node.slot = slot_;
    slot_ += kind == kFloat ? 2 : 1;
    if (kind >= kDescriptor && kind < kPointer) {
      node.payload = *payload_++;
      node.text = text_ < texts_.size() ? texts_[text_++] : "";
    }
    return node;
  }

 private:
  const uint64_t* payload_;
  const std::vector<std::string>& texts_;
  size_t text_ = 0;
  int slot_ = 0;
};

bool is_constant(const Node& node) {
  const uint8_t kind = node.code & kKindBits;
  return kind >= kConstInt && kind < kPointer;
}

std::string signature(const Description& description) {
  std::string text = description.function + "(";
  for (size_t i = 0; i < description.parameters.size(); ++i) {
    const Parameter& parameter = description.parameters[i];
    text += (i ? ", " : "") + parameter.name + (parameter.is_constexpr ? ": constexpr" : "");
    if (!parameter.default_value.empty()) text += " = " + parameter.default_value;
  }
  return text + ")";
}

// What an error says of one argument.
[[noreturn]] void refuse(const Description& description, size_t index, const Node& node,
                         const std::string& expected, const std::string& hint) {
  throw Error(Cause::kArgument,
              subject_of(description) + ": argument " + std::to_string(index + 1) + " `" +
                  description.parameters[index].name + "` is of the wrong kind\n\n  expected  " +
                  expected + "\n  given     " + shown(node) + "\n\nhint: " + hint);
}

// The class of a value that Triton sees as Python would: by the rules, whatever the parameter says.
std::string free_class(const Node& node) {
  const uint8_t kind = node.code & kKindBits;
  const char* suffix = node.code & kOne ? ":1" : node.code & kDivisible ? ":16" : "";
  if (kind >= kPointer) return std::string("*") + kDTypeNames[kind - kPointer] + suffix;
  switch (kind) {
    case kI32:
      return std::string("i32") + suffix;
    case kI64:
      return std::string("i64") + suffix;
    case kU64:
      return std::string("u64") + suffix;
    case kU1:
      return "u1";
    case kFloat:
      return "fp32";
    case kNone:
      return "none";
    case kDescriptor:
      return node.text;
    case kTuple: {
      std::string text = "(";
      for (size_t i = 0; i < node.items.size(); ++i)
        text += (i ? ", " : "") + free_class(node.items[i]);
      return text + (node.items.size() == 1 ? ",)" : ")");
    }
    default:
      return "=" + node.text;
  }
}

std::string class_of(const Description& description, size_t index, const Node& node) {
  const Parameter& parameter = description.parameters[index];
  const uint8_t kind = node.code & kKindBits;
  if (parameter.is_constexpr) {
    if (kind == kNone) return "=None";
    if (!is_constant(node)) {
      refuse(description, index, node, "a constexpr",
             "pass opwright::triton::cx(value); a kernel is compiled "
             "for each value, so remove `tl.constexpr` from the parameter if there are many.");
    }
    return "=" + node.text;
  }
  if (is_constant(node)) {
    refuse(description, index, node, "a value at run time",
           "pass it without cx, or annotate the parameter with `tl.constexpr`.");
  }
  if (kind == kNone || kind == kTuple || kind == kDescriptor) return free_class(node);
  const std::string& type = parameter.type;
  if (type.empty() || kind >= kPointer) {
    Node masked = node;
    masked.code &= static_cast<uint8_t>(
        reinterpret_cast<const unsigned char*>(description.keep.data())[index]);
    return free_class(masked);
  }
  if (is_float_type(type) || type == "u1") return type;
  if (kind == kU64 && type != "u64") {
    refuse(description, index, node, type + ", as the parameter is annotated",
           "pass an integer below 2^63.");
  }
  if (kind == kFloat) {
    refuse(description, index, node, type + ", as the parameter is annotated", "pass an integer.");
  }
  const bool is_divisible =
      node.code & kDivisible && parameter.specializes && parameter.specializes_alignment;
  return type + (is_divisible ? ":16" : "");
}

// The argument that a text stands for: a default, or what a decorator gives.
Node literal_node(const Value& literal, const std::string& text, bool is_constexpr) {
  Node node;
  node.text = text;
  node.literal = literal;
  const int64_t value = node.literal.integer;
  uint64_t large = 0;
  if (is_constexpr) {
    node.code = kConstDynamic;
  } else if (node.literal.type == Value::Type::kTuple) {
    node.code = kTuple;
    for (const Value& item : literal.items) node.items.push_back(literal_node(item, "", false));
  } else if (node.literal.type == Value::Type::kLargeInt &&
             std::from_chars(text.data(), text.data() + text.size(), large).ec == std::errc()) {
    node.code = static_cast<uint8_t>(kU64 | (large % 16 == 0 ? int{kDivisible} : 0));
    node.literal.integer = static_cast<int64_t>(large);
  } else if (node.literal.type == Value::Type::kInt) {
    node.code = static_cast<uint8_t>((value == static_cast<int32_t>(value) ? kI32 : kI64) |
                                     (value % 16 == 0 ? kDivisible : 0) | (value == 1 ? kOne : 0));
  } else if (node.literal.type == Value::Type::kBool) {
    node.code = kU1;
  } else if (node.literal.type == Value::Type::kFloat) {
    node.code = kFloat;
  } else if (node.literal.type == Value::Type::kNone && (text == "None" || text.empty())) {
    node.code = kNone;
  } else {
    node.code = kConstDynamic;  // no run-time value: class_of refuses it
  }
  return node;
}

}  // namespace

std::string shown(const Node& node) {
  const uint8_t kind = node.code & kKindBits;
  const std::string aligned = node.code & kDivisible ? ", a multiple of 16" : "";
  if (kind >= kPointer) {
    return std::string(kDTypeNames[kind - kPointer]) + " pointer" +
           (node.code & kDivisible ? ", 16-byte aligned" : ", not 16-byte aligned");
  }
  switch (kind) {
    case kAbsent:
      return "nothing";
    case kI32:
      return node.code & kOne ? "int 1" : "int" + aligned;
    case kI64:
      return "int beyond 32 bits" + aligned;
    case kU64:
      return "int beyond 63 bits" + aligned;
    case kU1:
      return "bool";
    case kFloat:
      return "float";
    case kNone:
      return "None";
    case kTuple:
      return "tuple of " + std::to_string(node.items.size());
    case kDescriptor:
      return node.text;
    default:
      return "constexpr " + node.text;
  }
}

std::vector<Node> read_call(const Description& description, const Call& call,
                            const std::vector<std::string>& texts) {
  const size_t parameter_count = description.parameters.size();
  const size_t positional = call.argument_count - call.name_count;
  const auto mismatch = [&](const std::string& what) {
    return Error(Cause::kArgument, subject_of(description) + ": " + what + "\n\n  expected  " +
                                       signature(description) + "\n  given     " +
                                       std::to_string(positional) + " by position, " +
                                       std::to_string(call.name_count) + " by name");
  };
  if (call.argument_count > parameter_count) {
    throw mismatch("it takes " + std::to_string(parameter_count) + " arguments, given " +
                   std::to_string(call.argument_count));
  }
  std::vector<Node> nodes(parameter_count);
  CallReader reader(call, texts);
  const auto* codes = reinterpret_cast<const unsigned char*>(call.words);
  for (size_t i = 0; i < call.argument_count; ++i) {
    int index = static_cast<int>(i);
    if (i >= positional) {
      const std::string_view name = call.names[i - positional];
      index = description.index_of(name);
      if (index < 0) throw mismatch("it has no parameter `" + std::string(name) + "`");
      if (nodes[index].code != kAbsent)
        throw mismatch("`" + std::string(name) + "` is given twice");
    }
    nodes[index] = reader.read(codes[i]);
  }
  return nodes;
}

void complete_call(const Description& description,
                   const std::map<std::string, std::string>& decided, std::vector<Node>& nodes) {
  for (size_t i = 0; i < description.parameters.size(); ++i) {
    const Parameter& parameter = description.parameters[i];
    const auto found = decided.find(parameter.name);
    if (found != decided.end() && nodes[i].code != kAbsent) {
      refuse(description, i, nodes[i], "nothing: a decorator of the kernel gives it",
             "leave it out.");
    }
    if (nodes[i].code != kAbsent) continue;
    const std::string& text = found != decided.end() ? found->second : parameter.default_value;
    if (text.empty()) {
      throw Error(Cause::kArgument, subject_of(description) + ": argument " +
                                        std::to_string(i + 1) + " `" + parameter.name +
                                        "` is missing\n\n  expected  " + signature(description));
    }
    nodes[i] = literal_node(parse_value(text), text, parameter.is_constexpr);
  }
}

std::vector<std::string> class_texts(const Description& description,
                                     const std::vector<Node>& nodes) {
  std::vector<std::string> classes;
  for (size_t i = 0; i < nodes.size(); ++i) classes.push_back(class_of(description, i, nodes[i]));
  return classes;
}

std::string key_text(const std::vector<std::string>& classes,
                     const std::map<std::string, std::string>& options) {
  std::string text;
  for (const std::string& item : classes) text += (text.empty() ? "" : ", ") + item;
  const char* separator = "; ";
  for (const auto& [name, value] : options) {
    text += separator + name + "=" + value;
    separator = ", ";
  }
  return text;
}

}  // namespace opwright::triton::detail
