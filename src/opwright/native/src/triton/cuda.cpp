#include "cuda.h"

#include <dlfcn.h>

#include <atomic>

#include "opwright/triton/error.h"

namespace opwright::triton::detail {

const Driver* loaded_driver = nullptr;
std::mutex driver_mutex;

namespace {

void* open_library() {
  if (void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) return library;
  const char* why = dlerror();
  throw Error(Cause::kDriver,
              std::string("there is no CUDA driver\n\n  dlopen  ") + (why ? why : "libcuda.so.1") +
                  "\n\nhint: launches need a GPU and its driver; compiling, building packs "
                  "and linking do not.");
}

const Driver* load(void* library) {
  auto* driver = new Driver;
  const auto get = [&](const char* name, bool is_needed) {
    void* found = dlsym(library, name);
    if (!found && is_needed) {
      throw Error(Cause::kDriver, std::string("the CUDA driver lacks ") + name +
                                      "\n\nhint: drivers for CUDA 12.0 (525) and newer have it.");
    }
    return found;
  };
#define OPWRIGHT_GET(MEMBER, NAME, PARAMETERS) \
  driver->MEMBER = reinterpret_cast<decltype(driver->MEMBER)>(get(#NAME, true));
  OPWRIGHT_DRIVER_FUNCTIONS(OPWRIGHT_GET)
#undef OPWRIGHT_GET
#define OPWRIGHT_GET(MEMBER, NAME, PARAMETERS) \
  driver->MEMBER = reinterpret_cast<decltype(driver->MEMBER)>(get(#NAME, false));
  OPWRIGHT_DRIVER_OPTIONAL(OPWRIGHT_GET)
#undef OPWRIGHT_GET
  loaded_driver = driver;
  check(driver->init(0), "cuInit");
  check(driver->version(&driver->cuda_version), "cuDriverGetVersion");
  return driver;
}

}  // namespace

const Driver& driver() {
  // A mutex and not a static's guard, which a child of fork could not release.
  static std::atomic<const Driver*> ready{nullptr};
  if (const Driver* known = ready.load(std::memory_order_acquire)) return *known;
  // Without the mutex: the library may call pthread_atfork when it is loaded, which waits in glibc
  // before 2.36 until the handlers of a fork have run.
  void* library = open_library();
  const std::lock_guard lock(driver_mutex);
  if (!ready.load(std::memory_order_relaxed)) ready.store(load(library), std::memory_order_release);
  return *ready.load(std::memory_order_relaxed);
}

std::string describe_result(Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (loaded_driver) {
    loaded_driver->error_name(result, &name);
    loaded_driver->error_text(result, &text);
  }
  return std::string(name ? name : "CUDA error") + " (" + std::to_string(result) + ")" +
         (text ? std::string(": ") + text : "");
}

void check(Result result, const std::string& what) {
  if (result != kSuccess) throw Error(Cause::kDriver, what + " failed: " + describe_result(result));
}

}  // namespace opwright::triton::detail
