"""References of callables as people write them: modules, weights from outside, buffers made inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import opwright
from opwright.errors import CheckError

torch.manual_seed(0)
LINEAR, NORM = nn.Linear(5, 7), nn.BatchNorm1d(5).eval()
with torch.no_grad():
    NORM.running_mean.normal_()
    NORM.running_var.uniform_(0.5, 2)
SAMPLES = [(torch.randn(3, 5),)]


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


def linear(x: Tensor) -> Tensor:
    return x @ LINEAR.weight.t() + LINEAR.bias


def failures(candidate: Any, reference: Any, samples: Any = SAMPLES, **options: Any) -> dict[str, str]:
    record = opwright.verify(candidate, reference=reference, samples=samples, quick=True, **options)
    assert any(check.outcome == "passed" for check in record.checks) or record.failures
    return {failure.check: failure.message for failure in record.failures}


@pytest.mark.parametrize(
    ("candidate", "reference"),
    [
        (linear, LINEAR),
        (LINEAR, linear),
        (Wrapped(LINEAR), LINEAR),
        (LINEAR, Wrapped(LINEAR)),
        (lambda x: F.linear(x, LINEAR.weight, LINEAR.bias), linear),
        (Wrapped(NORM), NORM),
        (lambda x: F.batch_norm(x, NORM.running_mean, NORM.running_var, NORM.weight, NORM.bias), NORM),
    ],
    ids=["function, module", "module, function", "wrapper, module", "module, wrapper", "functions", "statistics", "statistics outside"],
)  # fmt: skip
def test_weights_that_only_one_of_them_knows_by_name(candidate: Any, reference: Any) -> None:
    assert failures(candidate, reference) == {}


@pytest.mark.parametrize("reference", [LINEAR, linear], ids=["module", "function"])
def test_wrong_ones_are_found_all_the_same(reference: Any) -> None:
    assert "numerics" in failures(lambda x: 1.0001 * linear(x), reference)
    assert "numerics" in failures(Wrapped(LINEAR, 1.0001), reference)
    assert "gradient numerics" in failures(lambda x: linear(x.detach()) + 0 * linear(x), reference)


def test_the_gradient_by_a_renamed_weight_counts() -> None:
    class Detached(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.inner.weight, self.inner.bias.detach())

    assert "gradient numerics" in failures(Detached(LINEAR), LINEAR, checks=["gradient numerics"])


def test_a_reference_that_makes_its_own_buffers() -> None:
    def reference(index: Tensor, x: Tensor) -> Tensor:
        return torch.zeros(10, x.shape[1]).index_add(0, index, x)

    def loop(index: Tensor, x: Tensor) -> Tensor:
        output = torch.zeros(10, x.shape[1], dtype=x.dtype)
        for i, row in zip(index, x, strict=True):
            output[i] += row
        return output

    index = torch.arange(30) % 7
    assert failures(loop, reference, [(index, torch.randn(30, 4))]) == {}
    assert "numerics" in failures(
        lambda i, x: torch.zeros(10, 4).index_copy(0, i, x), reference, [(index, torch.randn(30, 4))]
    )


def test_a_reference_for_one_dtype_is_refused_at_once() -> None:
    def reference(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("float32 only")
        return x.sin()

    with pytest.raises(CheckError, match="cannot compute in float64") as caught:
        failures(torch.sin, reference)
    assert ("it says", "TypeError: float32 only") in caught.value.rows


def quantised(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def test_a_derivative_that_is_zero_without_memory() -> None:
    """The second gradient of a rounding crashed the process of the checks."""
    assert failures(quantised, quantised, [(torch.randn(3, 33),)], checks=["second gradients"]) == {}


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ v


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize(
    ("candidate", "reference", "shapes"),
    [
        (causal, attention, [(2, 4, 16, 32)] * 3),  # of a query of -inf PyTorch's own makes zeros
        (lambda a, b: torch.where((a - b).abs() < 1, 0.5 * (a - b) ** 2, (a - b).abs() - 0.5),
         lambda a, b: F.huber_loss(a, b, reduction="none"), [(5, 12), (5, 12)]),  # in steps, with their results
        (lambda x: ((x - x.mean(-1, keepdim=True)) ** 2).sum(-1) / (x.shape[-1] - 1), lambda x: x.var(-1), [(4, 30)]),
        (lambda x: x * (x - 1), lambda x: x * x - x, [(6, 4)]),  # of infinity infinity, and NaN
        (lambda x, w: torch.einsum("bctk,ock->bot", F.pad(x, (1, 1)).unfold(-1, 3, 1), w),
         lambda x, w: F.conv1d(x, w, padding=1), [(2, 3, 20), (4, 3, 3)]),  # for weights of 3 alone
    ],
    ids=["attention", "huber", "variance", "product", "convolution"],
)  # fmt: skip
def test_right_ones_are_not_accused(candidate: Callable, reference: Callable, shapes: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    assert failures(candidate, reference, [tuple(map(torch.randn, shapes))]) == {}


@pytest.mark.parametrize("seed", [1, 4])  # of six: an element erred 164 ulp where 132 were allowed
def test_attention_passes_for_other_random_numbers(seed: int) -> None:
    torch.manual_seed(seed)
    assert failures(causal, attention, [tuple(torch.randn(2, 4, 16, 32) for _ in range(3))]) == {}


@pytest.mark.parametrize(
    ("candidate", "reference", "shape"),
    [
        (lambda x: x.sin() if x.shape[0] > 1 else x, torch.sin, (6, 8)),
        (lambda x: x.sum(-1).squeeze(), lambda x: x.sum(-1), (6, 8)),
        (lambda x: (x[..., 0] ** 2 + x[..., 1] ** 2).sqrt(), lambda x: torch.hypot(x[..., 0], x[..., 1]), (6, 2)),
    ],
    ids=["wrong in a batch of one", "a batch of one squeezed", "squares of large numbers in a small sample"],
)  # fmt: skip
def test_wrong_where_no_sample_is(candidate: Callable, reference: Callable, shape: tuple[int, ...]) -> None:
    assert "numerics" in failures(candidate, reference, [(torch.randn(shape),)], checks=["numerics"])


def test_masks_whose_last_entry_counts() -> None:
    mask = torch.rand(5, 9, generator=torch.Generator().manual_seed(0)) > 0.8
    assert "numerics" in failures(lambda m: m[..., :8].any(-1), lambda m: m.any(-1), [(mask,)])
    assert failures(lambda m: m.sum(-1) > 0, lambda m: m.any(-1), [(mask,)]) == {}
