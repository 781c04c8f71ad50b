"""Log-sum-exp and cross-entropy against PyTorch in float64, in the places where losses go wrong."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opwright
from opwright_ops.cross_entropy.loss import cross_entropy, logsumexp
from opwright_ops.cross_entropy.op import (
    row_cross_entropy,
    row_cross_entropy_gradient_,
    row_logsumexp,
    total_loss,
)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Shorter than a vector, whole vectors, beside them, and longer than what a thread or a block takes at once.
WIDTHS = [1, 2, 7, 64, 257, 1000, 4096, 5001, 50_257]
OPTIONS = [{}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"label_smoothing": 0.3, "z_loss": 0.01}]


def logits_of(rows: int, n: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(n)
    logits = (3 * torch.randn(rows, n, generator=generator, dtype=torch.float64)).to(dtype)
    target = torch.randint(0, n, (rows,), generator=generator)
    target[rows // 2] = -100
    return logits.to(device), target.to(device)


def in_pytorch(logits: Tensor, target: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    loss = F.cross_entropy(logits, target, reduction="none", label_smoothing=label_smoothing)
    return loss + z_loss * torch.logsumexp(logits, -1).square() * (target != -100)


def differentiate(call, logits: Tensor, *arguments, **options) -> list[Tensor]:
    x = logits.detach().clone().requires_grad_()
    y = call(x, *arguments, **options)
    grad = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).to(y).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad(y, x, grad)]


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_float64(dtype: torch.dtype, options: dict, device: str) -> None:
    """Errors are those of the type and of sums in the wider type, at every width."""
    wide = torch.finfo(torch.float32).eps
    for n in WIDTHS:
        logits, target = logits_of(9, n, dtype, device)
        exact = differentiate(in_pytorch, logits.double(), target, **options)
        loss, grad = differentiate(lambda *a, **o: row_cross_entropy(*a, **o).loss, logits, target, **options)
        # The error of the logarithm is the relative error of the sum: a few units, and log2(n) from its additions.
        size = 1 + exact[0].abs() + logits.double().abs().amax(-1)
        assert ((loss - exact[0]).abs() <= (8 + math.log2(n)) * wide * size).all(), n
        # The error of an exponential grows with its argument. Three more roundings follow, then that of the result.
        off = (grad.double() - exact[1]).abs()
        spread = (logits.double() - torch.logsumexp(logits.double(), -1, keepdim=True)).abs()
        softmax = torch.softmax(logits.double(), -1)
        allowed = (torch.finfo(dtype).eps + 3 * wide) * exact[1].abs()
        allowed += (8 + spread + math.log2(n)) * wide * softmax + 8 * wide / n
        assert (off <= allowed + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps).all(), n


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float64(options: dict, device: str) -> None:
    for n in WIDTHS:
        logits, target = logits_of(9, n, torch.float64, device)
        found = differentiate(lambda *a, **o: row_cross_entropy(*a, **o).loss, logits, target, **options)
        torch.testing.assert_close(found, differentiate(in_pytorch, logits, target, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logsumexp(dtype: torch.dtype, device: str) -> None:
    for n in WIDTHS:
        logits, _ = logits_of(9, n, dtype, device)
        found = differentiate(logsumexp, logits)
        exact = differentiate(lambda x: torch.logsumexp(x, -1), logits.double())
        assert found[0].dtype == dtype
        # The gradient is taken at the sum that is not yet rounded to 16 bits.
        torch.testing.assert_close(found[0], exact[0].to(dtype))
        rtol = 4 * torch.finfo(dtype).eps + 1e-5 * (dtype != torch.float64)
        torch.testing.assert_close(found[1].double(), exact[1], rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions(reduction: str) -> None:
    logits, target = logits_of(12, 33, torch.float32)
    exact = differentiate(lambda x: F.cross_entropy(x, target, reduction=reduction), logits)
    torch.testing.assert_close(differentiate(lambda x: cross_entropy(x, target, reduction=reduction), logits), exact)


def test_a_mean_of_16_bits_is_rounded_once() -> None:
    logits, target = logits_of(3000, 50, torch.bfloat16)
    exact = F.cross_entropy(logits.double(), target)
    assert torch.equal(cross_entropy(logits, target), exact.to(torch.bfloat16))


def test_autocast_keeps_the_loss_of_16_bits_in_float32() -> None:
    logits, target = logits_of(12, 33, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = cross_entropy(logits, target)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.cross_entropy(logits.float(), target))


def test_rows_without_a_target_have_no_gradient_whatever_they_hold() -> None:
    logits, _ = logits_of(3, 17, torch.float32)
    logits[1] = math.nan
    target = torch.tensor([3, -100, 5])
    loss, grad = differentiate(lambda x: cross_entropy(x, target, reduction="none"), logits)
    assert loss.isfinite().all()
    assert loss[1] == 0
    assert torch.equal(grad[1], torch.zeros(17))


def test_no_row_with_a_target() -> None:
    logits, target = torch.randn(3, 5), torch.full((3,), -100)
    assert F.cross_entropy(logits, target).isnan()
    assert cross_entropy(logits, target).isnan()
    assert cross_entropy(logits, target, reduction="sum") == 0


def test_classes_that_are_masked() -> None:
    """A class at minus infinity has no probability; smoothing makes its loss infinite, as in PyTorch."""
    logits, target = logits_of(4, 9, torch.float32)
    logits[:, 3], target[:] = -math.inf, 1
    exact = differentiate(lambda x: F.cross_entropy(x, target), logits)
    torch.testing.assert_close(differentiate(lambda x: cross_entropy(x, target), logits), exact)
    assert cross_entropy(logits, target, label_smoothing=0.1) == math.inf
    assert torch.equal(logsumexp(torch.full((2, 3), -math.inf)), torch.full((2,), -math.inf))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_near_the_largest_number(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    logits = torch.tensor([[most, -most, most / 2], [most, most, -most]], dtype=dtype)
    assert torch.equal(logsumexp(logits[:1]), logits[:1, 0])
    (grad,) = differentiate(lambda x: cross_entropy(x, torch.tensor([0, 2]), reduction="none"), logits)[1:]
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, device: str) -> None:
    for n in (3, 1000, 5001):
        logits, target = logits_of(50, n, dtype, device)
        whole = row_cross_entropy(logits, target)
        alone = row_cross_entropy(logits[20:21].clone(), target[20:21])
        assert all(torch.equal(a[0], w[20]) for a, w in zip(alone, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts(dtype: torch.dtype, device: str) -> None:
    """Rows apart, rows that begin anywhere, transposed, one row for all."""
    for n in (5, 700, 9001):
        base, target = logits_of(6, n + 3, dtype, device)
        target = target.clamp(max=n - 1)
        for logits in (base[:, :n], base[:, 3:], base.T[:n].contiguous().T, base[:1, :n].expand(6, n)):
            assert logits.shape == (6, n)
            found = [row_cross_entropy(logits, target).loss, *differentiate(cross_entropy, logits, target)]
            dense = logits.contiguous()
            wanted = [row_cross_entropy(dense, target).loss, *differentiate(cross_entropy, dense, target)]
            torch.testing.assert_close(found, wanted)


def test_a_loss_beside_another_use_of_the_logits() -> None:
    """The gradients of both are added: none is written over what the other needs."""
    start, target = logits_of(6, 19, torch.float64)

    def compose(loss, x: Tensor) -> Tensor:
        logits = x * 2
        return loss(logits, target) + logits.square().sum() + logits.tanh().mean()

    exact = differentiate(lambda x: compose(F.cross_entropy, x), start)
    torch.testing.assert_close(differentiate(lambda x: compose(cross_entropy, x), start), exact)


def test_a_backward_in_place() -> None:
    start, target = logits_of(6, 19, torch.float32)
    x = start.clone().requires_grad_()
    logits = x * 1
    (grad,) = torch.autograd.grad(cross_entropy(logits, target, inplace_backward=True), x)
    (exact,) = torch.autograd.grad(F.cross_entropy(x, target), x)
    torch.testing.assert_close(grad, exact)
    torch.testing.assert_close(logits.detach(), exact)


def test_a_backward_in_place_is_never_wrong_in_silence() -> None:
    """What needs the logits afterwards gets PyTorch's error; what needed them before has had them."""
    start, target = logits_of(6, 19, torch.float64)

    def compose(x: Tensor, in_place: bool, first: bool) -> Tensor:
        logits = x * 1
        if first:  # its backward runs last
            other = logits.square().sum()
            return other + cross_entropy(logits, target, inplace_backward=in_place)
        loss = cross_entropy(logits, target, inplace_backward=in_place)
        return loss + logits.square().sum()

    exact = differentiate(lambda x: compose(x, False, False), start)
    torch.testing.assert_close(differentiate(lambda x: compose(x, True, False), start), exact)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        differentiate(lambda x: compose(x, True, True), start)
    x = start.clone().requires_grad_()
    loss = cross_entropy(x * 1, target, inplace_backward=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


def test_a_backward_in_place_of_a_leaf_is_refused() -> None:
    logits, target = logits_of(6, 19, torch.float32)
    with pytest.raises(ValueError, match="is a leaf"):
        cross_entropy(logits.requires_grad_(), target, inplace_backward=True)


def test_a_second_derivative_of_a_backward_in_place_is_refused() -> None:
    """Its first gradient would have been a constant, without an error."""
    hidden, weight = torch.randn(6, 4), torch.randn(4, 5, requires_grad=True)
    loss = cross_entropy(hidden @ weight, torch.tensor([0, 1, 2, 3, 4, 0]), inplace_backward=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(loss, weight, create_graph=True)
    torch.autograd.grad(loss, weight)  # nothing was overwritten


@pytest.mark.parametrize("target", [-1, 5])
def test_a_target_that_is_no_class_is_refused(target: int) -> None:
    logits, targets = torch.randn(3, 5, requires_grad=True), torch.tensor([0, target, 2])
    with pytest.raises(IndexError, match="neither a class"):
        cross_entropy(logits, targets)
    with pytest.raises(IndexError, match="neither a class"):
        cross_entropy(logits.detach(), targets)


def test_a_target_as_in_torch_nn_functional_is_refused() -> None:
    logits = torch.randn(2, 5, 3)
    cases = [
        (torch.rand(2, 5, 3), TypeError, "`torch.nn.functional.cross_entropy` takes probabilities"),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            ValueError,
            r"hint: classes are the last axis: `logits.movedim\(1, -1\)`",
        ),
        (torch.zeros(10, dtype=torch.int64), ValueError, r"hint: `target.reshape\(\[2, 5\]\)`"),
        (torch.zeros(4, dtype=torch.int64), ValueError, r"int64\[4\] cpu  expected int64\[2, 5\]$"),
    ]
    for target, kind, message in cases:
        with pytest.raises(kind, match=message):
            cross_entropy(logits, target)
    with pytest.raises(TypeError, match="`target` must be a tensor"):
        cross_entropy(logits, None)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match='"mean", "sum" or "none"'):
        cross_entropy(torch.randn(3, 5), torch.tensor([0, 1, 2]), reduction="average")


def test_transforms() -> None:
    logits, target = torch.randn(4, 5, 7, dtype=torch.float64), torch.randint(0, 7, (4, 5))
    each = torch.stack([F.cross_entropy(x, t) for x, t in zip(logits, target, strict=True)])
    torch.testing.assert_close(torch.vmap(cross_entropy)(logits, target), each)
    exact = torch.func.grad(lambda x: F.cross_entropy(x.reshape(20, 7), target.reshape(20)))(logits)
    torch.testing.assert_close(torch.func.grad(cross_entropy)(logits, target), exact)
    x = logits[0].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: cross_entropy(x, target[0], label_smoothing=0.1, z_loss=0.1), x)
    assert torch.autograd.gradgradcheck(logsumexp, x)


@pytest.mark.compiler
def test_compiled() -> None:
    logits, target = logits_of(6, 19, torch.float32)
    exact = differentiate(cross_entropy, logits, target)
    torch.testing.assert_close(differentiate(torch.compile(cross_entropy, fullgraph=True), logits, target), exact)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "name", [row_logsumexp, row_cross_entropy, row_cross_entropy_gradient_, total_loss], ids=lambda o: o.__name__
)
def test_verify(name) -> None:
    record = opwright.verify(name)
    assert record.passed, record.failures
    assert record.backends == ["cpu"]


@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4])
def test_smoothed_labels_of_logits_with_an_offset(offset: float) -> None:
    """The sum of the logits of a row would lose what they differ by."""
    torch.manual_seed(0)
    logits, target = torch.randn(16, 4000) + offset, torch.randint(4000, (16,))
    found = cross_entropy(logits, target, label_smoothing=1.0, reduction="none")
    wanted = F.cross_entropy(logits.double(), target, label_smoothing=1.0, reduction="none")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


def test_a_label_smoothing_outside_of_0_to_1_is_refused() -> None:
    for smoothing in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="`label_smoothing` must be from 0 to 1"):
            cross_entropy(torch.randn(2, 3), torch.tensor([0, 1]), label_smoothing=smoothing)


def test_a_backward_in_place_is_refused_for_a_view_of_a_leaf() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match="is a view of it"):
        cross_entropy(weight.flatten(0, 1), torch.zeros(6, dtype=torch.long), inplace_backward=True)
    leaf = torch.zeros(9, 5)[:6].requires_grad_()  # and a view of a tensor without a gradient
    with pytest.raises(ValueError, match="which is a leaf"):
        cross_entropy(leaf, torch.zeros(6, dtype=torch.long), inplace_backward=True)


@pytest.mark.parametrize("outlier", [-1e4, -1e9, -1e37, 1e4])
@pytest.mark.parametrize("at", [0, 2000, 3999])
def test_smoothed_labels_beside_one_outlier(outlier: float, at: int) -> None:
    """Such as a class that is masked."""
    torch.manual_seed(0)
    logits, target = torch.randn(4, 4000) + 10, torch.randint(1, 1999, (4,))
    logits[:, at] = outlier
    found = cross_entropy(logits, target, label_smoothing=1.0, reduction="none")
    wanted = F.cross_entropy(logits.double(), target, label_smoothing=1.0, reduction="none")
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
