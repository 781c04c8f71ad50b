// Calls operators of a wheel through PyTorch's dispatcher, in a program without Python.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <opwright/library.h>

#include <iostream>

int main(int count, char** arguments) {
  opwright::load_library(count > 1 ? arguments[1] : OPWRIGHT_OPS);
  const auto bias_gelu =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("opwright_ops::bias_gelu", "")
          .typed<at::Tensor(const at::Tensor&, const at::Tensor&, c10::string_view)>();
  const at::Tensor x = at::randn({512, 4096}), b = at::randn({4096});
  const at::Tensor y = bias_gelu.call(x, b, "tanh");
  std::cout << "bias_gelu is right: " << std::boolalpha
            << at::allclose(y, at::gelu(x + b, "tanh"), 1e-5, 1e-6) << "\n";
  try {
    bias_gelu.call(x, b.slice(0, 0, 7), "tanh");
  } catch (const c10::Error& error) {
    std::cout << error.what_without_backtrace() << "\n";
  }
}
