"""Kernels that are wrong at inputs beside the usual ones, each with its right twin, which must pass."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import opwright
from opwright.errors import OutOfBoundsError

pytestmark = pytest.mark.compiler


def judge(function, *checks: str) -> str:
    """Returns the first failure of an operator, "" if there is none."""
    record = opwright.verify(function, checks=checks)
    assert record.backends == ["cpu"]
    assert all(check.outcome in ("passed", "failed") for check in record.checks), record.checks
    assert record.passed == (not record.failures)
    return "".join(f"{f.check}: {f.case}: {f.message}" for f in record.failures[:1])


# --- integer tensors ---------------------------------------------------------------------------------------

GATHER = """
#include <opwright/kernel.h>
template <typename T>
void gather(opwright::View<const T, 2> x, opwright::View<const int64_t, 1> index, opwright::View<T, 2> output) {
  for (int64_t i = 0; i < index.size(0); ++i) {
    const int64_t n = x.size(0);
    int64_t row = index(i);
    ROW;
    for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = x(row, j);
  }
}
OPWRIGHT_KERNEL(gather, float)
"""
RIGHT_ROW = "row = opwright::check_index(row, n)"
ROWS = {
    "right": RIGHT_ROW,
    "right, in its own words": 'opwright::check(-n <= row && row < n, "index out of range"); row += row < 0 ? n : 0',
    "negative ones are row 0": 'opwright::check(-n <= row && row < n, "range"); row = row < 0 ? 0 : row',
    "-n refused": 'opwright::check(-n < row && row < n, "range"); row += row < 0 ? n : 0',
    "16 bits": RIGHT_ROW + "; row = int16_t(row) < 0 ? 0 : int16_t(row)",
    "wrong from row 40000 on": RIGHT_ROW + "; row = row < 40000 ? row : 0",
    "wraps around": "row = ((row % n) + n) % n",
    "not looked at": "row += row < 0 ? n : 0",
    "the last row is the first": RIGHT_ROW + "; row = row == n - 1 ? 0 : row",
    "32 bits": "row = opwright::check_index(int32_t(row), n)",
}


def make_gather(ns: str, kernel: str):
    @opwright.operator(f"{ns}::gather", cpu=kernel)
    def gather(x: Float[Tensor, "n k"], index: Int64[Tensor, "m"]) -> Float[Tensor, "m k"]:
        return x[index]

    return gather


@pytest.mark.parametrize("kind", ROWS)
def test_indices_of_the_whole_range_and_beyond_it(ns, kind: str) -> None:
    found = judge(make_gather(ns, GATHER.replace("ROW", ROWS[kind])), "boundaries")
    assert found.startswith("" if "right" in kind else "boundaries"), found
    assert bool(found) == ("right" not in kind), found


def test_an_index_out_of_bounds_is_an_index_error_in_every_dtype(ns) -> None:
    gather = make_gather(ns, GATHER.replace("ROW", RIGHT_ROW))
    for dtype in (torch.float32, torch.float64):  # the kernel, the reference
        for index in (5, -6):
            with pytest.raises(IndexError, match=rf"index {index} is out of bounds for .*dimension .*size 5"):
                gather(torch.zeros(5, 2, dtype=dtype), torch.tensor([0, index]))
    with pytest.raises(OutOfBoundsError, match=r"OPW213"):
        gather(torch.zeros(5, 2), torch.tensor([7]))


LENGTHS = """
#include <opwright/kernel.h>
template <typename T>
void first_sum(opwright::View<const T, 2> x, opwright::View<const int64_t, 1> lengths, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) {
    double sum = 0;
    const int64_t n = x.size(1);
    for (int64_t j = 0; LOOP; ++j) sum += x(i, j);
    output(i) = T(sum);
  }
}
OPWRIGHT_KERNEL(first_sum, float)
"""


@pytest.mark.parametrize(
    ("loop", "is_right"),
    [
        ("j < lengths(i) && j < n", True),
        ("j < int32_t(lengths(i)) && j < n", False),
        ("j != lengths(i) && j < n", False),
    ],
)
def test_integers_that_are_no_indices_take_every_value(ns, loop: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::first_sum", cpu=LENGTHS.replace("LOOP", loop))
    def first_sum(x: Float[Tensor, "m n"], lengths: Int64[Tensor, "m"]) -> Float[Tensor, "m"]:
        return torch.where(torch.arange(x.shape[1]) < lengths[:, None], x, 0).sum(-1)

    assert (judge(first_sum, "boundaries") == "") == is_right
