"""softmax where the generic suite does not look: any axis, rows without a maximum, long rows; and all of verify."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import opwright
import opwright.testing
from opwright_ops.softmax import softmax
from opwright_ops.softmax.op import softmax as softmax_of_rows

# Each test runs on a CPU and on a GPU.
pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.compiler
def test_verify(device: str) -> None:
    with torch.device("cpu"):
        record = opwright.verify(softmax, devices=[device])
    assert record.passed, record.failures
    assert device in record.backends


def test_special_rows() -> None:
    x = torch.zeros(4, 7)
    x[0] = -torch.inf
    x[1, 5] = torch.nan
    x[2, 5] = torch.inf
    x[3, 5] = 1e30
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        got = softmax(x.to(dtype))
        assert got[:3].isnan().all()
        assert got[3].tolist() == [0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_against_float64(dtype: torch.dtype) -> None:
    """As near to float64 as PyTorch's own but for the last rounding, at every width, rows apart and transposed."""
    for n in (1, 2, 7, 64, 257, 4096, 70_000):
        base = torch.randn(n + 1, 9, dtype=torch.float64).to(dtype)
        for x in (base[1:].T, base.T.contiguous()[:, 1:]):
            exact = torch.softmax(x.double(), -1)
            own = (torch.softmax(x, -1).double() - exact).abs().max()
            allowed = torch.finfo(dtype).eps * exact + 2 * own
            assert ((softmax(x).double() - exact).abs() <= allowed).all(), n


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradient_against_float64(dtype: torch.dtype) -> None:
    """Off by the rounding of the sum, the difference to it and the result, at every width, with strided gradients."""
    single = torch.finfo(torch.float32).eps
    for n in (1, 2, 7, 257, 4096, 30_000, 70_000):
        output = torch.softmax(torch.randn(9, n, dtype=torch.float64), -1).to(dtype)
        base = torch.randn(n + 1, 9, dtype=torch.float64).to(dtype)
        for grads in (base[1:].T, base.T.contiguous()[:, 1:]):
            products = grads.double() * output.double()
            difference = grads.double() - products.sum(-1, keepdim=True)
            sums = n**0.5 * single * products.abs().sum(-1, keepdim=True)
            exact = output.double() * difference
            allowed = torch.finfo(dtype).eps * exact.abs() + output.double() * (
                sums + 4 * single * grads.double().abs()
            )
            found = torch.ops.opwright_ops.softmax_backward(grads, output)
            assert ((found.double() - exact).abs() <= allowed + torch.finfo(dtype).smallest_normal).all(), n


def inputs(dtype: torch.dtype) -> Iterator[tuple[Tensor, int]]:
    """Yields tensors of 0 to 4 dimensions, contiguous and transposed, and empty ones, with each of their axes."""
    for shape in ((), (1,), (5,), (3, 4), (4, 1), (2, 3, 5), (2, 0, 3), (0,), (3, 2, 4, 5)):
        x = torch.randn(shape, dtype=dtype)
        for layout in (x, x.movedim(0, -1)) if x.ndim else (x,):
            for dim in range(-max(x.ndim, 1), max(x.ndim, 1)):
                yield layout, dim


def test_every_axis() -> None:
    for x, dim in inputs(torch.float64):
        found, expected = softmax(x, dim), torch.softmax(x, dim)
        torch.testing.assert_close(found, expected, msg=lambda m, x=x, dim=dim: f"{x.shape} {dim}: {m}")
        assert found.stride() == expected.stride()
        if dim == -1:
            assert torch.equal(softmax(x), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_axis_of_shorter_types(dtype: torch.dtype) -> None:
    """Computed in float32 within the bound of the notes, then rounded once."""
    for x, dim in inputs(dtype):
        found = softmax(x, dim)
        assert found.dtype == dtype
        if x.numel():
            wide = x.double()
            exact, spread = torch.softmax(wide, dim), wide.amax(dim, keepdim=True) - wide
            allowed = exact * (torch.finfo(dtype).eps + (6 + spread) * torch.finfo(torch.float32).eps)
            assert ((found.double() - exact).abs() <= allowed).all(), (x.shape, dim)


def test_both_gradients_along_every_axis() -> None:
    for x, dim in inputs(torch.float64):
        if x.numel():
            leaf = x.clone().requires_grad_()
            torch.autograd.gradcheck(softmax, (leaf, dim), fast_mode=True)
            torch.autograd.gradgradcheck(softmax, (leaf, dim), fast_mode=True)


def test_vmap_along_every_axis() -> None:
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    for batch, dim in itertools.product(range(3), range(-2, 2)):
        expected = torch.stack([torch.softmax(part, dim) for part in x.unbind(batch)])
        torch.testing.assert_close(torch.vmap(softmax, in_dims=(batch, None))(x, dim), expected)
    ones = torch.ones(3, dtype=torch.float64)
    torch.testing.assert_close(torch.vmap(softmax)(x[:, 0, 0]), ones)  # of 0 dimensions


def test_compiled_along_every_axis() -> None:
    compiled = torch.compile(lambda x, dim: softmax(x * 2, dim), backend="aot_eager", fullgraph=True)
    for shape, dim in (((3, 4), 0), ((3, 4), 1), ((3, 4), -2), ((3, 4), -1), ((), 0)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        found, expected = compiled(x, dim), torch.softmax(x * 2, dim)
        torch.testing.assert_close(found, expected)
        (gradient,) = torch.autograd.grad(found.square().sum(), x)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0])


@pytest.mark.parametrize("dim", [-2, -1, 0, 1])
def test_autocast(dim: int, device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(3, 4, dtype=dtype)
        with torch.autocast(device, torch.bfloat16):
            found = softmax(x, dim)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, torch.softmax(x.float(), dim))


@pytest.mark.parametrize(("shape", "dim"), [((3, 4), 2), ((3, 4), -3), ((), 1), ((), -2)], ids=str)
def test_an_axis_that_is_not_there(shape: tuple[int, ...], dim: int) -> None:
    with pytest.raises(IndexError, match="`dim` is not an axis of `input`") as caught:
        softmax(torch.ones(shape), dim)
    bound = max(len(shape), 1)
    assert f"dim    {dim}  expected {-bound} to {bound - 1}" in str(caught.value)


def test_other_inputs_are_refused() -> None:
    for value, dim in itertools.product((torch.ones(2, 2, dtype=torch.int64), [1.0, 2.0], torch.tensor(True)), (-1, 0)):
        with pytest.raises(TypeError, match="`softmax`: `input`"):
            softmax(value, dim)
    for dim in (None, (0, 1), [0, 1], "a", 1.0):
        with pytest.raises(TypeError, match="`dim` must be an integer"):
            softmax(torch.ones(2, 2), dim)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_operator_of_the_function() -> None:
    """verify, bench and tests are given `opwright_ops.softmax`."""
    assert softmax.operator.function is softmax_of_rows
    assert opwright.testing.cases(softmax)
