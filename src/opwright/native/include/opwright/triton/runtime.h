// The runtime's settings, for the whole process: where kernels come from, hooks, scratch memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "opwright/triton/driver.h"

namespace opwright::triton {

// Takes kernels from a pack file, which stays mapped. Packs are asked in the order of loading.
// Throws Error(kPack) if the file is damaged.
void load_pack(const std::string& path);

// The same for a pack that is linked into the program; the bytes must outlive the process's
// launches.
void load_pack(std::span<const unsigned char> bytes, std::string_view name);

// From now on a kernel that is not loaded yet comes from a pack or is an error: no file is read, no
// Python is started.
void freeze();
bool is_frozen();

// How kernels are compiled. Empty texts and zeros leave what the environment says, or the default.
struct Settings {
  std::string python;  // the worker's interpreter; default: $VIRTUAL_ENV, then python3 on the PATH
  std::string cache_dir;  // default: $OPWRIGHT_CACHE_DIR, then ~/.cache/opwright
  std::string record;     // a file that receives the key of every kernel that is resolved
  int workers = 0;        // compile processes at most; default 2
  int timeout_s = 0;      // of one compile; default 600
  bool tunes = false;     // autotuned kernels are measured at their first launch with a new key
  bool checks_pointers =
      false;  // every pointer is looked up before a launch, which then is waited for
};
void configure(const Settings& settings);

// One launch, as hooks see it.
struct LaunchInfo {
  const char* kernel;
  const char* key;
  Grid grid;         // in programs
  uint32_t threads;  // of a block
  uint32_t shared_bytes;
  Stream stream;
  void* function;  // CUfunction
};

// Called around every launch, in the launching thread; nullptr removes them.
struct LaunchHooks {
  void (*enter)(const LaunchInfo& launch, void* data) = nullptr;
  void (*exit)(const LaunchInfo& launch, void* data) = nullptr;
  void* data = nullptr;
};
void set_launch_hooks(const LaunchHooks* hooks);  // must outlive the launches

// Where kernels' scratch memory comes from. Memory is freed right after the launch, in the stream's
// order.
struct ScratchAllocator {
  void* (*allocate)(size_t bytes, size_t alignment, Stream stream, void* data) = nullptr;
  void (*release)(void* memory, Stream stream, void* data) = nullptr;
  void* data = nullptr;
};
void set_scratch_allocator(const ScratchAllocator& allocator);  // default: cuMemAllocAsync

// In a process that is Python: compiles by a callback instead of a worker. The request and the
// reply are the worker's JSON lines; the callback returns memory that stays valid until its next
// call in the same thread, or nullptr if Ctrl-C interrupted it, which the launch passes on to the
// process's handler.
using Compiler = const char* (*)(const char* request);
void set_compiler(Compiler compiler);

}  // namespace opwright::triton
