// Memory that the GPU and the host see, from the driver, without CUDA's headers or libraries.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

// A function of the driver; the program ends if there is none.
template <typename... A>
void call_driver(const char* name, A... arguments) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  void* const found = library ? dlsym(library, name) : nullptr;
  const int result = found ? reinterpret_cast<int (*)(A...)>(found)(arguments...) : -1;
  if (result == 0) return;
  std::fprintf(stderr, "%s: %s\n", name,
               found ? "the driver refuses it" : "there is no CUDA driver");
  std::exit(1);
}

// Makes GPU 0 the current one.
inline void use_gpu() {
  int device = 0;
  void* context = nullptr;
  call_driver("cuInit", 0u);
  call_driver("cuDeviceGet", &device, 0);
  call_driver("cuDevicePrimaryCtxRetain", &context, device);
  call_driver("cuCtxSetCurrent", context);
}

template <typename T>
T* allocate(size_t count) {
  void* memory = nullptr;
  constexpr unsigned kGlobal = 1;
  call_driver("cuMemAllocManaged", &memory, count * sizeof(T), kGlobal);
  return static_cast<T*>(memory);
}

// Waits for the launches.
inline void wait() { call_driver("cuCtxSynchronize"); }
