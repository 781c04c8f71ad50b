#include "expression.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>

#include "opwright/triton/error.h"
#include "opwright/triton/integers.h"
#include "opwright/triton/value.h"

namespace opwright::triton::detail {
namespace {

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error(why); }

// As CPython does it: the remainder first, with the sign of the divisor.
double float_modulo(double a, double b) {
  if (b == 0) fail("modulo by zero");
  const double rest = std::fmod(a, b);
  if (rest == 0) return std::copysign(0.0, b);
  return (rest < 0) != (b < 0) ? rest + b : rest;
}
double float_floor_divide(double a, double b) {
  if (b == 0) fail("division by zero");
  const double rest = std::fmod(a, b);
  double quotient = (a - rest) / b;
  if (rest != 0 && (rest < 0) != (b < 0)) quotient -= 1;
  if (quotient == 0) return std::copysign(0.0, a / b);
  const double down = std::floor(quotient);
  return quotient - down > 0.5 ? down + 1 : down;
}

constexpr int kUnordered = 2;  // a NaN

// Python's comparison of numbers and of texts: -1, 0, 1, or kUnordered.
int compare(const Value& a, const Value& b) {
  if (a.type == Value::Type::kString && b.type == Value::Type::kString) {
    const int order = a.text.compare(b.text);
    return order < 0 ? -1 : order > 0;
  }
  if (!a.is_number() || !b.is_number()) fail("values that have no order are compared");
  if (a.type != Value::Type::kFloat && b.type != Value::Type::kFloat) {
    return a.integer < b.integer ? -1 : a.integer > b.integer;
  }
  // Exact for any 64-bit integer where a long double has 64 bits of mantissa.
  const long double x = a.as_long_double(), y = b.as_long_double();
  if (std::isnan(x) || std::isnan(y)) return kUnordered;
  return x < y ? -1 : x > y;
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number()) return compare(a, b) == 0;
  if (a.type != b.type) return false;
  if (a.type == Value::Type::kString || a.type == Value::Type::kLargeInt) return a.text == b.text;
  if (a.type == Value::Type::kPointer) fail("pointers are compared");
  if (a.type == Value::Type::kTuple) {
    if (a.items.size() != b.items.size()) return false;
    for (size_t i = 0; i < a.items.size(); ++i) {
      if (!equal(a.items[i], b.items[i])) return false;
    }
  }
  return true;
}

int64_t integer_of(const Value& value) {
  if (value.type != Value::Type::kInt && value.type != Value::Type::kBool)
    fail("an integer is needed");
  return value.integer;
}

// Two bools give a bool.
Value of_bits(const Value& a, const Value& b, int64_t bits) {
  const bool are_bools = a.type == Value::Type::kBool && b.type == Value::Type::kBool;
  return are_bools ? Value::of_bool(bits) : Value::of_int(bits);
}

constexpr int kMaxDepth = 64;  // of tuples, as of JSON

// Reads a value from the front of a text.
Value read_value(std::string_view& text, int depth);

Value read_tuple(std::string_view& text, int depth) {
  if (depth == kMaxDepth) {
    throw Error(Cause::kArgument,
                "a value nests more than " + std::to_string(kMaxDepth) + " tuples");
  }
  Value tuple;
  tuple.type = Value::Type::kTuple;
  text.remove_prefix(1);
  while (!text.empty() && text[0] != ')') {
    tuple.items.push_back(read_value(text, depth + 1));
    while (!text.empty() && (text[0] == ',' || text[0] == ' ')) text.remove_prefix(1);
  }
  if (!text.empty()) text.remove_prefix(1);
  return tuple;
}

Value read_word(std::string_view word) {
  if (word == "True" || word == "False") return Value::of_bool(word == "True");
  if (word == "inf") return Value::of_float(std::numeric_limits<double>::infinity());
  if (word == "-inf") return Value::of_float(-std::numeric_limits<double>::infinity());
  if (word == "nan") return Value::of_float(std::numeric_limits<double>::quiet_NaN());
  int64_t integer;
  const char* end = word.data() + word.size();
  const auto whole = std::from_chars(word.data(), end, integer);
  if (whole.ec == std::errc() && whole.ptr == end) return Value::of_int(integer);
  if (whole.ec == std::errc::result_out_of_range && whole.ptr == end) {
    Value large;
    large.type = Value::Type::kLargeInt;
    large.text = word;
    return large;
  }
  double number;
  const auto real = std::from_chars(word.data(), end, number);
  if (real.ec == std::errc() && real.ptr == end) return Value::of_float(number);
  return {};
}

Value read_value(std::string_view& text, int depth) {
  if (text[0] == '(') return read_tuple(text, depth);
  size_t end = 0;
  if (text[0] == '"') {
    for (end = 1; end < text.size() && text[end] != '"'; ++end) end += text[end] == '\\';
    end = std::min(end + 1, text.size());
    Value value;
    try {
      value = Value::of_text(parse_json(text.substr(0, end)).text);
    } catch (const std::runtime_error& error) {
      throw Error(Cause::kArgument,
                  std::string("the string of a value cannot be read: ") + error.what());
    }
    text.remove_prefix(end);
    return value;
  }
  end = std::max<size_t>(std::min(text.find_first_of(",)"), text.size()), 1);
  const Value value = read_word(text.substr(0, end));
  text.remove_prefix(end);
  return value;
}

}  // namespace

Value Value::of_int(int64_t value) {
  Value result;
  result.type = Type::kInt;
  result.integer = value;
  return result;
}
Value Value::of_bool(bool value) {
  Value result;
  result.type = Type::kBool;
  result.integer = value;
  return result;
}
Value Value::of_float(double value) {
  Value result;
  result.type = Type::kFloat;
  result.number = value;
  return result;
}
Value Value::of_text(std::string value) {
  Value result;
  result.type = Type::kString;
  result.text = std::move(value);
  return result;
}

bool Value::truth() const {
  switch (type) {
    case Type::kNone:
      return false;
    case Type::kFloat:
      return number != 0;
    case Type::kString:
      return !text.empty();
    case Type::kTuple:
      return !items.empty();
    case Type::kPointer:
    case Type::kLargeInt:
      return true;
    default:
      return integer != 0;
  }
}

std::string value_text_of(const Value& value) {
  switch (value.type) {
    case Value::Type::kNone:
      return "None";
    case Value::Type::kBool:
      return value.integer ? "True" : "False";
    case Value::Type::kInt:
      return int_text(value.integer);
    case Value::Type::kFloat:
      return float_text(value.number);
    case Value::Type::kString:
      return quoted(value.text);
    case Value::Type::kLargeInt:
      return value.text;
    case Value::Type::kPointer:
      return "pointer";
    case Value::Type::kTuple:
      break;
  }
  std::string text = "(";
  for (size_t i = 0; i < value.items.size(); ++i)
    text += (i ? ", " : "") + value_text_of(value.items[i]);
  return text + (value.items.size() == 1 ? ",)" : ")");
}

Value parse_value(std::string_view text) { return text.empty() ? Value() : read_value(text, 0); }

Expression::Expression(const Json& form) {
  switch (form.type) {
    case Json::Type::kNull:
      return;
    case Json::Type::kBool:
      literal_ = Value::of_bool(form.truth());
      return;
    case Json::Type::kInt:
      literal_ = Value::of_int(form.integer);
      return;
    case Json::Type::kFloat:
      literal_ = Value::of_float(form.number);
      return;
    case Json::Type::kArray:
      break;
    default:
      fail("an expression must be a number or a list");
  }
  using O = Operation;
  struct Form {
    std::string_view name;
    O operation;
    size_t least, most;
  };
  static constexpr Form kForms[] = {
      {"+", O::kAdd, 2, 2},        {"-", O::kSubtract, 2, 2},     {"*", O::kMultiply, 2, 2},
      {"/", O::kDivide, 2, 2},     {"//", O::kFloorDivide, 2, 2}, {"%", O::kModulo, 2, 2},
      {"**", O::kPower, 2, 2},     {"<<", O::kShiftLeft, 2, 2},   {">>", O::kShiftRight, 2, 2},
      {"&", O::kBitAnd, 2, 2},     {"|", O::kBitOr, 2, 2},        {"^", O::kBitXor, 2, 2},
      {"==", O::kEqual, 2, 2},     {"!=", O::kNotEqual, 2, 2},    {"<", O::kLess, 2, 2},
      {"<=", O::kLessEqual, 2, 2}, {">", O::kGreater, 2, 2},      {">=", O::kGreaterEqual, 2, 2},
      {"and", O::kAnd, 1, 64},     {"or", O::kOr, 1, 64},         {"not", O::kNot, 1, 1},
      {"neg", O::kNegate, 1, 1},   {"if", O::kIf, 3, 3},          {"tuple", O::kTuple, 0, 64}};
  static constexpr Form kCalls[] = {
      {"cdiv", O::kCdiv, 2, 2}, {"min", O::kMin, 1, 64},
      {"max", O::kMax, 1, 64},  {"next_power_of_2", O::kNextPowerOf2, 1, 1},
      {"abs", O::kAbs, 1, 1},   {"int", O::kInt, 1, 1}};
  const std::string& head = form[0].text;
  if (head == "str" || head == "arg") {
    if (form.items.size() != 2 || form[1].type != Json::Type::kString)
      fail("no expression: " + head);
    literal_ = Value::of_text(form[1].text);
    if (head == "arg") operation_ = O::kArgument;
    return;
  }
  const bool is_call = head == "call";
  const std::span<const Form> table =
      is_call ? std::span<const Form>(kCalls) : std::span<const Form>(kForms);
  const std::string& name = is_call ? form[1].text : head;
  const auto found =
      std::find_if(table.begin(), table.end(), [&](const Form& one) { return one.name == name; });
  const size_t first = is_call ? 2 : 1;
  if (found == table.end() || form.items.size() < first + found->least ||
      form.items.size() > first + found->most) {
    fail("no expression: " + head);
  }
  operation_ = found->operation;
  for (size_t i = first; i < form.items.size(); ++i) operands_.emplace_back(form[i]);
}

void Expression::names(std::vector<std::string>& found) const {
  if (operation_ == Operation::kArgument) found.push_back(literal_.text);
  for (const Expression& operand : operands_) operand.names(found);
}

Value Expression::evaluate(const Lookup& lookup) const {
  using O = Operation;
  switch (operation_) {
    case O::kLiteral:
      return literal_;
    case O::kArgument:
      return lookup(literal_.text);
    case O::kIf:
      return operands_[operands_[0].evaluate(lookup).truth() ? 1 : 2].evaluate(lookup);
    case O::kNot:
      return Value::of_bool(!operands_[0].evaluate(lookup).truth());
    case O::kAnd:
    case O::kOr: {
      Value value;
      for (const Expression& operand : operands_) {
        value = operand.evaluate(lookup);
        if (value.truth() == (operation_ == O::kOr)) break;
      }
      return value;
    }
    case O::kTuple: {
      Value tuple;
      tuple.type = Value::Type::kTuple;
      for (const Expression& operand : operands_) tuple.items.push_back(operand.evaluate(lookup));
      return tuple;
    }
    case O::kMin:
    case O::kMax: {
      Value best = operands_[0].evaluate(lookup);
      for (size_t i = 1; i < operands_.size(); ++i) {
        Value next = operands_[i].evaluate(lookup);
        const int order = compare(next, best);
        if (order == (operation_ == O::kMin ? -1 : 1)) best = std::move(next);
      }
      return best;
    }
    default:
      break;
  }
  const Value a = operands_[0].evaluate(lookup);
  const Value b = operands_.size() > 1 ? operands_[1].evaluate(lookup) : Value();
  switch (operation_) {
    case O::kEqual:
      return Value::of_bool(equal(a, b));
    case O::kNotEqual:
      return Value::of_bool(!equal(a, b));
    case O::kLess:
      return Value::of_bool(compare(a, b) == -1);
    case O::kLessEqual:
      return Value::of_bool(compare(a, b) == -1 || compare(a, b) == 0);
    case O::kGreater:
      return Value::of_bool(compare(a, b) == 1);
    case O::kGreaterEqual:
      return Value::of_bool(compare(a, b) == 1 || compare(a, b) == 0);
    default:
      break;
  }
  if (!a.is_number() || (operands_.size() > 1 && !b.is_number())) fail("a number is needed");
  const bool is_float = a.type == Value::Type::kFloat || b.type == Value::Type::kFloat;
  const double x = a.as_double(), y = b.as_double();
  switch (operation_) {
    case O::kAdd:
      if (is_float) return Value::of_float(x + y);
      return Value::of_int(python::add(a.integer, b.integer, fail));
    case O::kSubtract:
      if (is_float) return Value::of_float(x - y);
      return Value::of_int(python::subtract(a.integer, b.integer, fail));
    case O::kMultiply:
      if (is_float) return Value::of_float(x * y);
      return Value::of_int(python::multiply(a.integer, b.integer, fail));
    case O::kDivide:
      if (is_float) return Value::of_float(python::divide(x, y, fail));
      return Value::of_float(python::divide(a.integer, b.integer, fail));
    case O::kFloorDivide:
      if (is_float) return Value::of_float(float_floor_divide(x, y));
      return Value::of_int(python::floor_divide(a.integer, b.integer, fail));
    case O::kModulo:
      if (is_float) return Value::of_float(float_modulo(x, y));
      return Value::of_int(python::modulo(a.integer, b.integer, fail));
    case O::kPower:
      if (x == 0 && y < 0) fail("zero to a negative power");
      if (is_float || b.integer < 0) {
        if (x < 0 && y != std::floor(y)) fail("a root of a negative number");
        const double raised = std::pow(x, y);
        if (std::isinf(raised) && std::isfinite(x) && std::isfinite(y))
          fail("a power beyond the range of floats");
        return Value::of_float(raised);
      }
      return Value::of_int(python::power(a.integer, b.integer, fail));
    case O::kShiftLeft:
      return Value::of_int(python::shift_left(integer_of(a), integer_of(b), fail));
    case O::kShiftRight:
      return Value::of_int(python::shift_right(integer_of(a), integer_of(b), fail));
    case O::kBitAnd:
      return of_bits(a, b, integer_of(a) & integer_of(b));
    case O::kBitOr:
      return of_bits(a, b, integer_of(a) | integer_of(b));
    case O::kBitXor:
      return of_bits(a, b, integer_of(a) ^ integer_of(b));
    case O::kNegate:
      if (is_float) return Value::of_float(-x);
      return Value::of_int(python::negate(a.integer, fail));
    case O::kAbs:
      if (is_float) return Value::of_float(std::fabs(x));
      return Value::of_int(python::absolute(a.integer, fail));
    case O::kInt:
      if (!is_float) return Value::of_int(a.integer);
      return Value::of_int(python::truncate(x, fail));
    case O::kCdiv:
      return Value::of_int(python::cdiv(integer_of(a), integer_of(b), fail));
    case O::kNextPowerOf2:
      return Value::of_int(python::next_power_of_2(integer_of(a), fail));
    default:
      fail("no operation");
  }
}

}  // namespace opwright::triton::detail
