"""Infinities and NaN in inputs: where another formula, or a kernel that skips what has no weight, may differ."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from opwright import verify


def failures(candidate, reference, contract: str) -> list[tuple[str, str]]:
    record = verify(candidate, reference=reference, contract=contract, checks=["numerics"])
    return [(f.case, f.message) for f in record.failures]


def attend(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(~mask_of(keep), -math.inf)
    return scores.softmax(-1) @ v


def mask_of(keep: Tensor) -> Tensor:
    t = keep.shape[-1]
    return (keep[..., None, :] & torch.ones(t, t, dtype=torch.bool).tril()) | torch.eye(t, dtype=torch.bool)


def attend_row_by_row(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    mask, rows = mask_of(keep), []
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            at = mask[b, i]
            rows.append((q[b, i] @ k[b, at].mT).softmax(-1) @ v[b, at])
    return torch.stack(rows).view_as(v) if rows else torch.empty_like(v)


ATTEND = "(q: Float32[Tensor, 'b t d'], k: Float32[Tensor, 'b t d'], v: Float32[Tensor, 'b t e'], "
ATTEND += "keep: Bool[Tensor, 'b t']) -> Float32[Tensor, 'b t e']"


def test_masked_keys_that_are_skipped() -> None:
    """Zero times infinity is NaN in the reference; who skips the key, as attention by blocks does, has a number."""
    assert not failures(attend_row_by_row, attend, ATTEND)


def test_keys_that_are_skipped_and_are_not_masked() -> None:
    def candidate(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return attend_row_by_row(q, k, v, keep & (torch.arange(keep.shape[-1]) != 1))

    assert failures(candidate, attend, ATTEND)


@pytest.mark.parametrize("is_right", [True, False])
def test_an_average_as_an_interpolation(is_right: bool) -> None:
    """At an infinity a + w (b - a) is NaN, and at -0 it is +0."""

    def reference(average: Tensor, value: Tensor, decay: float = 0.9) -> None:
        average.mul_(decay).add_(value, alpha=1 - decay)

    def candidate(average: Tensor, value: Tensor, decay: float = 0.9) -> None:
        wide = average.double()
        part = 1 - decay if is_right else decay
        average.copy_(wide + part * (value.double() - wide))

    contract = "(average: Mutates[Float32[Tensor, 'n']], value: Float32[Tensor, 'n'], decay: float = 0.9) -> None"
    assert bool(failures(candidate, reference, contract)) != is_right


def test_a_row_that_is_masked_as_a_whole() -> None:
    """The maximum in x - max(x) is not an input, so NaN where the reference has -inf is a failure."""

    def candidate(x: Tensor) -> Tensor:
        largest = x.amax(-1)
        return (x - largest[..., None]).exp().sum(-1).log() + largest

    contract = "(x: Float[Tensor, '*b 7']) -> Float[Tensor, '*b']"
    assert failures(candidate, lambda x: torch.logsumexp(x, -1), contract)


def test_a_nan_alone_in_its_row() -> None:
    """Beside an infinity, which was in the same row, it might have come from that."""

    def largest(x: Tensor) -> Tensor:
        found = torch.full(x.shape[:-1], -math.inf)
        for column in x.unbind(-1):
            found = torch.where(column > found, column, found)
        return found

    samples = [(torch.randn(5, 33),)]
    record = verify(largest, reference=lambda x: x.amax(-1), samples=samples, checks=["numerics"])
    assert "with one NaN" in record.failures[0].case
