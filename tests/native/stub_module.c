// Modules, and the functions in them.
//
// A function belongs to the context that was current when its module was loaded. Handles of
// unloaded modules stay allocated and are recognised as dead, so using one is an error, not a
// crash.
#include "stub_driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { kDefaultShared = 49152 };  // of a block, without opting in

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
FREE_IN_CHILD(lock)

static bool is_module(const Module* module) {
  return module != NULL && module->magic == kModuleMagic;
}
static bool is_function(const Function* function) {
  return function != NULL && function->magic == kFunctionMagic;
}

// A driver reads cubins of its own CUDA version and older, and of newer ones with the same major.
static Result check_image(const Image* image) {
  int major = stub_driver_version() / 1000;
  return image->toolkit / 10 > major ? kInvalidImage : kSuccess;
}

static Result load_image(const void* bytes, Image* image) {
  if (stub_is_capturing()) return kCaptureUnsupported;
  Result result = stub_parse_image(bytes, image);
  if (result == kSuccess && (result = check_image(image)) != kSuccess) stub_free_image(image);
  return result;
}

static int find_entry(const Image* image, const char* name) {
  for (int i = 0; i < image->num_entries; i++)
    if (strcmp(image->entries[i].name, name) == 0) return i;
  return -1;
}

static void update_limits(Function* function) {
  function->has_cluster =
      function->entry->required_cluster[0] != 0 || function->attributes[kClusterMustBeSet] != 0;
  function->max_threads = (uint32_t)function->attributes[kMaxThreads];
  function->dynamic_shared = (uint32_t)function->attributes[kMaxDynamicShared];
  if (function->attributes[kSharedMemoryMode] != 0)
    function->dynamic_shared = (uint32_t)(stub_max_dynamic_shared(function->context->device) -
                                          function->entry->static_shared);
}

static Function* new_function(Context* context, const Image* image, const Entry* entry) {
  Function* function = calloc(1, sizeof *function);
  const uint32_t* threads = entry->required_threads;
  uint32_t required = threads[0] * threads[1] * threads[2];
  function->magic = kFunctionMagic;
  function->context = context;
  function->entry = entry;
  function->image = image;
  function->has_params = entry->num_params > 0;
  memcpy(function->block, threads, sizeof function->block);
  int* attributes = function->attributes;
  uint32_t most = entry->max_threads != 0 ? entry->max_threads : 1024;
  attributes[kMaxThreads] = (int)(required != 0 ? required : most);
  attributes[kStaticShared] = entry->static_shared;
  attributes[kLocalSize] = entry->local_size;
  attributes[kRegisters] = entry->registers;
  attributes[kPtxVersion] = attributes[kBinaryVersion] = image->arch;
  attributes[kMaxDynamicShared] = kDefaultShared - entry->static_shared;
  attributes[kCarveout] = -1;
  for (int i = 0; i < 3; i++) attributes[kClusterWidth + i] = (int)entry->required_cluster[i];
  update_limits(function);
  return function;
}

// ---- modules

API Result cuModuleLoadData(Module** module, const void* bytes) {
  ENTER_CONTEXT(cuModuleLoadData);
  if (module == NULL) return kInvalidValue;
  Module* made = calloc(1, sizeof *made);
  Result result = load_image(bytes, &made->image);
  if (result == kSuccess &&
      !stub_image_runs_on(&made->image, stub_device_arch(stub_current->device))) {
    stub_free_image(&made->image);
    result = kNoBinaryForGpu;
  }
  if (result != kSuccess) {
    free(made);
    return result;
  }
  made->magic = kModuleMagic;
  made->context = stub_current;
  made->functions = calloc((size_t)made->image.num_entries + 1, sizeof *made->functions);
  *module = made;
  return kSuccess;
}

API Result cuModuleUnload(Module* module) {
  ENTER_CONTEXT(cuModuleUnload);
  if (!is_module(module)) return kInvalidHandle;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < module->image.num_entries; i++)
    if (module->functions[i] != NULL) module->functions[i]->magic = kDeadMagic;
  module->magic = kDeadMagic;
  pthread_mutex_unlock(&lock);
  return kSuccess;
}

API Result cuModuleGetFunction(Function** function, Module* module, const char* name) {
  ENTER_CONTEXT(cuModuleGetFunction);
  if (function == NULL || name == NULL || *name == 0) return kInvalidValue;
  if (!is_module(module)) return kInvalidHandle;
  int index = find_entry(&module->image, name);
  if (index < 0) return kNotFound;
  pthread_mutex_lock(&lock);
  if (module->functions[index] == NULL)
    module->functions[index] =
        new_function(module->context, &module->image, &module->image.entries[index]);
  *function = module->functions[index];
  pthread_mutex_unlock(&lock);
  return kSuccess;
}

// ---- attributes

static Result check_attribute(const Entry* entry, Device device, int attribute, int value) {
  switch (attribute) {
    case kMaxDynamicShared:
      return value < 0 || value > stub_max_dynamic_shared(device) - entry->static_shared
                 ? kInvalidValue
                 : kSuccess;
    case kCarveout:
      return value < -1 || value > 100 ? kInvalidValue : kSuccess;
    case kClusterMustBeSet:
    case kNonPortableCluster:
      return value < 0 || value > 1 ? kInvalidValue : kSuccess;
    case kSchedulingPolicy:
      return value < 0 || value > 2 ? kInvalidValue : kSuccess;
    case kSharedMemoryMode:
      return stub_oversized_shared() ? kSuccess : kInvalidValue;
    default:
      return attribute >= kClusterWidth && attribute < kClusterWidth + 3 ? kSuccess : kInvalidValue;
  }
}

API Result cuFuncGetAttribute(int* value, int attribute, Function* function) {
  ENTER_CONTEXT(cuFuncGetAttribute);
  if (value == NULL || attribute < 0 || attribute >= kFunctionAttributes) return kInvalidValue;
  if (!is_function(function)) return kInvalidHandle;
  *value = function->attributes[attribute];
  return kSuccess;
}

API Result cuFuncSetAttribute(Function* function, int attribute, int value) {
  ENTER_CONTEXT(cuFuncSetAttribute);
  if (!is_function(function)) return kInvalidHandle;
  Result result = check_attribute(function->entry, function->context->device, attribute, value);
  if (result != kSuccess) return result;
  function->attributes[attribute] = value;
  update_limits(function);
  return kSuccess;
}

API Result cuFuncSetCacheConfig(Function* function, int config) {
  ENTER_CONTEXT(cuFuncSetCacheConfig);
  if (!is_function(function)) return kInvalidHandle;
  return config >= 0 && config <= 3 ? kSuccess : kInvalidValue;
}

API Result cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size) {
  ENTER(cuFuncGetParamInfo);
  if (!is_function(function)) return kInvalidHandle;
  const Entry* entry = function->entry;
  if (offset == NULL || index >= (size_t)entry->num_params) return kInvalidValue;
  *offset = entry->params[index].offset;
  if (size != NULL) *size = entry->params[index].size;
  return kSuccess;
}
