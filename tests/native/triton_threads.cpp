// Launches from many threads, for tests/integration/triton/test_runtime_threads.py; run it under
// the thread and address sanitizers.
//
//   triton_threads KERNELS.py CLASSES PACK THREADS ROUNDS
//
// Each thread launches every one of the pack's kernels `left` with a constant 0 to CLASSES - 1 and
// each of the classes of `n`, in an order of its own, on its GPU of two, and writes its number and
// the round into the pointer: the stub's record then has every launch, told apart. Meanwhile one
// thread prepares, one reads settings and sets hooks, and in the last round the process is frozen.
// Prints the number of launches, and the errors.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../../src/opwright/native/src/triton/cuda.h"
#include "opwright/triton.h"

using namespace opwright::triton;

namespace {

std::mutex mutex;
std::vector<std::string> errors;
std::atomic<int> ready{0}, wanted{0};
std::atomic<bool> is_over{false};
std::atomic<int64_t> hooked{0};

void see(const LaunchInfo&, void*) { hooked.fetch_add(1, std::memory_order_relaxed); }

void use_device(int device) {
  const detail::Driver& driver = detail::driver();
  detail::Context context = nullptr;
  detail::check(driver.primary_retain(&context, device), "cuDevicePrimaryCtxRetain");
  detail::check(driver.context_set(context), "cuCtxSetCurrent");
}

template <typename Act>
void guarded(const Act& act) {
  try {
    act();
  } catch (const std::exception& error) {
    const std::lock_guard lock(mutex);
    errors.emplace_back(error.what());
  }
}

Argument dynamic_int(int64_t value) {
  Argument argument;
  argument.type = Argument::Type::kInt;
  argument.integer = value;
  return argument;
}

void launch_all(const std::string& file, int number, int rounds, int classes) {
  std::mt19937 random(static_cast<unsigned>(number));
  guarded([&] { use_device(number % 2); });
  ready.fetch_add(1);
  while (ready.load() < wanted) std::this_thread::yield();
  const Kernel kernel(file, "left");
  for (int round = 0; round < rounds; ++round) {
    const int first = static_cast<int>(random() % static_cast<unsigned>(classes));
    for (int i = 0; i < classes; ++i) {
      const int constant = (first + i) % classes;
      // The address tells thread, round and constant; it stays a multiple of 16.
      auto* const pointer = reinterpret_cast<int32_t*>(
          ((int64_t{number} * 64 + round) * 4096 + constant) * 16 + (1ll << 40));
      const int64_t n = (constant * 7 + round) % 3 == 0 ? 32 : 5 + 2 * constant;
      guarded([&] {
        if (constant % 5 == 4) {  // the same kernel by the other path
          Argument address, value;
          address.type = Argument::Type::kPointer;
          address.pointer = {pointer, DType::i32};
          value.type = Argument::Type::kConstexpr;
          value.text = std::to_string(constant);
          const std::vector<Argument> arguments = {address, dynamic_int(n), value};
          launch(kernel, nullptr, Grid{1}, arguments);
        } else if (constant % 5 == 3) {
          kernel(nullptr, 1, pointer, named<"C">(cx(constant)), named<"n">(n));
        } else if (constant % 5 == 2) {
          kernel.bind(pointer, n, cx(constant))(nullptr, Grid{1}, pointer, n, cx(constant));
        } else {
          kernel(nullptr, 1, pointer, n, cx(constant));
        }
      });
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  const std::string file = argv[1];
  const int classes = std::atoi(argv[2]), threads = std::atoi(argv[4]), rounds = std::atoi(argv[5]);
  load_pack(argv[3]);
  wanted = threads;
  std::vector<std::thread> pool;
  for (int i = 0; i < threads; ++i) pool.emplace_back(launch_all, file, i, rounds, classes);
  std::thread preparer([&] {
    guarded([&] { use_device(0); });
    const Kernel kernel(file, "left");
    for (int i = 0; !is_over; i = (i + 1) % classes) {
      guarded([&] { kernel.prepare(reinterpret_cast<int32_t*>(0x1000), 5, cx(i)); });
      std::this_thread::yield();
    }
  });
  static const LaunchHooks hooks{see, nullptr, nullptr};
  std::thread setter([&] {
    for (int i = 0; !is_over; ++i) {
      guarded([&] {
        set_launch_hooks(i % 2 ? &hooks : nullptr);
        if (i % 16 == 0) configure({});
        if (i % 16 == 8) set_scratch_allocator({});
        if (i == 40) freeze();
        Kernel(file, "left", {{"num_warps", 1 + i % 4}});
      });
      std::this_thread::yield();
    }
  });
  for (std::thread& thread : pool) thread.join();
  is_over = true;
  preparer.join();
  setter.join();
  const auto count = reinterpret_cast<int64_t (*)(const char*)>(
      dlsym(dlopen("libcuda.so.1", RTLD_NOW), "stub_count"));
  std::printf("%lld\n", static_cast<long long>(count("cuLaunchKernelEx")));
  for (const std::string& error : errors) std::printf("%s\n", error.c_str());
}
