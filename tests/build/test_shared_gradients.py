"""Inputs with one gradient: a declared backward returns it once."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opwright
from opwright import operator
from opwright.errors import DeclarationError

SOURCE = """
#include <opwright/kernel.h>
using opwright::View;

// output = (a + b) * scale
template <typename T>
void scaled_sum(View<const T, 1> a, View<const T, 1> b, View<const T, 1> scale, View<T, 1> output) {
  for (int64_t i = 0; i < a.size(0); ++i) output(i) = (a(i) + b(i)) * scale(i);
}
template <typename T>
void scaled_sum_backward(View<const T, 1> grad, View<const T, 1> a, View<const T, 1> b,
                         View<const T, 1> scale, View<T, 1> grad_a, View<T, 1> grad_scale) {
  for (int64_t i = 0; i < a.size(0); ++i) {
    grad_a(i) = grad(i) * scale(i);
    grad_scale(i) = grad(i) * (a(i) + b(i));
  }
}
OPWRIGHT_KERNEL(scaled_sum, float, double)
OPWRIGHT_KERNEL(scaled_sum_backward, float, double)
"""


def declare(ns: str):
    @operator(f"{ns}::scaled_sum", cpu=SOURCE, shared_gradients=[("a", "b")])
    def scaled_sum(a: Float[Tensor, "n"], b: Float[Tensor, "n"], scale: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return (a + b) * scale

    @scaled_sum.backward
    def scaled_sum_backward(grad_output, a, b, scale):
        return grad_output * scale, grad_output * (a + b)

    return scaled_sum


@pytest.mark.compiler
def test_both_inputs_get_the_gradient(ns: str) -> None:
    op = declare(ns)
    a, b, scale = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grads = torch.autograd.grad(op(a, b, scale).sum(), (a, b, scale))
    torch.testing.assert_close(grads, (scale, scale, a + b))
    assert torch.autograd.gradcheck(op, (a, b, scale))
    assert torch.autograd.gradgradcheck(op, (a, b, scale))
    (only,) = torch.autograd.grad(op(a.detach(), b, scale).sum(), b)
    torch.testing.assert_close(only, scale)


@pytest.mark.compiler
def test_gradients_that_accumulate_do_not_share_memory(ns: str) -> None:
    """The engine keeps the first gradient of a leaf, and adds the next to it in place."""
    op = declare(ns)
    a, b, scale = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    for _ in range(2):
        op(a, b, scale).sum().backward()
    assert a.grad.tolist() == b.grad.tolist() == [4.0] * 3
    a.grad.zero_()
    assert b.grad.tolist() == [4.0] * 3
    both = torch.ones(3, requires_grad=True)
    op(both, both, scale).sum().backward()
    assert both.grad.tolist() == [4.0] * 3


@pytest.mark.compiler
def test_compiled(ns: str) -> None:
    op = declare(ns)
    inputs = [torch.randn(5, requires_grad=True) for _ in range(3)]
    compiled = torch.compile(lambda *values: op(*values).sin(), backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad(op(*inputs).sin().sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad(compiled(*inputs).sum(), inputs), wanted)


def test_its_schema_has_one_gradient_less(ns: str) -> None:
    backward = declare(ns).operator.backward_operator
    assert [output.name for output in backward.contract.outputs] == ["grad_a", "grad_scale"]


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (("a", "c"), "`c` is not a tensor that always has a gradient"),
        (("a", "count"), "`count` is not a tensor that always has a gradient"),
        (("a", "other"), '`other` is `Float.*"m".*`, and `a` is `Float.*"n".*`: their gradients differ'),
        (("a", "rest"), "`rest` is not a tensor that always has a gradient"),
    ],
)
def test_refusals(ns: str, group: tuple[str, ...], message: str) -> None:
    with pytest.raises(DeclarationError, match=message):

        @opwright.operator(f"{ns}::sums", shared_gradients=[group])
        def sums(
            a: Float[Tensor, "n"], other: Float[Tensor, "m"], rest: Float[Tensor, "n"] | None = None, count: int = 1
        ) -> Float[Tensor, "n"]:
            return a + other.sum()
