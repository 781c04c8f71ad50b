#include "json.h"

#include <charconv>
#include <cstdlib>
#include <stdexcept>

namespace opwright::triton::detail {
namespace {

const Json kNull;
constexpr int kDeepest = 64;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json document() {
    Json value = parse(0);
    skip_space();
    if (at_ != text_.size()) fail();
    return value;
  }

 private:
  [[noreturn]] void fail() const {
    throw std::runtime_error("no JSON at byte " + std::to_string(at_));
  }
  void skip_space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) {
      ++at_;
    }
  }
  char peek() const {
    if (at_ >= text_.size()) fail();
    return text_[at_];
  }
  bool take(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) return false;
    at_ += word.size();
    return true;
  }
  void expect(char letter) {
    if (peek() != letter) fail();
    ++at_;
  }

  Json parse(int depth) {
    if (depth > kDeepest) fail();
    skip_space();
    Json value;
    const char first = peek();
    if (first == '{') {
      value.type = Json::Type::kObject;
      ++at_;
      for (skip_space(); peek() != '}'; skip_space()) {
        if (!value.fields.empty()) {
          expect(',');
          skip_space();
        }
        std::string name = string();
        skip_space();
        expect(':');
        value.fields.insert_or_assign(std::move(name), parse(depth + 1));
      }
      ++at_;
    } else if (first == '[') {
      value.type = Json::Type::kArray;
      ++at_;
      for (skip_space(); peek() != ']'; skip_space()) {
        if (!value.items.empty()) expect(',');
        value.items.push_back(parse(depth + 1));
      }
      ++at_;
    } else if (first == '"') {
      value.type = Json::Type::kString;
      value.text = string();
    } else if (take("true")) {
      value.type = Json::Type::kBool;
      value.integer = 1;
    } else if (take("false")) {
      value.type = Json::Type::kBool;
    } else if (!take("null")) {
      number(value);
    }
    return value;
  }

  void number(Json& value) {
    const char* begin = text_.data() + at_;
    const char* end = text_.data() + text_.size();
    const auto whole = std::from_chars(begin, end, value.integer);
    const bool is_float =
        whole.ptr != end && (*whole.ptr == '.' || *whole.ptr == 'e' || *whole.ptr == 'E');
    if (whole.ec == std::errc() && !is_float) {
      value.type = Json::Type::kInt;
      at_ += whole.ptr - begin;
      return;
    }
    const auto real = std::from_chars(begin, end, value.number);
    if (real.ec == std::errc::result_out_of_range) {
      value.number =
          std::strtod(std::string(begin, real.ptr).c_str(), nullptr);  // infinite, or zero
    } else if (real.ec != std::errc()) {
      fail();
    }
    value.type = Json::Type::kFloat;
    at_ += real.ptr - begin;
  }

  uint32_t hex4() {
    uint32_t code = 0;
    if (at_ + 4 > text_.size()) fail();
    const char* begin = text_.data() + at_;
    if (std::from_chars(begin, begin + 4, code, 16).ptr != begin + 4) fail();
    at_ += 4;
    return code;
  }

  std::string string() {
    expect('"');
    std::string out;
    while (peek() != '"') {
      const char letter = text_[at_++];
      if (letter != '\\') {
        out += letter;
        continue;
      }
      const char escaped = peek();
      ++at_;
      switch (escaped) {
        case 'n':
          out += '\n';
          break;
        case 't':
          out += '\t';
          break;
        case 'r':
          out += '\r';
          break;
        case 'b':
          out += '\b';
          break;
        case 'f':
          out += '\f';
          break;
        case 'u':
          append_utf8(out);
          break;
        default:
          out += escaped;
      }
    }
    ++at_;
    return out;
  }

  void append_utf8(std::string& out) {
    uint32_t code = hex4();
    if (code >= 0xd800 && code < 0xdc00 && take("\\u")) {
      code = 0x10000 + ((code - 0xd800) << 10) + ((hex4() - 0xdc00) & 0x3ff);
    }
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else if (code < 0x800) {
      out += static_cast<char>(0xc0 | code >> 6);
      out += static_cast<char>(0x80 | (code & 0x3f));
    } else if (code < 0x10000) {
      out += static_cast<char>(0xe0 | code >> 12);
      out += static_cast<char>(0x80 | (code >> 6 & 0x3f));
      out += static_cast<char>(0x80 | (code & 0x3f));
    } else {
      out += static_cast<char>(0xf0 | code >> 18);
      out += static_cast<char>(0x80 | (code >> 12 & 0x3f));
      out += static_cast<char>(0x80 | (code >> 6 & 0x3f));
      out += static_cast<char>(0x80 | (code & 0x3f));
    }
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

const Json& Json::operator[](std::string_view name) const {
  const auto found = fields.find(name);
  return found == fields.end() ? kNull : found->second;
}

const Json& Json::operator[](size_t index) const {
  return index < items.size() ? items[index] : kNull;
}

Json parse_json(std::string_view text) { return Parser(text).document(); }

std::string json_quoted(std::string_view text) {
  static const char digits[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char letter : text) {
    const auto code = static_cast<unsigned char>(letter);
    if (letter == '"' || letter == '\\') {
      out += '\\';
      out += letter;
    } else if (code < 0x20) {
      out += "\\u00";
      out += digits[code >> 4];
      out += digits[code & 15];
    } else {
      out += letter;
    }
  }
  return out + "\"";
}

}  // namespace opwright::triton::detail
