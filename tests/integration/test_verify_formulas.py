"""Right kernels of other formulas than their reference's pass in every dtype; their wrong twins do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import opwright
from opwright import operator
from opwright.dispatch.operator import operator_of
from opwright.verify.checks.pytorch import torch_compile
from opwright.verify.target import make_target

pytestmark = pytest.mark.compiler

SOURCE = """
#include <opwright/kernel.h>
#include <cmath>
#include <type_traits>
#include <vector>

template <typename T>
void NAME(opwright::View<const T, 2> x, ARGUMENTS) {
  using A = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const int64_t n = x.size(1);
  for (int64_t r = 0; r < x.size(0); ++r) {
    BODY
  }
}
OPWRIGHT_KERNEL(NAME, float, double, opwright::half, opwright::bfloat16)
"""
TWO_PASSES = """
    A mean = 0, squares = 0;
    for (int64_t i = 0; i < n; ++i) mean += A(x(r, i));
    mean /= A(n);
    for (int64_t i = 0; i < n; ++i) squares += (A(x(r, i)) - mean) * (A(x(r, i)) - mean);"""
WELFORD = """
    A mean = 0, squares = 0;
    for (int64_t i = 0; i < n; ++i) {
      A d = A(x(r, i)) - mean;
      mean += d / A(i + 1);
      squares += d * (A(x(r, i)) - mean);
    }"""
NORMALIZED = """
    A scale = A(1) / std::sqrt(squares / A(n) + A(1e-5));
    for (int64_t i = 0; i < n; ++i) output(r, i) = T((A(x(r, i)) - mean) * scale * A(w(i)) + A(b(i)));"""
VARIANCE = " output(r) = T(n ? squares / A(n - 1) : A(NAN));"
KAHAN = """
    A sum = 0, lost = 0;
    for (int64_t i = 0; i < n; ++i) { A y = A(x(r, i)) - lost; A t = sum + y; lost = (t - sum) - y; sum = t; }
    output(r) = T(sum);"""
TREE = """
    std::vector<A> v(n);
    for (int64_t i = 0; i < n; ++i) v[i] = A(x(r, i));
    for (int64_t k = n; k > 1; k = (k + 1) / 2) for (int64_t i = (k + 1) / 2; i < k; ++i) v[i - (k + 1) / 2] += v[i];
    output(r) = T(n ? v[0] : A(0));"""
WIDE = "double sum = 0; for (int64_t i = n; i-- > 0;) sum += double(x(r, i)); output(r) = T(sum);"
ONLINE = """
    A m = -INFINITY, sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      A v = A(x(r, i)), k = std::isnan(v + m) ? v + m : std::fmax(m, v);
      sum = k == -INFINITY ? A(0) : (m == k ? sum : sum * std::exp(m - k)) + std::exp(v - k);
      m = k;
    }
    for (int64_t i = 0; i < n; ++i) output(r, i) = T(std::exp(A(x(r, i)) - m) / sum);"""
ERFC = """
    for (int64_t i = 0; i < n; ++i) {
      A v = A(x(r, i));
      output(r, i) = T(A(0.5) * v * std::erfc(-v * A(0.7071067811865476)));
    }"""


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def layer_norm_by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-5) * w + b


def declare(name: str, body: str, reference: Callable[..., Tensor], kind: str) -> Callable[..., Tensor]:
    arguments = {
        "affine": "opwright::View<const T, 1> w, opwright::View<const T, 1> b, opwright::View<T, 2> output",
        "map": "opwright::View<T, 2> output",
        "sum": "opwright::View<T, 1> output",
    }[kind]

    def affine(x: Float[Tensor, "*s n"], w: Float[Tensor, "n"], b: Float[Tensor, "n"]) -> Float[Tensor, "*s n"]:
        return reference(x, w, b)

    def mapped(x: Float[Tensor, "*s n"]) -> Float[Tensor, "*s n"]:
        return reference(x)

    def summed(x: Float[Tensor, "*s n"]) -> Float[Tensor, "*s"]:
        return reference(x)

    source = SOURCE.replace("NAME", name).replace("ARGUMENTS", arguments).replace("BODY", body)
    function = {"affine": affine, "map": mapped, "sum": summed}[kind]
    function.__name__ = name
    return operator(f"verify_formulas::{name}", cpu=source)(function)


def failures_of(op: Callable[..., Tensor], checks: tuple[str, ...]) -> list[opwright.records.Failure]:
    return opwright.verify(op, quick=True, devices=["cpu"], checks=checks).failures


RIGHT = {
    "layer_norm_two_passes": (TWO_PASSES + NORMALIZED, layer_norm, "affine"),
    "layer_norm_welford": (WELFORD + NORMALIZED, layer_norm, "affine"),
    "layer_norm_of_steps_welford": (WELFORD + NORMALIZED, layer_norm_by_hand, "affine"),
    "variance_two_passes": (TWO_PASSES + VARIANCE, lambda x: x.var(-1), "sum"),
    "variance_welford": (WELFORD + VARIANCE, lambda x: x.var(-1), "sum"),
    "sum_kahan": (KAHAN, lambda x: x.sum(-1), "sum"),
    "sum_tree": (TREE, lambda x: x.sum(-1), "sum"),
    "sum_in_float64_from_the_end": (WIDE, lambda x: x.sum(-1), "sum"),
    "softmax_online": (ONLINE, lambda x: x.softmax(-1), "map"),
    "gelu_erfc": (ERFC, F.gelu, "map"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_another_formula_is_right(name: str) -> None:
    assert failures_of(declare(name, *RIGHT[name]), ("numerics", "boundaries", "fresh data")) == []


WRONG = {
    "layer_norm_last_entry": (TWO_PASSES + NORMALIZED.replace("i < n;", "i < n - 1;"), layer_norm, "affine"),
    "layer_norm_n_minus_1": (WELFORD + NORMALIZED.replace("A(n)", "A(n - 1)"), layer_norm, "affine"),
    "variance_of_n": (WELFORD + VARIANCE.replace("n - 1", "n"), lambda x: x.var(-1), "sum"),
    "sum_of_all_but_one": (KAHAN.replace("i = 0", "i = 1"), lambda x: x.sum(-1), "sum"),
    "sum_infinities_clipped": (
        WIDE.replace("double(x(r, i))", "std::fmin(double(x(r, i)), 3e38)"), lambda x: x.sum(-1), "sum",
    ),
    "softmax_without_maximum": (
        ONLINE.replace("std::isnan(v + m) ? v + m : std::fmax(m, v)", "0"), lambda x: x.softmax(-1), "map",
    ),
    "gelu_tanh": (
        ERFC.replace("A(0.5) * v * std::erfc(-v * A(0.7071067811865476))",
                     "v / (A(1) + std::exp(A(-1.5957691216057308) * (v + A(0.044715) * v * v * v)))"), F.gelu, "map",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_its_wrong_twin_is_not(name: str) -> None:
    assert failures_of(declare(name, *WRONG[name]), ("numerics",)) != []


def test_callables_of_other_formulas_are_right_in_float64() -> None:
    def welford(x: Tensor) -> Tensor:
        mean, squares = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
        for i in range(x.shape[-1]):
            d = x[..., i] - mean
            mean = mean + d / (i + 1)
            squares = squares + d * (x[..., i] - mean)
        return squares / (x.shape[-1] - 1)

    def compensated(x: Tensor) -> Tensor:
        total, lost = torch.zeros_like(x[..., 0]), torch.zeros_like(x[..., 0])
        for part in x.unbind(-1):
            y = part - lost
            t = total + y
            total, lost = t, (t - total) - y
        return total

    for dtype in (torch.float64, torch.float32):
        given = [(torch.randn(7, 33, dtype=torch.float64).to(dtype),)]
        for right, reference in ((welford, lambda x: x.var(-1)), (compensated, lambda x: x.sum(-1))):
            record = opwright.verify(right, reference, given, checks=["numerics", "fresh data"])
            assert record.failures == []
            wrong = opwright.verify(lambda x, f=right: f(x[..., 1:]), reference, given, checks=["numerics"])
            assert not wrong.passed


# --- what PyTorch cannot compile ---------------------------------------------------------------------------


def test_what_pytorch_cannot_compile_of_the_reference_is_no_failure() -> None:
    @operator("verify_formulas::power")
    def power(x: Float[Tensor, "*s"], *, k: int = 2) -> Float[Tensor, "*s"]:
        return x**k

    assert opwright.verify(power, checks=["compile"], devices=["cpu"]).passed
    target = make_target(power, None, None)
    call = target.call

    def breaks(values: list) -> list:
        torch._dynamo.graph_break()
        return call(values)

    target.call = breaks  # and the reference does not
    with pytest.raises(torch._dynamo.exc.Unsupported):
        list(torch_compile(target))


# --- gradients of all sizes --------------------------------------------------------------------------------


def test_finite_differences_are_not_taken_of_gradients_of_all_sizes() -> None:
    @operator("verify_formulas::scaled")
    def scaled(x: Float[Tensor, "*s n"], w: Float[Tensor, "n"]) -> Float[Tensor, "*s n"]:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w

    @scaled.backward
    def scaled_backward(grad_output, x, w):
        n = x.shape[-1]
        r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        g = grad_output * w
        return r * g - x * r**3 * (g * x).mean(-1, keepdim=True), (grad_output * x * r).reshape(-1, n).sum(0)

    @scaled.samples
    def samples():
        yield torch.randn(3, 33), torch.randn(33)

    record = opwright.verify(
        scaled, quick=True, devices=["cpu"], checks=["gradients", "second gradients", "vmap", "opcheck"]
    )
    assert record.failures == []
    assert {check.outcome for check in record.checks} == {"passed"}
    backward = make_target(operator_of(scaled).backward_operator.function, None, None)
    plain = [case for case in backward.cases() if case.label == "sample 0"]
    assert all(float(case.values[0].abs().max()) < 10 for case in plain)  # those of all sizes are a copy
