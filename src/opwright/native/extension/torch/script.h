// Stands in for PyTorch's header of this name: operators and custom classes, without torch::jit,
// which loads models. It has the rest of the lighter torch/all.h too, so that one precompiled
// header serves both.
#pragma once

#if defined(OPWRIGHT_WHOLE_TORCH) || defined(TORCH_STABLE_ONLY) || defined(TORCH_TARGET_VERSION)
#include_next <torch/script.h>
#else
#include <torch/all.h>
#include <torch/csrc/autograd/InferenceMode.h>
#include <torch/custom_class.h>
#endif
