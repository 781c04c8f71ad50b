from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from opwright import operator

KERNEL = """
#include <opwright/kernel.h>
using opwright::View;

template <typename T>
void row_max(View<const T, 2> x, View<T, 1> value, View<int64_t, 1> index) {
  opwright::check(x.size(1) > 0, "a row without elements has no maximum");
  for (int64_t i = 0; i < x.size(0); ++i) {
    int64_t best = 0;
    for (int64_t j = 1; j < x.size(1); ++j) {
      const float most = x(i, best), value = x(i, j);
      if (most != most) break;  // the first NaN is the maximum, as in PyTorch
      if (!(value <= most)) best = j;
    }
    value(i) = x(i, best);
    index(i) = best;
  }
}
OPWRIGHT_KERNEL(row_max, float, opwright::half, opwright::bfloat16)
"""


class RowMax(NamedTuple):
    value: Float[Tensor, "*batch"]
    index: Int64[Tensor, "*batch"]


@operator("examples::row_max", cpu=KERNEL)
def row_max(x: Float[Tensor, "*batch n"]) -> RowMax:
    return RowMax(*x.max(-1))


x = torch.tensor([[1.0, 3.0, 2.0], [6.0, 4.0, 5.0]], requires_grad=True)
found = row_max(x)
print("value:", found[0].tolist(), "index:", found[1].tolist())
found[0].sum().backward()
print("gradient:", x.grad.tolist())
try:
    row_max(torch.empty(2, 0))
except IndexError as error:
    print(str(error).splitlines()[0])
