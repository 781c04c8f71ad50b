// Stands in for PyTorch's header of this name where that takes too long: everything of it but
// torch::nn, data, optim, jit and serialize, which are half of what it costs, and which a source
// with kernels does not use. One that does fails to compile, and is compiled again with the whole.
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
