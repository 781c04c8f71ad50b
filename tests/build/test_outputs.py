"""Operators with kernels and several outputs, and `out=`."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from jaxtyping import Float
from kernel_head import COMPILED, HEAD
from torch import Tensor

from opwright import operator
from opwright.errors import OutError

pytestmark = pytest.mark.compiler


class MinMax(NamedTuple):
    low: Float[Tensor, "*batch"]
    high: Float[Tensor, "*batch"]


@pytest.fixture(scope="module")
def minmax(ns):
    @operator(f"{ns}::minmax", cpu=HEAD + """
    template <typename T> void minmax(View<const T, 2> x, View<T, 1> low, View<T, 1> high) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        low(i) = high(i) = x(i, 0);
        for (int64_t j = 1; j < x.size(1); ++j) {
          if (C<T>(x(i, j)) < C<T>(low(i))) low(i) = x(i, j);
          if (C<T>(x(i, j)) > C<T>(high(i))) high(i) = x(i, j);
        }
      }
    }
    OPWRIGHT_KERNEL(minmax, THREE)""")  # fmt: skip
    def minmax(x: Float[Tensor, "*batch n"]) -> MinMax:
        return MinMax(x.amin(-1), x.amax(-1))

    return minmax


def test_named_tuple_of_outputs(minmax, check, whole):
    make = lambda d: [whole(2, 3, 4, dtype=d)]  # noqa: E731
    check(minmax, make, lambda x: (x.min(-1), x.max(-1)), compiled=COMPILED)


def test_named_tuple_keeps_its_names(minmax):
    # Who declares a NamedTuple reads its fields by name, from the function.
    result = minmax(torch.tensor([1.0, 3.0]))
    assert (result.low, result.high) == (1.0, 3.0)


def test_out(minmax, entries):
    x = torch.tensor([[1.0, 5.0], [4.0, -2.0]])
    for entry in entries(minmax):
        for make in (lambda: torch.full((2,), 9.0), lambda: torch.full((4,), 9.0)[::2]):
            low, high = make(), make()
            before = low._version, high._version
            if entry is minmax:
                result = entry(x, out=(low, high))
            else:
                result = entry.out(x, out0=low, out1=high)
            assert result[0] is low or torch.equal(result[0], low)
            assert low.tolist() == [1.0, -2.0]
            assert high.tolist() == [5.0, 4.0]
            # autograd must notice that somebody else's saved tensor was overwritten.
            assert low._version > before[0]
            assert high._version > before[1]


def test_out_overlaps_an_input(ns, entries):
    @operator(f"{ns}::shifted", cpu=HEAD + """
    template <typename T> void shifted(View<const T, 1> x, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i ? i - 1 : x.size(0) - 1);
    }
    OPWRIGHT_KERNEL(shifted, float)""")  # fmt: skip
    def shifted(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x.roll(1)

    for dtype in (torch.float32, torch.float64):  # kernel, reference
        for entry in entries(shifted):
            call = entry if entry is shifted else entry.out
            x = torch.arange(5.0, dtype=dtype)
            call(x, out=x)
            assert x.tolist() == [4.0, 0.0, 1.0, 2.0, 3.0]
            base = torch.arange(6.0, dtype=dtype)
            call(base[:5], out=base[1:])
            assert base.tolist() == [0.0, 4.0, 0.0, 1.0, 2.0, 3.0]
            base = torch.arange(6.0, dtype=dtype)
            call(base[::2], out=base[::2])
            assert base.tolist() == [4.0, 1.0, 0.0, 3.0, 2.0, 5.0]


def test_out_is_refused(minmax):
    x = torch.ones(2, 3)
    with pytest.raises(OutError, match="shape"):
        minmax(x, out=(torch.empty(2), torch.empty(3)))
    for wrong in (1, [torch.empty(2), 1], [None, torch.empty(2)], "ab"):
        with pytest.raises(OutError, match=r"(?s)takes a tensor for each result.*expected +2 tensors"):
            minmax(x, out=wrong)
    with pytest.raises(OutError, match="number"):
        minmax(x, out=torch.empty(2))
    with pytest.raises(OutError, match="autograd"):
        minmax(x.requires_grad_(), out=(torch.empty(2), torch.empty(2)))
    with torch.no_grad():
        low, _ = minmax(x, out=(torch.empty(2), torch.empty(2)))
    np.testing.assert_array_equal(low.numpy(), [1, 1])


def test_tensors_of_out_that_share_memory_are_refused(minmax) -> None:
    x, both = torch.ones(2, 3), torch.zeros(3)
    for low, high in ((both[:2], both[1:]), (both[1:], both[:2]), (both[:2], both[:2])):
        with pytest.raises(OutError, match=r"(?s)two tensors of `out=` share memory.*a tensor of its own"):
            minmax(x, out=(low, high))
    between = torch.zeros(4)
    minmax(x, out=(between[::2], between[1::2]))
    assert between.tolist() == [1.0] * 4
