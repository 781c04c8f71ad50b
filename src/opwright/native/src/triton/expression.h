// The small form of a Python lambda: what grids and heuristics compute from a call's arguments.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "json.h"

namespace opwright::triton::detail {

// A Python value: None, bool, int, float, str, or a tuple; a tensor, whose presence alone is
// known; an int beyond 64 bits, as text.
struct Value {
  enum class Type { kNone, kBool, kInt, kFloat, kString, kTuple, kPointer, kLargeInt };
  Type type = Type::kNone;
  int64_t integer = 0;
  double number = 0;
  std::string text;
  std::vector<Value> items;

  static Value of_int(int64_t value);
  static Value of_bool(bool value);
  static Value of_float(double value);
  static Value of_text(std::string value);
  bool truth() const;
  double as_double() const { return type == Type::kFloat ? number : static_cast<double>(integer); }
  long double as_long_double() const {
    return type == Type::kFloat ? number : static_cast<long double>(integer);
  }
  bool is_number() const {
    return type == Type::kBool || type == Type::kInt || type == Type::kFloat;
  }
};

// The text of a value in a key, and back; parse_value returns None for texts that are not a
// plain value, and throws Error for an open string and for tuples nested deeper than 64.
std::string value_text_of(const Value& value);
Value parse_value(std::string_view text);

class Expression {
 public:
  using Lookup = std::function<Value(std::string_view name)>;
  // Throws std::runtime_error for an invalid form.
  explicit Expression(const Json& form);
  // Throws std::runtime_error for what Python would refuse, and for integers beyond 64 bits.
  Value evaluate(const Lookup& lookup) const;
  // The names of the arguments that it reads.
  void names(std::vector<std::string>& found) const;

 private:
  enum class Operation {
    kLiteral,
    kArgument,
    kAdd,
    kSubtract,
    kMultiply,
    kDivide,
    kFloorDivide,
    kModulo,
    kPower,
    kShiftLeft,
    kShiftRight,
    kBitAnd,
    kBitOr,
    kBitXor,
    kEqual,
    kNotEqual,
    kLess,
    kLessEqual,
    kGreater,
    kGreaterEqual,
    kAnd,
    kOr,
    kNot,
    kNegate,
    kIf,
    kTuple,
    kCdiv,
    kMin,
    kMax,
    kNextPowerOf2,
    kAbs,
    kInt,
  };
  Operation operation_ = Operation::kLiteral;
  Value literal_;
  std::vector<Expression> operands_;
};

}  // namespace opwright::triton::detail
