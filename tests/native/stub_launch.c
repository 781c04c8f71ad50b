// Launches: what a driver refuses is refused; what it accepts is counted and, if asked, recorded.
#include "stub_driver.h"

enum { kAttributeCooperative = 2, kAttributeCluster = 4 };
enum { kPortableCluster = 8, kLargestCluster = 16, kBlocksPerMultiprocessor = 32 };
enum { kParamEnd = 0, kParamBufferPointer = 1, kParamBufferSize = 2 };

// Reads the packed form: {1, buffer, 2, &size, 0}.
static Result read_extra(void** extra, const void** buffer, size_t* size) {
  while (extra[0] != (void*)kParamEnd) {
    if (extra[0] == (void*)kParamBufferPointer)
      *buffer = extra[1];
    else if (extra[0] == (void*)kParamBufferSize)
      *size = *(size_t*)extra[1];
    else
      return kInvalidValue;
    extra += 2;
  }
  return kSuccess;
}

static const LaunchAttribute* find_attribute(const LaunchConfig* config, int id) {
  for (unsigned i = 0; i < config->num_attributes; i++)
    if (config->attributes[i].id == id) return &config->attributes[i];
  return NULL;
}

// The cluster of a launch: of its attribute, else of the cubin. It must divide the grid, and be the
// cubin's where that states one.
static Result check_cluster(const Function* function, const LaunchConfig* config) {
  const LaunchAttribute* attribute = find_attribute(config, kAttributeCluster);
  const uint32_t* required = function->entry->required_cluster;
  const uint32_t* cluster = attribute != NULL ? attribute->dim : required;
  if (cluster[0] == 0 && attribute == NULL)
    return function->attributes[kClusterMustBeSet] ? kInvalidClusterSize : kSuccess;
  if (stub_device_arch(function->context->device) < 90) return kInvalidClusterSize;
  for (int i = 0; i < 3; i++) {
    if (cluster[i] == 0 || config->grid[i] % cluster[i] != 0) return kInvalidClusterSize;
    if (required[0] != 0 && required[i] != cluster[i]) return kInvalidClusterSize;
  }
  unsigned size = cluster[0] * cluster[1] * cluster[2];
  unsigned most = function->attributes[kNonPortableCluster] ? kLargestCluster : kPortableCluster;
  return size > most ? kInvalidClusterSize : kSuccess;
}

static Result check_attributes(const Function* function, const LaunchConfig* config) {
  Result result = check_cluster(function, config);
  if (result != kSuccess) return result;
  const LaunchAttribute* cooperative = find_attribute(config, kAttributeCooperative);
  if (cooperative != NULL && cooperative->number != 0) {
    uint64_t blocks = (uint64_t)config->grid[0] * config->grid[1] * config->grid[2];
    // 132 on sm_90: coarse, but far from what a test launches and from what a driver refuses.
    if (blocks > 132u * kBlocksPerMultiprocessor) return kCooperativeTooLarge;
  }
  return kSuccess;
}

static __attribute__((noinline)) Result record(const Function* function, const LaunchConfig* config,
                                               void** params, void** extra, const char* call) {
  const void* buffer = NULL;
  size_t size = 0;
  if (params == NULL && extra != NULL) read_extra(extra, &buffer, &size);
  for (int i = 0; params != NULL && i < function->entry->num_params; i++)
    if (params[i] == NULL) return kInvalidValue;
  stub_record_launch(function, config, params, buffer, size, call);
  return kSuccess;
}

static __attribute__((noinline)) Result check_packed(const Function* function, void** params,
                                                     void** extra) {
  if (params != NULL || extra == NULL) return kInvalidValue;
  const void* buffer = NULL;
  size_t size = 0;
  Result result = read_extra(extra, &buffer, &size);
  if (result != kSuccess) return result;
  return buffer == NULL || size < function->entry->params_size ? kInvalidValue : kSuccess;
}

static inline Result check_block(const Function* function, const unsigned* block) {
  const uint32_t* required = function->block;
  if (LIKELY(required[0] != 0))
    return ((block[0] ^ required[0]) | (block[1] ^ required[1]) | (block[2] ^ required[2])) == 0
               ? kSuccess
               : kInvalidValue;
  uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
  if (threads == 0 || threads > 1024) return kInvalidValue;
  return threads > function->max_threads ? kLaunchOutOfResources : kSuccess;
}

static inline Result check_function(const Function* function) {
  return function != NULL && function->magic == kFunctionMagic ? kSuccess : kInvalidHandle;
}

// A current context tells that cuInit was called.
#define ENTER_LAUNCH(name)                                                 \
  do {                                                                     \
    ENTER_UNINITIALIZED(name);                                             \
    if (UNLIKELY(stub_current == NULL))                                    \
      return IS_SET(stub_initialized) ? kInvalidContext : kNotInitialized; \
  } while (0)

static inline
    __attribute__((always_inline)) Result launch(Function* function, const LaunchConfig* config,
                                                 void** params, void** extra, const char* call) {
  if (UNLIKELY(check_function(function) != kSuccess)) return kInvalidHandle;
  if (UNLIKELY(function->context != stub_current)) return kInvalidHandle;
  const unsigned* grid = config->grid;
  // Less one and unsigned: zero is the largest.
  if (UNLIKELY(grid[0] - 1 >= 0x7fffffff || grid[1] - 1 >= 65535 || grid[2] - 1 >= 65535))
    return kInvalidValue;
  Result checked = check_block(function, config->block);
  if (UNLIKELY(checked != kSuccess)) return checked;
  if (UNLIKELY(config->shared > function->dynamic_shared)) return kInvalidValue;
  if (UNLIKELY(config->num_attributes != 0 || function->has_cluster)) {
    Result result = check_attributes(function, config);
    if (result != kSuccess) return result;
  }
  if (UNLIKELY((params == NULL || extra != NULL) && function->has_params)) {
    Result result = check_packed(function, params, extra);
    if (result != kSuccess) return result;
  }
  if (UNLIKELY((uintptr_t)config->stream > 2)) {
    Stream* stream = stub_stream(config->stream);
    if (stream == NULL || stream->context != function->context) return kInvalidHandle;
  }
  if (UNLIKELY(IS_SET(stub_slow_launch))) return record(function, config, params, extra, call);
  return kSuccess;
}

API Result cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          void* stream, void** params, void** extra) {
  ENTER_LAUNCH(cuLaunchKernel);
  LaunchConfig config = {
      {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared, stream, NULL, 0};
  return launch(function, &config, params, extra, "cuLaunchKernel");
}

API Result cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** params,
                            void** extra) {
  ENTER_LAUNCH(cuLaunchKernelEx);
  if (UNLIKELY(config == NULL)) return kInvalidValue;
  return launch(function, config, params, extra, "cuLaunchKernelEx");
}

// ---- occupancy: one cluster per multiprocessor at most

API Result cuOccupancyMaxActiveClusters(int* clusters, Function* function,
                                        const LaunchConfig* config) {
  ENTER_CONTEXT(cuOccupancyMaxActiveClusters);
  if (clusters == NULL || config == NULL) return kInvalidValue;
  if (check_function(function) != kSuccess) return kInvalidHandle;
  const LaunchAttribute* cluster = find_attribute(config, kAttributeCluster);
  unsigned size = cluster == NULL ? 1 : cluster->dim[0] * cluster->dim[1] * cluster->dim[2];
  if (size == 0) return kInvalidClusterSize;
  *clusters = (int)(132 / size);
  return kSuccess;
}
