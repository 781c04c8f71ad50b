// Values that a kernel is compiled for: constexpr arguments and options, as the texts of its key.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

#include "opwright/triton/dtype.h"

namespace opwright::triton {

// Another @triton.jit function of the kernel's module, as a constexpr argument.
struct Function {
  std::string_view name;
};

// A constexpr argument; made by cx.
template <typename T>
struct Constant {
  T value;
};

// A constexpr argument: cx(1024), cx(0.5), cx(true), cx("relu"), cx(DType::fp16), cx(nullptr),
// cx(Function{"activation"}), cx(std::tuple(1, 2)).
template <typename T>
constexpr Constant<std::decay_t<const T>> cx(const T& value) {
  return {value};
}
template <size_t N>
constexpr Constant<std::string_view> cx(const char (&text)[N]) {
  return {std::string_view(text, N - 1)};
}

namespace detail {

// Mixes a word into a hash: one multiplication of 64 by 64 bits.
inline uint64_t mix(uint64_t hash, uint64_t word) {
  const __uint128_t product =
      static_cast<__uint128_t>(hash ^ 0x9E3779B97F4A7C15ull) * (word ^ 0xD6E8FEB86659FD93ull);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t hash_text(std::string_view text) {
  uint64_t hash = text.size();
  size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    uint64_t word;
    __builtin_memcpy(&word, text.data() + at, 8);
    hash = mix(hash, word);
  }
  uint64_t rest = 0;
  for (; at < text.size(); ++at) rest = rest << 8 | static_cast<unsigned char>(text[at]);
  return mix(hash, rest);
}

template <typename T, bool kIsEnum = std::is_enum_v<T>>
inline constexpr bool kIsUnsigned = std::is_unsigned_v<T>;
template <typename T>
inline constexpr bool kIsUnsigned<T, true> = std::is_unsigned_v<std::underlying_type_t<T>>;

template <typename T>
inline constexpr bool kIsTuple = false;
template <typename... T>
inline constexpr bool kIsTuple<std::tuple<T...>> = true;
template <typename A, typename B>
inline constexpr bool kIsTuple<std::pair<A, B>> = true;
template <typename T>
inline constexpr bool kIsText = std::is_convertible_v<const T&, std::string_view>;

std::string int_text(int64_t value);
std::string unsigned_text(uint64_t value);
std::string float_text(double value);  // as Python's repr writes it
std::string quoted(std::string_view text);

// The text of a value: 1024, 0.5, True, "relu", fp16, @activation, (1, 2).
template <typename T>
std::string value_text(const T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value ? "True" : "False";
  } else if constexpr (std::is_same_v<T, std::nullptr_t>) {
    return "None";
  } else if constexpr (std::is_same_v<T, DType>) {
    const char* name = kDTypeNames[static_cast<int>(value)];
    if (value == DType::u1) return "int1";
    if (name[0] == 'i') return std::string("int") + (name + 1);
    if (name[0] == 'u') return std::string("uint") + (name + 1);
    return name;
  } else if constexpr (std::is_same_v<T, Function>) {
    return "@" + std::string(value.name);
  } else if constexpr (kIsText<T>) {
    return quoted(value);
  } else if constexpr (std::is_floating_point_v<T>) {
    return float_text(static_cast<double>(value));
  } else if constexpr (kIsUnsigned<T>) {
    return unsigned_text(static_cast<uint64_t>(value));
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    return int_text(static_cast<int64_t>(value));
  } else if constexpr (kIsTuple<T>) {
    std::string text = "(";
    std::apply(
        [&](const auto&... items) {
          size_t index = 0;
          ((text += (index++ ? ", " : "") + value_text(items)), ...);
          if (sizeof...(items) == 1) text += ",";
        },
        value);
    return text + ")";
  } else {
    static_assert(kIsTuple<T>,
                  "cx takes an int, float, bool, string, DType, Function, nullptr or "
                  "a std::tuple of these");
    return {};
  }
}

}  // namespace detail
}  // namespace opwright::triton
