// Host time of one launch, from the driver's own calls up to a Triton kernel by name.
//
//   triton_launch KERNELS.py ROUNDS CALLS [PACK]
//
// Every row runs CALLS launches and waits for the stream, ROUNDS times, in turns with all others; a
// line of JSON gives the median and the least of each in nanoseconds. benchmarks/triton_launch.py
// builds and runs it.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../../src/opwright/native/src/triton/cuda.h"
#include "opwright/triton.h"

using namespace opwright::triton;
namespace cuda = opwright::triton::detail;
using Clock = std::chrono::steady_clock;

namespace {

double ns_since(Clock::time_point start) {
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

struct Row {
  std::string name;
  std::function<void(int)> run;  // so many launches
  std::vector<double> ns;
};

LaunchInfo seen;
void remember(const LaunchInfo& info, void*) { seen = info; }

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const int rounds = std::atoi(argv[2]), calls = std::atoi(argv[3]);
  const cuda::Driver& driver = cuda::driver();
  cuda::Context context = nullptr;
  driver.primary_retain(&context, 0);
  driver.context_set(context);
  Stream stream = nullptr;
  void* const handle = dlopen("libcuda.so.1", RTLD_NOW);
  reinterpret_cast<int (*)(Stream*, unsigned)>(dlsym(handle, "cuStreamCreate"))(&stream, 1);
  using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                         unsigned, Stream, void**, void**);
  const auto launch_kernel = reinterpret_cast<Launch>(dlsym(handle, "cuLaunchKernel"));
  cuda::Address memory = 0;
  driver.memory_allocate(&memory, 1 << 20, stream);
  driver.stream_synchronize(stream);

  float* const x = reinterpret_cast<float*>(memory);
  float *const y = x + 4096, *const out = y + 4096;
  int64_t n = 4095;

  Clock::time_point start = Clock::now();
  if (argc > 4) {
    load_pack(argv[4]);
    freeze();
  }
  const Kernel add{argv[1], "add3"}, nop19{argv[1], "nop19"}, nop0{argv[1], "nop0"};
  add(stream, cdiv(n, 1024), x, y, out, n, cx(1024));
  driver.stream_synchronize(stream);
  const double first_ms = ns_since(start) / 1e6;
  start = Clock::now();
  const auto launch19 = [&] {
    nop19(stream, 1, x, y, out, x, y, 2, 3, 4, 5, 6, 7, 8, 9, 10, cx(32), cx(32), cx(32), cx(32),
          cx(32));
  };
  launch19();
  const double second_ms = ns_since(start) / 1e6;
  nop0(stream, 1);

  const LaunchHooks hooks{remember, nullptr, nullptr};
  set_launch_hooks(&hooks);
  launch19();
  const LaunchInfo info19 = seen;
  add(stream, cdiv(n, 1024), x, y, out, n, cx(1024));
  const LaunchInfo info3 = seen;
  set_launch_hooks(nullptr);

  // The same launches by hand: what any caller pays for the driver.
  int32_t small = static_cast<int32_t>(n);
  uint64_t zero = 0;
  void* parameters3[] = {(void*)&x, (void*)&y, (void*)&out, &small, &zero, &zero};
  int32_t ints[] = {2, 3, 4, 5, 6, 7, 8, 9, 10};
  void* parameters19[] = {(void*)&x, (void*)&y, (void*)&out, (void*)&x, (void*)&y, ints,
                          ints + 1,  ints + 2,  ints + 3,    ints + 4,  ints + 5,  ints + 6,
                          ints + 7,  ints + 8,  &zero,       &zero};
  const auto by_hand = [&](const LaunchInfo& info, void** parameters, unsigned grid) {
    launch_kernel(info.function, grid, 1, 1, info.threads, 1, 1, info.shared_bytes, stream,
                  parameters, nullptr);
  };
  const auto by_hand_ex = [&](const LaunchInfo& info, void** parameters, unsigned grid) {
    cuda::LaunchConfig config = {grid,   1,       1, info.threads, 1, 1, info.shared_bytes,
                                 stream, nullptr, 0};
    driver.launch(&config, info.function, parameters, nullptr);
  };
  const FrozenKernel bound = add.bind(x, y, out, n, cx(1024));
  const auto repeat = [](const auto& one) {
    return [&one](int count) {
      for (int i = 0; i < count; ++i) one();
    };
  };
  const auto context_get = [&] { driver.context_get(&context); };
  const auto raw3 = [&] { by_hand(info3, parameters3, 4); };
  const auto raw3_ex = [&] { by_hand_ex(info3, parameters3, 4); };
  const auto raw19 = [&] { by_hand(info19, parameters19, 1); };
  const auto raw19_ex = [&] { by_hand_ex(info19, parameters19, 1); };
  const auto add3 = [&] { add(stream, cdiv(n, 1024), x, y, out, n, cx(1024)); };
  const auto bound3 = [&] { bound(stream, Grid{4}, x, y, out, n, cx(1024)); };
  const auto functor3 = [&] {
    add(
        stream, [&](const Meta& meta) { return Grid{cdiv(n, meta["BLOCK"])}; }, x, y, out, n,
        cx(1024));
  };
  const auto none = [&] { nop0(stream, 1); };
  const auto changing = [&] {
    n = n == 4095 ? 4096 : n == 4096 ? 1 : 4095;
    add(stream, 4, x, y, out, n, cx(1024));
  };
  std::vector<Row> rows = {
      {"cuCtxGetCurrent", repeat(context_get), {}},
      {"cuLaunchKernel, add of 3", repeat(raw3), {}},
      {"cuLaunchKernelEx, add of 3", repeat(raw3_ex), {}},
      {"cuLaunchKernel, 19 arguments", repeat(raw19), {}},
      {"cuLaunchKernelEx, 19 arguments", repeat(raw19_ex), {}},
      {"Kernel, no arguments", repeat(none), {}},
      {"Kernel, add of 3 (5 arguments)", repeat(add3), {}},
      {"Kernel, 19 arguments", repeat(launch19), {}},
      {"Kernel, add of 3, bound", repeat(bound3), {}},
      {"Kernel, add of 3, grid by a functor", repeat(functor3), {}},
      {"Kernel, add of 3, classes changing", repeat(changing), {}},
  };
  const auto two_threads = [&](const auto& one) {
    return [&](int count) {
      const auto work = [&] {
        driver.context_set(context);
        for (int i = 0; i < count; ++i) one();
      };
      std::thread other(work);
      work();
      other.join();
    };
  };
  const int several = std::max(calls, 20000);
  for (int round = -1; round < rounds; ++round) {
    for (Row& row : rows) {
      start = Clock::now();
      row.run(calls);
      const double ns = ns_since(start) / calls;
      driver.stream_synchronize(stream);
      if (round >= 0) row.ns.push_back(ns);
    }
  }
  // Threads are started once for many launches; the stub's rows are what they are for.
  n = 4095;
  for (const auto& [name, run] : std::vector<std::pair<std::string, std::function<void(int)>>>{
           {"two threads: cuLaunchKernelEx, add of 3", two_threads(raw3_ex)},
           {"two threads: Kernel, add of 3 (5 arguments)", two_threads(add3)}}) {
    Row row{name, run, {}};
    for (int round = 0; round < 7; ++round) {
      start = Clock::now();
      row.run(several);
      row.ns.push_back(ns_since(start) / several);
      driver.stream_synchronize(stream);
    }
    rows.push_back(row);
  }
  std::printf("{\"first_ms\": %.2f, \"second_ms\": %.2f, \"rows\": {", first_ms, second_ms);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::vector<double>& ns = rows[i].ns;
    std::sort(ns.begin(), ns.end());
    std::printf("%s\"%s\": [%.1f, %.1f]", i ? ", " : "", rows[i].name.c_str(), ns[ns.size() / 2],
                ns[0]);
  }
  std::printf("}}\n");
}
