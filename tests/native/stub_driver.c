// A libcuda.so.1 with no GPU behind it, on which Triton's own launchers and the C++ runtime run.
//
// It keeps what a driver would notice: handles belong to contexts, cubins to architectures, and a
// launch that a driver refuses is refused with the driver's number. What a kernel computes is not
// its business: a launch that is allowed does nothing.
//
//   gcc -O2 -shared -fPIC -Wall -Wextra -Wl,-soname,libcuda.so.1 -o libcuda.so.1 stub_*.c
//
// Cost: a launch about 5 ns, for checks and a counter of the thread's own; nothing is recorded
// unless asked for, so that what is timed above the stub is host overhead alone.
//
// Environment, read when the library is loaded
//   STUB_DEVICES=1           number of devices; 0: cuInit fails with CUDA_ERROR_NO_DEVICE
//   STUB_ARCH=90             their compute capability, or a list, "90,80"; the last one repeats
//   STUB_DRIVER_VERSION=13000
//   STUB_UNIFIED=1           cuPointerGetAttribute knows every address; 0: only those it allocated
//   STUB_OVERSIZED_SHARED=0  1: the function attribute 17 of CUDA 13.2 is known
//   STUB_RECORD=path         as stub_record
//   STUB_COUNTS=path         at exit, the counters are written there as a JSON object
//   STUB_FAIL=cuModuleLoadData:2:209,cuLaunchKernelEx:1:700
//
// Functions for tests
//   int stub_record(const char* path)       appends a JSON line per launch to the file; NULL: stops
//   int64_t stub_count(const char* name)    calls of an entry point by all threads, -1 if unknown
//   int stub_fail(const char* name, int nth, int error)
//                                           from now the nth call fails, or every call if nth is 0;
//                                           name NULL: no more failures
//   int stub_set_capturing(void* stream, int status)     NULL: all streams there are
//
// Files: this one has devices and contexts, stub_image.c reads cubins, stub_module.c has modules
// and functions, stub_launch.c launches, stub_memory.c memory, stub_stream.c streams and
// events, stub_tensor_map.c TMA descriptors, stub_record.c recorder, counters and failures,
// stub_lookup.c names: of errors, and cuGetProcAddress.
//
// Known limits: no PTX and no fatbin (CUDA_ERROR_INVALID_IMAGE), no graphs but the state of being
// captured, no contexts but the primary ones, and only the entry points of stub_functions.h, which
// the runtime and Triton's launchers call. Device memory is host memory.
#include "stub_driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__thread Thread* stub_thread;
__thread Context* stub_current;
bool stub_initialized;

enum { kDeviceAttributes = 151 };

static int num_devices = 1;
static int device_archs[kMaxDevices];
static int driver_version = 13000;
static bool oversized_shared;
static Context primaries[kMaxDevices];
static int num_contexts;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
FREE_IN_CHILD(lock)

// What differs between architectures, from NVIDIA's table of compute capabilities.
typedef struct {
  int arch, multiprocessors, threads_per_multiprocessor, shared_per_multiprocessor;
} Architecture;
static const Architecture kArchitectures[] = {
    {75, 40, 1024, 65536},    {80, 108, 2048, 167936},  {86, 84, 1536, 102400},
    {89, 128, 1536, 102400},  {90, 132, 2048, 233472},  {100, 148, 2048, 233472},
    {103, 148, 2048, 233472}, {120, 170, 1536, 102400},
};

__attribute__((constructor)) static void configure(void) {
  const char* text = getenv("STUB_DEVICES");
  if (text != NULL) num_devices = atoi(text);
  if (num_devices > kMaxDevices) num_devices = kMaxDevices;
  text = getenv("STUB_ARCH");
  int arch = 90;
  for (int i = 0; i < kMaxDevices; i++) {
    if (text != NULL && *text != 0) {
      char* end;
      arch = (int)strtol(text, &end, 10);
      text = *end == ',' ? end + 1 : end;
    }
    device_archs[i] = arch;
  }
  text = getenv("STUB_DRIVER_VERSION");
  if (text != NULL) driver_version = atoi(text);
  text = getenv("STUB_OVERSIZED_SHARED");
  oversized_shared = text != NULL && atoi(text) != 0;
}

int stub_device_count(void) { return num_devices; }
int stub_device_arch(Device device) { return device_archs[device]; }
int stub_driver_version(void) { return driver_version; }
bool stub_oversized_shared(void) { return oversized_shared; }

static const Architecture* architecture(Device device) {
  const Architecture* found = &kArchitectures[0];
  for (size_t i = 0; i < sizeof kArchitectures / sizeof *kArchitectures; i++)
    if (kArchitectures[i].arch <= device_archs[device]) found = &kArchitectures[i];
  return found;
}

// The driver keeps 1 KB of each block's shared memory from sm_80 on.
int stub_max_dynamic_shared(Device device) {
  int reserved = device_archs[device] >= 80 ? 1024 : 0;
  return architecture(device)->shared_per_multiprocessor - reserved;
}

static bool is_device(Device device) { return device >= 0 && device < num_devices; }

API Result cuInit(unsigned flags) {
  ENTER_UNINITIALIZED(cuInit);
  if (flags != 0) return kInvalidValue;
  if (num_devices <= 0) return kNoDevice;
  __atomic_store_n(&stub_initialized, true, __ATOMIC_RELEASE);
  return kSuccess;
}

API Result cuDriverGetVersion(int* version) {
  ENTER_UNINITIALIZED(cuDriverGetVersion);
  if (version == NULL) return kInvalidValue;
  *version = driver_version;
  return kSuccess;
}

// ---- devices

API Result cuDeviceGetCount(int* count) {
  ENTER(cuDeviceGetCount);
  if (count == NULL) return kInvalidValue;
  *count = num_devices;
  return kSuccess;
}

API Result cuDeviceGet(Device* device, int ordinal) {
  ENTER(cuDeviceGet);
  if (device == NULL) return kInvalidValue;
  if (!is_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

API Result cuDeviceGetName(char* name, int length, Device device) {
  ENTER(cuDeviceGetName);
  if (name == NULL || length <= 0) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  snprintf(name, (size_t)length, "Opwright stub sm_%d", device_archs[device]);
  return kSuccess;
}

API Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  ENTER(cuDeviceGetAttribute);
  if (value == NULL || attribute <= 0) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  const Architecture* arch = architecture(device);
  const int number = device_archs[device];
  const int values[kDeviceAttributes] = {
      [1] = 1024,        // threads of a block
      [2] = 1024,        // block x
      [3] = 1024,        // block y
      [4] = 64,          // block z
      [5] = 2147483647,  // grid x
      [6] = 65535,       // grid y
      [7] = 65535,       // grid z
      [8] = 49152,       // shared memory of a block
      [9] = 65536,       // constant memory
      [10] = 32,         // warp
      [12] = 65536,      // registers of a block
      [13] = 1980000,    // clock, kHz
      [16] = arch->multiprocessors,
      [36] = 2619000,   // memory clock, kHz
      [37] = 5120,      // memory bus, bits
      [38] = 50 << 20,  // L2, bytes
      [39] = arch->threads_per_multiprocessor,
      [41] = 1,            // unified addressing
      [75] = number / 10,  // compute capability, major
      [76] = number % 10,  // and minor
      [81] = arch->shared_per_multiprocessor,
      [82] = 65536,                            // registers of a multiprocessor
      [95] = 1,                                // cooperative launch
      [97] = stub_max_dynamic_shared(device),  // opt-in shared memory of a block
      [106] = 32,                              // blocks of a multiprocessor
      [111] = number >= 80 ? 1024 : 0,         // reserved shared memory
      [115] = 1,                               // memory pools
      [120] = number >= 90,                    // clusters
      [127] = number >= 90,                    // tensor maps
      [150] = oversized_shared ? 232 * 1024 : 0,
  };
  *value = attribute < kDeviceAttributes ? values[attribute] : 0;
  return kSuccess;
}

API Result cuDeviceComputeCapability(int* major, int* minor, Device device) {
  ENTER(cuDeviceComputeCapability);
  if (major == NULL || minor == NULL) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  *major = device_archs[device] / 10;
  *minor = device_archs[device] % 10;
  return kSuccess;
}

// ---- contexts

static bool is_context(const Context* context) {
  return context != NULL && context->magic == kContextMagic;
}

API Result cuDevicePrimaryCtxRetain(Context** context, Device device) {
  ENTER(cuDevicePrimaryCtxRetain);
  if (context == NULL) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  pthread_mutex_lock(&lock);
  Context* primary = &primaries[device];
  if (primary->magic == 0)
    *primary = (Context){.magic = kContextMagic, .id = ++num_contexts, .device = device};
  pthread_mutex_unlock(&lock);
  *context = primary;
  return kSuccess;
}

API Result cuCtxGetCurrent(Context** context) {
  ENTER(cuCtxGetCurrent);
  if (context == NULL) return kInvalidValue;
  *context = stub_current;
  return kSuccess;
}

API Result cuCtxSetCurrent(Context* context) {
  ENTER(cuCtxSetCurrent);
  if (context != NULL && !is_context(context)) return kInvalidContext;
  stub_current = context;
  return kSuccess;
}

API Result cuCtxGetDevice(Device* device) {
  ENTER_CONTEXT(cuCtxGetDevice);
  if (device == NULL) return kInvalidValue;
  *device = stub_current->device;
  return kSuccess;
}

API Result cuCtxGetDevice_v2(Device* device, Context* context) {
  ENTER(cuCtxGetDevice_v2);
  if (context == NULL) context = stub_current;
  if (!is_context(context)) return kInvalidContext;
  *device = context->device;
  return kSuccess;
}

API Result cuCtxGetLimit(size_t* value, int limit) {
  ENTER_CONTEXT(cuCtxGetLimit);
  if (value == NULL || limit < 0 || limit >= 16) return kInvalidValue;
  *value = stub_current->limits[limit];
  return kSuccess;
}

API Result cuCtxSetLimit(int limit, size_t value) {
  ENTER_CONTEXT(cuCtxSetLimit);
  if (limit < 0 || limit >= 16) return kInvalidValue;
  stub_current->limits[limit] = value;
  return kSuccess;
}

API Result cuCtxSynchronize(void) {
  ENTER_CONTEXT(cuCtxSynchronize);
  return stub_is_capturing() ? kCaptureUnsupported : kSuccess;
}
