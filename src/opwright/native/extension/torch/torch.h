// Stands in for PyTorch's header of this name: the lighter torch/all.h and, in an extension, the
// lighter torch/extension.h.
#pragma once

#if defined(OPWRIGHT_WHOLE_TORCH) || defined(TORCH_STABLE_ONLY) || defined(TORCH_TARGET_VERSION)
#include_next <torch/torch.h>
#else
#include <torch/all.h>
#ifdef TORCH_API_INCLUDE_EXTENSION_H
#include <torch/extension.h>
#endif
#endif
