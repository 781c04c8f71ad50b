"""Inputs that verify makes where kernels and functions go wrong: zeros, numbers far from zero, other batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import opwright
from opwright import Mutates, operator

pytestmark = pytest.mark.compiler


def unit_rows(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)


def similarity(a: Tensor, b: Tensor) -> Tensor:
    return F.cosine_similarity(a, b, dim=-1)


def similarity_without_eps(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


ROWS = torch.randn(8, 16), torch.randn(8, 16)


@pytest.mark.parametrize(
    ("candidate", "reference", "samples"),
    [
        (lambda x: x / x.norm(dim=-1, keepdim=True), unit_rows, [ROWS[:1]]),
        (similarity_without_eps, similarity, [ROWS]),
    ],
    ids=["a norm", "a cosine"],
)
def test_rows_of_zeros(candidate, reference, samples) -> None:
    record = opwright.verify(candidate, reference, samples=samples, checks=["numerics"])
    assert "zeros in" in record.failures[0].case
    assert opwright.verify(reference, reference, samples=samples, checks=["numerics"]).passed


def test_rows_of_zeros_in_the_inputs_of_a_contract() -> None:
    contract = "(x: Float[Tensor, '*b n']) -> Float[Tensor, '*b n']"
    candidate = lambda x: x / x.norm(dim=-1, keepdim=True)  # noqa: E731
    record = opwright.verify(candidate, unit_rows, contract=contract, checks=["numerics"])
    assert "zeros in all tensors" in record.failures[0].case


def test_the_gradient_of_equal_numbers_is_free() -> None:
    """Of a row of zeros `amax` shares the gradient of its largest, and `max` gives it to one."""
    record = opwright.verify(lambda x: x.max(-1).values, lambda x: x.amax(-1), samples=[ROWS[:1]])
    assert record.passed, record.failures


SCALED_STEP = """
#include <opwright/kernel.h>
#include <cmath>
template <typename T>
void scaled_step(opwright::View<T, 1> param, opwright::View<const T, 1> grad) {
  double squares = 0;
  for (int64_t i = 0; i < grad.size(0); ++i) squares += double(grad(i)) * double(grad(i));
  for (int64_t i = 0; i < grad.size(0); ++i) param(i) -= T(double(grad(i)) / DIVISOR);
}
OPWRIGHT_KERNEL(scaled_step, float)
"""


@pytest.mark.parametrize(("divisor", "passes"), [("(std::sqrt(squares) + 1e-8)", True), ("std::sqrt(squares)", False)])
def test_zeros_in_all_tensors_of_a_step(ns: str, divisor: str, passes: bool) -> None:
    @operator(f"{ns}::scaled_step", cpu=SCALED_STEP.replace("DIVISOR", divisor))
    def scaled_step(param: Mutates[Float[Tensor, "n"]], grad: Float[Tensor, "n"]) -> None:
        param.sub_(grad / (grad.norm() + 1e-8))

    record = opwright.verify(scaled_step, checks=["numerics"])
    assert record.passed == passes, record.failures
    assert passes or "zeros in all tensors" in record.failures[0].case


STANDARDISED = """
#include <opwright/kernel.h>
#include <cmath>
template <typename T>
void standardised(opwright::View<const T, 2> x, opwright::View<T, 2> output) {
  const int64_t n = x.size(1);
  for (int64_t row = 0; row < x.size(0); ++row) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; ++i) sum += x(row, i), squares += SQUARE;
    const MEAN mean = MEAN(sum / double(n));
    const double scale = 1 / std::sqrt(double(MEAN(squares / double(n)) - mean * mean) + 1e-5);
    for (int64_t i = 0; i < n; ++i) output(row, i) = T((x(row, i) - mean) * scale);
  }
}
OPWRIGHT_KERNEL(standardised, float)
"""


@pytest.mark.parametrize(("mean", "passes"), [("double", True), ("float", False)])
def test_a_variance_of_numbers_far_from_zero(ns: str, mean: str, passes: bool) -> None:
    """The mean of squares less the square of the mean: in double it keeps enough digits."""
    square = f"double({mean}(x(row, i)) * {mean}(x(row, i)))"

    @operator(f"{ns}::standardised", cpu=STANDARDISED.replace("MEAN", mean).replace("SQUARE", square))
    def standardised(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        away = x - x.mean(-1, keepdim=True)
        return away * torch.rsqrt(away.square().mean(-1, keepdim=True) + 1e-5)

    record = opwright.verify(standardised, checks=["numerics"])
    assert record.passed == passes, record.failures


def dice(p: Tensor, t: Tensor) -> Tensor:
    p, t = p.flatten(1), t.flatten(1)
    return (1 - 2 * ((p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)).mean()


def dice_of_all(p: Tensor, t: Tensor) -> Tensor:
    return 1 - 2 * ((p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def test_a_batch_of_one_is_tried_larger() -> None:
    samples = [(torch.rand(1, 1, 8, 8), (torch.rand(1, 1, 8, 8) > 0.5).float())]
    record = opwright.verify(dice_of_all, dice, samples=samples, checks=["numerics"])
    assert "where 1 are" in record.failures[0].case
    assert opwright.verify(dice, dice, samples=samples, checks=["numerics"]).passed


def test_a_first_axis_of_one_in_one_tensor_may_be_there_to_be_repeated() -> None:
    samples = [(torch.rand(1, 3, 4), torch.rand(1, 3, 1))]
    record = opwright.verify(
        lambda x, bias: x + bias.view(3, 1), lambda x, bias: x + bias, samples=samples, checks=["numerics"]
    )
    assert record.passed, record.failures


def test_sizes_that_a_loop_over_another_tensor_ignores() -> None:
    """A reference that loops over one tensor takes any more of the other, and gives an integer for none."""

    def weighted(s: Tensor, v: Tensor) -> Tensor:
        return sum(v[i] * s[i] for i in range(s.shape[0]))

    samples = [(torch.randn(20), torch.randn(20, 4))]
    record = opwright.verify(lambda s, v: (v * s[:, None]).sum(0), weighted, samples=samples, checks=["numerics"])
    assert record.passed, record.failures
