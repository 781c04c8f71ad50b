// Names: of entry points, for counters and cuGetProcAddress, and of errors.
#include "stub_driver.h"

#include <dlfcn.h>
#include <string.h>

const char* const kFunctionNames[kFunctions] = {
#define F(name) #name,
#include "stub_functions.h"
#undef F
};
// ---- cuGetProcAddress

// Names that mean different functions to callers of different CUDA versions.
typedef struct {
  const char *name, *symbol;
  int since;
} Version;
static const Version kVersions[] = {
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
    {"cuCtxGetDevice", "cuCtxGetDevice_v2", 13000},
    {"cuEventElapsedTime", "cuEventElapsedTime_v2", 12080},
};

// By the library's own symbols, so that a build that leaves some out is an older driver.
static void* find(const char* name) {
  static void* own;
  void* library = __atomic_load_n(&own, __ATOMIC_ACQUIRE);
  Dl_info info;
  if (library == NULL && dladdr((void*)find, &info) != 0) {
    library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    __atomic_store_n(&own, library, __ATOMIC_RELEASE);
  }
  return library != NULL && strncmp(name, "cu", 2) == 0 ? dlsym(library, name) : NULL;
}

static void* find_version(const char* name, int version) {
  const char* symbol = NULL;
  for (size_t i = 0; i < sizeof kVersions / sizeof *kVersions; i++)
    if (strcmp(kVersions[i].name, name) == 0 && kVersions[i].since <= version)
      symbol = kVersions[i].symbol;
  if (symbol != NULL) return find(symbol);
  void* found = find(name);
  if (found != NULL) return found;
  char suffixed[96];
  size_t length = strlen(name);
  if (length > sizeof suffixed - 4) return NULL;
  memcpy(suffixed, name, length);
  strcpy(suffixed + length, "_v2");  // what an unsuffixed name has meant since CUDA 3.2
  return find(suffixed);
}

enum { kSymbolFound = 0, kSymbolNotFound = 1, kVersionTooLow = 2 };

API Result cuGetProcAddress_v2(const char* name, void** address, int version, uint64_t flags,
                               int* status) {
  stub_count_call(kId_cuGetProcAddress_v2);
  if (name == NULL || address == NULL || flags > 2) return kInvalidValue;
  *address = find_version(name, version);
  if (status != NULL) *status = *address != NULL ? kSymbolFound : kSymbolNotFound;
  return *address != NULL ? kSuccess : kNotFound;
}

API Result cuGetProcAddress(const char* name, void** address, int version, uint64_t flags) {
  stub_count_call(kId_cuGetProcAddress);
  if (name == NULL || address == NULL || flags > 2) return kInvalidValue;
  *address = find_version(name, version);
  return *address != NULL ? kSuccess : kNotFound;
}

// ---- errors

typedef struct {
  Result number;
  const char *name, *text;
} ErrorText;
static const ErrorText kErrors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {4, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
    {215, "CUDA_ERROR_UNSUPPORTED_LIMIT", "limit is not supported on this architecture"},
    {216, "CUDA_ERROR_CONTEXT_ALREADY_IN_USE",
     "exclusive-thread device already in use by a different thread"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "PTX JIT compiler library not found"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
     "the provided PTX was compiled with an unsupported toolchain."},
    {300, "CUDA_ERROR_INVALID_SOURCE", "device kernel image is invalid"},
    {301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {302, "CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", "shared object symbol not found"},
    {303, "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", "shared object initialization failed"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {401, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {702, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {708, "CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "cannot set while device is active in this process"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {710, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {714, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
    {715, "CUDA_ERROR_ILLEGAL_INSTRUCTION", "an illegal instruction was encountered"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {717, "CUDA_ERROR_INVALID_ADDRESS_SPACE",
     "operation not supported on global/shared address space"},
    {718, "CUDA_ERROR_INVALID_PC", "invalid program counter"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {720, "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "too many blocks in cooperative launch"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {902, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {912, "CUDA_ERROR_INVALID_CLUSTER_SIZE", "cluster misconfiguration"},
    {913, "CUDA_ERROR_FUNCTION_NOT_LOADED", "specified function handle was not loaded"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static const ErrorText* find_error(Result number) {
  for (size_t i = 0; i < sizeof kErrors / sizeof *kErrors; i++)
    if (kErrors[i].number == number) return &kErrors[i];
  return NULL;
}

API Result cuGetErrorName(Result number, const char** name) {
  stub_count_call(kId_cuGetErrorName);
  if (name == NULL) return kInvalidValue;
  const ErrorText* found = find_error(number);
  *name = found != NULL ? found->name : NULL;
  return found != NULL ? kSuccess : kInvalidValue;
}

API Result cuGetErrorString(Result number, const char** text) {
  stub_count_call(kId_cuGetErrorString);
  if (text == NULL) return kInvalidValue;
  const ErrorText* found = find_error(number);
  *text = found != NULL ? found->text : NULL;
  return found != NULL ? kSuccess : kInvalidValue;
}
