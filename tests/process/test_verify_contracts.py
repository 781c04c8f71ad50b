"""A callable verified over the inputs that follow from a contract given as text."""

from __future__ import annotations

import opwright_ops
import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor

import opwright
from opwright.errors import CheckError, OpwrightError

CONTRACT = "(x: Float[Tensor, '*b n'], weight: Float[Tensor, 'n'], *, eps: float = 1e-5) -> Float[Tensor, '*b n']"


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def ignores_eps(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    return rms_norm(x, weight)


def ignores_strides(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), x.storage_offset(), x.shape)
    return rms_norm(flat, weight, eps=eps)


def fails_on_odd_sizes(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    result = rms_norm(x, weight, eps=eps)
    if x.shape[-1] % 4:
        result[..., -1] = 0
    return result


def verify(candidate, contract: str = CONTRACT, reference=rms_norm, **options):
    return opwright.verify(candidate, reference=reference, contract=contract, checks=["numerics"], **options)


def test_the_reference_passes_in_every_dtype() -> None:
    record = verify(rms_norm)
    assert record.passed, record.failures
    cases = " ".join(error.case for error in record.checks[0].errors)
    assert all(f"{dtype}[" in cases for dtype in ("f16", "bf16", "f32", "f64"))


def has_another_default(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    return rms_norm(x, weight, eps=eps)


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (ignores_eps, "eps="), (ignores_strides, "transposed"), (fails_on_odd_sizes, "f32["),
        (has_another_default, "defaults left out"),
    ],
)  # fmt: skip
def test_what_is_wrong_on_some_inputs_is_found(candidate, text: str) -> None:
    (failure,) = verify(candidate, quick=True).failures
    assert text in failure.case


def test_lists_have_other_lengths() -> None:
    contract = "(xs: list[Float[Tensor, '*b n']]) -> Float[Tensor, '*b n']"
    (failure,) = verify(lambda xs: sum(xs[:4]), contract, sum, quick=True).failures
    assert "lists of 5" in failure.case


def test_domains_hold() -> None:
    """No logarithm of a negative number is compared."""
    contract = "(x: Annotated[Float[Tensor, '*s'], Positive]) -> Float[Tensor, '*s']"
    record = verify(lambda x: x.log2() * 0.6931471805599453, contract, torch.log, only="f64")
    assert all("nan" not in failure.message for failure in record.failures)
    wrong = verify(lambda x: x.abs().log(), contract, torch.log, quick=True)
    assert wrong.passed, wrong.failures  # differs on negative numbers only


def test_inputs_that_the_reference_refuses_are_noted() -> None:
    contract = "(x: Float[Tensor, '*b n']) -> Float[Tensor, '*b']"
    record = verify(lambda x: x.max(-1).values, contract, lambda x: x.amax(-1), quick=True)
    (note,) = record.notes
    assert "refuses" in note
    assert "empty n" in note
    assert verify(lambda x: x.sum(-1), contract, lambda x: x.sum(-1), quick=True).notes == []


@pytest.mark.parametrize(
    ("contract", "text"),
    [
        ("x -> y", "invalid `contract`"),
        ("(x: Float[Tensor, 'n']) -> Flaot[Tensor, 'n']", "names `Flaot`, which is not defined"),
        ("(x: Float[Tensor, 'n'], y) -> Float[Tensor, 'n']", "y"),
        ("(x: Float[Tensor, 'n'], w: Float[Tensor, 'n + 1']) -> Float[Tensor, 'n']", "axis cannot be read"),
        ("(x: Float[Tensor, 'a b c'], w: Float[Tensor, 'c d']) -> Float[Tensor, 'a b c']", "takes none of the inputs"),
    ],
)
def test_a_contract_that_cannot_be_used_is_an_error(contract: str, text: str) -> None:
    with pytest.raises(OpwrightError, match=text):
        verify(rms_norm, contract)


def test_a_contract_takes_the_place_of_samples() -> None:
    with pytest.raises(CheckError, match="takes the place of `samples`"):
        verify(rms_norm, samples=[(torch.ones(3, 4), torch.ones(4))])
    with pytest.raises(CheckError, match="an operator and a task have inputs of their own"):
        opwright.verify(opwright_ops.bias_gelu, contract=CONTRACT)


def test_one_rounding_that_a_row_shares() -> None:
    """A rounded sum moves all of its row, and was taken for results that are not rounded to nearest."""

    def dice(p, t, eps=1e-6):
        return 1 - (2 * (p * t).sum(-1) + eps) / (p.sum(-1) + t.sum(-1) + eps)

    def in_one_sum(p, t, eps=1e-6):
        return 1 - (2 * (p * t).sum(-1) + eps) / ((p + t).sum(-1) + eps)

    row = "Annotated[Float[Tensor, '*b n'], Probability]"
    contract = f"(p: {row}, t: {row}, eps: Annotated[float, Positive] = 1e-6) -> Float[Tensor, '*b']"
    record = opwright.verify(in_one_sum, dice, contract=contract, checks=["gradient numerics"])
    assert record.passed, [(f.check, f.case, f.message) for f in record.failures]


def test_gradients_and_special_values_of_tensors_of_any_dtype() -> None:
    """Gradients of `Shaped` were not checked, and NaN was asked of its integers."""

    @opwright.operator("verify_contracts::flip_rows")
    def flip_rows(x: Shaped[Tensor, "*b n"]) -> Shaped[Tensor, "*b n"]:
        return x.flip(-1)

    checks = ["gradients", "gradient numerics", "boundaries"]
    assert opwright.verify(flip_rows, checks=checks, devices=["cpu"]).passed

    @flip_rows.backward
    def flip_rows_backward(grad_output):
        return grad_output.roll(1, -1)

    failed = {f.check for f in opwright.verify(flip_rows, checks=checks, devices=["cpu"]).failures}
    assert failed == {"gradients", "gradient numerics"}


def test_an_operator_of_integers_on_tensors_of_any_dtype() -> None:
    """Autocast was checked on its integers, as if they were floating-point."""

    @opwright.operator("verify_contracts::bits_of_both")
    def bits_of_both(x: Shaped[Tensor, "*b n"], y: Shaped[Tensor, "n"]) -> Shaped[Tensor, "*b n"]:
        return x & y

    record = opwright.verify(bits_of_both, devices=["cpu"], quick=True)
    assert record.passed, [(f.check, f.case, f.message) for f in record.failures]
