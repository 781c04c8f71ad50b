from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

import opwright
from opwright import Probability, operator

KERNEL = """
#include <cmath>
#include <opwright/kernel.h>
using opwright::View;

template <typename T>
void entropy(View<const T, 2> p, Base base, View<T, 1> output) {
  for (int64_t i = 0; i < p.size(0); ++i) {
    T sum = 0;
    for (int64_t j = 0; j < p.size(1); ++j)
      if (p(i, j) > 0) sum -= p(i, j) * (base == Base::two ? std::log2(p(i, j)) : std::log(p(i, j)));
    output(i) = sum;
  }
}
OPWRIGHT_KERNEL(entropy, float, double)
"""


@operator("examples::entropy", cpu=KERNEL)
def entropy(
    p: Annotated[Float[Tensor, "*batch n"], Probability], *, base: Literal["e", "two"] = "e"
) -> Float[Tensor, "*batch"]:
    """The entropy of distributions, in nats or in bits."""
    logarithm = torch.log2 if base == "two" else torch.log
    return -(p * logarithm(torch.where(p > 0, p, 1))).sum(-1)


if __name__ == "__main__":
    print("bits of a fair coin:", entropy(torch.tensor([0.5, 0.5]), base="two").item())
    try:
        entropy(torch.tensor([0.5, 0.5]), base="ten")
    except ValueError as error:
        print(str(error).splitlines()[0])
    record = opwright.verify(entropy, quick=True, checks=["numerics"])
    print("right for every distribution and option:", record.passed)
