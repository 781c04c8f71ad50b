"""Inputs whose gradient a declared backward leaves to the reference."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from kernel_head import HEAD
from torch import Tensor

from opwright import operator
from opwright.errors import BackwardError, DeclarationError

SOURCE = """
#include <opwright/kernel.h>
using opwright::View;

template <typename T>
void scaled(View<const T, 1> x, View<const T, 1> table, View<const T, 1> shift, View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) * table(i) + (shift.defined() ? shift(i) : T(0));
}
template <typename T>
void scaled_backward(View<const T, 1> grad, View<const T, 1> table, View<T, 1> grad_x) {
  for (int64_t i = 0; i < table.size(0); ++i) grad_x(i) = grad(i) * table(i);
}
OPWRIGHT_KERNEL(scaled, float, double)
OPWRIGHT_KERNEL(scaled_backward, float, double)
"""


@pytest.fixture(scope="module")
def scaled(ns: str):
    @operator(f"{ns}::scaled", cpu=SOURCE, derived_gradients=["table", "shift"])
    def scaled(
        x: Float[Tensor, "n"], table: Float[Tensor, "n"], shift: Float[Tensor, "n"] | None = None
    ) -> Float[Tensor, "n"]:
        return x * table if shift is None else x * table + shift

    @scaled.backward
    def scaled_backward(grad_output, table):
        return grad_output * table

    return scaled


@pytest.mark.compiler
def test_each_gradient_and_the_next(scaled, entries) -> None:
    x, table, shift = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for entry in entries(scaled):
        grads = torch.autograd.grad(entry(x, table, shift).sum(), (x, table, shift))
        torch.testing.assert_close(grads, (table, x, torch.ones_like(x)))
        (only,) = torch.autograd.grad(entry(x.detach(), table).sum(), table)
        torch.testing.assert_close(only, x)
        assert torch.autograd.gradcheck(entry, (x, table, shift))
        assert torch.autograd.gradgradcheck(entry, (x, table, shift))
        loss = torch.func.grad(lambda table, entry=entry: entry(x.detach(), table).square().sum())
        torch.testing.assert_close(loss(table.detach()), (2 * x * x * table).detach())


@pytest.mark.compiler
def test_compiled(scaled) -> None:
    x, table = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    compiled = torch.compile(lambda *values: scaled(*values).sin(), backend="aot_eager", fullgraph=True)
    wanted = torch.autograd.grad((x * table).sin().sum(), (x, table))
    torch.testing.assert_close(torch.autograd.grad(compiled(x, table).sum(), (x, table)), wanted)


@pytest.mark.compiler
def test_keeps_and_runs_no_more_than_is_asked_for(scaled, count_reference) -> None:
    x, table = torch.randn(5, requires_grad=True), torch.randn(5)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        output = scaled(x, table)
    assert kept == [table.data_ptr()]
    with count_reference(scaled) as runs:
        output.sum().backward()
    assert not runs
    assert torch.equal(x.grad, table)


def test_refusals(ns: str) -> None:
    def declare(names: list[str]):
        @operator(f"{ns}::refused", derived_gradients=names)
        def refused(x: Float[Tensor, "n"], table: Float[Tensor, "n"], power: int = 1) -> Float[Tensor, "n"]:
            return x * table**power

        return refused

    for names in (["power"], ["output"]):
        with pytest.raises(DeclarationError, match=f"`{names[0]}`, which is not a tensor that has a gradient"):
            declare(names)
    with pytest.raises(DeclarationError, match="names every input"):
        declare(["x", "table"])
    with pytest.raises(BackwardError, match="that is not in `derived_gradients`"):

        @declare(["table"]).backward
        def refused_backward(
            grad_output: Float[Tensor, "n"], table: Float[Tensor, "n"]
        ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
            return grad_output * table, table


def test_output_that_is_not_used_has_no_part_in_the_gradient(ns):
    """The derivative of the root is infinite at 0."""

    @operator(f"{ns}::double_and_root", cpu=HEAD + """
    template <typename T> void double_and_root(View<const T, 1> x, View<T, 1> doubled, View<T, 1> root) {
      for (int64_t i = 0; i < x.size(0); ++i) doubled(i) = 2 * x(i), root(i) = T(__builtin_sqrt(x(i)));
    }
    OPWRIGHT_KERNEL(double_and_root, float, double)""")  # fmt: skip
    def double_and_root(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        return x * 2, x.sqrt()

    x = torch.tensor([0.0, 1.0], requires_grad=True)
    for _ in range(4):  # the later ones take what was recorded
        assert torch.autograd.grad(double_and_root(x)[0].sum(), x)[0].tolist() == [2.0, 2.0]
    differentiate = torch.func.grad(lambda x: double_and_root(x)[0].sum())
    assert differentiate(x.detach()).tolist() == [2.0, 2.0]
    assert torch.vmap(differentiate)(x.detach()[None]).tolist() == [[2.0, 2.0]]
    y = torch.rand(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda y: double_and_root(y)[0], y)


def test_output_that_is_not_used_beside_a_declared_backward(ns):
    """Zeros stood for it in the gradient that is derived, and made NaN."""

    @operator(f"{ns}::sum_and_root", derived_gradients=["table"])
    def sum_and_root(x: Float[Tensor, "n"], table: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        return x * 2 + table * 3, x * table.sqrt()

    @sum_and_root.backward
    def sum_and_root_backward(grad_output0, grad_output1, table):
        return grad_output0 * 2 + grad_output1 * table.sqrt()

    x, table = torch.ones(2), torch.tensor([0.0, 1.0])

    def total(x: Tensor, table: Tensor, i: int) -> Tensor:
        return sum_and_root(x, table)[i].sum()

    for function in (total, torch.compile(total, backend="aot_eager")):
        for i, expected in ((0, ([2.0, 2.0], [3.0, 3.0])), (1, ([0.0, 1.0], [torch.inf, 0.5]))):
            tensors = [t.clone().requires_grad_() for t in (x, table)]
            found = torch.autograd.grad(function(*tensors, i), tensors)
            assert tuple(t.tolist() for t in found) == expected
    differentiate = torch.func.grad(lambda *tensors: total(*tensors, 0), (0, 1))
    assert [t.tolist() for t in differentiate(x, table)] == [[2.0, 2.0], [3.0, 3.0]]
    assert [t.tolist() for t in torch.vmap(differentiate)(x[None], table[None])] == [[[2.0, 2.0]], [[3.0, 3.0]]]
    y = (torch.rand(2, 3, dtype=torch.float64) + 0.5).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda y: sum_and_root(*y)[0], y)
    assert torch.autograd.gradgradcheck(lambda y: sum_and_root(*y)[1], y)
