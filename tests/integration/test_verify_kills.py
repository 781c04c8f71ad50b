"""Wrong kernels that verify must catch, and right ones that must pass."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opwright

_numbers = itertools.count()

KERNEL = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void scaled_gelu(View<const T, 2> x, View<const T, 1> scale, View<T, 2> output) {
  using C = opwright::compute_t<T>;
  const int64_t rows = x.size(0), n = x.size(1);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < n; ++j) {
      const C v = C(x(i, j)) * C(scale(j));
      C y = v * C(0.5) * std::erfc(-v * C(0.70710678118654752440));
      if (v == -C(INFINITY)) y = 0;
      MUTATION
      output(i, j) = T(y);
    }
}
OPWRIGHT_KERNEL(scaled_gelu, float, double, opwright::half, opwright::bfloat16)
"""

# Each is a mistake that somebody has made, or a cheat that somebody has tried.
MUTATIONS = {
    "another approximation": "y = v / (C(1) + std::exp(-C(1.702) * v));",
    "tanh form": "y = C(0.5) * v * (C(1) + std::tanh(C(0.7978845608) * (v + C(0.044715) * v * v * v)));",
    "offset of 0.009": "y += C(0.009);",
    "one part in a thousand": "y *= C(1.001);",
    "forty ulp of float32": "y *= C(1.0000024);",
    "cancelling tail": "y = C(0.5) * v * (C(1) + std::erf(v * C(0.70710678118654752440)));",
    "in-range polynomial": "y = C(0.0006) + v * (C(0.4938) + v * (C(0.4197) + v * (C(-0.0316) + v * C(-0.0406))));",
    "zeros": "y = 0;",
    "identity": "y = v;",
    "dropped remainder": "if (n > 8 && j >= n / 8 * 8) y = 0;",
    "last row left out": "if (i == rows - 1 && rows > 1) continue;",
    "wrong entry of scale": "y = C(x(i, j)) * C(scale((j + 1) % n)); y = C(0.5) * y * std::erfc(-y * C(0.7071067811865475));",
    "stride ignored": "{ const C w = C(x.data()[i * n + j]) * C(scale.data()[j]); y = C(0.5) * w * std::erfc(-w * C(0.70710678118654752440)); if (w == -C(INFINITY)) y = 0; }",
    "NaN swallowed": "if (!(y == y)) y = 0;",
    "infinity clipped": "if (y > C(1e30)) y = C(1e30);",
    "denormals flushed": "if (std::abs(double(v)) < 1e-30) y = 0;",
    "computed in half": "y = C(float(opwright::half(float(y))));",
    "first call only": "{ static int calls = 0; if (i == 0 && j == 0) ++calls; if (calls > 40) y = 0; }",
    "entries depend on each other": "if (i > 0) y += C(1e-3) * C(x(i - 1, j));",
    "out of bounds": "if (i == rows - 1 && j == n - 1) output.data()[rows * n] = T(1);",
}  # fmt: skip


def make(mutation: str):
    reference = _reference
    # The kernel of another namespace for each, so that they do not replace each other.
    return opwright.operator(f"kills{next(_numbers)}::scaled_gelu", cpu=KERNEL.replace("MUTATION", mutation))(reference)


def _reference(x: Float[Tensor, "*batch n"], scale: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    v = x * scale
    return torch.where(v == -math.inf, torch.zeros_like(v), 0.5 * v * torch.erfc(-v / math.sqrt(2)))


FAST = ["numerics", "determinism", "outputs written", "independence"]


@pytest.mark.compiler
@pytest.mark.parametrize("kind", MUTATIONS)
def test_killed(kind: str) -> None:
    record = opwright.verify(make(MUTATIONS[kind]), checks=FAST)
    assert record.backends == ["cpu"]
    assert not record.passed
    assert record.failures[0].message


@pytest.mark.compiler
def test_the_right_kernel_passes() -> None:
    record = opwright.verify(make(""), checks=FAST)
    assert record.passed, record.failures


@pytest.mark.compiler
def test_a_failure_tells_where_and_how_to_repeat() -> None:
    record = opwright.verify(make(MUTATIONS["dropped remainder"]), checks=["numerics"])
    (failure,) = record.failures
    assert "along axis" in failure.pattern
    assert " wrong; worst at [" in failure.message
    assert failure.repeat.startswith("opwright verify ")
    assert "--check numerics" in failure.repeat


FLAT = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void average_(View<T, 1> average, View<const T, 1> value, double decay) {
  using C = opwright::compute_t<T>;
  const C kept = C(DECAY), added = C(1 - DECAY);
  for (int64_t i = 0; i < value.size(0); ++i) average(i) = T(C(average(i)) * kept + C(VALUE) * added);
}
OPWRIGHT_KERNEL(average_, float, double, opwright::half, opwright::bfloat16)
"""


def make_flat(value: str, decay: str):
    source = FLAT.replace("VALUE", value).replace("DECAY", decay)

    @opwright.operator(f"kills{next(_numbers)}::average_", cpu=source)
    def average_(
        average: opwright.Mutates[Float[Tensor, "*s"]], value: Float[Tensor, "*s"], decay: float = 0.9
    ) -> None:
        average.mul_(decay).add_(value * (1 - decay))

    return average_


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("value", "decay", "passes"),
    [
        ("value(i)", "decay", True),
        ("value.data()[i]", "decay", False),  # the stride of a single axis ignored
        ("value(i)", "0.9", False),  # right at the default only
    ],
)
def test_an_operator_that_mutates(value: str, decay: str, passes: bool) -> None:
    record = opwright.verify(make_flat(value, decay))
    assert record.passed == passes, record.failures


@pytest.mark.compiler
def test_a_backward_is_tried_on_outputs_that_can_be() -> None:
    """softmax's backward takes the output, which is never larger than 1."""

    @opwright.operator(f"kills{next(_numbers)}::softmax")
    def softmax(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return torch.softmax(x, -1)

    @softmax.backward
    def softmax_backward(grad_output, output):
        return output * (grad_output - (grad_output * output).sum(-1, keepdim=True))

    record = opwright.verify(softmax, checks=["numerics", "gradients", "gradient numerics"])
    assert record.passed, record.failures
