"""Samples in place of a sweep: what verify checks on them, and what it makes of them for a backward."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from opwright import operator, verify
from opwright.verify.target import make_target

pytestmark = pytest.mark.compiler

# y = tanh(x w + b); the backward's kernel takes tanh's argument from `kept`, or computes it from the inputs.
SOURCE = """
#include <cmath>
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void layer(View<const T, 1> x, View<const T, 1> w, View<const T, 1> b, int64_t keep, View<T, 1> y, View<T, 1> kept) {
  for (int64_t i = 0; i < x.size(0); ++i) {
    const T z = x(i) * w(0) + (b.defined() ? b(0) : T(0));
    y(i) = std::tanh(z);
    if (keep) kept(i) = z;
  }
}
template <typename T>
void layer_backward(View<const T, 1> grad_y, View<const T, 1> x, View<const T, 1> w, View<const T, 1> b,
                    View<const T, 1> kept, int64_t keep, View<T, 1> grad_x, View<T, 1> grad_w, View<T, 1> grad_b) {
  T sum_w = 0, sum_b = 0;
  for (int64_t i = 0; i < x.size(0); ++i) {
    const T z = keep ? kept(i) : x(i) * w(0) + (b.defined() ? b(0) : T(0));
    const T c = std::cosh(z), grad = FACTOR grad_y(i) / (c * c);
    grad_x(i) = grad * w(0), sum_w += grad * x(i), sum_b += grad;
  }
  grad_w(0) = sum_w;
  if (b.defined()) grad_b(0) = sum_b;
}
OPWRIGHT_KERNEL(layer, float, double)
OPWRIGHT_KERNEL(layer_backward, float, double)
"""


class Layer(NamedTuple):
    y: Float[Tensor, "*batch"]
    kept: Float[Tensor, "keep *batch"]


def declare(name: str, factor: str = ""):
    source = SOURCE.replace("FACTOR", factor).replace("View<const T, 1> kept", "View<const T, 2> kept")
    source = source.replace("View<T, 1> kept", "View<T, 2> kept").replace("kept(i)", "kept(0, i)")

    @operator(name, cpu=source, non_differentiable=["kept"])
    def layer(
        x: Float[Tensor, "*batch"],
        w: Float[Tensor, "1"],
        b: Float[Tensor, "1"] | None = None,
        *,
        keep: int = 0,
    ) -> Layer:
        if w.numel() != 1:
            raise ValueError("one weight")
        z = x * w if b is None else x * w + b
        return Layer(torch.tanh(z), torch.stack([z] * keep) if keep else z.new_zeros(0, *z.shape))

    @layer.backward
    def layer_backward(grad_y, x, w, b, kept, *, keep=0):
        z = x * w if b is None else x * w + b  # not from `kept`: through that there is no derivative
        grad = grad_y * (1 - torch.tanh(z) ** 2)
        return grad * w, (grad * x).sum().reshape(1), None if b is None else grad.sum().reshape(1)

    @layer.samples
    def samples():
        for dtype in (torch.float32, torch.float64):
            for keep in (1, 0):
                yield (
                    (torch.randn(3).to(dtype), torch.randn(1).to(dtype), torch.randn(1).to(dtype)),
                    {"keep": keep},
                )
                yield (torch.randn(4).to(dtype), torch.randn(1).to(dtype)), {"keep": keep}

    return layer


@pytest.fixture(scope="module")
def layer(ns):
    torch.manual_seed(0)
    return declare(f"{ns}::layer")


def test_a_backward_is_checked_on_the_samples_of_its_operator(layer) -> None:
    backward = make_target(layer.operator.backward_operator.function, None, None)
    names = [p.name for p in backward.contract.parameters]
    assert len(backward.cases()) == 8 + 6  # of each type three copies in other layouts
    for case in backward.cases():
        given = dict(zip(names, case.values, strict=True))
        y, kept = layer(given["x"], given["w"], given["b"], keep=given["keep"])
        torch.testing.assert_close(given["kept"], kept)  # what the operator returns, no random tensor
        assert given["grad_y"].shape == y.shape
        assert given["grad_y"].dtype == case.dtype
    assert {names[i] for i in backward.computed} == {"kept"}


def test_verified_with_samples(layer) -> None:
    """With what a backward gets of its operator's outputs, with an absent argument, in both types."""
    record = verify(layer)
    assert record.passed, record.failures
    ran = {check.title for check in record.checks if check.outcome == "passed"}
    assert {"gradient numerics", "backward: numerics", "backward: gradients", "backward: vmap"} <= ran


def test_a_wrong_gradient_is_found_on_samples(ns) -> None:
    torch.manual_seed(0)
    wrong = declare(f"{ns}_wrong::layer", "T(1.001) *")
    record = verify(wrong, checks=["numerics", "gradient numerics"])
    assert {failure.check for failure in record.failures} == {"gradient numerics", "backward: numerics"}


PICK = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void pick(View<const T, 1> x, View<const int64_t, 1> index, View<T, 1> output) {
  for (int64_t i = 0; i < index.size(0); ++i) output(i) = x(index(i)) * T(sizeof(T) == 8 ? 3 : 2);
}
OPWRIGHT_KERNEL(pick, float, double)
"""


@pytest.mark.parametrize("dense", ["x", "index"])
def test_samples_come_in_layouts_that_can_be_seen(ns, dense) -> None:
    """The smallest sample has one element, whose strides do not matter; each tensor of another has strides once."""
    read = {"x": "x.data()[index(i)]", "index": "x(index.data()[i])"}[dense]
    source = PICK.replace("x(index(i)) * T(sizeof(T) == 8 ? 3 : 2)", f"{read} * 2")

    @operator(f"{ns}_{dense}::pick", cpu=source)
    def pick(x: Float[Tensor, "n"], index: Int64[Tensor, "k"]) -> Float[Tensor, "k"]:
        return 2 * x[index]

    @pick.samples
    def samples():
        for n in (1, 0, 5):
            yield torch.randn(n), torch.arange(n)

    assert [failure.check for failure in verify(pick, checks=["numerics"]).failures] == ["numerics"]


def test_samples_of_one_dtype_are_taken_in_every_dtype(ns) -> None:
    """A kernel wrong in float64 only, and samples in float32, as people write them."""

    @operator(f"{ns}_dtypes::pick", cpu=PICK)
    def pick(x: Float[Tensor, "n"], index: Int64[Tensor, "k"]) -> Float[Tensor, "k"]:
        return 2 * x[index]

    @pick.samples
    def samples():
        yield torch.randn(5), torch.tensor([4, 0, 4])

    dtypes = {case.dtype for case in make_target(pick, None, None).cases()}
    assert dtypes == {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    record = verify(pick, quick=True, checks=["numerics", "gradients", "vmap"])
    assert {check.title: check.outcome for check in record.checks} == dict.fromkeys(
        ("numerics", "gradients", "vmap"), "failed"
    )
    assert all("f64[5]" in failure.case for failure in record.failures)
