"""Wrong kernels that verify must catch, and right ones that must pass."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
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
    assert "--check 'numerics'" in failure.repeat


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


# --- any callable ------------------------------------------------------------------------------------------


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * torch.erfc(-x / math.sqrt(2))


def samples():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        yield (torch.randn(17, 33).to(dtype),)
        yield (torch.randn(4, 1001).mul(5).to(dtype)[:, ::2],)


class PointerCache:
    """Returns the last result when it meets the same address again."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def __call__(self, x: Tensor) -> Tensor:
        return self.seen.setdefault(x.data_ptr(), gelu(x))


WRONG_CALLABLES = {
    "changes its input": lambda x: gelu(x.copy_(x * 1.0 + 1e-3)),
    "returns its input": lambda x: x,
    "returns a view of its input": lambda x: x.mul_(0).view(x.shape),
    "wrong dtype": lambda x: gelu(x).double(),
    "wrong shape": lambda x: gelu(x)[:1],
    "too many outputs": lambda x: (gelu(x), x + 1),
    "raises": lambda x: 1 / 0,
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "random": lambda x: gelu(x) + 1e-3 * torch.rand_like(x),
}


@pytest.mark.parametrize("kind", WRONG_CALLABLES)
def test_wrong_callables(kind: str) -> None:
    assert not opwright.verify(WRONG_CALLABLES[kind], reference=gelu, samples=samples).passed


def test_right_callables() -> None:
    """PyTorch's own operators against float64 references: no false alarm."""
    pairs = {
        "exp": (torch.exp, torch.exp),
        "softmax": (lambda x: F.softmax(x, -1), lambda x: torch.exp(x - x.logsumexp(-1, keepdim=True))),
        "layer norm": (
            lambda x: F.layer_norm(x, x.shape[-1:]),
            lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt(),
        ),
        "sum": (lambda x: x.sum(0), lambda x: x.sum(0)),
        "matmul": (lambda x: x @ x.mT, lambda x: torch.einsum("ij,kj->ik", x, x)),
        "sigmoid": (torch.sigmoid, lambda x: 1 / (1 + torch.exp(-x))),
    }
    for name, (candidate, reference) in pairs.items():
        record = opwright.verify(candidate, reference=reference, samples=samples)
        assert record.passed, (name, record.failures)


def test_samples_with_named_arguments() -> None:
    def scale(x: Tensor, *, by: float) -> Tensor:
        return x * by

    good = [((torch.ones(3),), {"by": 2.0}), ((torch.randn(5),), {"by": -1.0})]
    assert opwright.verify(scale, reference=lambda x, *, by: x * by, samples=good).passed
    assert not opwright.verify(scale, reference=lambda x, *, by: x / by, samples=good).passed


def test_a_callable_needs_a_reference() -> None:
    with pytest.raises(opwright.errors.CheckError, match="samples"):
        opwright.verify(gelu)


@pytest.mark.compiler
def test_bench_refuses_a_wrong_operator() -> None:
    with pytest.raises(opwright.errors.NotVerifiedError, match="does not pass verify"):
        opwright.bench(make(MUTATIONS["offset of 0.009"]), ["eager"])
