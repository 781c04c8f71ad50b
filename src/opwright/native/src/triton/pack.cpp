#include "pack.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "opwright/triton/error.h"

namespace opwright::triton::detail {
namespace {

constexpr char kMagic[] = "OPWPACK1";
constexpr uint32_t kVersion = 1;
constexpr size_t kHeaderSize = 64;
constexpr size_t kRowSize = 40;

template <typename T>
T read(Bytes bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// The text that a record is filed under.
std::string filing_text(const Json& record) {
  const std::string& file = record["file"].text;
  const std::string place = file.substr(file.rfind('/') + 1) + "\n" + record["function"].text;
  const std::string arch = "\n" + std::to_string(record["arch"].integer);
  if (!record["key"].is_null()) return "kernel\n" + place + arch + "\n" + record["key"].text;
  if (!record["arch"].is_null()) return "tuned\n" + place + arch;
  return "describe\n" + place;
}

// Whether the tables of an ELF file and what they point to lie within it: the driver is given an
// address only.
bool is_whole_elf(Bytes image) {
  constexpr size_t kElfHeader = 64, kSectionHeader = 64, kSegmentHeader = 56;
  constexpr uint32_t kNoBits = 8;
  if (image.size() < kElfHeader || std::memcmp(image.data(), "\177ELF", 4) != 0) return false;
  const auto lies_within = [&](uint64_t from, uint64_t length) {
    return from <= image.size() && length <= image.size() - from;
  };
  // Where a header has its table's offset, entry size and number; where an entry has its data's
  // offset and size.
  const auto table = [&](size_t offset_at, size_t entry_at, size_t entry_size, size_t data_at,
                         size_t size_at) {
    const uint64_t offset = read<uint64_t>(image, offset_at);
    const uint16_t size = read<uint16_t>(image, entry_at),
                   count = read<uint16_t>(image, entry_at + 2);
    if (count == 0) return true;
    if (size != entry_size || !lies_within(offset, uint64_t{count} * size)) return false;
    for (uint16_t i = 0; i < count; ++i) {
      const size_t entry = offset + size_t{i} * size;
      if (entry_size == kSectionHeader && read<uint32_t>(image, entry + 4) == kNoBits) continue;
      if (!lies_within(read<uint64_t>(image, entry + data_at),
                       read<uint64_t>(image, entry + size_at)))
        return false;
    }
    return true;
  };
  return table(0x28, 0x3a, kSectionHeader, 24, 32) && table(0x20, 0x36, kSegmentHeader, 8, 32);
}

}  // namespace

std::shared_ptr<Pack> Pack::open(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0)
    throw Error(Cause::kPack, "cannot open the pack " + path + ": " + std::strerror(errno));
  struct stat status;
  const bool is_known = fstat(file, &status) == 0;
  const size_t size = is_known ? static_cast<size_t>(status.st_size) : 0;
  void* memory = size ? mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  close(file);
  if (memory == MAP_FAILED)
    throw Error(Cause::kPack, "cannot map the pack " + path + ": it is empty or no file");
  return std::shared_ptr<Pack>(
      new Pack({static_cast<const unsigned char*>(memory), size}, path, true));
}

std::shared_ptr<Pack> Pack::from_memory(Bytes bytes, std::string name) {
  return std::shared_ptr<Pack>(new Pack(bytes, std::move(name), false));
}

Pack::Pack(Bytes bytes, std::string name, bool is_mapped)
    : bytes_(bytes), name_(std::move(name)), is_mapped_(is_mapped) {
  try {
    if (bytes.size() < kHeaderSize || std::memcmp(bytes.data(), kMagic, 8) != 0)
      refuse("it is not a pack");
    if (read<uint32_t>(bytes, 8) != kVersion) {
      refuse("its version is " + std::to_string(read<uint32_t>(bytes, 8)) +
             ", this library reads 1");
    }
    row_count_ = read<uint32_t>(bytes, 12);
    rows_at_ = read<uint64_t>(bytes, 24);
    if (read<uint64_t>(bytes, 16) != bytes.size()) refuse("it is cut short");
    if (rows_at_ > bytes.size() || row_count_ > (bytes.size() - rows_at_) / kRowSize) {
      refuse("its rows lie outside of it");
    }
    const Digest digest = sha256(bytes.subspan(rows_at_, size_t{row_count_} * kRowSize));
    if (std::memcmp(digest.data(), bytes.data() + 32, 32) != 0) refuse("its rows are damaged");
  } catch (...) {
    if (is_mapped_) munmap(const_cast<unsigned char*>(bytes_.data()), bytes_.size());
    throw;
  }
}

Pack::~Pack() {
  if (is_mapped_) munmap(const_cast<unsigned char*>(bytes_.data()), bytes_.size());
}

void Pack::refuse(const std::string& why) const {
  throw Error(Cause::kPack, "the pack " + name_ + " cannot be used: " + why +
                                "\n\nhint: `opwright pack verify " + name_ +
                                "` says more; build it again.");
}

Json Pack::record(size_t row) const {
  const size_t at = rows_at_ + row * kRowSize;
  const uint64_t offset = read<uint64_t>(bytes_, at + 16);
  const uint32_t size = read<uint32_t>(bytes_, at + 24);
  if (offset > bytes_.size() || size > bytes_.size() - offset)
    refuse("a record lies outside of it");
  const Bytes text = bytes_.subspan(offset, size);
  if (std::memcmp(sha256(text).data(), bytes_.data() + at + 32, 8) != 0)
    refuse("a record is damaged");
  try {
    return parse_json({reinterpret_cast<const char*>(text.data()), text.size()});
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    refuse(std::string("a record is unreadable: ") + error.what());
  }
}

std::vector<Json> Pack::find(std::string_view filed_under) const {
  const Digest digest = sha256(filed_under);
  const auto row_digest = [&](size_t row) { return bytes_.data() + rows_at_ + row * kRowSize; };
  size_t low = 0, high = row_count_;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (std::memcmp(row_digest(middle), digest.data(), 16) < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  std::vector<Json> found;
  for (; low < row_count_ && std::memcmp(row_digest(low), digest.data(), 16) == 0; ++low) {
    found.push_back(record(low));
    // The row's digest vouches for itself only: the record must say the same.
    if (filing_text(found.back()) != filed_under) refuse("a record is filed under another name");
  }
  return found;
}

std::vector<Json> Pack::all() const {
  std::vector<Json> found;
  for (size_t row = 0; row < row_count_; ++row) found.push_back(record(row));
  return found;
}

Bytes Pack::blob(const Json& record) const {
  const auto offset = static_cast<uint64_t>(record["blob"][0].integer);
  const auto size = static_cast<uint64_t>(record["blob"][1].integer);
  if (offset > bytes_.size() || size > bytes_.size() - offset) refuse("a cubin lies outside of it");
  const Bytes blob = bytes_.subspan(offset, size);
  if (hex(sha256(blob)) != record["sha256"].text) refuse("a cubin is damaged");
  if (!is_whole_elf(blob)) refuse("a cubin is not a complete ELF file");
  return blob;
}

}  // namespace opwright::triton::detail
