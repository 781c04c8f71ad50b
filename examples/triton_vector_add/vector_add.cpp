// out = x + y on the GPU, by the Triton kernel of add.py.
#include <cstdio>
#include <cstring>
#include <exception>

#include <opwright/triton.h>

#include "gpu.h"

namespace ot = opwright::triton;

// Returns the number of wrong elements.
static int add(const ot::Kernel& kernel, int n) {
  float* x = allocate<float>(n);
  float* y = allocate<float>(n);
  float* out = allocate<float>(n);
  for (int i = 0; i < n; ++i) x[i] = 0.5f * i, y[i] = 1.0f;

  constexpr int kBlock = 1024;
  kernel(nullptr, ot::cdiv(n, kBlock), x, y, out, n, ot::cx(kBlock));
  wait();

  int wrong = 0;
  for (int i = 0; i < n; ++i) wrong += out[i] != x[i] + y[i];
  return wrong;
}

int main(int argc, char** argv) {
  // For a driver that computes nothing, as the tests have it.
  const bool launch_only = argc > 1 && std::strcmp(argv[1], "--launch-only") == 0;
  try {
#ifdef FROZEN
    ot::freeze();  // nothing but the pack from now on: no file is read, no Python is started
#endif
    use_gpu();
    const ot::Kernel kernel(KERNEL_FILE, "add_kernel");
    // Two kernels, for Triton: n is a multiple of 16, and it is not.
    const int wrong = add(kernel, 100'000) + add(kernel, 99'999);
    std::printf("%d elements are wrong\n", launch_only ? 0 : wrong);
    return wrong != 0 && !launch_only;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
