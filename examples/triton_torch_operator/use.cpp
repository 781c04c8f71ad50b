// Calls the operator from C++, through the dispatcher.
#include <cstdio>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/rand.h>

int main() {
  const auto scaled_add = c10::Dispatcher::singleton()
                              .findSchemaOrThrow("triton_example::scaled_add", "")
                              .typed<at::Tensor(const at::Tensor&, const at::Tensor&, double)>();
  const at::Device device(at::hasCUDA() ? at::kCUDA : at::kCPU);
  const at::Tensor x = at::rand({1000, 77}, device), y = at::rand({1000, 77}, device);
  const bool is_right = at::allclose(scaled_add.call(x, y, 2.5), at::add(x, y, 2.5));
  std::printf("%s: %s\n", device.str().c_str(), is_right ? "right" : "wrong");
  return !is_right;
}
