// The runtime's small parts on cases that tests/integration/triton/test_runtime_units.py makes: one
// JSON object per line each way.
//
//   {"do": "json", "text": ...}               {"ok": the value, written again} or {"error": ...}
//   {"do": "quote", "text": ...}              {"ok": ...}
//   {"do": "sha256", "hex": ...}              {"ok": ...}
//   {"do": "float", "bits": ...}              {"ok": float_text of it}
//   {"do": "value", "text": ...}              {"ok": parse_value and value_text_of}
//   {"do": "cdiv", "a": ..., "b": ...}        {"ok": ...}
//   {"do": "evaluate", "form": ..., "args": {name: VALUE text}}
//                                             {"ok": the value's text}
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>

#include "../../src/opwright/native/src/triton/digest.h"
#include "../../src/opwright/native/src/triton/expression.h"
#include "../../src/opwright/native/src/triton/json.h"
#include "opwright/triton.h"

using namespace opwright::triton::detail;

namespace {

std::string write(const Json& value) {
  switch (value.type) {
    case Json::Type::kNull:
      return "null";
    case Json::Type::kBool:
      return value.truth() ? "true" : "false";
    case Json::Type::kInt:
      return std::to_string(value.integer);
    case Json::Type::kFloat: {
      char text[64];
      std::snprintf(text, sizeof text, "%.17g", value.number);
      const std::string shown = text;
      if (shown.find("inf") != std::string::npos) return shown[0] == '-' ? "-Infinity" : "Infinity";
      if (shown.find("nan") != std::string::npos) return "NaN";
      return shown.find_first_of(".e") == std::string::npos ? shown + ".0" : shown;
    }
    case Json::Type::kString:
      return json_quoted(value.text);
    case Json::Type::kArray: {
      std::string text = "[";
      for (const Json& item : value.items) text += (text.size() > 1 ? "," : "") + write(item);
      return text + "]";
    }
    default: {
      std::string text = "{";
      for (const auto& [name, item] : value.fields) {
        text += (text.size() > 1 ? "," : "") + json_quoted(name) + ":" + write(item);
      }
      return text + "}";
    }
  }
}

std::string answer(const Json& request) {
  const std::string& what = request["do"].text;
  if (what == "json") return write(parse_json(request["text"].text));
  if (what == "quote") return json_quoted(json_quoted(request["text"].text));
  if (what == "sha256") {
    std::string bytes;
    const std::string& text = request["hex"].text;
    for (size_t i = 0; i + 1 < text.size(); i += 2) {
      bytes += static_cast<char>(std::stoi(text.substr(i, 2), nullptr, 16));
    }
    return json_quoted(hex(sha256(bytes)));
  }
  if (what == "float") {
    return json_quoted(float_text(__builtin_bit_cast(double, std::stoull(request["bits"].text))));
  }
  if (what == "cdiv")
    return std::to_string(opwright::triton::cdiv(request["a"].integer, request["b"].integer));
  if (what == "value") return json_quoted(value_text_of(parse_value(request["text"].text)));
  const Expression expression(request["form"]);
  return json_quoted(value_text_of(expression.evaluate(
      [&](std::string_view name) { return parse_value(request["args"][name].text); })));
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    std::string reply;
    try {
      reply = "{\"ok\": " + answer(parse_json(line)) + "}";
    } catch (const std::exception& error) {
      reply = "{\"error\": " + json_quoted(error.what()) + "}";
    }
    std::puts(reply.c_str());
  }
}
