#include "compiled.h"

#include "opwright/triton/error.h"

namespace opwright::triton::detail {
namespace {

// No kernel has more: the driver's limits since CUDA 12.1.
constexpr uint32_t kMostParameterBytes = 32764;
constexpr size_t kMostParameters = 4096;
constexpr uint32_t kDefaultShared = 48 * 1024;

uint64_t natural(const Json& value, uint64_t most, const char* what, const Pack& pack) {
  const auto number = static_cast<uint64_t>(value.integer);
  if (value.type != Json::Type::kInt || number > most) {
    throw Error(Cause::kPack, "the pack " + pack.name() + " cannot be used: a kernel's " + what +
                                  " is out of range");
  }
  return number;
}

}  // namespace

std::shared_ptr<Compiled> read_compiled(std::shared_ptr<const Pack> pack, const Json& record) {
  auto compiled = std::make_shared<Compiled>();
  const auto get = [&](const Json& value, uint64_t most, const char* what) {
    return natural(value, most, what, *pack);
  };
  const auto refuse = [&](const char* what) {
    return Error(Cause::kPack, "the pack " + pack->name() + " cannot be used: a kernel's " + what);
  };
  compiled->key = record["key"].text;
  compiled->triton = record["triton"].text;
  compiled->ptxas = record["ptxas"].text;
  compiled->symbol = record["symbol"].text;
  compiled->cubin = pack->blob(record);
  compiled->cuda = static_cast<int>(get(record["cuda"], 1 << 20, "CUDA version"));
  compiled->warps = static_cast<uint32_t>(get(record["num_warps"], 64, "number of warps"));
  compiled->ctas = static_cast<uint32_t>(get(record["num_ctas"], 16, "cluster size"));
  compiled->shared = static_cast<uint32_t>(get(record["shared"], 1 << 20, "shared memory"));
  compiled->is_pdl = record["pdl"].truth();
  compiled->is_cooperative = record["cooperative"].truth();
  compiled->scratch_bytes = get(record["global_scratch"][0], 1ull << 32, "scratch size");
  compiled->scratch_alignment = get(record["global_scratch"][1], 1 << 20, "scratch alignment");
  compiled->profile_bytes = get(record["profile_scratch"][0], 1ull << 32, "scratch size");
  compiled->profile_alignment = get(record["profile_scratch"][1], 1 << 20, "scratch alignment");
  if (compiled->warps == 0 || compiled->ctas == 0 || compiled->symbol.empty())
    throw refuse("launch is empty");
  const std::vector<Json>& parameters = record["params"].items;
  if (parameters.size() > kMostParameters) throw refuse("parameters are too many");
  uint32_t end = 0;
  for (const Json& item : parameters) {
    CubinParameter parameter;
    const std::string& source = item["arg"].text;
    if (source == "global_scratch") {
      parameter.source = CubinParameter::Source::kGlobalScratch;
    } else if (source == "profile_scratch") {
      parameter.source = CubinParameter::Source::kProfileScratch;
    } else {
      for (const Json& step : item["arg"].items) {
        parameter.path.push_back(static_cast<int>(get(step, 1 << 16, "parameter")));
      }
      if (parameter.path.empty()) throw refuse("parameter belongs to no argument");
    }
    parameter.type = item["type"].text;
    parameter.field = item["field"].text;
    parameter.dimension =
        item["dim"].is_null() ? 0 : static_cast<int>(get(item["dim"], 4, "dimension"));
    parameter.offset = static_cast<uint32_t>(get(item["offset"], kMostParameterBytes, "parameter"));
    parameter.size = static_cast<uint32_t>(get(item["size"], 128, "parameter"));
    if (parameter.offset < end || parameter.size == 0) throw refuse("parameters overlap");
    end = parameter.offset + parameter.size;
    if (end > kMostParameterBytes) throw refuse("parameters are too large");
    compiled->parameters.push_back(std::move(parameter));
  }
  for (const Json& item : record["tma"].items) {
    TmaRecipe recipe;
    recipe.swizzle = static_cast<int>(get(item["swizzle"], 16, "descriptor"));
    recipe.element_size = static_cast<int>(get(item["elem_size"], 16, "descriptor"));
    recipe.element_type = static_cast<int>(get(item["elem_type"], 32, "descriptor"));
    recipe.is_fp4_padded = item["fp4_padded"].truth();
    for (const Json& extent : item["block_size"].items) {
      recipe.block.push_back(static_cast<int>(get(extent, 1 << 20, "descriptor")));
    }
    if (recipe.block.size() > 5) throw refuse("descriptor has more than five dimensions");
    compiled->recipes.push_back(std::move(recipe));
  }
  compiled->pack = std::move(pack);
  return compiled;
}

LoadedFunction Compiled::load(Device device, const std::string& subject, bool is_capturing) const {
  const Driver& cuda_driver = driver();
  const auto capturing = [&] {
    return Error(Cause::kCapturing,
                 subject +
                     ": it is not loaded yet, and cannot be while a graph is captured\n\n"
                     "hint: call `prepare` with the same arguments before the capture.");
  };
  if (is_capturing) throw capturing();
  if (cuda > cuda_driver.cuda_version) {
    throw Error(Cause::kDriver,
                subject + ": its cubin is newer than the driver\n\n  cubin   ptxas " + ptxas +
                    ", of Triton " + triton + ", needs a driver for CUDA " +
                    std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10) +
                    "\n  driver  for CUDA " + std::to_string(cuda_driver.cuda_version / 1000) +
                    "." + std::to_string(cuda_driver.cuda_version % 1000 / 10) +
                    "\n\nhint: build the pack with an older Triton (3.6 brings ptxas 12.8), or "
                    "renew the driver.");
  }
  const auto device_attribute = [&](int attribute) {
    int value = 0;
    check(cuda_driver.device_attribute(&value, attribute, device), "cuDeviceGetAttribute");
    return value;
  };
  const auto too_large = [&](const char* what, uint32_t needed, int most) {
    return Error(Cause::kDriver, subject + ": it needs more " + what +
                                     " than the GPU has\n\n  needed  " + std::to_string(needed) +
                                     "\n  GPU     " + std::to_string(most) +
                                     "\n\nhint: smaller blocks, fewer stages or fewer warps.");
  };
  const int most_shared = device_attribute(kMaxSharedOptin);
  const int most_threads = device_attribute(kMaxThreadsPerBlock);
  if (warps * 32 > static_cast<uint32_t>(most_threads))
    throw too_large("threads", warps * 32, most_threads);

  Module module = nullptr;
  Result result = cuda_driver.module_load(&module, cubin.data());
  if (result == kCaptureUnsupported) throw capturing();
  if (result != kSuccess) {
    throw Error(Cause::kDriver, subject +
                                    ": the driver refuses its cubin: " + describe_result(result) +
                                    "\n\n  cubin   " + key + "\n          ptxas " + ptxas +
                                    ", of Triton " + triton + "\n  pack    " + pack->name());
  }
  Function_ function = nullptr;
  const auto verify = [&](Result code, const char* what) {
    if (code == kSuccess) return;
    cuda_driver.module_unload(module);
    throw Error(Cause::kDriver, subject + ": " + what + " failed: " + describe_result(code));
  };
  verify(cuda_driver.module_function(&function, module, symbol.c_str()), "cuModuleGetFunction");
  // The query also loads a function that the driver would load at its first launch.
  int threads = 0;
  verify(cuda_driver.function_attribute(&threads, kFunctionMaxThreads, function),
         "cuFuncGetAttribute");
  const auto refuse_size = [&](const char* what, uint32_t needed, int most) {
    cuda_driver.module_unload(module);
    throw too_large(what, needed, most);
  };
  if (warps * 32 > static_cast<uint32_t>(threads)) refuse_size("threads", warps * 32, threads);
  if (cuda_driver.parameter_info) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      size_t offset = 0, size = 0;
      verify(cuda_driver.parameter_info(function, i, &offset, &size), "cuFuncGetParamInfo");
      if (offset == parameters[i].offset && size == parameters[i].size) continue;
      cuda_driver.module_unload(module);
      throw Error(Cause::kPack, subject + ": the cubin's parameter " + std::to_string(i) +
                                    " is not what its record says\n\n  pack    " + pack->name() +
                                    "\n\nhint: build the pack again.");
    }
  }
  LoadedFunction loaded{function};
  if (shared > kDefaultShared) {
    loaded.is_oversize =
        shared > static_cast<uint32_t>(most_shared) &&
        cuda_driver.function_set(function, kFunctionSharedMemoryMode, 3) == kSuccess;
    if (!loaded.is_oversize) {
      if (shared > static_cast<uint32_t>(most_shared))
        refuse_size("shared memory", shared, most_shared);
      int static_bytes = 0;
      verify(cuda_driver.function_attribute(&static_bytes, kFunctionStaticShared, function),
             "cuFuncGetAttribute");
      verify(cuda_driver.function_cache(function, 1), "cuFuncSetCacheConfig");
      verify(
          cuda_driver.function_set(function, kFunctionMaxDynamicShared, most_shared - static_bytes),
          "cuFuncSetAttribute");
    }
  }
  if (ctas == 16) {
    verify(cuda_driver.function_set(function, kFunctionNonPortableCluster, 1),
           "cuFuncSetAttribute");
  }
  return loaded;
}

}  // namespace opwright::triton::detail
