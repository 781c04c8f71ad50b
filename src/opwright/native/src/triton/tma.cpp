// The 128-byte maps by which a GPU's TMA unit reads blocks of a tensor.
#include <array>
#include <cstring>

#include "opwright/triton/error.h"
#include "state.h"

namespace opwright::triton::detail {
namespace {

constexpr size_t kMostDimensions = 5;
constexpr int kTf32 = 11;

// CUtensorMapDataType of Triton's element type, which counts the floats in another order.
int host_type(int element_type) {
  switch (element_type) {
    case 8:
      return 10;
    case 9:
      return 8;
    case 10:
      return 9;
    default:
      return element_type;
  }
}

struct MapKey {
  std::array<uint64_t, 2 * kMostDimensions + 1> words = {};
  std::array<int, kMostDimensions> block = {};
  int swizzle = 0, element_type = 0;
  bool is_fp4_padded = false, pads_with_nan = false;
  size_t rank = 0;
  bool operator==(const MapKey&) const = default;
};

struct alignas(64) Map {
  unsigned char bytes[128];
};

struct CachedMap {
  bool is_set = false;
  Context context = nullptr;
  MapKey key;
  Map map;
};

constexpr size_t kCachedMaps = 16;

// Drivers up to CUDA 13.1 set a bit that makes the unit read small tensors wrongly; CUTLASS and
// Triton 3.7 clear it, too. `sizes` and `strides` (bytes, without the innermost) count from the
// innermost dimension.
void mend_small_tensor(Map& map, size_t rank, int element_size, const uint64_t* sizes,
                       const uint64_t* strides) {
  constexpr int kLastWrongDriver = 13010;
  constexpr uint64_t kSmallBytes = 128 * 1024;
  if (driver().cuda_version > kLastWrongDriver) return;
  uint64_t bytes = 1;
  for (size_t i = 0; i < rank; ++i) {
    bytes += (sizes[i] - 1) * (i == 0 ? static_cast<uint64_t>(element_size) : strides[i - 1]);
  }
  if (bytes >= kSmallBytes) return;
  uint64_t word;
  std::memcpy(&word, map.bytes + 8, 8);
  word &= ~(1ull << 21);
  std::memcpy(map.bytes + 8, &word, 8);
}

}  // namespace

const void* tma_map(const TensorDescriptor& descriptor, const TmaRecipe& recipe,
                    const Description& description) {
  static thread_local CachedMap cache[kCachedMaps];
  static thread_local size_t next = 0;

  const size_t rank = descriptor.shape.size();
  const auto refuse = [&](const std::string& why) {
    return Error(Cause::kArgument, subject_of(description) + ": a TMA descriptor cannot be made: " +
                                       why + "\n\n  descriptor  " + descriptor_text(descriptor));
  };
  if (rank == 0 || rank > kMostDimensions || descriptor.strides.size() != rank ||
      descriptor.block.size() != rank || recipe.block.size() != rank) {
    throw refuse("shape, strides and block must have the same 1 to 5 dimensions");
  }
  if (descriptor.strides.back() != 1) throw refuse("the last stride must be 1");
  if (reinterpret_cast<uint64_t>(descriptor.base.address) % 16 != 0)
    throw refuse("its address must be a multiple of 16");

  MapKey key;
  key.rank = rank;
  key.swizzle = recipe.swizzle;
  key.element_type = descriptor.rounds_to_tf32 ? kTf32 : host_type(recipe.element_type);
  key.is_fp4_padded = recipe.is_fp4_padded;
  key.pads_with_nan = descriptor.pads_with_nan;
  key.words[0] = reinterpret_cast<uint64_t>(descriptor.base.address);
  for (size_t i = 0; i < rank; ++i) {
    key.words[1 + i] = static_cast<uint64_t>(descriptor.shape[i]);
    key.words[1 + kMostDimensions + i] = static_cast<uint64_t>(descriptor.strides[i]);
    key.block[i] = recipe.block[i];
  }
  Context context = nullptr;
  driver().context_get(&context);
  for (CachedMap& cached : cache) {
    if (cached.is_set && cached.context == context && cached.key == key) return cached.map.bytes;
  }

  // The driver counts dimensions from the innermost one.
  uint64_t sizes[kMostDimensions], strides[kMostDimensions];
  uint32_t box[kMostDimensions], steps[kMostDimensions];
  for (size_t i = 0; i < rank; ++i) {
    const size_t from = rank - 1 - i;
    sizes[i] = key.words[1 + from];
    box[i] = static_cast<uint32_t>(recipe.block[from]);
    steps[i] = 1;
    if (i + 1 < rank) {
      strides[i] =
          static_cast<uint64_t>(recipe.element_size) * key.words[1 + kMostDimensions + from - 1];
    }
  }
  if (recipe.is_fp4_padded) sizes[0] *= 2;
  strides[rank - 1] = rank > 1 ? sizes[rank - 1] * strides[rank - 2]
                               : sizes[0] * static_cast<uint64_t>(recipe.element_size);

  if (!driver().encode_tiled) throw refuse("the driver has no cuTensorMapEncodeTiled");
  CachedMap& slot = cache[next++ % kCachedMaps];
  slot.is_set = false;
  // No interleaving, 128-byte promotion in L2.
  const Result result =
      driver().encode_tiled(slot.map.bytes, key.element_type, static_cast<uint32_t>(rank),
                            const_cast<void*>(descriptor.base.address), sizes, strides, box, steps,
                            0, recipe.swizzle, 2, descriptor.pads_with_nan);
  if (result != kSuccess) throw refuse(describe_result(result));
  mend_small_tensor(slot.map, rank, recipe.element_size, sizes, strides);
  slot.context = context;
  slot.key = key;
  slot.is_set = true;
  return slot.map.bytes;
}

}  // namespace opwright::triton::detail
