// Calls whose arguments are known at run time only: from an interpreter, a configuration, a test.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "opwright/triton/kernel.h"

namespace opwright::triton {

// One argument of such a call.
struct Argument {
  enum class Type {
    kNone,
    kPointer,
    kInt,
    kUnsigned,
    kFloat,
    kBool,
    kConstexpr,
    kTuple,
    kDescriptor
  };

  Type type = Type::kNone;
  Pointer pointer;
  int64_t integer = 0;  // kInt, kBool; kUnsigned: its bits
  double number = 0;    // kFloat
  std::string text;     // kConstexpr: the value as the key writes it: 1024, True, "relu", fp16
  std::vector<Argument> items;  // kTuple
  TensorDescriptor descriptor;  // kDescriptor
  std::string name;             // empty: by position
};

// Launches a kernel with them; named ones come last. Throws Error.
void launch(const Kernel& kernel, Stream stream, Grid grid, std::span<const Argument> arguments);
void launch(const Kernel& kernel, Stream stream, GridFunction grid,
            std::span<const Argument> arguments);

}  // namespace opwright::triton
