"""The example of `opwright/along.h` in docs/reference/headers.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator

pytestmark = pytest.mark.compiler


@operator("along::unit_rows", cpu=Path(__file__).with_name("unit_rows.cpp"))
def unit_rows(input: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    return input * input.square().mean(-1, keepdim=True).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [1, 15, 16, 1000, 40_000])
def test_rows_of_any_length(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 2 * n).to(dtype)[..., :n]
    for given in (x, x[..., ::2], x.mT.contiguous().mT):
        exact = unit_rows.operator.declaration.reference(given.double())
        torch.testing.assert_close(unit_rows(given), exact.to(dtype))
