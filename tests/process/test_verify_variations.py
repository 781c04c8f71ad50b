"""Inputs that follow from a sample of a callable: what they find, and which right results must pass."""

from __future__ import annotations

import functools
import math
import re

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

import opwright
from opwright.errors import CheckError
from opwright.verify.checks.memory import _large_case
from opwright.verify.inputs.budget import Pace
from opwright.verify.target import make_target


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def verify(candidate, reference, sample, checks: tuple[str, ...] = ("numerics",)):
    return opwright.verify(candidate, reference=reference, samples=[sample], checks=checks, quick=True)


class NoAffine(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape)


class SecondHalf(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        return centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def variance_of_squares(x: Tensor) -> Tensor:
    n = x.shape[-1]
    return ((x * x).mean(-1) - x.mean(-1) ** 2) * (n / (n - 1))


def logsumexp_of_finite(x: Tensor) -> Tensor:
    largest = x.amax(-1, keepdim=True)
    return (x - largest).exp().sum(-1).log() + largest.squeeze(-1)


def softmax_in_blocks(x: Tensor) -> Tensor:
    return torch.cat([torch.softmax(part, -1) for part in x.split(1024, -1)], -1)


def sum_of_steps(x: Tensor, dim: int) -> Tensor:
    """Takes blocks of 32, then one of 16, and no more."""
    blocks = x.shape[dim] // 32 * 32
    return x.narrow(dim, 0, blocks).sum(dim) + x.narrow(dim, blocks, min(x.shape[dim] - blocks, 16)).sum(dim)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(~mask, -1.0)


WRONG = {
    "mean far from zero": (variance_of_squares, lambda x: x.var(-1), (drawn(9, 40),)),
    "infinities alone": (logsumexp_of_finite, lambda x: torch.logsumexp(x, -1), (drawn(8, 33),)),
    "a wide axis": (softmax_in_blocks, lambda x: torch.softmax(x, -1), (drawn(8, 64),)),
    "a tail of more than one step": (lambda x: sum_of_steps(x, -1), lambda x: x.sum(-1), (drawn(8, 64),)),
    "a tail of rows that are added up": (lambda x: sum_of_steps(x, 0), lambda x: x.sum(0), (drawn(64, 8),)),
    "an option made an integer": (
        lambda x, limit: x.clamp(max=int(limit)), lambda x, limit: x.clamp(max=limit), (4 * drawn(8, 64), 6.0)
    ),
    "an option in half precision": (
        lambda x, by: x * torch.tensor(by).half().item(), lambda x, by: x * by, (drawn(8, 64), 0.5)
    ),
    "two entries": (
        lambda x: torch.var_mean(x, -1, correction=int(x.shape[-1] > 2)), lambda x: torch.var_mean(x, -1), (drawn(6, 40),)
    ),
    "weights of ones": (NoAffine(32), nn.LayerNorm(32), (drawn(6, 32),)),
    "a state of zeros": (lambda x, h: x.tanh(), lambda x, h: torch.tanh(x + h), (drawn(6, 8), torch.zeros(6, 8))),
    "a mask of ones": (lambda x, m: x.clone(), masked, (drawn(6, 8), torch.ones(6, 8, dtype=torch.bool))),
    "eps": (
        lambda x, eps: F.layer_norm(x, x.shape[-1:]), lambda x, eps: F.layer_norm(x, x.shape[-1:], eps=eps), (drawn(8, 64), 1e-5)
    ),
    "keepdim": (lambda x, *, keepdim: x.sum(-1), lambda x, *, keepdim: x.sum(-1, keepdim), ((drawn(4, 5),), {"keepdim": False})),
    "a negative axis": (lambda x, dim: x.sum(max(dim, 0)), lambda x, dim: x.sum(dim), (drawn(4, 5, 6), 1)),
    "the least integer": (
        lambda x: x.short().abs().clamp(max=127).char(), lambda x: x.abs(), (torch.arange(-20, 20, dtype=torch.int8),)
    ),
    "probabilities of zero": (
        lambda x, t: (t * (t.log() - x)).sum(), lambda x, t: F.kl_div(x, t, reduction="sum"),
        (drawn(6, 5).log_softmax(-1), drawn(5, 6).T.softmax(-1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_variations_find_what_the_sample_does_not_show(name: str) -> None:
    candidate, reference, sample = WRONG[name]
    assert not verify(candidate, reference, sample).passed
    plain = opwright.verify(candidate, reference=reference, samples=[sample], checks=["numerics"], expand=False)
    assert plain.passed  # so it is the variation that has found it


def made_for_one_option(x: Tensor, k: int) -> Tensor:
    if k != 4:
        raise NotImplementedError("k = 4 only")
    return x.sort(-1, descending=True).values[..., :4]


def softmax_by_powers_of_two(x: Tensor) -> Tensor:
    powers = torch.exp2((x - x.amax(-1, keepdim=True)) * math.log2(math.e))
    return powers / powers.sum(-1, keepdim=True)


def convolution_of_windows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    windows = F.pad(x, (2, 2)).unfold(-1, weight.shape[-1], 1)
    return torch.einsum("nclk,ock->nol", windows, weight) + bias[:, None]


def product_of_parts(a: Tensor, b: Tensor) -> Tensor:
    return torch.complex(a.real @ b.real - a.imag @ b.imag, a.real @ b.imag + a.imag @ b.real)


RIGHT = {
    "made for one option": (made_for_one_option, lambda x, k: x.topk(k).values, (drawn(5, 30), 4)),
    "equal numbers in any order": (
        lambda x: x.sort(-1, descending=True).indices[:, :3], lambda x: x.topk(3).indices, (drawn(5, 30),)
    ),
    "a mean of infinities": (
        lambda x: (((x - x.mean(-1, keepdim=True)) ** 2).sum(-1) / (x.shape[-1] - 1), x.mean(-1)),
        lambda x: torch.var_mean(x, -1), (drawn(6, 40),),
    ),
    "an option that draws": (
        lambda x, p, train: x.clone(), lambda x, p, train: F.dropout(x, p, train), (drawn(6, 40), 0.5, False)
    ),
    "softmax by powers of two": (softmax_by_powers_of_two, lambda x: torch.softmax(x, -1), (drawn(6, 40),)),
    "layer norm in steps": (SecondHalf(64), nn.LayerNorm(64), (drawn(8, 64),)),
    "convolution": (
        convolution_of_windows, lambda x, w, b: F.conv1d(x, w, b, padding=2), (drawn(2, 3, 32), drawn(4, 3, 5), drawn(4))
    ),
    "Fourier transform": (
        lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1]), lambda x: torch.fft.ifft(torch.fft.fft(x) * 2).real,
        (drawn(6, 40),),
    ),
    "complex product": (
        product_of_parts, lambda a, b: a @ b,
        (torch.complex(drawn(4, 6), drawn(6, 4).T.contiguous()), torch.complex(drawn(6, 5), drawn(5, 6).T.contiguous())),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_variations_accuse_nobody_who_is_right(name: str) -> None:
    record = verify(*RIGHT[name])
    assert record.passed, [(f.case, f.message) for f in record.failures]


def test_a_candidate_that_takes_no_gradients_is_not_asked_for_them() -> None:
    checks = ("numerics", "gradient numerics", "second gradients")
    record = verify(lambda x: torch.from_numpy(x.numpy() * 2), lambda x: x * 2, (drawn(4, 5),), checks)
    outcomes = {check.name: check.outcome for check in record.checks}
    assert outcomes == {"numerics": "passed", "gradient numerics": "skipped", "second gradients": "skipped"}
    record = verify(lambda x: torch.from_numpy(x.numpy() * 2), lambda x: x * 2, (drawn(4, 5).requires_grad_(),), checks)
    assert not record.passed  # a sample that requires one asks for it


def test_a_class_of_modules_is_refused_with_what_to_type() -> None:
    with pytest.raises(CheckError) as caught:
        opwright.verify(NoAffine, reference=nn.LayerNorm(32), samples=[(drawn(6, 32),)])
    assert "this is a class of modules" in str(caught.value)
    assert "`NoAffine(...)`" in str(caught.value)


def test_no_input_is_made_that_is_too_large_to_be_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three axes of a weight have the size of the channels: with 513 of each it would be half a billion numbers."""
    made = []
    rand = torch.rand

    def counted(shape, **options):
        made.append(math.prod(shape))
        assert made[-1] < 2**20
        return rand(shape, **options)

    monkeypatch.setattr("opwright.verify.inputs.variations.torch.rand", counted)
    conv = functools.partial(F.conv2d, padding=1)
    sample = (torch.randn(2, 3, 6, 7), torch.randn(4, 3, 3, 3))
    record = opwright.verify(conv, reference=conv, samples=[sample], checks=["numerics"], isolated=False)
    assert record.passed, record.failures
    assert made


@pytest.mark.parametrize("grows", ["a tensor", "a loop"])
def test_a_reference_that_grows_faster_than_its_input_gets_no_large_part(grows: str) -> None:
    """The distances of 8,201 rows are 67 million numbers, and 8,201 steps of a loop take seconds."""
    rows = []

    def reference(x: Tensor) -> Tensor:
        rows.append(len(x))
        return (x[:, None] - x).abs().amax(1) if grows == "a tensor" else torch.stack([row * 2 for row in x])

    record = opwright.verify(reference, reference=reference, samples=[(drawn(4),)], checks=["numerics"], isolated=False)
    assert record.passed, record.failures
    assert 1000 < max(rows) < 5000


@pytest.mark.parametrize("seconds", [1e-9, 2e-5])
def test_a_slow_reference_gets_one_large_input(ns, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A loop in Python over 48 thousand elements takes a second, and each dtype had a dozen inputs of that size."""
    now = [0.0]
    monkeypatch.setattr("opwright.verify.inputs.budget.time.perf_counter", lambda: now[0])

    @opwright.operator(f"{ns}::twice")
    def twice(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        now[0] += seconds * x.numel()
        return x * 2

    cases = [case for case in make_target(twice, None, None).cases() if not case.label.startswith("long")]
    large = sum(case.values[0].numel() > 20_000 for case in cases)
    assert large == 1 if seconds > 1e-6 else large > 10


@pytest.mark.parametrize("power", [1, 2])
def test_memory_is_not_measured_where_the_reference_would_take_minutes(
    ns, monkeypatch: pytest.MonkeyPatch, power: int
) -> None:
    """One million elements cost 256 times as much as 64 thousand where each is compared with all others."""
    now = [0.0]
    monkeypatch.setattr("opwright.verify.inputs.budget.time.perf_counter", lambda: now[0])

    @opwright.operator(f"{ns}::twice")
    def twice(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        now[0] += 0.15 * (x.numel() / 65_536) ** power / (8 if power == 1 else 1)
        return x * 2

    assert (_large_case(make_target(twice, None, None))[0] is None) == (power == 2)


def test_a_case_that_takes_minutes_is_told_in_whole_seconds() -> None:
    """It was told as `one takes up to 2.6e+02 s`."""
    pace = Pace(0.0)
    pace._costs, pace._skipped = [(1, 259.6)], 3
    assert pace.tell() == "1 of 4 cases: one takes up to 260 s"


def test_a_slow_candidate_gets_the_sample_and_what_the_time_is_enough_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("opwright.verify.inputs.budget.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("opwright.verify.inputs.budget.seconds_for_check", lambda: 10.0)  # whatever the machine does

    def slow(x: Tensor) -> Tensor:
        now[0] += 6
        return x * 2

    def check(name: str, *samples: Tensor):
        record = opwright.verify(
            slow, reference=lambda x: x * 2, samples=[(x,) for x in samples], checks=[name], isolated=False
        )
        assert record.passed
        return record.checks[0]

    few = check("numerics", drawn(3, 5))
    assert few.cases == len(few.errors) == 2
    assert re.fullmatch(r"2 of more than \d\d cases: one takes up to 6.0 s", few.note)
    every = check("numerics", drawn(3, 5), drawn(4, 6), drawn(5, 7))
    assert [error.case for error in every.errors][:3] == [
        "f32[3, 5] (sample 0)",
        "f32[4, 6] (sample 1)",
        "f32[5, 7] (sample 2)",
    ]


def by_windows(x: Tensor) -> Tensor:
    return x.unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))


def one_after_the_other(x: Tensor) -> Tensor:
    found, total = torch.empty_like(x), torch.zeros_like(x[..., 0])
    for i in range(x.shape[-1]):
        total = total + x[..., i]
        found[..., i] = total
    return found


def by_halves(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        ahead, behind = x.tensor_split(2, -1)
        x = torch.cat([ahead[..., : behind.shape[-1]] * behind, ahead[..., behind.shape[-1] :]], -1)
    return x.reshape(x.shape[:-1]) if x.shape[-1] else x.new_ones(x.shape[:-1])


def added_one_by_one(x: Tensor, at: Tensor, terms: Tensor) -> Tensor:
    found = x.clone()
    for i, term in zip(at.tolist(), terms, strict=True):
        found[i] += term
    return found


@pytest.mark.parametrize(
    ("candidate", "reference", "sample"),
    [
        (by_windows, functools.partial(F.avg_pool2d, kernel_size=2), (drawn(2, 3, 6, 8),)),
        (one_after_the_other, functools.partial(torch.cumsum, dim=-1), (drawn(4, 300),)),
        (by_halves, functools.partial(torch.prod, dim=-1), (drawn(4, 40),)),
        (
            added_one_by_one,
            lambda x, at, terms: x.index_add(0, at, terms),
            (drawn(6, 5), torch.arange(60) * 7 % 6, drawn(60, 5)),
        ),
    ],
)
def test_sums_and_products_in_another_order_are_right(candidate, reference, sample) -> None:
    """Of pools, cumulative ones, and of what is scattered: PyTorch has one operator for each."""
    assert verify(candidate, reference, sample).passed
    by_16_bits = verify(
        lambda *given: candidate(*(t.bfloat16() if t.is_floating_point() else t for t in given)).float(),
        reference,
        sample,
    )
    assert not by_16_bits.passed
