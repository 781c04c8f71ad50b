"""`torch.func` over operators, in eager mode and compiled, against the same formulas in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import opwright

pytestmark = pytest.mark.compiler

SQUARE = """
#include <opwright/kernel.h>
template <typename T>
void NAME(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) * x(i);
}
OPWRIGHT_KERNEL(NAME, float, double)
"""


@opwright.operator("test_transforms::derived", cpu=SQUARE.replace("NAME", "derived"))
def derived(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * x


@opwright.operator("test_transforms::without_kernel")
def without_kernel(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * x


@opwright.operator("test_transforms::composite")
def composite(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return derived(x) + derived(0 * x)


@opwright.operator("test_transforms::declared", cpu=SQUARE.replace("NAME", "declared"))
def declared(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * x


@declared.backward
def declared_backward(grad_output, x):
    return 2 * x * grad_output


@opwright.operator("test_transforms::declared_without_kernel")
def declared_without_kernel(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * x


@declared_without_kernel.backward
def declared_without_kernel_backward(grad_output, x):
    return 2 * x * grad_output


Function = Callable[[Tensor], Tensor]
OPERATORS = [derived, without_kernel, composite, declared, declared_without_kernel]
X, V = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([2.0, 3.0, 5.0])
ROWS = torch.arange(12.0).view(4, 3)


def _pulled(f: Function, x: Tensor, v: Tensor) -> Tensor:
    return vjp(f, x)[1](v)[0]


TRANSFORMS: dict[str, Callable[[Function], Tensor]] = {
    "vjp": lambda f: _pulled(f, X, V),
    "vjp of vjp": lambda f: _pulled(lambda x: _pulled(f, x, V), X, V),
    "vjp of grad": lambda f: _pulled(grad(lambda x: f(x).sum()), X, V),
    "grad of vjp": lambda f: grad(lambda x: (_pulled(f, x, V) ** 2).sum())(X),
    "vjp of vmap": lambda f: _pulled(vmap(f), ROWS, ROWS + 1),
    "vmap of vjp": lambda f: vmap(lambda x: _pulled(f, x, V))(ROWS),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum()))(ROWS),
    "jacrev in chunks": lambda f: jacrev(f, chunk_size=1)(X),
    "jvp": lambda f: jvp(lambda x: f(x) + x, (X,), (V,))[1],
    "jacfwd": lambda f: jacfwd(lambda x: f(x) + x)(X),
    "hessian": lambda f: hessian(lambda x: (f(x) * x).sum())(X),
}


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_gives_what_it_gives_of_the_formula(name: str, operator: Function) -> None:
    found, expected = (TRANSFORMS[name](f) for f in (operator, lambda x: x * x))
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["vjp", "vmap of grad", "jvp", "jacfwd", "hessian"])
def test_a_compiled_transform_gives_what_it_gives_of_the_formula(name: str) -> None:
    transform = TRANSFORMS[name]
    for operator in (derived, declared):
        compiled = torch.compile(lambda operator=operator: transform(operator), backend="aot_eager")
        torch.testing.assert_close(compiled(), transform(lambda x: x * x))


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda each: each.__name__)
def test_a_gradient_of_vjp_reaches_what_requires_one(operator: Function) -> None:
    def second(f: Function) -> Tensor:
        z = X.clone().requires_grad_()
        (found,) = torch.autograd.grad((_pulled(f, z, V) ** 2).sum(), z)
        return found

    torch.testing.assert_close(second(operator), second(lambda x: x * x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch reads it
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda each: each.__name__)
def test_compiled_autograd_without_graph_breaks(operator: Function) -> None:
    x = X.clone().requires_grad_()
    loss = (operator(x) * V).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()
    torch.testing.assert_close(x.grad, 2 * X * V)


def test_a_node_has_the_name_of_its_operator() -> None:
    assert type(declared(X.clone().requires_grad_()).grad_fn).__name__ == "declaredBackward"
