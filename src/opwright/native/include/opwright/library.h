// The operators of a wheel in a program without Python:
//
//   opwright::load_library("my_ops/_opwright/library.so");
//   c10::Dispatcher::singleton().findSchemaOrThrow("my_ops::scale_shift", "") ...
//
// The program is linked to libtorch, 2.11 or newer. Call it once, before the first use of an
// operator; in a process that has imported the package in Python, the operators are there already.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace opwright {

// Defines the operators of a library and registers their kernels with the dispatcher.
// Throws std::runtime_error: it cannot be loaded, is not a library of operators, or its
// names are taken.
inline void load_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error("opwright: " + path + " cannot be loaded: " + dlerror());
  auto* define = reinterpret_cast<int (*)()>(dlsym(library, "opwright_define"));
  if (!define) throw std::runtime_error("opwright: " + path + " is not a library of operators");
  if (define())
    throw std::runtime_error("opwright: PyTorch already has operators with the names of " + path);
}

}  // namespace opwright
