// The code of docs/guides/triton-from-cpp.md, run above the stub driver.
#include <cstdio>
#include <vector>

#include <opwright/triton.h>

#include "check.h"

using namespace opwright::triton;

static void arguments(Stream stream, const float* x, const float* bias, float* out, int n) {
  static const Kernel linear(KERNEL_FILE, "linear_kernel");
  const int blocks = cdiv(n, 256);

  linear(stream, blocks, x, bias, out, n);          // defaults for the rest
  linear(stream, blocks, x, nullptr, out, n, 0.5);  // bias is None
  linear(stream, blocks, x, bias, out, n, named<"BLOCK">(cx(128)));
  linear(stream, blocks, x, bias, out, n, 2.0, cx(Function{"relu"}), cx(256));
}

static void descriptors(Stream stream, void* x, void* out) {
  const Kernel copy(KERNEL_FILE, "copy_kernel");
  const TensorDescriptor source{{x, DType::fp16}, {1024, 512}, {512, 1}, {64, 64}};
  const TensorDescriptor target{{out, DType::fp16}, {1024, 512}, {512, 1}, {64, 64}};
  copy(stream, 1, source, target);
}

static void options(Stream stream, float* x, int n) {
  static const Kernel linear(KERNEL_FILE, "linear_kernel", {{"num_warps", 8}, {"num_stages", 2}});
  static const Kernel exact = linear.with({{"enable_fp_fusion", false}});
  exact(stream, cdiv(n, 256), x, nullptr, x, n);
}

static void grids(Stream stream, float* x, int n) {
  const Kernel linear(KERNEL_FILE, "linear_kernel");
  linear(stream, Grid{16, 2, 1}, x, nullptr, x, n);
  // clang-format off
  linear(stream, [](const Meta& meta) { return Grid{cdiv(meta["n"], meta["BLOCK"])}; }, x, nullptr, x, n);
  linear(stream, GridFunction{"blocks"}, x, nullptr, x, n);  // def blocks(meta) of the kernel's file
  // clang-format on
}

static void ahead(Stream stream, float* x, int n) {
  const Kernel linear(KERNEL_FILE, "linear_kernel");
  linear.prepare(x, nullptr, x, n);                          // compiled and loaded, not launched
  const FrozenKernel bound = linear.bind(x, nullptr, x, n);  // and never looked up again
  bound(stream, Grid{cdiv(n, 256)}, x, nullptr, x, n);
}

static void run_time(Stream stream, float* x, int n) {
  const Kernel linear(KERNEL_FILE, "linear_kernel");
  std::vector<Argument> arguments(4);
  arguments[0] = {.type = Argument::Type::kPointer, .pointer = {x, DType::fp32}};
  arguments[1] = {.type = Argument::Type::kNone};
  arguments[2] = arguments[0];
  arguments[3] = {.type = Argument::Type::kInt, .integer = n};
  launch(linear, stream, GridFunction{"blocks"}, arguments);
}

static void errors(Stream stream, float* x) {
  const Kernel linear(KERNEL_FILE, "linear_kernel");
  try {
    linear(stream, 1, x, nullptr, x, 16, cx(2.0));
  } catch (const Error& error) {
    if (error.cause() == Cause::kArgument) std::puts(error.what());
  }
}

int main() {
  float* const memory = reinterpret_cast<float*>(0x100000);
  Settings settings;
  settings.timeout_s = 300;
  configure(settings);
  arguments(nullptr, memory, memory, memory, 1024);
  descriptors(nullptr, memory, memory);
  options(nullptr, memory, 1024);
  grids(nullptr, memory, 1024);
  ahead(nullptr, memory, 1024);
  run_time(nullptr, memory, 1024);
  errors(nullptr, memory);
}
