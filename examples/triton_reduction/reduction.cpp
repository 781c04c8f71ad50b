// The sums of the rows of a matrix, by the Triton kernel of row_sum.py: its block is computed by a
// heuristic, its rows per program by @triton.autotune, and its grid follows from them.
#include <cstdio>
#include <cstring>
#include <exception>

#include <opwright/triton.h>

#include "gpu.h"

namespace ot = opwright::triton;

int main(int argc, char** argv) {
  // For a driver that computes nothing, as the tests have it.
  const bool launch_only = argc > 1 && std::strcmp(argv[1], "--launch-only") == 0;
  constexpr int kRows = 1000, kColumns = 500;
  try {
    use_gpu();
    float* x = allocate<float>(kRows * kColumns);
    float* sums = allocate<float>(kRows);
    float* again = allocate<float>(kRows);
    for (int i = 0; i < kRows * kColumns; ++i) x[i] = static_cast<float>(i % 7);

    const ot::Kernel row_sum(KERNEL_FILE, "row_sum_kernel");
    // The grid as a functor, which sees what autotune has chosen.
    const auto grid = [](const ot::Meta& meta) {
      return ot::Grid{ot::cdiv(meta["rows"], meta["ROWS"])};
    };
    row_sum(nullptr, grid, x, sums, kRows, kColumns);
    // The grid as row_sum.py has it, in C++ too.
    row_sum(nullptr, ot::GridFunction{"row_grid"}, x, again, kRows, kColumns);
    wait();

    int wrong = 0;
    for (int row = 0; row < kRows; ++row) {
      float sum = 0;  // of small integers: exact
      for (int column = 0; column < kColumns; ++column) sum += x[row * kColumns + column];
      wrong += (sums[row] != sum) + (again[row] != sum);
    }
    std::printf("%d sums are wrong\n", launch_only ? 0 : wrong);
    return wrong != 0 && !launch_only;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
