"""The norms against PyTorch in float64, in the places where norms go wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opwright
from opwright_ops.norm import LayerNorm, RMSNorm, add_rms_norm, layer_norm, rms_norm
from opwright_ops.norm.module import _takes
from opwright_ops.norm.op import WITH_FLOAT32_WEIGHT

# Each test runs on a CPU and on a GPU.
pytestmark = pytest.mark.usefixtures("device")

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Shorter than a vector, whole vectors, beside them, and longer than what a block of a GPU keeps.
WIDTHS = [2, 7, 64, 100, 257, 768, 4096, 5001, 70_000]
Call = Callable[..., Any]


def in_pytorch(name: str) -> Call:
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, total.shape[-1:], weight, 1e-6), total

    return {
        "rms_norm": lambda x, weight=None: F.rms_norm(x, x.shape[-1:], weight, 1e-6),
        "add_rms_norm": add_rms_norm,
        "layer_norm": lambda x, weight=None, bias=None: F.layer_norm(x, x.shape[-1:], weight, bias),
    }[name]


NORMS = {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "layer_norm": layer_norm}
# Inputs behind the rows, and how many outputs each has.
COLUMNS = {"rms_norm": 1, "add_rms_norm": 1, "layer_norm": 2}


def inputs_of(name: str, rows: int, n: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    matrices = [torch.randn(rows, n, dtype=torch.float64) for _ in range(2 if name == "add_rms_norm" else 1)]
    columns = [torch.randn(n, dtype=torch.float64) for _ in range(COLUMNS[name])]
    return [t.to(dtype) for t in (*matrices, *columns)]


def differentiate(call: Call, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the outputs and the gradients of their sum, with weights that every type has."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    outputs = call(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    grads = [(torch.randn(o.shape, generator=generator) * 16).round().to(o.dtype) / 16 for o in outputs]
    return [*(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, grads)]


@pytest.mark.parametrize("name", NORMS)
def test_rows_of_millions_of_elements(name: str) -> None:
    """One sum over such a row, in float32, would lose two digits."""
    inputs = [t.abs() for t in inputs_of(name, 1, 2**22 + 5, torch.float32)]
    exact = differentiate(in_pytorch(name), [t.double() for t in inputs])
    for found, wanted in zip(differentiate(NORMS[name], inputs), exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float64], ids=str)
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    """As near to float64 as PyTorch's own, but for the last rounding, at every width."""
    for n in WIDTHS:
        inputs = inputs_of(name, 5, n, dtype)
        exact = differentiate(in_pytorch(name), [t.double() for t in inputs])
        if name == "add_rms_norm":  # what is normalised is the rounded sum
            total = inputs[0] + inputs[1]
            exact = differentiate(
                in_pytorch(name), [total.double(), torch.zeros_like(total).double(), inputs[2].double()]
            )
        own = differentiate(in_pytorch(name), inputs)
        for found, theirs, wanted in zip(differentiate(NORMS[name], inputs), own, exact, strict=True):
            allowed = torch.finfo(dtype).eps * wanted.abs().max() + 2 * (theirs.double() - wanted).abs().max()
            assert (found.double() - wanted).abs().max() <= allowed, (n, found.shape)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_of_16_bits_with_a_weight_in_float32(name: str, dtype: torch.dtype) -> None:
    """Results have the type of the rows, gradients of the columns their own; one rounding each."""
    for n in WIDTHS:
        inputs = inputs_of(name, 5, n, torch.float32)
        count = len(inputs) - COLUMNS[name]
        inputs = [*(t.to(dtype) for t in inputs[:count]), *inputs[count:]]
        found = differentiate(NORMS[name], inputs)
        assert [t.dtype for t in found] == [*([dtype] * count), *(t.dtype for t in inputs)]
        # In float32 from the same numbers; the sum that is normalised is rounded to 16 bits.
        singles = [t.float() for t in inputs]
        if count == 2:
            singles[:2] = (inputs[0] + inputs[1]).float(), torch.zeros_like(singles[0])
        for ours, wanted in zip(found, differentiate(NORMS[name], singles), strict=True):
            rounding = torch.finfo(ours.dtype).eps * wanted.abs() + torch.finfo(ours.dtype).tiny
            allowed = rounding + 2e-5 * wanted.abs().max()
            assert ((ours.float() - wanted).abs() <= allowed).all(), (n, ours.shape)


def test_results_are_written_to_out() -> None:
    x, weight = torch.randn(3, 8).half(), torch.randn(8)
    for given in (weight, weight.half()):
        out = torch.empty_like(x), torch.empty_like(x)
        assert rms_norm(x, given, out=out[0]) is out[0]
        assert torch.equal(out[0], rms_norm(x, given))
        add_rms_norm(x, x, given, out=out)
        assert torch.equal(out[1], x + x)
        layer_norm(x, given, out=out[0])
        assert torch.equal(out[0], layer_norm(x, given))


def test_a_weight_of_another_type_is_refused() -> None:
    x = torch.randn(3, 8).half()
    for weight in (torch.randn(8).double(), torch.randn(8).bfloat16()):
        with pytest.raises(opwright.errors.DtypeError, match="`weight` must have the dtype of `input`"):
            rms_norm(x, weight)
    with pytest.raises(opwright.errors.DtypeError, match="bias"):
        layer_norm(x, torch.randn(8), torch.randn(8).half())


@pytest.mark.parametrize("Norm", [RMSNorm, LayerNorm])
def test_modules_in_float32_take_rows_of_16_bits(Norm: Any) -> None:
    norm, x = Norm(64, eps=1e-5), torch.randn(3, 64).bfloat16()
    assert _takes(norm, x)
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).float(), norm(x.float()), rtol=2**-8, atol=0)


@pytest.mark.parametrize("name", NORMS)
def test_float64(name: str) -> None:
    for n in WIDTHS:
        inputs = inputs_of(name, 5, n, torch.float64)
        torch.testing.assert_close(differentiate(NORMS[name], inputs), differentiate(in_pytorch(name), inputs))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(name: str, dtype: torch.dtype) -> None:
    count = 2 if name == "add_rms_norm" else 1
    for n in (3, 100, 768, 5001):
        inputs = inputs_of(name, 50, n, dtype)
        whole = differentiate(NORMS[name], inputs)
        rows = [t[20:21].contiguous() for t in inputs[:count]]
        alone = NORMS[name](*rows, *inputs[count:])
        for found, wanted in zip(alone if isinstance(alone, tuple) else (alone,), whole, strict=False):
            assert torch.equal(found[0], wanted[20])


@pytest.mark.parametrize("name", NORMS)
def test_the_same_bits_with_any_number_of_threads(name: str) -> None:
    inputs = inputs_of(name, 700, 1031, torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(differentiate(NORMS[name], inputs))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mean_far_from_zero_does_not_cancel(dtype: torch.dtype) -> None:
    """A variance as the difference of two means would be off by a third here in float32."""
    torch.manual_seed(0)
    x = (100 + torch.randn(7, 1000, dtype=torch.float64)).to(dtype)
    exact = differentiate(layer_norm.operator.declaration.reference, [x.double()])
    own = differentiate(in_pytorch("layer_norm"), [x])
    for found, theirs, wanted in zip(differentiate(layer_norm, [x]), own, exact, strict=True):
        allowed = torch.finfo(dtype).eps * wanted.abs().max() + 2 * (theirs.double() - wanted).abs().max()
        assert (found.double() - wanted).abs().max() <= allowed


@pytest.mark.parametrize("number", [0.1, 0.3, 1.1])
def test_equal_numbers_are_their_mean(number: float) -> None:
    """A sum of 4,097 of them is rounded, and so was their distance to its share."""
    assert layer_norm(torch.full((2, 4097), number)).abs().max() <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("n", [896, 7168])
@pytest.mark.parametrize("number", [1.5, 100.0])
def test_equal_numbers_in_16_bits_are_their_mean(number: float, n: int) -> None:
    """Their sum is exact, its product with a rounded 1 / n is not."""
    x = torch.full((2, n), number, dtype=torch.bfloat16)
    assert torch.equal(layer_norm(x), torch.zeros_like(x))


@pytest.mark.parametrize("name", NORMS)
def test_without_eps_rows_that_share_a_warp_have_gradients(name: str) -> None:
    """On a GPU, lanes without a row have zeros, whose scale is infinite without eps."""
    inputs = inputs_of(name, 5, 64, torch.bfloat16)
    found = differentiate(lambda *leaves: NORMS[name](*leaves, eps=0.0), inputs)
    assert all(result.isfinite().all() for result in found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_squares_do_not_overflow_in_16_bits(dtype: torch.dtype) -> None:
    x = torch.full((2, 300), 3e4, dtype=dtype)
    assert torch.equal(rms_norm(x), torch.ones_like(x))


def test_rows_of_zeros() -> None:
    x = torch.zeros(2, 5, requires_grad=True)
    for norm in (rms_norm, layer_norm):
        y = norm(x)
        assert torch.equal(y, torch.zeros_like(y))
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_columns_accumulate_in_float32(dtype: torch.dtype) -> None:
    inputs = inputs_of("layer_norm", 6000, 37, dtype)
    exact = differentiate(in_pytorch("layer_norm"), [t.double() for t in inputs])
    for found, wanted in zip(differentiate(layer_norm, inputs)[2:], exact[2:], strict=True):
        # One rounding to the type, and sums in float32 of 6,000 terms of size 1.
        allowed = wanted.abs() * torch.finfo(dtype).eps / 2 + 6000 * 4 * torch.finfo(torch.float32).eps
        assert ((found.double() - wanted).abs() <= allowed).all()


def test_without_weight_and_bias() -> None:
    x, weight, bias = torch.randn(4, 9), torch.randn(9), torch.randn(9)
    for given in itertools.product((None, weight), (None, bias)):
        torch.testing.assert_close(layer_norm(x, *given), F.layer_norm(x, (9,), *given))
    torch.testing.assert_close(rms_norm(x), F.rms_norm(x, (9,), None, 1e-6))


def test_shapes() -> None:
    """No batch, several batch axes, no rows."""
    for shape in ((6,), (2, 3, 6), (0, 6)):
        x, weight = torch.randn(shape, requires_grad=True), torch.randn(6, requires_grad=True)
        y = rms_norm(x, weight)
        torch.testing.assert_close(y, F.rms_norm(x, (6,), weight, 1e-6))
        grads = torch.autograd.grad(y.sum(), (x, weight))
        assert [g.shape for g in grads] == [x.shape, weight.shape]


@pytest.mark.compiler
@pytest.mark.parametrize("name", [*NORMS, *(f"{name}_float32_weight" for name in NORMS)])
def test_verify(name: str, device: str) -> None:
    norm = NORMS.get(name) or getattr(WITH_FLOAT32_WEIGHT, name.removesuffix("_float32_weight"))
    with torch.device("cpu"):
        record = opwright.verify(norm, devices=[device])
    assert record.passed, record.failures
    assert device in record.backends
