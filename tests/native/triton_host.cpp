// A library as an operator's build makes it, for tests/integration/triton/test_host.py: Python
// gives it its compiler.
#include "opwright/triton/operator.h"

using namespace opwright::triton;

extern "C" const char* opwright_triton_setup(Compiler compiler, const char* cache_dir) {
  return set_up(compiler, cache_dir, "host.py");
}

// Launches `kernel` of a file for a constant; returns what is wrong, until the thread's next call.
extern "C" const char* launch(const char* file, int64_t constant) {
  static thread_local std::string text;
  try {
    Kernel(file, "kernel")(nullptr, 1, reinterpret_cast<int32_t*>(0x1000), cx(constant));
    return nullptr;
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}
