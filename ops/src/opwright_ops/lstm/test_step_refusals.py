"""What lstm_step refuses, with the types and the texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from opwright.errors import KernelError
from opwright_ops import LSTM, lstm_step
from opwright_ops.lstm.step import lstm_step_

BIDIRECTIONAL = "`lstm_step`: `lstm` must go in one direction: a stream has no end to come back from"
CONSTRUCTIONS = [
    (
        (nn.GRU(3, 4),),
        TypeError,
        "`lstm` must be an LSTM",
        "got       GRU",
        "opwright_ops.LSTM, torch.nn.LSTM",
    ),
    ((None,), TypeError, "`lstm` must be an LSTM", "NoneType"),
    ((LSTM(3, 4, bidirectional=True),), ValueError, BIDIRECTIONAL, "`LSTM(..., bidirectional=False)`"),
    ((nn.LSTM(3, 4, bidirectional=True),), ValueError, BIDIRECTIONAL),
    (
        (LSTM(3, 4, reverse=True),),
        ValueError,
        "`lstm_step`: `lstm` must go forward in time: a stream has no end to begin at",
        "`LSTM(..., reverse=False)`",
    ),
    ((LSTM(3, 4), 1, "int4"), ValueError, "`weights` is not a type", "'int4'", "'float32' | 'bfloat16' | 'int8'"),
    ((LSTM(3, 4), 1, torch.int8), ValueError, "`weights` is not a type", "torch.int8"),
    ((LSTM(3, 4), 1, []), ValueError, "`weights` is not a type", "[]"),
    ((LSTM(3, 4), -1), ValueError, "`batch_size` must not be negative", "-1"),
    ((LSTM(3, 4), 1.0), TypeError, "`batch_size` must be an int", "float 1.0"),
    ((LSTM(3, 4), None), TypeError, "`batch_size` must be an int", "NoneType"),
    ((LSTM(3, 4), True), TypeError, "`batch_size` must be an int", "bool True"),
]


def refused(kind: type[Exception], parts: tuple[str, ...], call: Callable[[], object]) -> None:
    with pytest.raises(kind) as info:
        call()
    assert info.type is kind
    text, at = str(info.value), 0
    assert text.startswith("`lstm_step`: ")
    for part in parts:
        at = text.index(part, at) + len(part)


@pytest.mark.parametrize(("arguments", "kind", "parts"), [(a, k, p) for a, k, *p in CONSTRUCTIONS])
def test_constructions_that_are_refused(arguments, kind, parts) -> None:
    refused(kind, parts, lambda: lstm_step(*arguments))


def test_computed_weights_are_refused() -> None:
    class Halved(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    for module in (LSTM, nn.LSTM):
        lstm = module(3, 4)
        step = lstm_step(lstm)
        parametrize.register_parametrization(lstm, "weight_hh_l0", Halved())
        hint = 'remove_parametrizations(lstm, "weight_hh_l0")'
        parts = ("`weight_hh_l0` is computed from others", hint)
        refused(ValueError, parts, lambda: step(torch.zeros(1, 3)))  # noqa: B023
        with pytest.raises(ValueError, match="weight_hh_l0"):
            lstm_step(lstm)(torch.zeros(1, 3))


SIZES = "expected  [B, 3] or [T, B, 3], B = 2"
INPUTS = [
    (torch.zeros(2, 4), ValueError, "`input` must have `input_size` as its last size", "f32[2, 4] cpu", SIZES),
    (torch.zeros(1, 2, 4), ValueError, "`input` must have `input_size`", SIZES),
    (torch.zeros(3, 3), ValueError, "`input` must have the entries of the state", SIZES, "`step.reset(3)`"),
    (torch.zeros(2, 1, 3), ValueError, "`input` must have the entries of the state", "`step.reset(1)`"),
    (torch.zeros(3), ValueError, "`input` must have the entries of the state", SIZES, "`step.reset(1)`"),
    (torch.zeros(()), ValueError, "`input` has the wrong number of dimensions", SIZES),
    (torch.zeros(1, 1, 2, 3), ValueError, "`input` has the wrong number of dimensions", SIZES),
    (torch.zeros(2, 3).long(), ValueError, "`input` must be of a floating-point type", "`input.float()`"),
    (torch.zeros(2, 3).bool(), ValueError, "`input` must be of a floating-point type"),
    (torch.zeros(2, 3).cfloat(), ValueError, "`input` must be of a floating-point type"),
    (torch.zeros(2, 3, device="meta"), ValueError, "`input` must be on the device", "meta", '`input.to("cpu")`'),
    ([[0.0] * 3] * 2, TypeError, "`input` must be a tensor", "list", SIZES),
    (None, TypeError, "`input` must be a tensor", "NoneType None"),
    (torch.zeros(2, 3, requires_grad=True), RuntimeError, "`input` needs a gradient, and steps have none",
     "`with torch.no_grad():`, or `input.detach()`"),
]  # fmt: skip


@pytest.mark.parametrize(("input", "kind", "parts"), [(x, k, p) for x, k, *p in INPUTS])
def test_inputs_that_are_refused(input, kind, parts) -> None:
    step = lstm_step(LSTM(3, 4), 2)
    refused(kind, parts, lambda: step(input))
    assert not step.state[0].any()


def test_inputs_that_are_refused_for_one_entry() -> None:
    step, x = lstm_step(LSTM(3, 4)), torch.zeros(1, 3)
    steps = "`input.unsqueeze(1)` for steps of one entry; `step.reset(5)` for another number of entries"
    refused(ValueError, (steps,), lambda: step(torch.zeros(5, 3)))
    first = lstm_step(LSTM(3, 4, batch_first=True))
    refused(ValueError, ("[B, T, 3]", "`input.unsqueeze(0)`"), lambda: first(torch.zeros(5, 3)))
    refused(ValueError, ("`input` must have the entries",), lambda: first(torch.zeros(5, 1, 3)))
    gradient = ("`input` needs a gradient",)
    refused(RuntimeError, gradient, lambda: step(x.clone().requires_grad_()))
    refused(RuntimeError, gradient, lambda: torch.func.grad(lambda x: step(x).sum())(x))
    with forward_ad.dual_level():
        refused(RuntimeError, gradient, lambda: step(forward_ad.make_dual(x, x)))
        assert step(x).shape == (1, 4)
    batched = ("`input` must not be batched by vmap", "`lstm_step(lstm, batch_size)`")
    refused(ValueError, batched, lambda: torch.vmap(step)(torch.zeros(2, 1, 3)))


PAIR = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
STATES = [
    (PAIR[0], TypeError, "`state` must be a pair (h, c)", "f32[1, 2, 4] cpu", "`step.state = lstm(input)[1]`"),
    (None, TypeError, "`state` must be a pair (h, c)", "NoneType"),
    ((*PAIR, *PAIR), TypeError, "`state` must be a pair (h, c)"),
    ((PAIR[0], None), TypeError, "`state: c` must be a floating-point tensor", "NoneType", "f32[1, 2, 4] cpu"),
    ((PAIR[0].long(), PAIR[1]), TypeError, "`state: h` must be a floating-point tensor", "int64[1, 2, 4]"),
    ((PAIR[0], PAIR[1][:, :1]), ValueError, "`state: c` must have the sizes", "f32[1, 1, 4]", "f32[1, 2, 4]",
     "`step.reset(batch_size)`"),
    ((PAIR[0][0], PAIR[1]), ValueError, "`state: h` must have the sizes", "f32[2, 4]"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "kind", "parts"), [(s, k, p) for s, k, *p in STATES])
def test_states_that_are_refused(state, kind, parts) -> None:
    step = lstm_step(LSTM(3, 4), 2)
    step(torch.ones(2, 3))
    before = step.state

    def set_state() -> None:
        step.state = state

    refused(kind, parts, set_state)
    assert all(map(torch.equal, step.state, before))
    refused(ValueError, ("`batch_size` must not be negative",), lambda: step.reset(-2))
    assert all(map(torch.equal, step.state, before))


@pytest.mark.compiler
def test_operator_with_too_few_blocks_of_weight_hr() -> None:
    h, c = torch.zeros(2, 128), torch.zeros(2, 16)
    packed = torch.zeros(1, 3, 64), torch.zeros(1, 128, 64)
    with pytest.raises(KernelError, match="`weight_hr` must be of a layer with the size of `h`"):
        lstm_step_(torch.ones(4, 2, 3), h, c, *packed, weight_hr=torch.zeros(1, 16, 64))
    output = lstm_step_(torch.ones(4, 2, 3), h, c, *packed, weight_hr=torch.zeros(2, 16, 64))
    assert output.shape == (4, 2, 128)
