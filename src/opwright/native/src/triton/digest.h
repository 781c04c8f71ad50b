// SHA-256 (FIPS 180-4), for packs and the cache.
#pragma once

#include <array>
#include <cstdint>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace opwright::triton::detail {

using Digest = std::array<unsigned char, 32>;

Digest sha256(std::span<const unsigned char> bytes);
inline Digest sha256(std::string_view text) {
  return sha256({reinterpret_cast<const unsigned char*>(text.data()), text.size()});
}
std::string hex(std::span<const unsigned char> bytes);

}  // namespace opwright::triton::detail
