#include <cstdio>
#include <exception>

#include <opwright/triton.h>

int main() {
  namespace ot = opwright::triton;
  try {
    ot::load_pack(OPWRIGHT_PACK);
    ot::freeze();
    const ot::Kernel kernel("twice.py", "twice_kernel", {{"num_warps", 2}});
    kernel(nullptr, 8, ot::Pointer{reinterpret_cast<void*>(0x1000), ot::DType::i32}, ot::cx(128));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
