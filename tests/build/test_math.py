"""opwright/math.h where operators do not reach it: tanh in vectors and scalars, against mpmath."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator

pytestmark = pytest.mark.compiler

SOURCE = """
#include <opwright/kernel.h>
#include <opwright/math.h>
using opwright::View;

template <typename T>
void tanh_both(View<const T, 1> x, View<T, 1> scalar, View<T, 1> vector) {
  constexpr int kLanes = opwright::kLanes<T>;
  const int64_t n = x.size(0);
  for (int64_t i = 0; i < n; ++i) scalar(i) = opwright::tanh(x(i));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    opwright::store_partial(&vector(i), opwright::tanh(opwright::load_partial(&x(i), count)), count);
  }
}
OPWRIGHT_KERNEL(tanh_both, float, double)
"""


@pytest.fixture(scope="module")
def tanh(ns):
    @operator(f"{ns}::tanh_both", cpu=SOURCE)
    def tanh_both(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        return torch.tanh(x), torch.tanh(x)

    return tanh_both


def magnitudes(dtype: torch.dtype) -> Tensor:
    """Returns positive numbers of all sizes: denormals, each power of two, dense where the result bends."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    denormal = smallest * torch.tensor([1, 2, 3, 1000, 2**20], dtype=torch.float64)
    powers = torch.logspace(math.log2(info.smallest_normal), math.log2(info.max), 400, base=2, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    random = torch.rand(4000, generator=generator, dtype=torch.float64)
    # Where 2|x| log2(e) is half an integer, the exponent's fraction changes its sign.
    seams = (torch.arange(1, 60) / 2 * math.log(2) / 2).double()
    dense = [random * 0.02, random * 0.5, random * 3, 3 + random * 20, seams, seams * (1 + info.eps)]
    return torch.cat([denormal, powers, *dense]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tanh_within_five_ulp(tanh, dtype) -> None:
    """What math.h promises; the largest errors seen are 4.7 (float, 28 million numbers) and 3.9 (double, 42,000)."""
    info = torch.finfo(dtype)
    x = magnitudes(dtype)
    with mpmath.workprec(200):
        for found in tanh(x):
            for value, got in zip(x.tolist(), found.tolist(), strict=True):
                wanted = mpmath.tanh(mpmath.mpf(value))
                exponent = max(math.frexp(float(wanted))[1] - 1, math.frexp(info.smallest_normal)[1] - 1)
                ulp = math.ldexp(info.eps, exponent)
                assert abs(got - wanted) <= 5 * ulp, (value, got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tanh_is_odd_and_keeps_special_values(tanh, dtype) -> None:
    x = magnitudes(dtype)
    for plus, minus in zip(tanh(x), tanh(-x), strict=True):
        assert torch.equal(plus, -minus)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan], dtype=dtype)
    for found in tanh(special):
        assert found[:4].tolist() == [0.0, 0.0, 1.0, -1.0]
        assert found[:4].signbit().tolist() == [False, True, False, True]
        assert found[4:].isnan().all()
