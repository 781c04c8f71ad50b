// Runs model.pt2 with operators of a wheel, in a program without Python.
#include <ATen/ATen.h>
#include <opwright/library.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

int main(int count, char** arguments) {
  opwright::load_library(count > 1 ? arguments[1]
                                   : OPWRIGHT_OPS);  // before the model, which looks for them
  torch::inductor::AOTIModelPackageLoader model("model.pt2");

  std::ifstream file("samples.pt", std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const c10::IValue samples = torch::jit::pickle_load(bytes);
  bool are_right = true;
  for (const c10::IValue& sample : samples.toListRef()) {
    const auto& [input, expected] = sample.to<std::tuple<at::Tensor, at::Tensor>>();
    const at::Tensor output = model.run({input}).at(0);
    const bool is_right = at::allclose(output, expected, 1e-5, 1e-6);
    std::cout << "batch of " << input.size(0) << ": " << (is_right ? "right" : "wrong") << "\n";
    are_right &= is_right;
  }
  return !are_right;
}
