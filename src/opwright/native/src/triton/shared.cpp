// The kernels of the process, and what a fork leaves of their state.
#include <pthread.h>

#include <new>

#include "process_settings.h"
#include "state.h"
#include "worker.h"

namespace opwright::triton::detail {
namespace {

KernelState* state_of(std::string_view file, std::string_view function,
                      const std::map<std::string, std::string>& options) {
  std::string name = std::string(file) + "\n" + std::string(function);
  for (const auto& [option, value] : options) name += "\n" + option + "=" + value;
  const std::lock_guard lock(shared().mutex);
  std::unique_ptr<KernelState>& state = shared().kernels[name];
  if (!state) {
    state = std::make_unique<KernelState>();
    state->file = file;
    state->function = function;
    state->options = options;
  }
  return state.get();
}

// A child of fork has one thread. Whatever the others were doing, it can launch, load and compile:
// every mutex of the runtime is free there, no work is in flight, and the parent's workers are not
// the child's. No code but this holds two of these mutexes, and none waits for anything else under
// one.
void lock_all() {
  settings_mutex.lock();
  driver_mutex.lock();
  shared().mutex.lock();
  workers_mutex.lock();
}

void unlock_all() {
  workers_mutex.unlock();
  shared().mutex.unlock();
  driver_mutex.unlock();
  settings_mutex.unlock();
}

void start_over() {
  shared().in_flight.clear();
  new (&shared().changed) std::condition_variable;  // the old one counts threads that are not here
  forget_workers();
  unlock_all();
}

// Runs when the library is loaded, before any thread can hold the guard of a static, which no child
// could release.
[[maybe_unused]] const int are_handlers_set =
    (shared(), pthread_atfork(lock_all, unlock_all, start_over));

}  // namespace

Shared& shared() {
  static auto* shared = new Shared;  // never destroyed: static kernels launch until the end
  return *shared;
}

KernelState* find_kernel(std::string_view file, std::string_view function) {
  return state_of(file, function, {});
}

KernelState* with_options(const KernelState* kernel,
                          const std::vector<std::pair<std::string, std::string>>& options) {
  std::map<std::string, std::string> all = kernel->options;
  for (const auto& [name, value] : options) all[name] = value;
  return state_of(kernel->file, kernel->function, all);
}

}  // namespace opwright::triton::detail
