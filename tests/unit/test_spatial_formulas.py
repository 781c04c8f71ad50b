"""The steps of interpolation and of the gradients of convolutions give what PyTorch's operators give."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from opwright import verify
from opwright.verify.compare import compare
from opwright.verify.formulas import Rounding
from opwright.verify.oracle import expect
from opwright.verify.spatial_formulas import INTERPOLATIONS, STEPS

aten = torch.ops.aten
INTERPOLATING = [op for op in INTERPOLATIONS if not op.overloadpacket.__name__.endswith("_backward")]


class Exact(Rounding):
    """Rounds nothing."""

    def compute(self, func, args, kwargs):
        return func(*args, **kwargs)


@pytest.mark.parametrize("op", INTERPOLATING, ids=str)
def test_interpolation(op) -> None:
    backward = getattr(aten, f"{op.overloadpacket.__name__}_backward").default
    axes = {"1d": 1, "2d": 2, "3d": 3}[op.overloadpacket.__name__[-2:]]
    for size, made, align_corners, stretch in itertools.product((1, 5, 8), (1, 3, 8, 13), (True, False), (0, 1.01)):
        x = torch.randn(2, 3, *[size] * axes, dtype=torch.float64)
        rest = (
            [[made] * axes, align_corners, *[stretch * made / size] * axes]
            if stretch
            else [[made] * axes, align_corners]
        )
        with Exact():
            found = INTERPOLATIONS[op](x, *rest)
            grad = torch.randn_like(found)
            found_grad = INTERPOLATIONS[backward](grad, rest[0], list(x.shape), *rest[1:])
        torch.testing.assert_close(found, op(x, *rest), rtol=0, atol=1e-12)
        torch.testing.assert_close(found_grad, backward(grad, rest[0], list(x.shape), *rest[1:]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_convolution(transposed: bool, axes: int) -> None:
    op = aten.convolution_backward.default
    for groups, stride, padding, dilation, beyond in itertools.product((1, 2), (1, 3), (0, 1), (1, 2), (0, 1)):
        if beyond and (not transposed or beyond >= max(stride, dilation)):
            continue
        x = torch.randn(2, 4, *[7] * axes, dtype=torch.float64)
        channels = (4, 6 // groups) if transposed else (6, 4 // groups)
        weight = torch.randn(*channels, *[3] * axes, dtype=torch.float64)
        how = [[stride] * axes, [padding] * axes, [dilation] * axes, transposed, [beyond] * axes, groups]
        grad = torch.randn_like(aten.convolution(x, weight, None, *how))
        for found, true in zip(
            STEPS[op](grad, x, weight, [6], *how, [True] * 3), op(grad, x, weight, [6], *how, [True] * 3), strict=True
        ):
            torch.testing.assert_close(found, true, rtol=0, atol=1e-11)


def twice(x: torch.Tensor, near: float = 0.75) -> torch.Tensor:
    """Bilinear interpolation to twice the size, along one axis after the other, with float32 in between."""
    y = x.float()
    for dim in (2, 3):
        size = y.shape[dim]
        at = torch.arange(size)
        before, after = (y.index_select(dim, i.clamp(0, size - 1)) for i in (at - 1, at + 1))
        pair = torch.stack([near * y + (1 - near) * before, near * y + (1 - near) * after], dim + 1)
        y = pair.flatten(dim, dim + 1)
    return y.to(x.dtype)


@pytest.mark.parametrize(("near", "is_right"), [(0.75, True), (0.77, False)])
def test_another_formula_of_an_interpolation(near: float, is_right: bool) -> None:
    """Positions were rounded to bfloat16, so that elements beyond the end were read, or wrong weights passed."""
    reference = lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")  # noqa: E731
    samples = [(torch.randn(2, 2, 3, 67).to(dtype),) for dtype in (torch.bfloat16, torch.float32)]
    record = verify(lambda x: twice(x, near), reference=reference, samples=samples, checks=["numerics"], expand=False)
    assert record.passed == is_right, record.failures


def test_the_weights_gradient_of_a_convolution_is_a_long_sum() -> None:
    """Of 12,544 terms: whoever adds them one after the other is right, and was refused."""
    torch.manual_seed(0)
    x, w = torch.randn(4, 3, 56, 56), torch.randn(2, 3, 1, 1)

    def of_weight(values):
        _, grad, _ = aten.convolution_backward(
            values[0].new_ones(4, 2, 56, 56) * values[0].mean(1, keepdim=True), values[0], values[1], None, [1, 1],
            [0, 0], [1, 1], False, [0, 0], 1, [False, True, False],
        )  # fmt: skip
        return [grad]

    (expected,) = expect(of_weight, [x, w])
    expected = expected.after()
    terms = (x.mean(1, keepdim=True) * x).permute(1, 0, 2, 3).reshape(3, -1)
    total = torch.zeros(3)
    for column in terms.T:
        total += column
    error = (total.double() - expected.exact[0, :, 0, 0]).abs()
    assert (error <= expected.allowance[0, :, 0, 0]).all()
    assert (expected.allowance < 1e-3 * expected.exact.abs()).all()


@pytest.mark.parametrize("is_right", [True, False])
def test_a_convolution_whose_sum_overflows_on_the_way(is_right: bool) -> None:
    """PyTorch adds its terms in an order that has room; whoever adds the equal ones first gets an infinity."""
    x = torch.tensor([[[2.0, -2.0, 2.0]]]) * (2.0**126 if is_right else 2.0**119)
    (expected,) = expect(lambda values: [F.conv1d(values[0], values[0].new_ones(1, 1, 3))], [x])
    assert bool(compare(torch.full((1, 1, 1), math.inf), expected).message) != is_right
