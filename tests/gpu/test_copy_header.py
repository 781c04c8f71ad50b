"""opwright/copy.cuh: copies to shared memory, of each size, in groups."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Int32
from torch import Tensor

from opwright import operator

SOURCE = """
#include <opwright/copy.cuh>
#include <opwright/kernel.h>
using namespace opwright;

// A block for each row: copies it to shared memory by KBYTES, the odd places as zeros, in two
// groups, and writes each group behind its wait. Other threads wrote what a thread reads.
__global__ void copy_rows(const int32_t* from, int32_t* to, int n) {
  constexpr int kWords = KBYTES / 4;
  extern __shared__ __align__(16) unsigned char bytes[];
  int32_t* const shared = reinterpret_cast<int32_t*>(bytes);
  from += blockIdx.x * int64_t{n}, to += blockIdx.x * int64_t{n};
  const int half = n / 2;
  for (int part = 0; part < 2; ++part) {
    for (int i = threadIdx.x; i < half / kWords; i += blockDim.x) {
      const int at = part * half + i * kWords;
      copy_async<KBYTES>(shared + at, from + at, i % 2 == 0);
    }
    end_copies();
  }
  for (int part = 0; part < 2; ++part) {
    if (part == 0)
      wait_for_copies<1>();
    else
      wait_for_copies();
    __syncthreads();
    for (int i = threadIdx.x; i < half; i += blockDim.x)
      to[part * half + i] = shared[part * half + half - 1 - i];
  }
}

void copied(View<const int32_t, 2> x, View<int32_t, 2> output, cudaStream_t stream) {
  const int n = static_cast<int>(x.size(1));
  copy_rows<<<x.size(0), 96, n * sizeof(int32_t), stream>>>(x.data(), output.data(), n);
}
OPWRIGHT_KERNEL(copied)
"""


@pytest.mark.parametrize("size", [4, 8, 16])
def test_copies_in_groups(size: int) -> None:
    words = size // 4

    @operator(f"gpu_copy::by_{size}", cuda=SOURCE.replace("KBYTES", str(size)).replace("copied", f"by_{size}"))
    def copied(x: Int32[Tensor, "m n"]) -> Int32[Tensor, "m n"]:
        halves = x.reshape(len(x), 2, -1, words).clone()
        halves[:, :, 1::2] = 0
        return halves.flatten(2).flip(2).flatten(1)

    x = torch.randint(-(2**31), 2**31 - 1, (37, 2 * 800), device="cuda", dtype=torch.int32)
    assert torch.equal(copied(x), copied.operator.declaration.reference(x))
