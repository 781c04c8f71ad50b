// Replaces PyTorch's header of this name, which takes long to compile. It leaves out torch::nn,
// torch::data, torch::optim, torch::jit and torch::serialize: they take half of that time, and
// sources with kernels seldom use them. A source that does is compiled again with PyTorch's header.
#pragma once

#if defined(OPWRIGHT_WHOLE_TORCH) || defined(TORCH_STABLE_ONLY) || defined(TORCH_TARGET_VERSION)
#include_next <torch/all.h>
#else
#include <torch/autograd.h>
#include <torch/cuda.h>
#include <torch/fft.h>
#include <torch/library.h>
#include <torch/nested.h>
#include <torch/sparse.h>
#include <torch/special.h>
#include <torch/types.h>
#include <torch/utils.h>
#include <torch/version.h>
// Which of these there are depends on the version of torch.
#if __has_include(<torch/enum.h>)
#include <torch/enum.h>
#endif
#if __has_include(<torch/mps.h>)
#include <torch/mps.h>
#endif
#if __has_include(<torch/print.h>)
#include <torch/print.h>
#endif
#if __has_include(<torch/xpu.h>)
#include <torch/xpu.h>
#endif
#endif
