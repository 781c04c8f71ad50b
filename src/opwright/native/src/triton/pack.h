// Reads a pack: rows vouch for records, records for cubins. Nothing of a file is trusted before
// that.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "digest.h"
#include "json.h"

namespace opwright::triton::detail {

using Bytes = std::span<const unsigned char>;

class Pack {
 public:
  // Maps a file; throws Error(kPack) if it cannot be read or its header and rows do not hold.
  static std::shared_ptr<Pack> open(const std::string& path);
  // Bytes that outlive every launch.
  static std::shared_ptr<Pack> from_memory(Bytes bytes, std::string name);
  ~Pack();

  const std::string& name() const { return name_; }
  // The records filed under a text (see decision 0006). Throws Error(kPack) if one is damaged.
  std::vector<Json> find(std::string_view filed_under) const;
  // Every record of a kernel's key is filed on its own; this walks over all of them.
  std::vector<Json> all() const;
  // The cubin of a kernel's record, checked.
  Bytes blob(const Json& record) const;

 private:
  Pack(Bytes bytes, std::string name, bool is_mapped);
  Pack(const Pack&) = delete;
  Json record(size_t row) const;
  [[noreturn]] void refuse(const std::string& why) const;

  Bytes bytes_;
  std::string name_;
  bool is_mapped_;
  uint64_t rows_at_ = 0;
  uint32_t row_count_ = 0;
};

}  // namespace opwright::triton::detail
