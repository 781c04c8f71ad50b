// Stands in for PyTorch's header of this name where that takes too long: everything of it but
// torch::nn, data, optim, jit and serialize, which are half of what it costs, and which a source
// with kernels does not use. One that does fails to compile, and is compiled again with the whole.
#pragma once

#if defined(OPWRIGHT_WHOLE_TORCH) || defined(TORCH_STABLE_ONLY) || defined(TORCH_TARGET_VERSION)
#include_next <torch/extension.h>
#else
#include <torch/autograd.h>
#ifndef OPWRIGHT_WITHOUT_PYTHON
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#endif
#include <torch/cuda.h>
#include <torch/fft.h>
#include <torch/library.h>
#include <torch/nested.h>
#include <torch/sparse.h>
#include <torch/special.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/version.h>
#endif
