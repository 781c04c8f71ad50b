"""Outputs that exist for the backward alone: no gradient flows through them."""

from typing import NamedTuple

import pytest
import torch
from jaxtyping import Float
from kernel_head import HEAD
from torch import Tensor

from opwright import operator, verify

pytestmark = pytest.mark.compiler


class Normalised(NamedTuple):
    y: Float[Tensor, "*batch n"]
    norm: Float[Tensor, "*batch"]


def normalised_operator(ns, name, with_backward):
    """x / |x|; the norm is there for the backward."""
    source = (
        HEAD
        + """
    template <typename T> void NAME(View<const T, 2> x, View<T, 2> y, View<T, 1> norm) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        norm(i) = 0;
        for (int64_t j = 0; j < x.size(1); ++j) norm(i) += x(i, j) * x(i, j);
        norm(i) = std::sqrt(norm(i));
        for (int64_t j = 0; j < x.size(1); ++j) y(i, j) = x(i, j) / norm(i);
      }
    }
    OPWRIGHT_KERNEL(NAME, float, double)""".replace("NAME", name)
    )
    if with_backward:
        source += """
    template <typename T>
    void NAME_backward(View<const T, 2> grad_y, View<const T, 2> y, View<const T, 1> norm, View<T, 2> grad_x) {
      for (int64_t i = 0; i < y.size(0); ++i) {
        T dot = 0;
        for (int64_t j = 0; j < y.size(1); ++j) dot += grad_y(i, j) * y(i, j);
        for (int64_t j = 0; j < y.size(1); ++j) grad_x(i, j) = (grad_y(i, j) - dot * y(i, j)) / norm(i);
      }
    }
    OPWRIGHT_KERNEL(NAME_backward, float, double)""".replace("NAME", name)

    @operator(f"{ns}::{name}", cpu=source, non_differentiable=["norm"])
    def normalised(x: Float[Tensor, "*batch n"]) -> Normalised:
        norm = x.norm(dim=-1)
        return Normalised(x / norm[..., None], norm)

    if with_backward:

        @normalised.backward
        def normalised_backward(grad_y, y, norm):
            return (grad_y - (grad_y * y).sum(-1, keepdim=True) * y) / norm[..., None]

    return normalised


@pytest.fixture(scope="module", params=[True, False], ids=["declared", "derived"])
def normalised(ns, request):
    return normalised_operator(ns, f"normalised{int(request.param)}", request.param)


def test_an_output_for_the_backward(normalised, entries, count_reference):
    x = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    weights = torch.randn(2, 3, 4, dtype=torch.double)
    normalised(x.detach())
    (wanted,) = torch.autograd.grad((x / x.norm(dim=-1)[..., None]).mul(weights).sum(), x)
    backward = normalised.operator.backward_operator
    for entry in entries(normalised):
        with (
            count_reference(normalised) as runs,
            count_reference((backward or normalised.operator).function) as more,
        ):
            y, norm = entry(x)
            assert not norm.requires_grad
            torch.testing.assert_close(norm, x.norm(dim=-1))
            (got,) = torch.autograd.grad((y * weights * norm[..., None] / norm[..., None]).sum(), x)
            assert not runs
            assert not more
        torch.testing.assert_close(got, wanted)
        assert torch.autograd.gradcheck(lambda x, entry=entry: entry(x)[0], x)
        # What the backward saved depends on x, though no gradient flows through it.
        assert torch.autograd.gradgradcheck(lambda x, entry=entry: entry(x)[0], x)
        leaf = x.detach()
        got = torch.func.hessian(lambda x, entry=entry: (entry(x)[0] * weights).sum())(leaf)
        wanted2 = torch.func.hessian(lambda x: (x / x.norm(dim=-1)[..., None] * weights).sum())(leaf)
        torch.testing.assert_close(got, wanted2)
        _, tangent = torch.func.jvp(lambda x, entry=entry: entry(x)[1], (leaf,), (leaf,))
        assert not tangent.any()


def test_an_output_for_the_backward_compiled(normalised, entries):
    x = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    for entry in entries(normalised):

        @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        def loss(x, entry=entry):
            y, norm = entry(x)
            return (y.cos() * norm[..., None]).sum()

        def plain(x):
            norm = x.norm(dim=-1, keepdim=True)
            return ((x / norm).cos() * norm.detach()).sum()

        (got,) = torch.autograd.grad(loss(x), x)
        torch.testing.assert_close(got, torch.autograd.grad(plain(x), x)[0])


def test_an_output_for_the_backward_that_was_drawn(ns, entries):
    # Recorded or not, the backward uses the mask of the forward, not a new one.
    @operator(f"{ns}::masked", random=True, non_differentiable=["output1"])
    def masked(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        mask = (torch.rand_like(x) < 0.5).to(x.dtype)
        return x * x * mask, mask

    @masked.backward
    def masked_backward(grad_output0, x, output1):
        return 2 * grad_output0 * x * output1

    for entry in entries(masked):
        x = torch.ones(1000, requires_grad=True)
        y, mask = entry(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.equal(first, 2 * mask)
        assert torch.equal(torch.autograd.grad(first.sum(), x)[0], 2 * mask)


def test_verify_asks_no_gradient_of_an_output_for_the_backward(normalised):
    checks = ["gradients", "second gradients", "gradient numerics", "opcheck", "compile"]
    record = verify(normalised, checks=checks)
    assert record.passed, record.failures


def test_second_derivatives_under_autocast(ns):
    """What they compute of the forward again was in bfloat16."""

    @operator(f"{ns}::exponential", non_differentiable=["output1"])
    def exponential(
        x: Float[Tensor, "n k"], w: Float[Tensor, "k m"]
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"]]:
        return (x @ w).exp(), x @ w

    @exponential.backward
    def exponential_backward(grad_output0, x, w, output1):
        grad = grad_output0 * output1.exp()
        return grad @ w.mT, x.mT @ grad

    x, w = torch.randn(4, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True)

    def second(is_enabled):
        result = exponential(x, w)[0].sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            (grad,) = torch.autograd.grad(result, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (x, w))

    torch.testing.assert_close(second(True), second(False))
