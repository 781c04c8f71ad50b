"""Float64 is not exact: right results that use another formula pass, and what the oracle cannot tell is undecided."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from report_cases import make_verify, show
from torch import Tensor

import opwright
from opwright import operator
from opwright.cli.verify_command import _end, verify_one
from opwright.records import Check, Failure, Undecided, VerifyRecord, read, save
from opwright.report.verdict import verdict
from opwright.testing import assert_matches
from opwright.testing.generic import _run
from opwright.verify.compare import Difference, compare
from opwright.verify.oracle import expect

torch.manual_seed(0)
mp = mpmath.MPContext()
mp.dps = 700


def _compare(got: Tensor, reference: Callable[..., Tensor], *values: Tensor) -> Difference:
    with torch.no_grad():
        (expected,) = expect(lambda v: [reference(*v)], list(values))
        return compare(got, expected)


def _is_right(candidate: Callable[..., Tensor], reference: Callable[..., Tensor], *values: Tensor) -> bool:
    found = _compare(candidate(*values), reference, *values)
    assert not found.undecided
    return not found.message


# --- right formulas and wrong ones in float64 --------------------------------------------------------------


def _reference_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gelu_that_does_not_cancel_is_right(dtype: torch.dtype) -> None:
    x = torch.linspace(-18, 10, 2001, dtype=torch.float64).to(dtype)
    got = _gelu(x.double())
    if dtype == torch.float64:
        exact = [
            mp.mpf(v) / (1 + mp.exp(-2 * mp.sqrt(2 / mp.pi) * (v + mp.mpf("0.044715") * mp.mpf(v) ** 3)))
            for v in x.tolist()[::40]
        ]
        off = max(abs(float(g / e - 1)) for g, e in zip(got.tolist()[::40], exact, strict=True) if e)
        assert off < 1e-12  # the candidate is right, whatever the oracle says
        assert F.gelu(x, approximate="tanh")[0] == 0  # and PyTorch's is not
    assert _is_right(lambda x: got.to(dtype), _reference_gelu, x)


def test_a_gelu_of_an_operator_is_right_in_every_dtype() -> None:
    @operator("undecided::gelu")
    def gelu(x: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
        return torch.where(torch.isinf(x), F.gelu(x, approximate="tanh"), _gelu(x.double()).to(x.dtype))

    record = opwright.verify(gelu, reference=_reference_gelu, checks=["numerics"], quick=True, isolated=False)
    assert record.failures == []
    assert record.passed
    assert record.undecided == 0


def test_a_gelu_that_is_off_by_1e_12_is_wrong() -> None:
    x = torch.linspace(-2, 10, 501, dtype=torch.float64)
    assert _is_right(_gelu, _reference_gelu, x)
    assert not _is_right(lambda x: _gelu(x) * (1 + 1e-12), _reference_gelu, x)


def test_erf_gelu_and_gradients() -> None:
    x = torch.linspace(-26, 5, 301, dtype=torch.float64)
    assert _is_right(lambda x: 0.5 * x * torch.erfc(-x * math.sqrt(0.5)), F.gelu, x)

    def slope(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def gradient(x: Tensor) -> Tensor:
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(function(leaf).sum(), leaf)[0]

        return gradient

    x = torch.linspace(-12, 5, 101, dtype=torch.float64)
    assert _is_right(slope(_gelu), slope(_reference_gelu), x)
    assert not _is_right(lambda x: slope(_gelu)(x) * (1 + 1e-11), slope(_reference_gelu), x)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Welford's mean and sum of squares."""
    mean = torch.zeros_like(x[..., 0])
    squares = torch.zeros_like(mean)
    for i in range(x.shape[-1]):
        off = x[..., i] - mean
        mean = mean + off / (i + 1)
        squares = squares + off * (x[..., i] - mean)
    return mean, squares


def _welford(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean, squares = _moments(x)
    return (x - mean[..., None]) * (squares / x.shape[-1] + 1e-5).rsqrt()[..., None] * w + b


def _two_pass(x: Tensor, w: Tensor, b: Tensor, correction: int = 0, eps_outside: float = 0.0) -> Tensor:
    off = x - x.mean(-1, keepdim=True)
    variance = (off * off).sum(-1, keepdim=True) / (x.shape[-1] - correction)
    eps = 0.0 if eps_outside else 1e-5
    return off / (torch.sqrt(variance + eps) + eps_outside) * w + b


def _layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


@pytest.mark.parametrize(("scale", "mean"), [(1, 0), (1, 1e3), (1e-3, 1e5), (1e-8, 1)])
def test_layer_norms_by_other_formulas_are_right(scale: float, mean: float) -> None:
    values = [
        torch.randn(5, 64, dtype=torch.float64) * scale + mean,
        *torch.randn(2, 64, dtype=torch.float64),
    ]
    for candidate in (_welford, _two_pass):
        assert _is_right(candidate, _layer_norm, *values)
        assert _is_right(_layer_norm, candidate, *values)


@pytest.mark.parametrize(
    "wrong", [{"correction": 1}, {"eps_outside": 1e-5}], ids=["unbiased variance", "eps outside of the root"]
)
def test_wrong_layer_norms_are_wrong_in_float64(wrong: dict[str, Any]) -> None:
    for mean in (0, 1e3):
        values = [torch.randn(5, 64, dtype=torch.float64) + mean, *torch.randn(2, 64, dtype=torch.float64)]
        assert not _is_right(lambda *v: _two_pass(*v, **wrong), _layer_norm, *values)


def test_variances_and_sums() -> None:
    x = torch.randn(4, 300, dtype=torch.float64) + 1e4
    assert _is_right(lambda x: _moments(x)[1] / 299, lambda x: x.var(-1), x)
    assert not _is_right(lambda x: _moments(x)[1] / 300, lambda x: x.var(-1), x)

    x = torch.randn(4, 300, dtype=torch.float64)
    exact = torch.tensor([math.fsum(row) for row in x.tolist()], dtype=torch.float64)
    assert _is_right(lambda x: exact, lambda x: x.sum(-1), x)

    def compensated(x: Tensor) -> Tensor:
        total, lost = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
        for term in x.unbind(-1):
            term = term - lost
            grown = total + term
            total, lost = grown, (grown - total) - term
        return total

    assert _is_right(compensated, lambda x: x.sum(-1), x)
    assert _is_right(lambda x: x.sum(-1), compensated, x)
    assert not _is_right(lambda x: compensated(x[..., 1:]), lambda x: x.sum(-1), x)


def test_float64_inside_of_float32_and_the_reverse() -> None:
    x = torch.randn(5, 64) + 1e3
    assert _is_right(
        lambda x: _two_pass(x.double(), torch.ones(64), torch.zeros(64)).float(),
        lambda x: F.layer_norm(x, (64,)),
        x,
    )
    wide = torch.randn(300, dtype=torch.float64)
    assert not _is_right(lambda x: F.gelu(x.float()).double(), F.gelu, wide)
    assert not _is_right(lambda x: torch.digamma(x.float()).double(), torch.digamma, wide)


# --- undecided ---------------------------------------------------------------------------------------------

_NEAR_ROOT = torch.linspace(1.4616, 1.4617, 50, dtype=torch.float64)  # of digamma, where PyTorch's has lost its digits


def _digamma(x: Tensor) -> Tensor:
    return torch.digamma(x + 1) - 1 / x


def test_a_function_without_more_digits_is_undecided_within_its_error_only() -> None:
    found = _compare(_digamma(_NEAR_ROOT), torch.digamma, _NEAR_ROOT)
    assert not found.message
    assert "50 of 50 elements are undecided" in found.undecided
    assert "`aten.digamma`" in found.undecided
    assert found.worst_ratio <= 1
    elsewhere = torch.linspace(2, 9, 50, dtype=torch.float64)
    assert _is_right(_digamma, torch.digamma, elsewhere)
    assert not _is_right(lambda x: _digamma(x) * (1 + 1e-9), torch.digamma, elsewhere)


def test_a_reference_in_numpy_is_undecided_within_its_error_only() -> None:
    x = torch.linspace(-4, 1, 101, dtype=torch.float64)

    def reference(x: Tensor) -> Tensor:
        return torch.from_numpy(1 + np.tanh(x.numpy()))

    found = _compare(2 * torch.sigmoid(2 * x), reference, x)
    assert not found.message
    assert "cannot be computed in more digits" in found.undecided
    assert _compare(2 * torch.sigmoid(2 * x.float()).double(), reference, x).message
    assert _compare(2 * torch.sigmoid(2 * x) * (1 + 1e-9), reference, x).message


@pytest.mark.parametrize("seed", range(2))
def test_a_chaotic_recurrence_in_another_order_is_not_wrong(seed: int) -> None:
    torch.manual_seed(seed)
    x, w = torch.randn(100, 64) * 8, torch.randn(64, 64)

    def states(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
        h, found = torch.zeros_like(x[0]), []
        for row in x.unbind(0):
            h = torch.tanh(row + multiply(h))
            found.append(h)
        return torch.stack(found)

    def reference(x: Tensor) -> Tensor:
        return states(x, lambda h: w.to(x.dtype) @ h)

    assert not _compare(states(x, lambda h: (w * h).flip(1).sum(1)), reference, x).message
    assert _compare(states(x, lambda h: w.T @ h), reference, x).message
    late = _compare(torch.cat([reference(x)[:90], x[90:].tanh()]), reference, x)
    assert late.message or late.undecided


# --- what users see ----------------------------------------------------------------------------------------


def _verify(samples: list[Tensor], candidate: Callable[..., Tensor] = _digamma) -> VerifyRecord:
    given = [(x,) for x in samples]
    return opwright.verify(candidate, torch.digamma, given, checks=["numerics"], expand=False, isolated=False)


def test_undecided_cases_are_in_the_record(tmp_path: Path) -> None:
    record = _verify([_NEAR_ROOT, torch.linspace(2, 9, 50, dtype=torch.float64)])
    (check,) = record.checks
    assert (check.outcome, check.cases, check.note) == ("passed", 2, "1 case undecided")
    assert record.passed
    assert record.undecided == 1
    assert check.worst_ratio <= 1
    save(record, tmp_path / "r.verify.json")
    assert read(tmp_path / "r.verify.json") == record

    alone = _verify([_NEAR_ROOT])
    assert alone.checks[0].outcome == "undecided"
    assert not alone.passed
    assert not alone.failures

    wrong = _verify([_NEAR_ROOT, torch.linspace(2, 9, 50, dtype=torch.float64)], lambda x: _digamma(x) * 1.001)
    assert wrong.failures
    assert not wrong.passed


def test_undecided_cases_run_in_a_process_of_their_own() -> None:
    record = opwright.verify(_digamma, torch.digamma, [(_NEAR_ROOT,)], checks=["numerics"], expand=False)
    assert record.in_process == ""
    assert [u.case.partition(" (")[0] for u in record.checks[0].undecided] == ["f64[50]"] * len(
        record.checks[0].undecided
    )
    assert record.undecided


def test_the_command_prints_undecided_cases_and_does_not_pass_on_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = verify_one(
        torch.digamma,
        "digamma",
        check=["numerics"],
        reference=torch.digamma,
        samples=[(torch.ones(3),)],
        isolated=False,
    )
    assert "undecided" not in "".join(capsys.readouterr())
    assert _end([record], json=False) == 0

    def sampled(candidate: Callable[..., Tensor]) -> tuple[int, str, str]:
        record = verify_one(
            candidate,
            "digamma",
            check=["numerics"],
            reference=torch.digamma,
            samples=[(_NEAR_ROOT,)],
            expand=False,
            isolated=False,
        )
        return (_end([record], json=False), *capsys.readouterr())

    code, out, _ = sampled(_digamma)
    assert code == 5  # nothing is proven
    assert "undecided" in out.splitlines()[1]
    assert "UNDECIDED numerics" in out
    assert "the reference itself may be off by" in out
    assert "Undecided: _digamma (callable) on 0 cases" in out
    code, *_ = sampled(lambda x: torch.full_like(x, torch.nan))
    assert code == 1


def test_undecided_is_beside_right_in_the_report(tmp_path: Path) -> None:
    reason = "3 of 9 elements are undecided; worst at [2]: <why>"
    some = Check("numerics", "passed", cases=10, undecided=[Undecided("f64[9]", reason)] * 2)
    record = make_verify(checks=[some], failures=[])
    assert verdict([record]) == "ns::bias_gelu: right on 8 cases, 2 undecided."
    page = show(tmp_path, record)
    assert page.cells("numerics")[1] == f"passed: 2 cases undecided: {reason}"

    every = replace(some, outcome="undecided", cases=2)
    record = make_verify(checks=[every], failures=[])
    assert verdict([record]) == "ns::bias_gelu: NOT verified, 2 cases undecided."
    page = show(tmp_path, record)
    assert page.cells("numerics")[1] == f"undecided: 2 cases undecided: {reason}"

    wrong = make_verify(checks=[replace(some, outcome="failed")], failures=[Failure("numerics", "f64[9]", "wrong")])
    assert "FAILS verify" in verdict([wrong])


def test_pytest_shows_undecided_cases() -> None:
    with pytest.warns(UserWarning, match="50 of 50 elements are undecided"):
        assert_matches(_digamma(_NEAR_ROOT), torch.digamma, _NEAR_ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_matches(torch.digamma(_NEAR_ROOT), torch.digamma, _NEAR_ROOT)

    @operator("undecided::digamma")
    def digamma(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return _digamma(x)

    @digamma.samples
    def samples():
        yield (_NEAR_ROOT,)

    settings: dict[str, Any] = {"reference": torch.digamma, "isolated": False, "only": "f64[50]"}
    with pytest.raises(pytest.skip.Exception, match=r"undecided: .* elements are undecided"):
        _run(opwright.dispatch.operator.operator_of(digamma), "numerics", "cpu", settings)
