// Triton kernels from C++: a JIT function of a Python file is called at the price of the driver
// call.
//
//   static opwright::triton::Kernel add{"add.py", "add_kernel"};
//   add(stream, opwright::triton::cdiv(n, 1024), x, y, out, n, opwright::triton::cx(1024));
//
//   triton/kernel.h     Kernel: call, with, prepare, bind
//   triton/arguments.h  Pointer, TensorDescriptor, named, as_pointer
//   triton/value.h      cx, Function: constexpr arguments
//   triton/dtype.h      DType, dtype_of
//   triton/dynamic.h    Argument: calls whose arguments are known at run time only
//   triton/runtime.h    packs, freeze, settings, hooks, scratch memory
//   triton/error.h      Error
//
// Included by those who want them: triton/aten.h, triton/stable.h, triton/dlpack.h (tensors as
// arguments). C++20; needs libc, libdl and libstdc++. The driver is loaded at the first call.
#pragma once

#include "opwright/triton/driver.h"
#include "opwright/triton/error.h"
#include "opwright/triton/dtype.h"
#include "opwright/triton/value.h"
#include "opwright/triton/arguments.h"
#include "opwright/triton/kernel.h"
#include "opwright/triton/dynamic.h"
#include "opwright/triton/runtime.h"
