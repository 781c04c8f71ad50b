// The CUDA driver's entry points, declared by hand and loaded from libcuda.so.1 at the first use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "opwright/triton/driver.h"

namespace opwright::triton::detail {

using Result = int;  // CUresult
using Device = int;
using Context = void*;
using Module = void*;
using Event = void*;
using Function_ = void*;  // CUfunction
using Address = uint64_t;

inline constexpr Result kSuccess = 0;
inline constexpr Result kCaptureUnsupported = 900;
inline constexpr Result kCaptureImplicit = 906;

// CUlaunchAttributeID.
enum AttributeId : uint32_t {
  kCooperative = 2,
  kClusterDimension = 4,
  kClusterPolicy = 5,
  kProgrammaticSerialization = 6,
  kSharedMemoryMode = 18,
};

struct LaunchAttribute {  // CUlaunchAttribute
  uint32_t id;
  uint32_t pad;
  union {
    uint32_t words[16];
    int32_t value;
  };
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {  // CUlaunchConfig
  uint32_t grid_x, grid_y, grid_z;
  uint32_t block_x, block_y, block_z;
  uint32_t shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  uint32_t attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

// Values of `extra`, the packed form of a kernel's parameters.
inline void* const kParamBuffer = reinterpret_cast<void*>(1);
inline void* const kParamBufferSize = reinterpret_cast<void*>(2);

// CUdevice_attribute.
inline constexpr int kMaxThreadsPerBlock = 1;
inline constexpr int kComputeMajor = 75;
inline constexpr int kComputeMinor = 76;
inline constexpr int kMaxSharedOptin = 97;
// CUfunction_attribute.
inline constexpr int kFunctionMaxThreads = 0;
inline constexpr int kFunctionStaticShared = 1;
inline constexpr int kFunctionMaxDynamicShared = 8;
inline constexpr int kFunctionNonPortableCluster = 14;
inline constexpr int kFunctionSharedMemoryMode = 17;
// CUpointer_attribute.
inline constexpr int kPointerDeviceAddress = 3;
inline constexpr int kPointerDevice = 9;

#define OPWRIGHT_DRIVER_FUNCTIONS(F)                                                               \
  F(init, cuInit, (unsigned flags))                                                                \
  F(version, cuDriverGetVersion, (int* version))                                                   \
  F(device_get, cuDeviceGet, (Device * device, int ordinal))                                       \
  F(device_attribute, cuDeviceGetAttribute, (int* value, int attribute, Device device))            \
  F(context_get, cuCtxGetCurrent, (Context * context))                                             \
  F(context_set, cuCtxSetCurrent, (Context context))                                               \
  F(context_device, cuCtxGetDevice, (Device * device))                                             \
  F(primary_retain, cuDevicePrimaryCtxRetain, (Context * context, Device device))                  \
  F(module_load, cuModuleLoadData, (Module * module, const void* image))                           \
  F(module_function, cuModuleGetFunction, (Function_ * function, Module module, const char* name)) \
  F(module_unload, cuModuleUnload, (Module module))                                                \
  F(function_attribute, cuFuncGetAttribute, (int* value, int attribute, Function_ function))       \
  F(function_set, cuFuncSetAttribute, (Function_ function, int attribute, int value))              \
  F(function_cache, cuFuncSetCacheConfig, (Function_ function, int config))                        \
  F(launch, cuLaunchKernelEx,                                                                      \
    (const LaunchConfig* config, Function_ function, void** parameters, void** extra))             \
  F(pointer_attribute, cuPointerGetAttribute, (void* value, int attribute, Address address))       \
  F(stream_capturing, cuStreamIsCapturing, (Stream stream, int* status))                           \
  F(stream_synchronize, cuStreamSynchronize, (Stream stream))                                      \
  F(event_create, cuEventCreate, (Event * event, unsigned flags))                                  \
  F(event_record, cuEventRecord, (Event event, Stream stream))                                     \
  F(event_synchronize, cuEventSynchronize, (Event event))                                          \
  F(event_elapsed, cuEventElapsedTime, (float* milliseconds, Event start, Event end))              \
  F(event_destroy, cuEventDestroy_v2, (Event event))                                               \
  F(error_name, cuGetErrorName, (Result error, const char** text))                                 \
  F(error_text, cuGetErrorString, (Result error, const char** text))
// Those that older drivers lack; nullptr there.
#define OPWRIGHT_DRIVER_OPTIONAL(F)                                                     \
  F(memory_allocate, cuMemAllocAsync, (Address * address, size_t bytes, Stream stream)) \
  F(memory_free, cuMemFreeAsync, (Address address, Stream stream))                      \
  F(parameter_info, cuFuncGetParamInfo,                                                 \
    (Function_ function, size_t index, size_t* offset, size_t* size))                   \
  F(encode_tiled, cuTensorMapEncodeTiled,                                               \
    (void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,          \
     const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,     \
     int interleave, int swizzle, int promotion, int fill))

struct Driver {
#define OPWRIGHT_DECLARE(MEMBER, NAME, PARAMETERS) Result(*MEMBER) PARAMETERS = nullptr;
  OPWRIGHT_DRIVER_FUNCTIONS(OPWRIGHT_DECLARE)
  OPWRIGHT_DRIVER_OPTIONAL(OPWRIGHT_DECLARE)
#undef OPWRIGHT_DECLARE
  int cuda_version = 0;  // the newest CUDA that the driver supports, as 12080
};

extern std::mutex driver_mutex;  // held while the driver is initialized

// Loads the driver once; throws Error(kDriver) if there is none.
const Driver& driver();
// The driver if it has been loaded: after the first resolve.
extern const Driver* loaded_driver;

// "CUDA_ERROR_INVALID_VALUE (1): invalid argument".
std::string describe_result(Result result);

// Throws Error(kDriver) that names the call.
void check(Result result, const std::string& what);

}  // namespace opwright::triton::detail
