#include "process_settings.h"

#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <mutex>

#include "cuda.h"
#include "opwright/triton/error.h"
#include "state.h"

namespace opwright::triton {
namespace detail {

std::atomic<uint32_t> watching{0};
std::mutex settings_mutex;

namespace {

std::shared_ptr<const ProcessSettings> current;
std::atomic<const LaunchHooks*> hooks{nullptr};
std::atomic<const ScratchAllocator*> allocator{nullptr};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string default_python() {
  const std::string venv = environment("VIRTUAL_ENV");
  if (!venv.empty() && access((venv + "/bin/python").c_str(), X_OK) == 0)
    return venv + "/bin/python";
  return "python3";
}

std::string default_cache() {
  std::string named = environment("OPWRIGHT_CACHE_DIR");
  if (!named.empty()) return named;
  named = environment("XDG_CACHE_HOME");
  return (named.empty() ? environment("HOME") + "/.cache" : named) + "/opwright";
}

int positive(const std::string& name, const std::string& value) {
  int number = 0;
  const char* end = value.data() + value.size();
  const auto read = std::from_chars(value.data(), end, number);
  if (read.ec == std::errc() && read.ptr == end && number > 0) return number;
  throw Error(Cause::kSetting, "OPWRIGHT_TRITON: `" + name + "` must be a positive number, not `" +
                                   value + "`\n\nhint: `" + name + "=2`");
}

void read_environment(ProcessSettings& settings) {
  settings.python = default_python();
  settings.cache_dir = default_cache();
  const std::string text = environment("OPWRIGHT_TRITON");
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string item = text.substr(at, end - at);
    const size_t equals = item.find('=');
    const std::string name = item.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : item.substr(equals + 1);
    if (name == "python") {
      settings.python = value;
    } else if (name == "worker") {
      settings.worker = value;
    } else if (name == "record") {
      settings.record = value;
    } else if (name == "pack") {
      settings.packs.push_back(Pack::open(value));
    } else if (name == "workers") {
      settings.workers = positive(name, value);
    } else if (name == "timeout") {
      settings.timeout_s = positive(name, value);
    } else if (name == "freeze") {
      settings.is_frozen = true;
    } else if (name == "tune") {
      settings.tunes = true;
    } else if (name == "check") {
      settings.checks_pointers = true;
      watching.fetch_or(kWatchesPointers);
    } else if (!name.empty()) {
      throw Error(Cause::kSetting, "OPWRIGHT_TRITON has no setting `" + name +
                                       "`\n\nhint: python=, worker=, record=, pack=, workers=, "
                                       "timeout=, freeze, tune, check; separated by commas.");
    }
    at = end + 1;
  }
}

std::shared_ptr<const ProcessSettings> snapshot() {  // settings_mutex held
  if (!current) {
    auto settings = std::make_shared<ProcessSettings>();
    read_environment(*settings);
    current = settings;
  }
  return current;
}

template <typename Change>
void change(const Change& apply) {
  const std::lock_guard lock(settings_mutex);
  auto changed = std::make_shared<ProcessSettings>(*snapshot());
  apply(*changed);
  current = changed;
}

// Memory of the stream-ordered pool, which a graph capture may contain.
void* pool_allocate(size_t bytes, size_t, Stream stream, void*) {
  Address address = 0;
  const Driver& cuda_driver = driver();
  if (!cuda_driver.memory_allocate ||
      cuda_driver.memory_allocate(&address, bytes, stream) != kSuccess)
    return nullptr;
  return reinterpret_cast<void*>(address);
}
void pool_release(void* memory, Stream stream, void*) {
  driver().memory_free(reinterpret_cast<Address>(memory), stream);
}

}  // namespace

std::shared_ptr<const ProcessSettings> process_settings() {
  const std::lock_guard lock(settings_mutex);
  return snapshot();
}

const LaunchHooks* launch_hooks() { return hooks.load(std::memory_order_acquire); }

ScratchAllocator scratch_allocator() {
  const ScratchAllocator* set = allocator.load(std::memory_order_acquire);
  return set ? *set : ScratchAllocator{pool_allocate, pool_release, nullptr};
}

}  // namespace detail

void load_pack(const std::string& path) {
  auto pack = detail::Pack::open(path);
  detail::change([&](detail::ProcessSettings& settings) { settings.packs.push_back(pack); });
}

void load_pack(std::span<const unsigned char> bytes, std::string_view name) {
  auto pack = detail::Pack::from_memory(bytes, std::string(name));
  detail::change([&](detail::ProcessSettings& settings) { settings.packs.push_back(pack); });
}

void freeze() {
  detail::change([](detail::ProcessSettings& settings) { settings.is_frozen = true; });
}
bool is_frozen() { return detail::process_settings()->is_frozen; }

void configure(const Settings& wanted) {
  detail::change([&](detail::ProcessSettings& settings) {
    if (!wanted.python.empty()) settings.python = wanted.python;
    if (!wanted.cache_dir.empty()) settings.cache_dir = wanted.cache_dir;
    if (!wanted.record.empty()) settings.record = wanted.record;
    if (wanted.workers > 0) settings.workers = wanted.workers;
    if (wanted.timeout_s > 0) settings.timeout_s = wanted.timeout_s;
    if (wanted.tunes) settings.tunes = true;
    if (wanted.checks_pointers) settings.checks_pointers = true;
  });
  if (wanted.checks_pointers) detail::watching.fetch_or(detail::kWatchesPointers);
}

void set_compiler(Compiler compiler) {
  detail::change([&](detail::ProcessSettings& settings) { settings.compiler = compiler; });
}

void set_launch_hooks(const LaunchHooks* launch_hooks) {
  detail::hooks.store(launch_hooks, std::memory_order_release);
  if (launch_hooks) {
    detail::watching.fetch_or(detail::kWatchesHooks);
  } else {
    detail::watching.fetch_and(~detail::kWatchesHooks);
  }
}

void set_scratch_allocator(const ScratchAllocator& wanted) {
  // Never freed: a launch in another thread may be using the former one.
  detail::allocator.store(new ScratchAllocator(wanted), std::memory_order_release);
}

}  // namespace opwright::triton
