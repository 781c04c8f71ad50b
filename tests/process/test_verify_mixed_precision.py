"""References that compute in more than one precision: each result is held to the digits that it has in PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from opwright import operator, verify


def check(candidate, reference, contract: str) -> None:
    record = verify(candidate, reference=reference, contract=contract, checks=["numerics", "boundaries"])
    assert record.passed, [(f.case, f.message) for f in record.failures]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_float32_state_beside_bfloat16_parameters(is_right: bool) -> None:
    """Each result is allowed the rounding of its own type; that of the coarsest hid a state in bfloat16."""

    def update(p: Tensor, m: Tensor, g: Tensor, beta: float = 0.9) -> tuple[Tensor, Tensor]:
        state = beta * m + (1 - beta) * g.float()
        return (p.float() - 0.1 * state).bfloat16(), state

    def candidate(p: Tensor, m: Tensor, g: Tensor, beta: float = 0.9) -> tuple[Tensor, Tensor]:
        state = torch.add((1 - beta) * g.float(), m, alpha=beta)
        return (p.float() - 0.1 * state).bfloat16(), state if is_right else state.bfloat16().float()

    contract = "(p: BFloat16[Tensor, 'n'], m: Float32[Tensor, 'n'], g: BFloat16[Tensor, 'n'], beta: float = 0.9)"
    contract += " -> tuple[BFloat16[Tensor, 'n'], Float32[Tensor, 'n']]"
    record = verify(candidate, reference=update, contract=contract, checks=["numerics"])
    assert record.passed == is_right, [(f.case, f.message) for f in record.failures]


def test_a_float32_result_that_is_computed_in_bfloat16() -> None:
    """A result may be as coarse as PyTorch's own."""

    def squares(x: Tensor) -> tuple[Tensor, Tensor]:
        square = x * x
        return square, square.sum(-1).float()

    def candidate(x: Tensor) -> tuple[Tensor, Tensor]:
        square = x * x
        return square, square[..., 1::2].sum(-1).float() + square[..., ::2].sum(-1).float()

    contract = "(x: BFloat16[Tensor, '*b n']) -> tuple[BFloat16[Tensor, '*b n'], Float32[Tensor, '*b']]"
    record = verify(candidate, reference=squares, contract=contract, checks=["numerics"])
    assert record.passed, [(f.case, f.message) for f in record.failures]


def test_a_float64_kernel_that_rounds_an_option_to_float32() -> None:
    """The second value that was tried for each option was one that float32 can represent."""

    def scale(x: Tensor, alpha: float = 1.0) -> Tensor:
        return x * alpha

    def candidate(x: Tensor, alpha: float = 1.0) -> Tensor:
        return x * torch.tensor(alpha, dtype=torch.float32).item()

    contract = "(x: Float[Tensor, 'n'], alpha: float = 1.0) -> Float[Tensor, 'n']"
    assert verify(scale, reference=scale, contract=contract, checks=["numerics"]).passed
    assert not verify(candidate, reference=scale, contract=contract, checks=["numerics"]).passed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_reference_that_casts_float64_to_float32(dtype: torch.dtype) -> None:
    """For float64 inputs, verify refused a sum in another order, and one that is computed in float64."""

    def squares(x: Tensor) -> Tensor:
        return x.float().square().sum(-1).to(x.dtype)

    def candidate(x: Tensor) -> Tensor:
        return x.to(dtype).square().cumsum(-1)[..., -1].to(x.dtype) if x.shape[-1] else x.sum(-1)

    contract = "(x: Float[Tensor, '*b n']) -> Float[Tensor, '*b']"
    record = verify(candidate, reference=squares, contract=contract, checks=["numerics", "vmap", "fresh data"])
    assert record.passed, [(f.case, f.message) for f in record.failures]


def test_a_part_in_float64_beside_one_in_float32() -> None:
    """What a reference does not cast is held to float64 nevertheless."""

    def mix(x: Tensor, y: Tensor) -> Tensor:
        return x.float().square().to(x.dtype) * 0 + y.exp()

    def candidate(x: Tensor, y: Tensor) -> Tensor:
        return x.float().square().to(x.dtype) * 0 + y.float().exp().to(y.dtype)

    contract = "(x: Float[Tensor, 'n'], y: Float[Tensor, 'n']) -> Float[Tensor, 'n']"
    assert verify(mix, reference=mix, contract=contract, checks=["numerics"]).passed
    assert not verify(candidate, reference=mix, contract=contract, checks=["numerics"]).passed


# --- constants, which are float32 whatever the inputs are -----------------------------------------------


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    half = x.shape[-1] // 2
    frequency = 1 / base ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
    angle = torch.arange(x.shape[-2]).float()[:, None] * frequency
    return rotate_by(angle, x)


def rotate_by(angle: Tensor, x: Tensor) -> Tensor:
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


ROTATED = "(x: Float[Tensor, '*b t 2*h'], base: float = 10000.0) -> Float[Tensor, '*b t 2*h']"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_angle_by_another_formula(dtype: torch.dtype) -> None:
    """An angle of 500 is off by 3e-5 in float32; the oracle took it for exact."""

    def candidate(x: Tensor, base: float = 10000.0) -> Tensor:
        half = x.shape[-1] // 2
        exponent = torch.arange(half, dtype=dtype) * (-torch.tensor(base, dtype=dtype).log() / max(half, 1))
        return rotate_by(torch.arange(x.shape[-2], dtype=dtype)[:, None] * exponent.exp(), x)

    check(candidate, rotate, ROTATED)


def test_an_angle_of_coarser_numbers() -> None:
    def candidate(x: Tensor, base: float = 10000.0) -> Tensor:
        half = x.shape[-1] // 2
        frequency = 1 / base ** (torch.arange(0, 2 * half, 2).float() / (2 * half))
        return rotate_by(torch.arange(x.shape[-2]).float()[:, None] * frequency.bfloat16().float(), x)

    assert not verify(candidate, reference=rotate, contract=ROTATED, checks=["numerics"]).passed


@pytest.mark.parametrize("is_right", [True, False])
def test_numbers_that_are_made_of_integers(is_right: bool) -> None:
    """Integers times 0.9 are float32 in PyTorch; a kernel for float64 computes them in that."""

    def smoothed(x: Tensor, target: Tensor, s: float = 0.1) -> Tensor:
        wanted = F.one_hot(target, x.shape[-1]) * (1 - s) + s / x.shape[-1]
        return -(wanted.to(x.dtype) * torch.log_softmax(x, -1)).sum(-1)

    def candidate(x: Tensor, target: Tensor, s: float = 0.1) -> Tensor:
        losses = -torch.log_softmax(x.to(torch.promote_types(x.dtype, torch.float32)), -1)
        part = s if is_right else s + 1e-4
        loss = (1 - s) * losses.gather(-1, target[..., None])[..., 0] + part / x.shape[-1] * losses.sum(-1)
        return loss.to(x.dtype)

    contract = "(x: Float[Tensor, '*b n'], target: Annotated[Int64[Tensor, '*b'], Index('n')], s: float = 0.1)"
    contract += " -> Float[Tensor, '*b']"
    if is_right:
        check(candidate, smoothed, contract)
    else:
        assert not verify(candidate, reference=smoothed, contract=contract, checks=["numerics"]).passed


def test_a_reference_that_returns_float32_for_another_dtype(ns) -> None:
    """The message was that `out=` gives different values; the declaration sees float32 alone."""

    @operator(f"{ns}::halved")
    def halved(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * (torch.arange(x.shape[0]) * 0.5).sum()[None]

    failures = verify(halved, checks=["outputs written", "numerics"]).failures
    assert failures[0].check == "outputs written"
    assert "the reference returns torch.float32, and its annotation says torch.float16" in failures[0].message
