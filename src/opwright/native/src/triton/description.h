// What is known of a JIT function: its parameters, decorators, and the key of a call to it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "expression.h"
#include "json.h"
#include "opwright/triton/arguments.h"

namespace opwright::triton::detail {

struct Parameter {
  std::string name;
  std::string type;           // annotated; empty: none
  std::string default_value;  // a value's text; empty: none
  bool is_constexpr = false;
  bool specializes = true;
  bool specializes_alignment = true;
};

// One @triton.autotune configuration.
struct Configuration {
  std::map<std::string, std::string> constexprs;
  std::map<std::string, std::string> options;
};

struct Heuristic {
  std::string name;
  std::unique_ptr<Expression> expression;  // none: `error` says why
  std::string error;
};

struct GridExpression {
  std::unique_ptr<Expression> expression;
  std::string error;
};

struct Description {
  std::string file, function;
  int line = 0;
  std::vector<Parameter> parameters;
  std::vector<Heuristic> heuristics;
  std::vector<std::string> tuning_key;
  std::vector<Configuration> configurations;
  std::vector<std::string> reset_to_zero, restore_value;
  std::map<std::string, GridExpression, std::less<>> grids;

  // The bytes of a key that stay when a call's own are masked with them, eight to a word: what
  // do_not_specialize, do_not_specialize_on_alignment and annotated types leave of a class.
  std::vector<uint64_t> keep;
  // A call's key needs values that are evaluated at every call.
  bool is_decorated() const { return !heuristics.empty() || !configurations.empty(); }

  int index_of(std::string_view name) const;
};

// Reads a description's record. Throws std::runtime_error if it is invalid.
std::unique_ptr<Description> read_description(const Json& record);

// One argument of a call, as the runtime reads it back from the key and the values.
struct Node {
  uint8_t code = kAbsent;
  int slot = -1;            // of the call's values
  uint64_t payload = 0;     // constexpr: its value, or the hash of it
  std::string text;         // constexpr and descriptor: from the call site
  Value literal;            // no slot: a default, or what a decorator gives
  std::vector<Node> items;  // tuple
};

// The arguments of a call in the order of the parameters; one that was left out has the code
// kAbsent. Throws Error(kArgument) for a wrong number or name.
std::vector<Node> read_call(const Description& description, const Call& call,
                            const std::vector<std::string>& texts);

// Fills in what a call leaves out: from `decided` (heuristics, a configuration), then from
// defaults. Throws Error(kArgument) for an argument that nothing gives, or two.
void complete_call(const Description& description,
                   const std::map<std::string, std::string>& decided, std::vector<Node>& nodes);

// The class of each parameter as the key writes it. Throws Error(kArgument).
std::vector<std::string> class_texts(const Description& description,
                                     const std::vector<Node>& nodes);

std::string key_text(const std::vector<std::string>& classes,
                     const std::map<std::string, std::string>& options);

// "`add_kernel` (add.py:12)".
std::string subject_of(const Description& description);

// An argument's type as an error shows it: "fp32 pointer, 16-byte aligned", "int (32 bits)".
std::string shown(const Node& node);

}  // namespace opwright::triton::detail
