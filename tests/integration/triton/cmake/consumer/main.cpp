#include <cstdio>
#include <exception>

#include <opwright/triton/runtime.h>

void twice(void* memory);

int main() {
  try {
    opwright::triton::freeze();
    twice(reinterpret_cast<void*>(0x1000));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
