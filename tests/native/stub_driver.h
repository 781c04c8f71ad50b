// What the parts of the stub driver share. The user's view is at the top of stub_driver.c.
#pragma once

#define _GNU_SOURCE
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Only what is marked API is a symbol of the library.
#pragma GCC visibility push(hidden)

#define API __attribute__((visibility("default")))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)

typedef int Result;  // CUresult
typedef int Device;  // CUdevice

enum {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kNoBinaryForGpu = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kLaunchOutOfResources = 701,
  kCooperativeTooLarge = 720,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureImplicit = 906,
  kInvalidClusterSize = 912,
};

enum {  // CUfunction_attribute
  kMaxThreads = 0,
  kStaticShared = 1,
  kLocalSize = 3,
  kRegisters = 4,
  kPtxVersion = 5,
  kBinaryVersion = 6,
  kMaxDynamicShared = 8,
  kCarveout = 9,
  kClusterMustBeSet = 10,
  kClusterWidth = 11,
  kNonPortableCluster = 14,
  kSchedulingPolicy = 15,
  kSharedMemoryMode = 17,
  kFunctionAttributes = 18,
};

enum { kMaxDevices = 64, kMaxStreams = 4096 };

// Every entry point; the order is that of the counters.
typedef enum {
#define F(name) kId_##name,
#include "stub_functions.h"
#undef F
  kFunctions
} FunctionId;
extern const char* const kFunctionNames[kFunctions];

typedef struct {
  uint32_t offset, size;
} Param;

typedef struct {  // of one entry function of a cubin
  char* name;
  Param* params;
  int num_params;
  uint32_t params_size;          // of the packed buffer
  uint32_t required_threads[3];  // .reqntid, zeros if none
  uint32_t max_threads;          // .maxntid, 0 if none
  uint32_t required_cluster[3];
  int registers, local_size, static_shared;
} Entry;

typedef struct {
  Entry* entries;
  int num_entries;
  int arch;           // 90
  char arch_variant;  // 'a', 'f' or 0
  int toolkit;        // 134 for CUDA 13.4, 0 if the cubin does not say
  uint64_t digest;    // FNV-1a of all its bytes
} Image;

typedef struct {  // of a device: its primary one
  uint32_t magic;
  int id;  // 1, 2, ... in the order of creation
  Device device;
  uint64_t limits[16];
} Context;

typedef struct {
  uint32_t magic;
  Image image;
  Context* context;
  struct Function** functions;  // one for each entry, made at the first request
} Module;

typedef struct Function {
  uint32_t magic;
  Context* context;
  uint32_t max_threads;     // of a block
  uint32_t dynamic_shared;  // most that a launch may ask for
  uint32_t block[3];        // .reqntid, zeros if none
  bool has_params, has_cluster;
  const Entry* entry;
  const Image* image;
  int attributes[kFunctionAttributes];
} Function;

enum {
  kContextMagic = 0x0c7c7c01,
  kModuleMagic = 0x0c7c7c02,
  kFunctionMagic = 0x0c7c7c03,
  kDeadMagic = 0x0dead000,
};

typedef struct {
  int id;  // 0: not created yet
  Context* context;
  int capture;  // CUstreamCaptureStatus
} Stream;
extern Stream stub_streams[kMaxStreams];

typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  const struct LaunchAttribute* attributes;
  unsigned num_attributes;
} LaunchConfig;  // CUlaunchConfig

typedef struct LaunchAttribute {
  int id;
  int pad;
  union {
    unsigned char bytes[64];
    int number;
    unsigned dim[3];
  };
} LaunchAttribute;  // CUlaunchAttribute

// A thread's own state, never freed: counters must outlive the thread. No two share a cache line.
typedef struct Thread {
  _Alignas(128) uint64_t counts[kFunctions];
  struct Thread* next;
} Thread;

// initial-exec: one load in place of a call of __tls_get_addr, which would cost as much as the
// launch. The two words fit into the surplus that the loader keeps for libraries opened later.
extern __thread Thread* stub_thread __attribute__((tls_model("initial-exec")));
extern __thread Context* stub_current __attribute__((tls_model("initial-exec")));

extern bool stub_initialized;
extern bool stub_slow_launch;  // the recorder runs
extern bool stub_has_faults;   // failures are injected

// A child of fork may call the stub, whatever the other threads were doing: the mutex is free
// there.
#define FREE_IN_CHILD(mutex)                                                             \
  static void free_##mutex(void) { mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; } \
  __attribute__((constructor)) static void free_##mutex##_in_child(void) {               \
    pthread_atfork(NULL, NULL, free_##mutex);                                            \
  }

// A plain load; relaxed, so that a sanitiser knows that another thread may write.
#define IS_SET(flag) __atomic_load_n(&(flag), __ATOMIC_RELAXED)

Thread* stub_new_thread(void);
Result stub_injected(FunctionId id);

static inline Thread* stub_self(void) {
  Thread* self = stub_thread;
  return LIKELY(self != NULL) ? self : stub_new_thread();
}

static inline void stub_count_call(FunctionId id) {
  uint64_t* count = &stub_self()->counts[id];
  __atomic_store_n(count, __atomic_load_n(count, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

// The first lines of every entry point: count, fail if told to, refuse what came before cuInit.
#define ENTER_UNINITIALIZED(name)                  \
  do {                                             \
    stub_count_call(kId_##name);                   \
    if (UNLIKELY(IS_SET(stub_has_faults))) {       \
      Result injected = stub_injected(kId_##name); \
      if (injected != kSuccess) return injected;   \
    }                                              \
  } while (0)
#define ENTER(name)                                                  \
  do {                                                               \
    ENTER_UNINITIALIZED(name);                                       \
    if (UNLIKELY(!IS_SET(stub_initialized))) return kNotInitialized; \
  } while (0)
#define ENTER_CONTEXT(name)                                     \
  do {                                                          \
    ENTER(name);                                                \
    if (UNLIKELY(stub_current == NULL)) return kInvalidContext; \
  } while (0)

// stub_image.c
Result stub_parse_image(const void* image, Image* parsed);
void stub_free_image(Image* image);
bool stub_image_runs_on(const Image* image, int device_arch);

// stub_device.c
int stub_device_count(void);
int stub_device_arch(Device device);
int stub_max_dynamic_shared(Device device);
int stub_driver_version(void);
bool stub_oversized_shared(void);
bool stub_is_capturing(void);  // would an unsafe call be refused now?
Stream* stub_stream(void* handle);

// stub_record.c
void stub_record_launch(const Function* function, const LaunchConfig* config, void** params,
                        const void* buffer, size_t buffer_size, const char* call);

#pragma GCC visibility pop
