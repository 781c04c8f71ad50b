"""Calls of operators without kernels: they take what others take, and return what was declared."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

from opwright import Mutates, operator
from opwright.errors import OptionTypeError, OutError


@operator("reference_calls::scaled")
def scaled(x: Float[Tensor, "*batch"], by: float = 2.0) -> Float[Tensor, "*batch"]:
    return x * by


@pytest.mark.parametrize("by", [np.float32(2), np.int64(2), torch.tensor(2.0), True, 3, 2**70], ids=repr)
def test_options_are_converted_as_for_kernels(by: Any) -> None:
    assert torch.equal(scaled(torch.ones(3), by), torch.full((3,), float(by)))


def test_options_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(OptionTypeError):
        scaled(torch.ones(3), "2")
    with pytest.raises(OptionTypeError, match="`by` does not fit in 64 bits"):
        scaled(torch.ones(3), 10**400)


@operator("reference_calls::shifted")
def shifted(x: Float[Tensor, "*batch"], by: int = 2) -> Float[Tensor, "*batch"]:
    return x + by


@pytest.mark.parametrize("by", [2**63, -(2**63) - 1, 2**70])
def test_integers_of_more_than_64_bits_are_refused(by: int) -> None:
    """PyTorch's error was: expected a value of type 'int', but instead found type 'int'."""
    for entry in (shifted, torch.ops.reference_calls.shifted):
        with pytest.raises(OptionTypeError, match="`by` does not fit in 64 bits"):
            entry(torch.ones(3), by)
    assert shifted(torch.ones(1, dtype=torch.float64), -(2**63)).item() == 1.0 - 2**63


def test_torchscript_traces_them() -> None:
    traced = torch.jit.trace(scaled, (torch.ones(3),))
    assert torch.equal(traced(torch.ones(3)), torch.full((3,), 2.0))


class One(NamedTuple):
    y: Float[Tensor, "n m"]


@operator("reference_calls::one")
def one(x: Float[Tensor, "n m"]) -> One:
    return One(x * 2)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_named_tuple_of_one_output(rows: int) -> None:
    assert torch.equal(one(torch.ones(rows, 2)).y, torch.full((rows, 2), 2.0))
    x = torch.ones(rows, 2, requires_grad=True)
    one(x).y.sum().backward()
    assert torch.equal(x.grad, torch.full((rows, 2), 2.0))


def test_more_outputs_than_letters() -> None:
    names: dict[str, Any] = {"T": Float[Tensor, "n"]}
    exec(f"def many(x: T) -> tuple[{', '.join(['T'] * 60)}]: return tuple(x + i for i in range(60))", names)
    many = operator("reference_calls::many")(names["many"])
    assert [int(y) for y in many(torch.zeros(1))] == list(range(60))
    outs = tuple(torch.empty(1) for _ in range(60))
    many(torch.zeros(1), out=outs)
    assert [int(y) for y in outs] == list(range(60))


def test_out_counts_the_version_of_an_argument_that_is_written() -> None:
    @operator("reference_calls::add_to")
    def add_to(total: Mutates[Float[Tensor, "n"]], x: Float[Tensor, "n"]) -> Float[Tensor, ""]:
        total.add_(x)
        return total.sum()

    w, total = torch.ones(3, requires_grad=True), torch.zeros(3)
    result = (w * total).sum()
    add_to(total, torch.ones(3), out=torch.empty(()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_the_registered_out_variant_takes_no_gradients() -> None:
    """It returned a result without one."""
    x, out = torch.ones(3, requires_grad=True), torch.empty(3)
    with pytest.raises(OutError, match="takes no part in autograd"):
        torch.ops.reference_calls.scaled(x, out=out)
    with torch.no_grad():
        assert torch.ops.reference_calls.scaled(x, out=out) is out


def test_out_takes_no_tangents() -> None:
    with forward_ad.dual_level(), pytest.raises(OutError, match="takes no part in autograd"):
        scaled(forward_ad.make_dual(torch.ones(3), torch.ones(3)), out=torch.empty(3))


def test_a_backward_takes_options_in_any_order() -> None:
    """One in front of a tensor has no default and no keyword there; PyTorch refused such a schema."""

    @operator("reference_calls::powers")
    def powers(x: Float[Tensor, "n"], by: float = 3.0, *, scale: float = 1.0) -> Float[Tensor, "n"]:
        return scale * by * x

    @powers.backward
    def powers_backward(grad_output, scale, by, x):
        return grad_output * scale * by + 0 * x

    x = torch.ones(2, requires_grad=True)
    assert torch.autograd.grad(powers(x).sum(), x)[0].tolist() == [3, 3]
    assert torch.autograd.grad(powers(x, 2.0, scale=5.0).sum(), x)[0].tolist() == [10, 10]


def test_a_reference_that_pytorch_cannot_vectorise_is_called_for_each_entry(ns):
    @operator(f"{ns}::mean_of_positive")
    def mean_of_positive(x: Float[Tensor, "n"], scale: Float[Tensor, ""]) -> Float[Tensor, ""]:
        return scale * x[x > 0].sum() / max(x.numel(), 1)

    x, scale = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    wanted = scale * x.clamp(min=0).mean(-1)
    both = torch.vmap(torch.vmap(mean_of_positive), (0, None))
    torch.testing.assert_close(both(x, scale), wanted)
    torch.testing.assert_close(torch.vmap(mean_of_positive, (0, None))(x[0], scale[0]), scale[0] * wanted[0] / scale)
    with pytest.raises(IndexError):  # no entry tells what an output is like
        torch.vmap(mean_of_positive, (0, None))(x[0, :0], scale[0])
