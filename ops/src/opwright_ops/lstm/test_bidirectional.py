"""The operator `lstm_bidirectional`: two `lstm`, to the bit, whether at the same time or in turn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import opwright
from opwright_ops.lstm import lstm, lstm_bidirectional
from opwright_ops.lstm.bidirectional import lstm_bidirectional_baseline
from opwright_ops.lstm.samples import inputs_of

NORMS = "norm_ih norm_hh norm_c"
MANY = f"bias weight_hr peephole {NORMS} h_mask lengths reset seed"
# The weights of a direction among the arguments of `lstm`, and what it has more of its own.
WEIGHTS, STATE, MORE = slice(3, 12), (1, 2), (12, 14, 15)
# Sizes whose directions run at the same time with two threads, and whose weights are too large for that.
AT_ONCE, IN_TURN = (5, 7, 9, 65, 65), (2, 1, 3, 640, 640)


def pair(sizes: tuple[int, ...], present: str, dtype: torch.dtype) -> tuple[list[list], list]:
    """Returns the arguments of `lstm` for each direction, and those of both."""
    one, other = (list(inputs_of(sizes, present, dtype, seed)) for seed in (1, 2))
    other[0], other[13] = one[0], one[13]
    stack = lambda i: None if one[i] is None else torch.stack([one[i], other[i]])  # noqa: E731
    both = [one[0], *map(stack, STATE), *one[WEIGHTS], *other[WEIGHTS], stack(12), one[13], *map(stack, MORE[1:])]
    return [one, other], both


def leaves(values: list) -> list:
    return [v.requires_grad_() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def loss(outputs) -> Tensor:
    return sum(torch.cos(r.double()).sum() for r in outputs[:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("sizes", "present", "options"),
    [
        (AT_ONCE, "bias", {"keep_gates": 1}),
        (IN_TURN, "bias", {"keep_gates": 1}),
        ((5, 7, 5, 33, 17), MANY, {"zoneout_h": 0.3, "zoneout_c": 0.4, "keep_gates": 1, "keep_cells": 1}),
        ((3, 2, 4, 17, 17), "peephole no_state", {"activation": "hard", "slope": 0.2, "coupled": True, "clip": 1.5}),
        ((0, 3, 4, 5, 5), "bias", {"keep_cells": 1}),
        ((3, 0, 4, 5, 5), "bias", {}),
    ],
    ids=["at once", "in turn", "everything", "hard", "no steps", "no entries"],
)  # fmt: skip
def test_it_is_two_directions(sizes, present, options, dtype) -> None:
    singles, both = pair(sizes, present, dtype)
    got = lstm_bidirectional(*leaves(both), **options)
    found = [lstm(*leaves(v), reverse=d, **options) for d, v in zip((False, True), singles, strict=True)]
    want = [
        torch.cat([f.output for f in found], -1), torch.stack([f.h_n for f in found]),
        torch.stack([f.c_n for f in found]), torch.cat([f.cells for f in found], -1),
        torch.stack([f.gates for f in found]),
    ]  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    loss(got).backward()
    loss(want).backward()
    (one, other), stacked = singles, [*STATE, *(i for i in MORE if i == 12)]
    places = dict(zip(stacked, (1, 2, 21), strict=True))
    for i in stacked:
        if one[i] is not None:
            assert torch.equal(both[places[i]].grad, torch.stack([one[i].grad, other[i].grad]))
    for mine, theirs in zip(both[3:21], [*one[WEIGHTS], *other[WEIGHTS]], strict=True):
        assert mine is None or torch.equal(mine.grad, theirs.grad)
    assert torch.equal(both[0].grad, one[0].grad)


def test_the_same_bits_for_any_number_of_threads() -> None:
    _, both = pair((6, 5, 9, 80, 80), "bias lengths", torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 4):
            torch.set_num_threads(count)
            given = leaves([v.detach() if isinstance(v, Tensor) else v for v in both])
            result = lstm_bidirectional(*given, keep_gates=1)
            inputs = [v for v in given if isinstance(v, Tensor) and v.requires_grad]
            found.append([*result, *torch.autograd.grad(loss(result), inputs)])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_derivatives() -> None:
    """First, forward-mode and second derivatives against finite differences."""
    _, both = pair((2, 2, 1, 2, 1), "bias weight_hr lengths", torch.float64)
    inputs = [v.requires_grad_() for v in both if isinstance(v, Tensor) and v.is_floating_point()]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        pending = iter(tensors)
        given = [next(pending) if v is not None and v.is_floating_point() else v for v in both]
        return tuple(lstm_bidirectional(*given)[:3])

    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, inputs)


def test_vmap_over_the_batch_is_one_call_of_the_kernel() -> None:
    _, both = pair((5, 4, 3, 17, 17), "bias h_mask lengths reset seed", torch.float32)
    dims = (1, 1, 1, *[None] * 18, 1, 0, 2, 1)
    call = lambda *v: tuple(lstm_bidirectional(*v, zoneout_h=0.2, keep_gates=1))  # noqa: E731
    for a, b in zip(torch.vmap(call, dims, (1, 1, 1, 1, 2))(*both), call(*both), strict=True):
        assert torch.equal(a, b)


def test_opcheck() -> None:
    _, both = pair((3, 2, 2, 3, 2), MANY, torch.float32)
    torch.library.opcheck(torch.ops.opwright_ops.lstm_bidirectional.default, tuple(leaves(both)), {"keep_gates": 1})


def test_the_baseline_computes_the_same() -> None:
    _, both = pair((5, 3, 4, 6, 6), "bias", torch.float64)
    output, h_n, c_n, *_ = lstm_bidirectional(*both)
    found = lstm_bidirectional_baseline(
        *both, activation="soft", coupled=False, clip=0.0, zoneout_h=0.0, zoneout_c=0.0, keep_cells=0, keep_gates=0
    )
    torch.testing.assert_close(found, (output, h_n, c_n))


@pytest.mark.slow
@pytest.mark.compiler
def test_verify() -> None:
    record = opwright.verify(lstm_bidirectional)
    assert record.passed, record.failures
    assert record.backends == ["cpu"]
