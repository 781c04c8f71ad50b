// Modules, libraries, and the functions in them.
//
// A function belongs to the context that was current when its module was loaded, a kernel of a
// library to none: it becomes a function in each context that asks. Handles of what was unloaded
// stay allocated and are recognised as dead, so that their use is an error and no crash.
#include "stub_driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kDefaultShared = 49152 };  // of a block, without opting in

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
FREE_IN_CHILD(lock)

static bool is_module(const Module* module) {
  return module != NULL && module->magic == kModuleMagic;
}
static bool is_library(const Library* library) {
  return library != NULL && library->magic == kLibraryMagic;
}
static bool is_kernel(const Kernel* kernel) {
  return kernel != NULL && kernel->magic == kKernelMagic;
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

static Function* new_function(Context* context, Module* module, const Image* image,
                              const Entry* entry) {
  Function* function = calloc(1, sizeof *function);
  const uint32_t* threads = entry->required_threads;
  uint32_t required = threads[0] * threads[1] * threads[2];
  function->magic = kFunctionMagic;
  function->generation = context->generation;
  function->context = context;
  function->entry = entry;
  function->image = image;
  function->module = module;
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

static Result load_module(Module** module, const void* bytes) {
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
  made->generation = stub_current->generation;
  made->functions = calloc((size_t)made->image.num_entries + 1, sizeof *made->functions);
  *module = made;
  return kSuccess;
}

API Result cuModuleLoadData(Module** module, const void* image) {
  ENTER_CONTEXT(cuModuleLoadData);
  return load_module(module, image);
}

API Result cuModuleLoadDataEx(Module** module, const void* image, unsigned count, int* options,
                              void** values) {
  ENTER_CONTEXT(cuModuleLoadDataEx);
  (void)count, (void)options, (void)values;
  return load_module(module, image);
}

API Result cuModuleLoad(Module** module, const char* path) {
  ENTER_CONTEXT(cuModuleLoad);
  if (path == NULL) return kInvalidValue;
  FILE* file = fopen(path, "rb");
  if (file == NULL) return kFileNotFound;
  fseek(file, 0, SEEK_END);
  long size = ftell(file);
  rewind(file);
  void* bytes = malloc(size > 0 ? (size_t)size : 1);
  bool whole = size > 0 && fread(bytes, 1, (size_t)size, file) == (size_t)size;
  fclose(file);
  Result result = whole ? load_module(module, bytes) : kInvalidImage;
  free(bytes);
  return result;
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

static Function* function_of(Module* module, int index) {
  pthread_mutex_lock(&lock);
  if (module->functions[index] == NULL)
    module->functions[index] =
        new_function(module->context, module, &module->image, &module->image.entries[index]);
  Function* function = module->functions[index];
  pthread_mutex_unlock(&lock);
  return function;
}

API Result cuModuleGetFunction(Function** function, Module* module, const char* name) {
  ENTER_CONTEXT(cuModuleGetFunction);
  if (function == NULL || name == NULL || *name == 0) return kInvalidValue;
  if (!is_module(module)) return kInvalidHandle;
  int index = find_entry(&module->image, name);
  if (index < 0) return kNotFound;
  *function = function_of(module, index);
  return kSuccess;
}

API Result cuModuleGetFunctionCount(unsigned* count, Module* module) {
  ENTER_CONTEXT(cuModuleGetFunctionCount);
  if (count == NULL) return kInvalidValue;
  if (!is_module(module)) return kInvalidHandle;
  *count = (unsigned)module->image.num_entries;
  return kSuccess;
}

API Result cuModuleEnumerateFunctions(Function** functions, unsigned count, Module* module) {
  ENTER_CONTEXT(cuModuleEnumerateFunctions);
  if (functions == NULL) return kInvalidValue;
  if (!is_module(module)) return kInvalidHandle;
  for (int i = 0; i < module->image.num_entries && i < (int)count; i++)
    functions[i] = function_of(module, i);
  return kSuccess;
}

API Result cuModuleGetGlobal_v2(uint64_t* address, size_t* bytes, Module* module,
                                const char* name) {
  ENTER_CONTEXT(cuModuleGetGlobal_v2);
  (void)address, (void)bytes, (void)name;
  return is_module(module) ? kNotFound : kInvalidHandle;
}

API Result cuModuleGetLoadingMode(int* mode) {
  ENTER(cuModuleGetLoadingMode);
  if (mode == NULL) return kInvalidValue;
  *mode = 2;  // lazy, the default since CUDA 12.2
  return kSuccess;
}

// ---- libraries

API Result cuLibraryLoadData(Library** library, const void* code, int* jit_options,
                             void** jit_values, unsigned num_jit, int* options, void** values,
                             unsigned num_options) {
  ENTER(cuLibraryLoadData);
  (void)jit_options, (void)jit_values, (void)num_jit;
  (void)options, (void)values, (void)num_options;
  if (library == NULL) return kInvalidValue;
  Library* made = calloc(1, sizeof *made);
  Result result = load_image(code, &made->image);
  bool runs = false;
  for (int i = 0; i < stub_device_count(); i++)
    runs = runs || stub_image_runs_on(&made->image, stub_device_arch(i));
  if (result == kSuccess && !runs) {
    stub_free_image(&made->image);
    result = kNoBinaryForGpu;
  }
  if (result != kSuccess) {
    free(made);
    return result;
  }
  made->magic = kLibraryMagic;
  made->kernels = calloc((size_t)made->image.num_entries + 1, sizeof *made->kernels);
  *library = made;
  return kSuccess;
}

API Result cuLibraryUnload(Library* library) {
  ENTER(cuLibraryUnload);
  if (!is_library(library)) return kInvalidHandle;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < library->image.num_entries; i++) {
    Kernel* kernel = library->kernels[i];
    if (kernel == NULL) continue;
    kernel->magic = kDeadMagic;
    for (int j = 0; j < kernel->num_functions; j++) kernel->functions[j]->magic = kDeadMagic;
  }
  library->magic = kDeadMagic;
  pthread_mutex_unlock(&lock);
  return kSuccess;
}

static Kernel* kernel_of(Library* library, int index) {
  pthread_mutex_lock(&lock);
  Kernel* kernel = library->kernels[index];
  if (kernel == NULL) {
    kernel = library->kernels[index] = calloc(1, sizeof *kernel);
    kernel->magic = kKernelMagic;
    kernel->library = library;
    kernel->entry = &library->image.entries[index];
  }
  pthread_mutex_unlock(&lock);
  return kernel;
}

API Result cuLibraryGetKernel(Kernel** kernel, Library* library, const char* name) {
  ENTER(cuLibraryGetKernel);
  if (kernel == NULL || name == NULL) return kInvalidValue;
  if (!is_library(library)) return kInvalidHandle;
  int index = find_entry(&library->image, name);
  if (index < 0) return kNotFound;
  *kernel = kernel_of(library, index);
  return kSuccess;
}

API Result cuLibraryGetKernelCount(unsigned* count, Library* library) {
  ENTER(cuLibraryGetKernelCount);
  if (count == NULL) return kInvalidValue;
  if (!is_library(library)) return kInvalidHandle;
  *count = (unsigned)library->image.num_entries;
  return kSuccess;
}

API Result cuLibraryEnumerateKernels(Kernel** kernels, unsigned count, Library* library) {
  ENTER(cuLibraryEnumerateKernels);
  if (kernels == NULL) return kInvalidValue;
  if (!is_library(library)) return kInvalidHandle;
  for (int i = 0; i < library->image.num_entries && i < (int)count; i++)
    kernels[i] = kernel_of(library, i);
  return kSuccess;
}

API Result cuLibraryGetModule(Module** module, Library* library) {
  ENTER_CONTEXT(cuLibraryGetModule);
  (void)module, (void)library;
  return kNotSupported;
}

API Result cuLibraryGetGlobal(uint64_t* address, size_t* bytes, Library* library,
                              const char* name) {
  ENTER_CONTEXT(cuLibraryGetGlobal);
  (void)address, (void)bytes, (void)name;
  return is_library(library) ? kNotFound : kInvalidHandle;
}

static Result get_function(Function** function, Kernel* kernel) {
  Result result = kSuccess;
  Context* context = stub_current;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < kernel->num_functions; i++) {
    Function* known = kernel->functions[i];
    if (known->context == context && known->generation == context->generation) {
      *function = known;
      pthread_mutex_unlock(&lock);
      return kSuccess;
    }
  }
  if (stub_is_capturing()) {  // the first use in a context loads the code
    result = kCaptureUnsupported;
  } else if (!stub_image_runs_on(&kernel->library->image, stub_device_arch(context->device))) {
    result = kNoBinaryForGpu;
  } else {
    Function* made = new_function(context, NULL, &kernel->library->image, kernel->entry);
    for (int i = 0; i < kFunctionAttributes; i++)
      if (kernel->set[context->device][i] != 0)
        made->attributes[i] = kernel->set[context->device][i] - 1;
    update_limits(made);
    kernel->functions =
        realloc(kernel->functions, (size_t)(kernel->num_functions + 1) * sizeof *kernel->functions);
    kernel->functions[kernel->num_functions++] = made;
    *function = made;
  }
  pthread_mutex_unlock(&lock);
  return result;
}

Result stub_function_of_kernel(Function** function, void* handle) {
  return is_kernel(handle) ? get_function(function, handle) : kInvalidHandle;
}

API Result cuKernelGetFunction(Function** function, Kernel* kernel) {
  ENTER_CONTEXT(cuKernelGetFunction);
  if (function == NULL) return kInvalidValue;
  return is_kernel(kernel) ? get_function(function, kernel) : kInvalidHandle;
}

API Result cuKernelGetLibrary(Library** library, Kernel* kernel) {
  ENTER(cuKernelGetLibrary);
  if (library == NULL) return kInvalidValue;
  if (!is_kernel(kernel)) return kInvalidHandle;
  *library = kernel->library;
  return kSuccess;
}

API Result cuKernelGetName(const char** name, Kernel* kernel) {
  ENTER(cuKernelGetName);
  if (name == NULL) return kInvalidValue;
  if (!is_kernel(kernel)) return kInvalidHandle;
  *name = kernel->entry->name;
  return kSuccess;
}

static Result get_param(const Entry* entry, size_t index, size_t* offset, size_t* size) {
  if (offset == NULL || index >= (size_t)entry->num_params) return kInvalidValue;
  *offset = entry->params[index].offset;
  if (size != NULL) *size = entry->params[index].size;
  return kSuccess;
}

API Result cuKernelGetParamInfo(Kernel* kernel, size_t index, size_t* offset, size_t* size) {
  ENTER(cuKernelGetParamInfo);
  return is_kernel(kernel) ? get_param(kernel->entry, index, offset, size) : kInvalidHandle;
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

API Result cuKernelGetAttribute(int* value, int attribute, Kernel* kernel, Device device) {
  ENTER(cuKernelGetAttribute);
  if (value == NULL || attribute < 0 || attribute >= kFunctionAttributes) return kInvalidValue;
  if (!is_kernel(kernel)) return kInvalidHandle;
  if (device < 0 || device >= stub_device_count()) return kInvalidDevice;
  Context context = {.device = device};
  Function* fresh = new_function(&context, NULL, &kernel->library->image, kernel->entry);
  int set = kernel->set[device][attribute];
  *value = set != 0 ? set - 1 : fresh->attributes[attribute];
  free(fresh);
  return kSuccess;
}

API Result cuKernelSetAttribute(int attribute, int value, Kernel* kernel, Device device) {
  ENTER(cuKernelSetAttribute);
  if (!is_kernel(kernel)) return kInvalidHandle;
  if (device < 0 || device >= stub_device_count()) return kInvalidDevice;
  Result result = check_attribute(kernel->entry, device, attribute, value);
  if (result != kSuccess) return result;
  pthread_mutex_lock(&lock);
  kernel->set[device][attribute] = value + 1;
  for (int i = 0; i < kernel->num_functions; i++) {
    if (kernel->functions[i]->context->device != device) continue;
    kernel->functions[i]->attributes[attribute] = value;
    update_limits(kernel->functions[i]);
  }
  pthread_mutex_unlock(&lock);
  return kSuccess;
}

API Result cuKernelSetCacheConfig(Kernel* kernel, int config, Device device) {
  ENTER(cuKernelSetCacheConfig);
  (void)device;
  if (!is_kernel(kernel)) return kInvalidHandle;
  return config >= 0 && config <= 3 ? kSuccess : kInvalidValue;
}

API Result cuFuncSetCacheConfig(Function* function, int config) {
  ENTER_CONTEXT(cuFuncSetCacheConfig);
  if (!is_function(function)) return kInvalidHandle;
  return config >= 0 && config <= 3 ? kSuccess : kInvalidValue;
}

API Result cuFuncSetSharedMemConfig(Function* function, int config) {
  ENTER_CONTEXT(cuFuncSetSharedMemConfig);
  if (!is_function(function)) return kInvalidHandle;
  return config >= 0 && config <= 2 ? kSuccess : kInvalidValue;
}

API Result cuFuncGetModule(Module** module, Function* function) {
  ENTER(cuFuncGetModule);
  if (module == NULL) return kInvalidValue;
  if (!is_function(function)) return kInvalidHandle;
  *module = function->module;
  return kSuccess;
}

API Result cuFuncGetName(const char** name, Function* function) {
  ENTER(cuFuncGetName);
  if (name == NULL) return kInvalidValue;
  if (!is_function(function)) return kInvalidHandle;
  *name = function->entry->name;
  return kSuccess;
}

API Result cuFuncGetParamInfo(Function* function, size_t index, size_t* offset, size_t* size) {
  ENTER(cuFuncGetParamInfo);
  return is_function(function) ? get_param(function->entry, index, offset, size) : kInvalidHandle;
}

API Result cuFuncIsLoaded(int* state, Function* function) {
  ENTER(cuFuncIsLoaded);
  if (state == NULL) return kInvalidValue;
  if (!is_function(function)) return kInvalidHandle;
  *state = 1;
  return kSuccess;
}

API Result cuFuncLoad(Function* function) {
  ENTER(cuFuncLoad);
  return is_function(function) ? kSuccess : kInvalidHandle;
}
