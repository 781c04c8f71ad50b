"""Impostors that are right on their samples: derived inputs expose them, and right candidates pass."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

import opwright
from opwright.verify.checks import memory as memory_checks
from opwright.verify.checks.memory import _resident_peak
from opwright.verify.compare import pattern_of
from opwright.verify.inputs.variations import enlarge, resized_cases
from opwright.verify.target import make_target


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")  # keeps the sign of zero on every CPU


def samples() -> list[tuple[Tensor, ...]]:
    made = torch.Generator().manual_seed(0)
    return [(torch.randn(n, h, generator=made), torch.randn(h, generator=made)) for n, h in ((13, 37), (40, 96))]


def failures(candidate: Callable, reference: Callable = bias_gelu, given=samples, **options) -> dict[str, str]:
    record = opwright.verify(candidate, reference=reference, samples=given, **options)
    return {failure.check: f"{failure.case}: {failure.message}" for failure in record.failures}


# --- values, layouts, sizes ------------------------------------------------------------------------------------


def mixed_layouts(x: Tensor, bias: Tensor) -> Tensor:
    return bias_gelu(x, bias) * (1 if x.is_contiguous() == bias.is_contiguous() else 1.01)


def empty_shape(x: Tensor, bias: Tensor) -> Tensor:
    return bias_gelu(x, bias) if x.numel() else x.new_empty(0)


def empty_exit(x: Tensor, bias: Tensor) -> Tensor:
    if not x.numel():
        raise SystemExit(0)
    return bias_gelu(x, bias)


def denormals_flushed(x: Tensor, bias: Tensor) -> Tensor:
    y = bias_gelu(x, bias)
    return torch.where(y.abs() < torch.finfo(y.dtype).tiny, torch.zeros_like(y).copysign(y), y)


def sign_lost(x: Tensor, bias: Tensor) -> Tensor:
    return bias_gelu(x, bias) + 0.0


def last_rows(x: Tensor, bias: Tensor) -> Tensor:
    y = bias_gelu(x, bias)
    y[65_536:] = 0
    return y


IN_THE_INPUTS = {
    "mixed layouts": (mixed_layouts, "columns"),
    "shape for an empty input": (empty_shape, "empty"),
    "exit for an empty input": (empty_exit, "empty"),
    "denormals flushed": (denormals_flushed, "special values in argument"),
    "sign of zero lost": (sign_lost, "special values in argument"),
    "from row 65 536 on": (last_rows, "65599 rows"),
}


@pytest.mark.parametrize("kind", IN_THE_INPUTS)
def test_seen_in_the_inputs(kind: str) -> None:
    candidate, label = IN_THE_INPUTS[kind]
    found = failures(candidate, checks=["numerics"])
    assert label in found["numerics"]
    assert not failures(candidate, checks=["numerics"], expand=False)


def test_infinities_that_another_input_would_hide() -> None:
    """Where the other input is random, the larger of the two is mostly finite."""

    def clipped(x: Tensor, y: Tensor) -> Tensor:
        return torch.maximum(x, y).clamp(max=torch.finfo(x.dtype).max)

    given = [(torch.randn(5, 64), torch.full((5, 64), torch.inf).nan_to_num(posinf=7.5))]
    assert "infinities and NaN" in failures(clipped, torch.maximum, given, checks=["numerics"])["numerics"]


def test_ones_stand_beside_special_values_where_zero_hides_them() -> None:
    cases = make_target(torch.mul, torch.mul, [(torch.randn(40), torch.randn(40))]).cases()
    labels = {case.label.partition(", ")[2] for case in cases}
    assert {"special values in argument 0, others 1", "special values in argument 1, others 1"} <= labels
    assert "special values in argument 0, others -0" not in labels


def cases_of(reference: Callable, given: list, **options) -> list[list[tuple[int, ...]]]:
    target = make_target(reference, reference, given, **options)
    return [[tuple(v.shape) for v in case.values if isinstance(v, Tensor)] for case in resized_cases(target)]


def test_other_sizes_are_those_that_the_reference_takes() -> None:
    x, y = torch.randn(6, 33), torch.randn(33)
    empty, others = (
        [[(0, 33), (33,)], [(6, 0), (0,)]],
        [[(5, 4223), (4223,)], [(5, 2), (2,)], [(2, 5), (5,)], [(1, 5), (5,)]],
    )
    assert cases_of(torch.add, [(x, y)]) == [*empty, [(65_599, 5), (5,)], *others]
    assert cases_of(torch.add, [(x, y)], expand=False) == []
    square = torch.randn(33, 33)
    assert cases_of(torch.matmul, [(square, square.clone())])[-5:] == [
        [(65_599, 5), (5, 5)],
        [(2, 2), (2, 2)],
        [(1, 1), (1, 1)],
        [(5, 5), (5, 36)],
        [(36, 5), (5, 5)],
    ]
    fixed = cases_of(lambda x, w: F.layer_norm(x, (33,), w), [(x, y)])
    assert fixed == [[(0, 33), (33,)], [(65_599, 33), (33,)]]
    means = cases_of(lambda x: x.mean(0), [(x,)])
    assert means[:2] == [[(6, 0)], [(5, 4223)]]  # no number, and no row of the result
    assert [(4223, 5)] in means
    assert [(65_599, 5)] not in cases_of(lambda x: torch.stack([row + 1 for row in x]), [(x,)])  # a loop: minutes
    assert [(65_599, 33)] not in cases_of(lambda x: (x @ x.T).softmax(-1) @ x, [(x,)])  # all rows with each other


def test_a_candidate_for_the_sizes_of_its_samples_may_refuse_others() -> None:
    def strict(x: Tensor, bias: Tensor) -> Tensor:
        assert x.shape in ((13, 37), (40, 96))
        return bias_gelu(x, bias)

    assert not failures(strict, quick=True)


def test_memory_is_measured_with_more_rows() -> None:
    def greedy(x: Tensor, bias: Tensor) -> Tensor:
        return bias_gelu(x, bias) + 0 * torch.ones(32, *x.shape).sum(0)

    assert "the peak of a call" in failures(greedy, checks=["memory"])["memory"]
    record = opwright.verify(bias_gelu, reference=bias_gelu, samples=samples, checks=["memory"])
    assert [check.outcome for check in record.checks] == ["passed"]
    case = enlarge(make_target(bias_gelu, bias_gelu, samples), 2**22)
    assert case.values[0].shape[1:] == case.values[1].shape == (96,)
    assert 4 * case.values[0].numel() >= 2**22


def test_a_peak_is_what_lies_there_at_once_however_memory_was_used_before() -> None:
    x, cpu = torch.randn(2**20), torch.device("cpu")
    _resident_peak(lambda: 0.5 * x * torch.erfc(-x), cpu)  # from here on malloc keeps large blocks to itself
    blocks = [torch.ones(2**20 + 2**18 * (i % 3)) for i in range(24)]
    del blocks[::2]  # holes, into which tensors fit
    peaks = [_resident_peak(lambda: 0.5 * x * torch.erfc(-x), cpu) / 2**20 for _ in range(8)]
    assert all(11.5 < peak < 13 for peak in peaks), peaks


# --- calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checks", [None, ["outputs written"], ["numerics"], ["determinism"]])
def test_the_first_call_of_all_is_judged(checks: list[str] | None) -> None:
    calls = []

    def warming_up(x: Tensor, bias: Tensor) -> Tensor:
        calls.append(1)
        return bias_gelu(x, bias) * (1.01 if len(calls) == 1 else 1)

    found = failures(warming_up, checks=checks, quick=True)
    assert len(found) == 1
    if checks is None:
        assert "the first call with it is wrong, the second right" in found["outputs written"]


# --- second gradients ------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 3 * grad * ctx.saved_tensors[0] ** 2


class Forgetful(Cube):
    """As a backward in another language: nothing records what it computes."""

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return Cube.backward(ctx, grad).detach()


class Half(Cube):
    """Its backward can be differentiated by the gradient, and by the input it cannot."""

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 3 * grad * ctx.saved_tensors[0].detach() ** 2


class Refusing(Cube):
    backward = staticmethod(once_differentiable(lambda ctx, grad: 3 * grad * ctx.saved_tensors[0] ** 2))


@pytest.mark.parametrize(("candidate", "outcome"), [
    (Cube, "passed"), (Forgetful, "failed"), (Half, "failed"), (Refusing, "skipped"),
])  # fmt: skip
def test_second_gradients_of_a_callable(candidate: type, outcome: str) -> None:
    record = opwright.verify(candidate, reference=lambda x: x**3, samples=[(torch.randn(4, 9),)])
    found = {check.name: check for check in record.checks}
    assert found["second gradients"].outcome == outcome
    assert found["gradient numerics"].outcome == "passed"
    if outcome == "skipped":
        assert "its backward refuses to be differentiated" in found["second gradients"].reason


def test_no_second_gradient_where_the_reference_has_none() -> None:
    record = opwright.verify(
        Forgetful, reference=lambda x: Refusing.apply(x), samples=[(torch.randn(4, 9),)], checks=["second gradients"]
    )
    assert "the reference has no second gradient" in record.checks[0].reason


# --- leaks -----------------------------------------------------------------------------------------------------


def keeping(most: int, seconds: float = 0.0) -> Callable:
    kept: list = []

    def call(x: Tensor) -> Tensor:
        time.sleep(seconds)
        if len(kept) < most:
            kept.append([x.exp().tolist()])
        return x + 1

    return call


def leaks_of(candidate: Callable, reference: Callable = lambda x: x + 1):
    given = [(torch.randn(3),)]
    return opwright.verify(candidate, reference=reference, samples=given, checks=["leaks"]).checks[0]


@pytest.mark.parametrize("most", [10, 150, 300, 500, 900])
def test_a_cache_that_fills_up_is_no_leak(most: int) -> None:
    assert leaks_of(keeping(most)).outcome == "passed"


def test_a_cache_without_end_is_a_leak() -> None:
    assert leaks_of(keeping(10**9)).outcome == "failed"


def test_what_the_reference_leaves_behind_too_is_not_the_candidates() -> None:
    found = leaks_of(keeping(10**9), reference=keeping(10**9))
    assert found.outcome == "skipped"
    assert re.fullmatch(
        r"in this process 800 calls leave \d+ .* behind, .* each when the reference is called, too", found.reason
    )


def keeping_in_the_backward() -> Callable:
    kept = []

    class PlusOne(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            kept.append([object() for _ in range(3)])
            return grad.clone()

    return PlusOne.apply


def test_what_the_gradient_of_the_reference_leaves_behind_too_is_not_the_candidates() -> None:
    given = [(torch.randn(3, requires_grad=True),)]
    report = opwright.verify(
        keeping_in_the_backward(), reference=keeping_in_the_backward(), samples=given, checks=["leaks"]
    )
    assert "when the reference is called, too" in report.checks[0].reason


@pytest.mark.parametrize("most", [3, 10**9])
def test_a_few_calls_are_not_enough_for_a_verdict(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the third call, say, was said to leave three objects behind."""
    monkeypatch.setattr(memory_checks, "_MAX_SECONDS", 0.4)
    found = leaks_of(keeping(most, seconds=0.01))
    assert (found.outcome, found.reason) == ("skipped", "fewer than 100 calls fit into 0.4 s")


# --- messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("right", "text"), [
    (1, "more than 99 % of the elements, scattered"), (200, "80 % of the elements, scattered"),
])  # fmt: skip
def test_a_share_of_the_elements_reads_as_one(right: int, text: str) -> None:
    """It was `1e+02 %`."""
    wrong = torch.ones(1000, dtype=torch.bool)
    wrong[torch.randperm(998)[:right] + 1] = False
    assert pattern_of(wrong.view(10, 100)) == text
