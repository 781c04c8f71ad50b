// A compiled kernel: what its record says, checked, and its functions in the contexts that loaded
// it.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda.h"
#include "description.h"
#include "pack.h"

namespace opwright::triton::detail {

// One parameter of the cubin.
struct CubinParameter {
  enum class Source { kArgument, kGlobalScratch, kProfileScratch };
  Source source = Source::kArgument;
  std::vector<int> path;  // of an argument
  std::string type;
  std::string field;  // of a descriptor: tma, base, shape, stride, nan, tf32
  int dimension = 0;
  uint32_t offset = 0, size = 0;
};

// How the TMA unit reads a descriptor's blocks, for each descriptor in order.
struct TmaRecipe {
  int swizzle = 0, element_size = 0, element_type = 0;
  std::vector<int> block;
  bool is_fp4_padded = false;
};

struct LoadedFunction {
  Function_ function = nullptr;
  bool is_oversize = false;  // shared memory beyond the usual limit, which the launch must say, too
};

struct Compiled {
  std::shared_ptr<const Pack> pack;
  std::string key, triton, ptxas, symbol;
  Bytes cubin;
  int cuda = 0;
  uint32_t warps = 0, ctas = 1, shared = 0;
  bool is_pdl = false, is_cooperative = false;
  uint64_t scratch_bytes = 0, scratch_alignment = 1;
  uint64_t profile_bytes = 0, profile_alignment = 1;
  std::vector<CubinParameter> parameters;
  std::vector<TmaRecipe> recipes;

  std::vector<std::pair<Context, LoadedFunction>> functions;  // under the mutex of `shared()`

  // Loads the function in the current context, which is of this device. `is_capturing` refuses
  // that.
  LoadedFunction load(Device device, const std::string& subject, bool is_capturing) const;
};

// Reads a kernel's record and checks it against the limits of any GPU. Throws Error(kPack).
std::shared_ptr<Compiled> read_compiled(std::shared_ptr<const Pack> pack, const Json& record);

}  // namespace opwright::triton::detail
