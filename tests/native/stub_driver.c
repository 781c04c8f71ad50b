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
//   void stub_reset_counts(void)
//   int stub_fail(const char* name, int nth, int error)
//                                           from now the nth call fails, or every call if nth is 0;
//                                           name NULL: no more failures
//   int stub_set_capturing(void* stream, int status)     NULL: all streams there are
//   void stub_set_driver_version(int version)
//   int64_t stub_live_allocations(void)     allocated and not yet freed
//
// Files: this one has devices and contexts, stub_image.c reads cubins, stub_module.c has modules,
// libraries and functions, stub_launch.c launches, stub_memory.c memory, stub_stream.c streams and
// events, stub_tensor_map.c TMA descriptors, stub_record.c recorder, counters and failures,
// stub_lookup.c names: of errors, and cuGetProcAddress.
//
// Known limits: no PTX and no fatbin (CUDA_ERROR_INVALID_IMAGE), no graphs but the state of being
// captured, no globals of modules. Device memory is host memory.
#include "stub_driver.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

__thread Thread* stub_thread;
__thread Context* stub_current;
bool stub_initialized;

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
API void stub_set_driver_version(int version) { driver_version = version; }

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

static Result get_uuid(unsigned char* uuid, Device device) {
  if (uuid == NULL) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  memset(uuid, 0, 16);
  memcpy(uuid, "opwright-stub", 13);
  uuid[15] = (unsigned char)device;
  return kSuccess;
}

API Result cuDeviceGetUuid(unsigned char* uuid, Device device) {
  ENTER(cuDeviceGetUuid);
  return get_uuid(uuid, device);
}

API Result cuDeviceGetUuid_v2(unsigned char* uuid, Device device) {
  ENTER(cuDeviceGetUuid_v2);
  return get_uuid(uuid, device);
}

API Result cuDeviceTotalMem_v2(size_t* bytes, Device device) {
  ENTER(cuDeviceTotalMem_v2);
  if (bytes == NULL) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  *bytes = 80ull << 30;
  return kSuccess;
}

API Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  ENTER(cuDeviceGetAttribute);
  if (value == NULL || attribute <= 0) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  const Architecture* arch = architecture(device);
  switch (attribute) {
    case 1:
      *value = 1024;
      break;  // threads of a block
    case 2:
    case 3:
      *value = 1024;
      break;  // block x, y
    case 4:
      *value = 64;
      break;  // block z
    case 5:
      *value = 2147483647;
      break;  // grid x
    case 6:
    case 7:
      *value = 65535;
      break;  // grid y, z
    case 8:
      *value = 49152;
      break;  // shared memory of a block
    case 9:
      *value = 65536;
      break;  // constant memory
    case 10:
      *value = 32;
      break;  // warp
    case 12:
    case 82:
      *value = 65536;
      break;  // registers: block, multiprocessor
    case 13:
      *value = 1980000;
      break;  // clock, kHz
    case 16:
      *value = arch->multiprocessors;
      break;
    case 36:
      *value = 2619000;
      break;  // memory clock, kHz
    case 37:
      *value = 5120;
      break;  // memory bus, bits
    case 38:
      *value = 50 << 20;
      break;  // L2, bytes
    case 39:
      *value = arch->threads_per_multiprocessor;
      break;
    case 41:
      *value = 1;
      break;  // unified addressing
    case 75:
      *value = device_archs[device] / 10;
      break;  // compute capability
    case 76:
      *value = device_archs[device] % 10;
      break;
    case 81:
      *value = arch->shared_per_multiprocessor;
      break;
    case 95:
      *value = 1;
      break;  // cooperative launch
    case 97:
      *value = stub_max_dynamic_shared(device);
      break;  // opt-in shared memory of a block
    case 106:
      *value = 32;
      break;  // blocks of a multiprocessor
    case 111:
      *value = device_archs[device] >= 80 ? 1024 : 0;
      break;  // reserved shared memory
    case 115:
      *value = 1;
      break;  // memory pools
    case 120:
    case 127:
      *value = device_archs[device] >= 90;
      break;  // clusters, tensor maps
    case 150:
      *value = oversized_shared ? 232 * 1024 : 0;
      break;
    default:
      *value = 0;
  }
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

API Result cuDeviceGetPCIBusId(char* id, int length, Device device) {
  ENTER(cuDeviceGetPCIBusId);
  if (id == NULL || length <= 0) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  snprintf(id, (size_t)length, "0000:%02x:00.0", device + 1);
  return kSuccess;
}

API Result cuDeviceCanAccessPeer(int* can, Device device, Device peer) {
  ENTER(cuDeviceCanAccessPeer);
  if (can == NULL) return kInvalidValue;
  if (!is_device(device) || !is_device(peer)) return kInvalidDevice;
  *can = device != peer;
  return kSuccess;
}

// ---- contexts

static bool is_context(const Context* context) {
  return context != NULL && context->magic == kContextMagic;
}

static void set_up(Context* context, Device device, bool primary) {
  context->magic = kContextMagic;
  context->id = ++num_contexts;
  context->device = device;
  context->primary = primary;
  context->alive = true;
}

API Result cuDevicePrimaryCtxRetain(Context** context, Device device) {
  ENTER(cuDevicePrimaryCtxRetain);
  if (context == NULL) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  pthread_mutex_lock(&lock);
  Context* primary = &primaries[device];
  if (primary->magic == 0) set_up(primary, device, true);
  if (!primary->alive) primary->alive = true;  // written only where it changes: others read it
  primary->retained++;
  pthread_mutex_unlock(&lock);
  *context = primary;
  return kSuccess;
}

// A primary context keeps its handle over its deaths, as with a driver; what it loaded dies.
static void tear_down(Context* context) {
  context->retained = 0;
  context->alive = false;
  context->generation++;
}

API Result cuDevicePrimaryCtxRelease_v2(Device device) {
  ENTER(cuDevicePrimaryCtxRelease_v2);
  if (!is_device(device)) return kInvalidDevice;
  pthread_mutex_lock(&lock);
  bool was_retained = primaries[device].retained > 0;
  if (was_retained && --primaries[device].retained == 0) tear_down(&primaries[device]);
  pthread_mutex_unlock(&lock);
  return was_retained ? kSuccess : kInvalidContext;
}

API Result cuDevicePrimaryCtxReset_v2(Device device) {
  ENTER(cuDevicePrimaryCtxReset_v2);
  if (!is_device(device)) return kInvalidDevice;
  pthread_mutex_lock(&lock);
  if (primaries[device].alive) tear_down(&primaries[device]);
  pthread_mutex_unlock(&lock);
  return kSuccess;
}

API Result cuDevicePrimaryCtxGetState(Device device, unsigned* flags, int* active) {
  ENTER(cuDevicePrimaryCtxGetState);
  if (flags == NULL || active == NULL) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  *flags = 0;
  *active = primaries[device].alive;
  return kSuccess;
}

API Result cuDevicePrimaryCtxSetFlags_v2(Device device, unsigned flags) {
  ENTER(cuDevicePrimaryCtxSetFlags_v2);
  (void)flags;
  return is_device(device) ? kSuccess : kInvalidDevice;
}

static Result push(Context* context) {
  Thread* self = stub_self();
  if (self->depth == kMaxStack) return kOutOfMemory;
  self->stack[self->depth++] = context;
  stub_current = context;
  return kSuccess;
}

static void pop(void) {
  Thread* self = stub_self();
  self->depth--;
  stub_current = self->depth > 0 ? self->stack[self->depth - 1] : NULL;
}

static Result create(Context** context, Device device) {
  if (context == NULL) return kInvalidValue;
  if (!is_device(device)) return kInvalidDevice;
  Context* made = calloc(1, sizeof *made);
  pthread_mutex_lock(&lock);
  set_up(made, device, false);
  pthread_mutex_unlock(&lock);
  *context = made;
  return push(made);
}

API Result cuCtxCreate_v2(Context** context, unsigned flags, Device device) {
  ENTER(cuCtxCreate_v2);
  (void)flags;
  return create(context, device);
}

API Result cuCtxCreate_v3(Context** context, void* params, int count, unsigned flags,
                          Device device) {
  ENTER(cuCtxCreate_v3);
  (void)params, (void)count, (void)flags;
  return create(context, device);
}

API Result cuCtxCreate_v4(Context** context, void* params, unsigned flags, Device device) {
  ENTER(cuCtxCreate_v4);
  (void)params, (void)flags;
  return create(context, device);
}

API Result cuCtxDestroy_v2(Context* context) {
  ENTER(cuCtxDestroy_v2);
  if (!is_context(context) || context->primary || !context->alive) return kInvalidContext;
  tear_down(context);  // its memory stays: other threads may have it current
  if (stub_current == context) pop();
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
  if (context != NULL && !context->alive) return kContextIsDestroyed;
  if (stub_self()->depth > 0) pop();
  return context != NULL ? push(context) : kSuccess;
}

API Result cuCtxPushCurrent_v2(Context* context) {
  ENTER(cuCtxPushCurrent_v2);
  if (!is_context(context)) return kInvalidContext;
  return context->alive ? push(context) : kContextIsDestroyed;
}

API Result cuCtxPopCurrent_v2(Context** context) {
  ENTER(cuCtxPopCurrent_v2);
  if (stub_self()->depth == 0) return kInvalidContext;
  if (context != NULL) *context = stub_current;
  pop();
  return kSuccess;
}

API Result cuCtxGetDevice(Device* device) {
  ENTER_CONTEXT(cuCtxGetDevice);
  if (device == NULL) return kInvalidValue;
  *device = stub_current->device;
  return kSuccess;
}

static Result resolve(Context** context) {
  if (*context == NULL) *context = stub_current;
  if (!is_context(*context)) return kInvalidContext;
  return (*context)->alive ? kSuccess : kContextIsDestroyed;
}

API Result cuCtxGetDevice_v2(Device* device, Context* context) {
  ENTER(cuCtxGetDevice_v2);
  Result result = resolve(&context);
  if (result == kSuccess) *device = context->device;
  return result;
}

// Unique over the life of the process: a primary context that is born again has another.
API Result cuCtxGetId(Context* context, unsigned long long* id) {
  ENTER(cuCtxGetId);
  if (id == NULL) return kInvalidValue;
  Result result = resolve(&context);
  if (result == kSuccess)
    *id = (unsigned long long)context->generation << 32 | (unsigned)context->id;
  return result;
}

API Result cuCtxGetFlags(unsigned* flags) {
  ENTER_CONTEXT(cuCtxGetFlags);
  *flags = 0;
  return kSuccess;
}

API Result cuCtxGetApiVersion(Context* context, unsigned* version) {
  ENTER(cuCtxGetApiVersion);
  Result result = resolve(&context);
  if (result == kSuccess) *version = 3020;
  return result;
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

API Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER_CONTEXT(cuCtxGetStreamPriorityRange);
  if (least != NULL) *least = 0;
  if (greatest != NULL) *greatest = -5;
  return kSuccess;
}
