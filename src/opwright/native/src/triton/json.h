// JSON as packs and the worker use it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace opwright::triton::detail {

struct Json {
  enum class Type { kNull, kBool, kInt, kFloat, kString, kArray, kObject };

  Type type = Type::kNull;
  int64_t integer = 0;  // kInt, kBool
  double number = 0;    // kFloat
  std::string text;
  std::vector<Json> items;
  std::map<std::string, Json, std::less<>> fields;

  bool is_null() const { return type == Type::kNull; }
  bool truth() const { return integer != 0; }
  // The field of an object, or a null.
  const Json& operator[](std::string_view name) const;
  const Json& operator[](size_t index) const;
};

// Parses a text; throws std::runtime_error if it is not JSON or nested deeper than 64.
Json parse_json(std::string_view text);

std::string json_quoted(std::string_view text);

}  // namespace opwright::triton::detail
