// Stands in for PyTorch's header of this name: the lighter torch/all.h, and bindings to Python.
#pragma once

#if defined(OPWRIGHT_WHOLE_TORCH) || defined(TORCH_STABLE_ONLY) || defined(TORCH_TARGET_VERSION)
#include_next <torch/extension.h>
#else
#include <torch/all.h>
#ifndef OPWRIGHT_WITHOUT_PYTHON
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#endif
#endif
