// Forks while threads launch, load and compile, for
// tests/integration/triton/test_runtime_threads.py.
//
//   triton_fork KERNELS.py CLASSES PACK FORKS
//
// The pack has the kernel `left` for the constants 0 to CLASSES - 1. Constants beyond are asked
// from a worker, whose refusal says whose child it is. Every child of fork launches a kernel that
// is loaded, loads one, and asks a worker, in its first thread and in another. Prints one line for
// each child that did not do so, and for each foreign worker.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../../src/opwright/native/src/triton/cuda.h"
#include "opwright/triton.h"

using namespace opwright::triton;

namespace {

// Longer is a hang. The allocator of GCC's thread sanitizer is not prepared for a fork: a child
// hangs in malloc if another thread held the allocator's mutex, once in some hundred forks. Such a
// hang says nothing about the runtime, so that only the build without the sanitizer counts it.
#ifdef __SANITIZE_THREAD__
constexpr unsigned kSecondsOfChild = 30;
constexpr bool kHangCounts = false;
#else
constexpr unsigned kSecondsOfChild = 120;
constexpr bool kHangCounts = true;
#endif
std::string file;
int classes = 0;
std::atomic<bool> is_over{false};

void use_device() {
  const detail::Driver& driver = detail::driver();
  detail::Context context = nullptr;
  detail::check(driver.primary_retain(&context, 0), "cuDevicePrimaryCtxRetain");
  detail::check(driver.context_set(context), "cuCtxSetCurrent");
}

void launch(int constant) {
  Kernel(file, "left")(nullptr, 1, reinterpret_cast<int32_t*>(0x1000), 5, cx(constant));
}

// Asks a worker; returns what is wrong with its answer.
std::string compile(int constant) {
  try {
    launch(classes + constant);
  } catch (const Error& error) {
    const std::string text = error.what();
    const std::string wanted = "worker of " + std::to_string(getpid()) + ".";
    return text.find(wanted) == std::string::npos ? "expected the " + wanted + " " + text : "";
  }
  return "it was compiled";
}

// Does it all in one thread of a child.
std::string use_all(int number) {
  try {
    use_device();
    launch(0);                   // loaded
    launch(number % classes);    // perhaps not
    return compile(number % 3);  // which threads of the parent are asking for, too
  } catch (const std::exception& error) {
    return error.what();
  }
}

int run_child(int number) {
  alarm(kSecondsOfChild);
  std::string second;
  const std::string first = use_all(number);
#ifndef __SANITIZE_THREAD__  // which refuses threads in such a child
  std::thread([&] { second = use_all(number + 1); }).join();
#endif
  for (const std::string& wrong : {first, second}) {
    if (!wrong.empty()) std::printf("child %d: %s\n", number, wrong.c_str());
  }
  std::fflush(stdout);
  return 0;
}

void repeat(const std::function<void(int)>& act) {
  try {
    use_device();
    for (int i = 0; !is_over; ++i) act(i);
  } catch (const std::exception& error) {
    std::printf("parent: %s\n", error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  file = argv[1];
  classes = std::atoi(argv[2]);
  load_pack(argv[3]);
  use_device();
  launch(0);
  std::vector<std::thread> threads;
  threads.emplace_back(repeat, [](int i) { launch(i % classes); });
  threads.emplace_back(repeat, [](int i) {
    const Kernel kernel = Kernel(file, "left").with({{"num_warps", 1 + i % 4}});
    kernel(nullptr, 1, reinterpret_cast<int32_t*>(0x1000), 5, cx(i % classes));
  });
  threads.emplace_back(repeat, [](int) {
    configure({});
    set_scratch_allocator({});
  });
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back(repeat, [](int j) {
      const std::string wrong = compile(j % 3);
      if (!wrong.empty()) std::printf("parent: %s\n", wrong.c_str());
    });
  }
  for (int i = 0; i < std::atoi(argv[4]); ++i) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) _exit(run_child(i));
    int status = 0;
    waitpid(child, &status, 0);
    if (status == 0) continue;
    const bool hangs = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
    if (!hangs || kHangCounts) std::printf("child %d: status %d\n", i, status);
    break;
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
}
