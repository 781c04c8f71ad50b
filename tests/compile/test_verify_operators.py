"""Operators that are right, of kinds that verify once took for wrong or left unchecked."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float32, Int8
from torch import Tensor

from opwright import operator, verify
from opwright.verify.subject import subject_of


def outcomes(target, *checks: str) -> dict[str, str]:
    record = verify(target, checks=checks, quick=True)
    return {check.title: check.outcome for check in record.checks} | {f.check: f.message for f in record.failures}


def test_sizes_that_the_reference_refuses_are_not_compiled(ns) -> None:
    """The window may not be longer than the row; the sizes in the order of the table are."""

    @operator(f"{ns}::windows")
    def windows(x: Float[Tensor, "*batch t"], w: Float[Tensor, "k"]) -> Float[Tensor, "*batch t-k+1"]:
        return (x.unfold(-1, w.shape[0], 1) * w).sum(-1)

    labels = [case.label for _, case in subject_of(windows, None, None, "quick").cases()]
    assert labels.count("base") == 4  # in each dtype
    assert outcomes(windows, "compile", "gradients") == {"compile": "passed", "gradients": "passed"}

    @operator(f"{ns}::shorter")
    def shorter(x: Float[Tensor, "t"], w: Float[Tensor, "k"]) -> Float[Tensor, "k-t"]:
        return w[x.shape[0] :] * x.sum()

    assert outcomes(shorter, "compile", "gradients") == {"compile": "passed", "gradients": "passed"}


def test_a_batch_as_long_as_a_fixed_axis_is_no_reason_to_compile_again(ns) -> None:
    @operator(f"{ns}::complex_mul")
    def complex_mul(a: Float[Tensor, "*s 2"], b: Float[Tensor, "*s 2"]) -> Float[Tensor, "*s 2"]:
        (ar, ai), (br, bi) = a.unbind(-1), b.unbind(-1)
        return torch.stack([ar * br - ai * bi, ar * bi + ai * br], -1)

    assert outcomes(complex_mul, "compile") == {"compile": "passed"}


def test_outputs_of_int8_and_float32(ns) -> None:
    """Finite differences through float32 see nothing, and opcheck adds a float to an integer in place."""

    @operator(f"{ns}::quantize")
    def quantize(x: Float[Tensor, "*batch n"]) -> tuple[Int8[Tensor, "*batch n"], Float32[Tensor, "*batch"]]:
        scale = x.float().abs().amax(-1) / 127
        return (x.float() / scale.unsqueeze(-1)).round().to(torch.int8), scale

    found = outcomes(quantize, "gradients", "second gradients", "gradient numerics", "opcheck")
    assert found == {
        "gradients": "skipped",
        "second gradients": "skipped",
        "gradient numerics": "passed",
        "opcheck": "passed",
    }

    @operator(f"{ns}::dequantize")
    def dequantize(q: Int8[Tensor, "*batch n"], scale: Float32[Tensor, "*batch"], x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        return x + q * scale.unsqueeze(-1).to(x.dtype)

    assert outcomes(dequantize, "gradients") == {"gradients": "passed"}  # of x alone


def test_an_operator_of_lists_alone(ns) -> None:
    @operator(f"{ns}::total")
    def total(tensors: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
        return torch.stack(tensors).sum(0)

    found = outcomes(total, "autocast", "refusals")
    assert found == {"autocast": "passed", "refusals": "passed"}
