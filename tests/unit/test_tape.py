"""Runs of the oracle that are played from what was written down of the first: the same bits, or not played at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from opwright.verify import rounding
from opwright.verify.formulas import oracle_formulas
from opwright.verify.rounding import Recording

_UNIT, _SEED, _RUNS = 2.0**-9, 5, 4


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 33, dtype=torch.float64, generator=generator)
    row = torch.randn(33, dtype=torch.float64, generator=generator)
    row[3], row[4] = 0.0, 1e-310
    return [x, row]


def _fused(values: list[Any]) -> list[torch.Tensor]:
    with oracle_formulas():
        return [torch.nn.functional.gelu(values[0] + values[1], approximate="tanh")]


def _gradient(values: list[Any]) -> Sequence[torch.Tensor]:
    with oracle_formulas(), torch.enable_grad():
        leaves = [v.detach().requires_grad_() for v in values]
        y = torch.nn.functional.gelu(leaves[0] * leaves[1].exp(), approximate="tanh").softmax(-1)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))


def _in_place(values: list[Any]) -> list[Any]:
    y = values[0].clone().mul_(2)
    y[0] = values[1]
    values[1].add_(1)
    y[1:].add_(values[1].exp())
    return [y, *torch.var_mean(y, 0), torch.cat([y, values[0]], 1), y > 0, None, y.view(-1)[5:], values[1]]


def _several_results(values: list[Any]) -> list[Any]:
    x, row = values
    with oracle_formulas():
        return [torch.nn.functional.layer_norm(x, (33,), row), *x.split(3), *torch.aminmax(x, dim=1), *x.sort(1)]


def _products(values: list[Any]) -> list[Any]:
    x, row = values
    spectrum = torch.fft.rfft(x)
    return [
        x @ x.mT,
        x @ row,
        x.sum(0),
        x.cumsum(1),
        torch.view_as_real(spectrum * spectrum.conj()),
        x.to(torch.float32),
    ]


_PLAYED: list[Callable[[list[Any]], Sequence[Any]]] = [_fused, _gradient, _in_place, _several_results, _products]
_NOT_PLAYED: dict[str, Callable[[list[Any]], Sequence[Any]]] = {
    "a number that Python sees": lambda v: [v[0] * float(v[1].sum())],
    "numbers that Python sees": lambda v: [v[0] * sum((v[1] * 2).tolist())],
    "NumPy": lambda v: [torch.from_numpy((v[0] * 2).numpy()) * 2],
    "a branch": lambda v: [v[0] * 2 if (v[1] * v[1]).sum() > 1 else v[0]],
    "a size that depends on data": lambda v: [v[0][v[0] > 0].sum()],
    "a warning": lambda v: [v[0][:1].var(0).nan_to_num() + v[0]],
    "random numbers": lambda v: [v[0] * torch.rand(33, dtype=torch.float64)],
    "a tensor made of numbers": lambda v: [v[0] * torch.tensor(2.0, dtype=torch.float64)],
}


def _runs(
    computation: Callable[[list[Any]], Sequence[Any]], monkeypatch: pytest.MonkeyPatch, may_replay: bool
) -> tuple[list[Sequence[Any]], int]:
    """Returns the results of all runs, and how often the computation was called for them."""
    calls = 0

    def counted(values: list[Any]) -> Sequence[Any]:
        nonlocal calls
        calls += 1
        return computation(values)

    with monkeypatch.context() as patch:
        if not may_replay:
            patch.setattr(Recording, "end", lambda self, outputs: self._give_up())
        torch.manual_seed(0)
        return list(rounding.round_at_random(counted, _inputs, _UNIT, _SEED, _RUNS)), calls


def _is_same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.numpy().tobytes() == other.numpy().tobytes()


@pytest.mark.parametrize("computation", _PLAYED, ids=lambda f: f.__name__.strip("_"))
def test_what_is_played_is_what_would_be_called(
    computation: Callable[[list[Any]], Sequence[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    called, calls = _runs(computation, monkeypatch, may_replay=False)
    played, times = _runs(computation, monkeypatch, may_replay=True)
    assert (calls, times) == (_RUNS, 1)
    assert all(
        _is_same(a, b) for one, other in zip(called, played, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert not _is_same(called[0][0], called[1][0])


@pytest.mark.parametrize("name", _NOT_PLAYED)
def test_what_python_may_have_decided_is_called_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called, _ = _runs(_NOT_PLAYED[name], monkeypatch, may_replay=False)
    again, calls = _runs(_NOT_PLAYED[name], monkeypatch, may_replay=True)
    assert calls == _RUNS
    assert all(_is_same(one[0], other[0]) for one, other in zip(called, again, strict=True))


def test_large_tensors_are_not_kept() -> None:
    large = torch.ones(2**20, dtype=torch.float64)
    recording = Recording([large])
    recording.note(None, torch.ops.aten.neg.default, (large,), {}, -large)
    assert recording.is_complete
    recording.note(None, torch.ops.aten.neg.default, (large,), {}, -large)
    assert not recording.is_complete


def test_rounding_imports_no_compiler(run_python: Callable) -> None:
    """A mode that PyTorch keeps from being compiled imports torch._dynamo: seconds, and more for each operator."""
    program = """
import sys, torch
from opwright.verify.formulas import Overflow, oracle_formulas
from opwright.verify.rounding import round_at_random
def compute(values):
    with oracle_formulas():
        return [torch.softmax(values[0], -1)]
def make():
    return [torch.ones(3, dtype=torch.float64)]
for _ in round_at_random(compute, make, 2.0**-24, 0, 2):
    pass
with Overflow(1e30, fill=float("nan")):
    compute(make())
print("torch._dynamo" in sys.modules)
"""
    assert run_python(program).stdout == "False\n"
