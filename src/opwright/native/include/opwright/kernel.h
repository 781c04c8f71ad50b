// What a kernel sees. It includes no PyTorch header, so it compiles in a fraction of a second.
//
//   libm.h      vector forms of std::exp and its relatives
//   types.h     half, bfloat16, compute_t<T>
//   view.h      View<T, R>, List<V>: the arguments and outputs of a kernel
//   parallel.h  parallel_for on PyTorch's own threads
//   entry.h     OPWRIGHT_KERNEL, check
//
// Included by the kernels that want them: math.h (functions of activations), vec.h (explicit
// vectors), scratch.h (memory for partial results), team.h (threads that wait for each other),
// tensor.h (tensors and ATen operators); in CUDA sources vector.cuh, rows.cuh, reduce.cuh,
// launch.cuh, copy.cuh, cluster.cuh.
#pragma once

#include <cstdint>

#include "opwright/libm.h"
#include "opwright/types.h"
#include "opwright/view.h"
#include "opwright/parallel.h"
#include "opwright/entry.h"
