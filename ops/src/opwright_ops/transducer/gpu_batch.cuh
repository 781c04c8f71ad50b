// Where the rows of each utterance of a batch are, on a GPU.
#pragma once

#include <cassert>

#include <opwright/reduce.cuh>
#include <opwright/vector.cuh>

#include "rows.h"

namespace opwright_ops {

using opwright::kWarp;

constexpr int kRowThreads = 256;

// The lengths of a batch; its rows are packed if `frames` is 0.
struct Batch {
  View<const int64_t, 1> logit_lengths, target_lengths;
  int64_t rows, labels, frames;

  __device__ OPWRIGHT_INLINE int64_t width(int64_t entry) const {
    return frames ? labels + 1 : target_lengths(entry) + 1;
  }
  __device__ OPWRIGHT_INLINE int64_t count(int64_t entry) const {
    return (frames ? frames : logit_lengths(entry)) * width(entry);
  }
};

// The rows of one utterance, of `most` frames at most where rows are packed. All threads of the
// block must call it: they add up the rows of those in front. Checks the lengths of this utterance.
__device__ OPWRIGHT_INLINE Rows rows_of_entry(const Batch& batch, int64_t entry, int64_t most) {
  __shared__ int64_t parts[kWarp];
  const int id = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  int64_t first = 0;
  if (batch.frames) {
    first = entry * batch.frames * (batch.labels + 1);
  } else {
    for (int64_t i = id; i < entry; i += threads) first += batch.count(i);
    first = opwright::warp_sum(first);
    if (id % kWarp == 0) parts[id / kWarp] = first;
    __syncthreads();
    first = 0;
    for (int i = 0; i < threads / kWarp; ++i) first += parts[i];
  }
  const int64_t frames = batch.logit_lengths(entry), labels = batch.target_lengths(entry);
  assert(1 <= frames && frames <= (batch.frames ? batch.frames : most) &&
         "`logit_lengths` must be at least 1, and at most the number of frames");
  assert(0 <= labels && labels <= batch.labels &&
         "`target_lengths` must be at least 0, and at most the number of columns of `targets`");
  assert((entry + 1 < batch.logit_lengths.size(0) ? first + batch.count(entry) <= batch.rows
                                                  : first + batch.count(entry) == batch.rows) &&
         "the number of rows is not that which the lengths make");
  return {first, batch.width(entry), frames, labels + 1};
}

}  // namespace opwright_ops
