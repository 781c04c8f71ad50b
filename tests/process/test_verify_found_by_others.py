"""Operators by authors who had not read these tests: right ones that verify refused, and wrong ones that it passed."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
import pytest
import torch
from jaxtyping import BFloat16, Bool, Float, Float32, Int8, Int64
from torch import Tensor

from opwright import Index, Mutates, Range, operator, verify
from opwright.testing import assert_matches
from opwright.verify.inputs.boundaries import boundary_cases
from opwright.verify.target import make_target

pytestmark = pytest.mark.compiler

HEAD = """
#include <cmath>
#include <vector>
#include <opwright/kernel.h>
using opwright::View;
"""


def check(function) -> None:
    record = verify(function)
    assert record.passed, [(f.check, f.case, f.message) for f in record.failures]


def test_a_sum_in_float32_of_products_in_bfloat16(ns) -> None:
    """`x.float()` rounded the oracle to float32 as well, which then allowed nothing for another order of a sum."""

    @operator(f"{ns}::dot", cpu=HEAD + """
    void dot(View<const opwright::bfloat16, 2> x, View<const opwright::bfloat16, 1> w, View<float, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        float sum = 0;
        for (int64_t j = 0; j < x.size(1); ++j) sum += float(x(i, j)) * float(w(j));
        output(i) = sum;
      }
    }
    OPWRIGHT_KERNEL(dot)""")  # fmt: skip
    def dot(x: BFloat16[Tensor, "*m k"], w: BFloat16[Tensor, "k"]) -> Float32[Tensor, "*m"]:
        return (x.float() * w.float()).sum(-1)

    check(dot)


def test_a_norm_that_casts_as_models_do(ns) -> None:
    @operator(f"{ns}::norm", cpu=HEAD + """
    template <typename T> void norm(View<const T, 2> x, View<const T, 1> w, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        float squares = 0;
        for (int64_t j = 0; j < x.size(1); ++j) squares += float(x(i, j)) * float(x(i, j));
        const float scale = 1 / std::sqrt(squares / x.size(1) + 1e-6f);
        for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = T(float(T(float(x(i, j)) * scale)) * float(w(j)));
      }
    }
    OPWRIGHT_KERNEL(norm, float, opwright::bfloat16)""")  # fmt: skip
    def norm(x: Float[Tensor, "*b n"], w: Float[Tensor, "n"]) -> Float[Tensor, "*b n"]:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * wide.to(x.dtype)

    check(norm)


def test_a_sum_with_a_part_for_each_thread(ns) -> None:
    """A compiled call and a gradient had another number of threads than a plain call."""

    @operator(f"{ns}::total", cpu=HEAD + """
    template <typename T> void total(View<const T, 1> x, View<T, 0> output) {
      const int64_t n = x.size(0), parts = opwright::num_threads();
      std::vector<double> sums(parts);
      opwright::parallel_for(parts, 1, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part)
          for (int64_t i = n * part / parts; i < n * (part + 1) / parts; ++i) sums[part] += float(x(i));
      });
      float sum = 0;
      for (const double each : sums) sum += float(each);
      output() = T(sum);
    }
    OPWRIGHT_KERNEL(total, float)""")  # fmt: skip
    def total(x: Float[Tensor, "n"]) -> Float[Tensor, ""]:
        return x.sum()

    check(total)


def test_a_mean_of_nothing_is_nan(ns) -> None:
    """Finite differences of NaN were compared."""

    @operator(f"{ns}::masked_mean")
    def masked_mean(x: Float[Tensor, "*b n"], mask: Bool[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
        return torch.where(mask, x, 0.0).sum(-1) / mask.sum(-1)

    check(masked_mean)


def test_samples_that_are_not_finite(ns) -> None:
    @operator(f"{ns}::doubled")
    def doubled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    doubled.samples(lambda: [(torch.randn(7),), (torch.tensor([1.0, float("nan"), float("inf")]),)])
    check(doubled)


def test_an_option_outside_of_its_range_is_never_given(ns) -> None:
    @operator(f"{ns}::count")
    def count(
        x: Annotated[Int64[Tensor, "n"], Index("bins")], bins: Annotated[int, Range(1, 100)] = 7
    ) -> Int64[Tensor, "bins"]:
        assert bins > 0 or x.device.type == "meta"
        return torch.zeros(bins, dtype=torch.int64).scatter_add(0, x, torch.ones_like(x))

    check(count)


def test_decay_in_place_by_another_formula() -> None:
    """At -inf one formula gives NaN; of a function that returns nothing, its variations were compared with nothing."""

    def decay(p: Tensor) -> None:
        p.mul_(1 - 1e-5)

    def reference(p: Tensor) -> None:
        p.sub_(1e-5 * p)

    record = verify(decay, reference=reference, samples=[(torch.randn(30),)])
    assert record.passed, record.failures


@pytest.mark.parametrize("reference", [
    lambda x: x / (x.view(torch.int32) & 0x7F800000).view(torch.float32),
    lambda x: (x / (x.view(torch.int32) & 0x7F800000).view(torch.float32)).sum(-1),
], ids=["bits", "sum of bits"])  # fmt: skip
def test_a_reference_that_reads_the_bits_of_float32(reference) -> None:
    samples = [(torch.randn(5, 8),)]
    record = verify(reference, reference=lambda x: reference(x.float()), samples=samples, checks=["numerics"])
    assert record.passed, record.failures
    wrong = verify(
        lambda x: torch.zeros_like(reference(x)),
        reference=lambda x: reference(x.float()),
        samples=samples,
        checks=["numerics"],
    )
    assert not wrong.passed


def test_what_is_computed_beside_a_cast_is_rounded_as_ever() -> None:
    """Beside a mean in float32, products in bfloat16 were held to float32."""

    def shifted(x: Tensor, y: Tensor) -> Tensor:
        mean = x.float().mean(-1, keepdim=True).to(x.dtype)
        return x * y + (x - y * mean)

    def reference(x: Tensor, y: Tensor) -> Tensor:
        mean = x.float().mean(-1, keepdim=True).to(x.dtype)
        return (x * y + x) - y * mean

    torch.manual_seed(0)
    samples = [(torch.randn(128, 128).bfloat16(), torch.randn(128, 128).bfloat16())]
    record = verify(shifted, reference=reference, samples=samples, checks=["numerics"])
    assert record.passed, record.failures


# --- wrong ones ---------------------------------------------------------------------------------------------


NORM = (
    HEAD
    + """
template <typename T> void norm(View<const T, 2> x, View<T, 2> output) {
  for (int64_t i = 0; i < x.size(0); ++i) {
    TYPE squares = TYPE(0);
    for (int64_t j = 0; j < x.size(1); ++j) squares = TYPE(float(squares) + float(x(i, j)) * float(x(i, j)));
    const float scale = 1 / std::sqrt(float(squares) / x.size(1) + 1e-6f);
    for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = T(float(x(i, j)) * scale);
  }
}
OPWRIGHT_KERNEL(norm, opwright::bfloat16)
"""
)


@pytest.mark.parametrize(("accumulator", "passes"), [("float", True), ("T", False)])
def test_a_cast_in_the_reference_is_no_leave_to_accumulate_in_16_bits(ns, accumulator: str, passes: bool) -> None:
    @operator(f"{ns}::norm", cpu=NORM.replace("TYPE", accumulator))
    def norm(x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    assert verify(norm, checks=["numerics"]).passed == passes


@pytest.mark.parametrize(("name", "reference", "kernel"), [
    ("mean", lambda a: a.sum(-1) / a.shape[-1], "sum / a.size(1)"),
    ("inverse", lambda a: a.sum(-1) / a.square().sum(-1).sqrt(), "sum / std::sqrt(squares)"),
])  # fmt: skip
def test_zero_where_pytorch_divides_zero_by_zero(ns, name: str, reference, kernel: str) -> None:
    """Rounding was thought to decide whether a quotient of sums of nothing is NaN."""

    @operator(f"{ns}::{name}", cpu=HEAD + f"""
    template <typename T> void {name}(View<const T, 2> a, View<T, 1> output) {{
      for (int64_t i = 0; i < a.size(0); ++i) {{
        double sum = 0, squares = 0;
        for (int64_t j = 0; j < a.size(1); ++j) sum += a(i, j), squares += double(a(i, j)) * a(i, j);
        output(i) = squares == 0 ? T(0) : T({kernel});
      }}
    }}
    OPWRIGHT_KERNEL({name}, float)""")  # fmt: skip
    def function(a: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
        return reference(a)

    record = verify(function, checks=["numerics", "boundaries"])
    assert "got 0, expected nan" in record.failures[0].message


def numpy_sigmoid_unit(x):
    a = x.numpy()
    with np.errstate(all="ignore"):
        return torch.from_numpy(a / (1 + np.exp(a.dtype.type(-1.702) * a)))


def python_norm(x):
    return torch.tensor([math.sqrt(sum(v * v for v in row)) for row in x.tolist()], dtype=x.dtype)


ROWS, TOTALS = (f"(x: Float[Tensor, 'b n']) -> Float[Tensor, '{axes}']" for axes in ("b n", "b"))


@pytest.mark.parametrize(
    ("reference", "contract", "right", "wrong"),
    [
        (numpy_sigmoid_unit, ROWS, lambda x: x * torch.sigmoid(1.702 * x), lambda x: x * torch.sigmoid(1.70201 * x)),
        (python_norm, TOTALS, lambda x: x.norm(dim=-1), lambda x: x[..., : max(x.shape[-1] & ~1, 1)].norm(dim=-1)),
    ],
)
def test_references_in_numpy_and_in_python(reference, contract, right, wrong) -> None:
    """What is computed there is rounded where verify does not see it."""
    for candidate, is_right in ((right, True), (wrong, False)):
        record = verify(candidate, reference, contract=contract, checks=["numerics"])
        assert record.passed is is_right, [(f.case, f.message) for f in record.failures]


def test_a_reference_that_writes_through_numpy() -> None:
    """What it wrote was lost where it wrote into a copy, and then anything passed."""

    def twice(x):
        out = torch.empty_like(x)
        np.multiply(x.numpy(), 2, out=out.numpy())
        return out

    x = torch.randn(64)
    assert_matches(2 * x, twice, x)
    for wrong in (2.5 * x, 0 * x):
        with pytest.raises(AssertionError):
            assert_matches(wrong, twice, x)


def test_a_running_logsumexp_of_a_largest_number_and_a_sum() -> None:
    """Near zero it has the digits of the largest number, which PyTorch's has too."""

    def running(x):
        rows = x if x.dtype == torch.float64 else x.float()
        largest, total, found = torch.full_like(rows[:, :1], -math.inf), torch.zeros_like(rows[:, :1]), [rows[:, :0]]
        for value in (rows[:, i : i + 1] for i in range(x.shape[1])):
            last, largest = largest, torch.maximum(largest, value)
            finite = largest.nan_to_num(0.0, 0.0, 0.0)
            total = total * torch.exp(last - finite) + torch.exp(value - finite)
            found.append(torch.log(total) + finite)
        return torch.cat(found, -1).to(x.dtype)

    reference = lambda x: torch.logcumsumexp(x, -1)  # noqa: E731
    record = verify(running, reference, contract=ROWS, checks=["numerics"])
    assert record.passed, [(f.case, f.message) for f in record.failures]
    record = verify(lambda x: running(x) * (1 + 1e-4), reference, contract=ROWS, checks=["numerics"])
    assert not record.passed


def test_equal_terms_added_one_after_the_other() -> None:
    """They are rounded alike, so the error grows with their number and not with its root."""

    def added(table, index):
        rows = table[index] if table.dtype == torch.float64 else table[index].float()
        totals = np.cumsum(torch.cat([rows.new_zeros(1, rows.shape[1]), rows]).numpy(), 0)  # in order, in this dtype
        return torch.from_numpy(totals[-1]).to(table.dtype)

    for candidate, is_right in (
        (added, True),
        (lambda table, index: added(table, index[: max(len(index) - 1, 1)]), False),
    ):
        record = verify(
            candidate,
            lambda table, index: table[index].sum(0),
            contract="(table: Float[Tensor, 'v d'], index: Int64[Tensor, 'n']) -> Float[Tensor, 'd']",
            checks=["numerics"],
        )
        assert record.passed is is_right, [(f.case, f.message) for f in record.failures]


def test_a_sum_may_start_from_a_positive_zero(ns) -> None:
    """0 + -0 + -0 is 0, where the reference has -0."""

    @operator(f"{ns}::mix", cpu=HEAD + """
    template <typename T> void mix(View<const T, 1> x, View<const T, 1> y, View<const T, 1> w, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        T sum = 0;
        sum += w(0) * x(i);
        sum += w(1) * y(i);
        output(i) = sum;
      }
    }
    OPWRIGHT_KERNEL(mix, float, double)""")  # fmt: skip
    def mix(x: Float[Tensor, "n"], y: Float[Tensor, "n"], w: Float[Tensor, "2"]) -> Float[Tensor, "n"]:
        return w[0] * x + w[1] * y

    check(mix)
    x = torch.tensor([-0.0, 1.0])
    both = lambda x: (x.clone(), x.sum())  # noqa: E731
    with pytest.raises(AssertionError, match="got 0, expected -0"):  # of a copy beside a sum
        assert_matches((x + 0.0, x.sum()), both, x)


def test_a_gradient_that_is_not_the_derivative(ns) -> None:
    """A reference says what the gradient is; finite differences of a rounding are 0."""

    @operator(f"{ns}::round_straight_through")
    def round_straight_through(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + (x.round() - x).detach()

    @operator(f"{ns}::round_twice_as_steep")
    def round_twice_as_steep(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + (x.round() - x).detach()

    @round_twice_as_steep.backward
    def round_twice_as_steep_backward(grad_output, x):
        return 2 * grad_output

    assert "gradient numerics" in {f.check for f in verify(round_twice_as_steep).failures}
    record = verify(round_straight_through)
    assert record.passed, [(f.check, f.case, f.message) for f in record.failures]
    skipped = {c.name: c.reason for c in record.checks if c.outcome == "skipped"}
    assert skipped["gradients"] == "the gradient of its reference is not the derivative, as after `detach`"


def test_a_reference_that_takes_no_empty_part(ns) -> None:
    """A rank may have none of an axis; PyTorch's Fourier transform refuses that."""

    @operator(f"{ns}::spectrum")
    def spectrum(x: Annotated[Float32[Tensor, "*b 8"], Range(-10, 10)]) -> Float32[Tensor, "*b 5"]:
        return torch.fft.rfft(x).abs()

    check(spectrum)


def test_a_matrix_that_grows_with_the_square_of_an_axis(ns) -> None:
    """Parts of a long axis were made to see what it costs: 16,385 times 16,385 numbers, several times over."""

    @operator(f"{ns}::form", cpu=HEAD + """
    template <typename T> void form(View<const T, 2> x, View<const T, 2> w, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        double sum = 0;
        for (int64_t a = 0; a < x.size(1); ++a)
          for (int64_t b = 0; b < x.size(1); ++b) sum += double(x(i, a)) * double(w(a, b)) * double(x(i, b));
        output(i) = T(sum);
      }
    }
    OPWRIGHT_KERNEL(form, float)""")  # fmt: skip
    def form(
        x: Annotated[Float[Tensor, "*b s"], Range(-10, 10)], w: Annotated[Float[Tensor, "s s"], Range(-10, 10)]
    ) -> Float[Tensor, "*b"]:
        return ((x @ w) * x).sum(-1)

    record = verify(form, checks=["boundaries"], memory_bytes=2 << 30)
    assert record.passed, [(f.check, f.case, f.message) for f in record.failures]


def test_rounding_decides_between_a_number_and_infinity() -> None:
    """Where PyTorch gets a number in bfloat16, and the oracle infinity, a kernel may get one too."""

    def prune(s):
        return torch.where(s >= s.amax(-1, keepdim=True) - 1.25, s, -torch.inf)

    assert_matches(prune(CLOSE), prune, CLOSE)
    with pytest.raises(AssertionError):
        assert_matches(torch.tensor([[-0.326171875, 1000.0]], dtype=torch.bfloat16), prune, CLOSE)


CLOSE = torch.tensor([[-0.326171875, -1.578125]], dtype=torch.bfloat16)


def test_options_that_the_forward_refuses_are_none_of_the_backward(ns) -> None:
    @operator(f"{ns}::shrink")
    def shrink(x: Float[Tensor, "n"], by: int = 3) -> Float[Tensor, "n"]:
        if not 2 <= by <= 8:
            raise ValueError("by must be from 2 to 8")
        return x / (by - 1)

    @shrink.backward
    def shrink_backward(grad_output, x, by):
        return grad_output / (by - 1)

    check(shrink)


def test_a_root_of_squares_as_hypot(ns) -> None:
    """In float64 the squares of small numbers are lost in the oracle, and hypot keeps them."""

    @operator(f"{ns}::length", cpu=HEAD + """
    template <typename T> void length(View<const T, 1> x, View<const T, 1> y, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = std::hypot(x(i), y(i));
    }
    OPWRIGHT_KERNEL(length, float, double)""")  # fmt: skip
    def length(x: Float[Tensor, "*b"], y: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.sqrt(x * x + y * y)

    check(length)


def test_all_entries_of_an_axis_with_each_other(ns) -> None:
    """Aligned inputs had 32,768 of them: the reference alone takes 13 GB then."""

    @operator(f"{ns}::nearest")
    def nearest(x: Float[Tensor, "n 3"]) -> Float[Tensor, "n"]:
        return (x[:, None] - x).square().sum(-1).sum(-1)

    sizes = [len(case.values[0]) for case in make_target(nearest, None, None).cases() if case.label == "aligned"]
    assert sizes
    assert max(sizes) <= 1024


@pytest.mark.parametrize(("weight", "is_right"), [("1 - decay", True), ("1.001 - decay", False)])
def test_the_other_formula_of_a_blend(ns, weight: str, is_right: bool) -> None:
    """PyTorch's `lerp` was one step, which rounds once; and NaN for an infinite average, where a sum is infinite."""

    @operator(f"{ns}::blend", cpu=HEAD + f"""
    template <typename T> void blend(View<T, 1> average, View<const T, 1> value, double decay) {{
      for (int64_t i = 0; i < average.size(0); ++i)
        average(i) = T(float(decay) * float(average(i)) + float({weight}) * float(value(i)));
    }}
    OPWRIGHT_KERNEL(blend, float, opwright::bfloat16)""")  # fmt: skip
    def blend(average: Mutates[Float[Tensor, "*s"]], value: Float[Tensor, "*s"], decay: float = 0.9) -> None:
        average.lerp_(value, 1 - decay)

    record = verify(blend, checks=["numerics"])
    assert record.passed == is_right, [(f.case, f.message) for f in record.failures]


@pytest.mark.parametrize(("function", "is_right"), [("nearbyint", True), ("round", False), ("floor", False)])
def test_integers_that_rounding_decides(ns, function: str, is_right: bool) -> None:
    """In float16 the quotient is rounded to 41.5, and that to 42; a kernel that divides in float32 gets 41."""

    @operator(f"{ns}::quantize", cpu=HEAD + f"""
    template <typename T> void quantize(View<const T, 2> x, View<const T, 1> scale, View<int8_t, 2> output) {{
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) {{
          const float q = std::{function}(float(x(i, j)) / float(scale(i)));
          output(i, j) = std::isnan(q) ? 0 : int8_t(q < -127 ? -127 : q > 127 ? 127 : q);
        }}
    }}
    OPWRIGHT_KERNEL(quantize, float, opwright::half)""")  # fmt: skip
    def quantize(
        x: Float[Tensor, "*b n"], scale: Annotated[Float[Tensor, "*b"], Range(0.01, 4.0)]
    ) -> Int8[Tensor, "*b n"]:
        return (x / scale[..., None]).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)

    record = verify(quantize, checks=["numerics", "boundaries"])
    assert record.passed == is_right, [(f.case, f.message) for f in record.failures]


def test_indices_that_a_forward_returns_are_no_inputs_of_its_own(ns) -> None:
    """They were drawn for the backward from sizes that the forward does not give."""

    @operator(f"{ns}::route", non_differentiable=["output1"])
    def route(
        logits: Float[Tensor, "*b e"], k: Annotated[int, Range(1, 4)] = 2
    ) -> tuple[Float[Tensor, "*b k"], Int64[Tensor, "*b k"]]:
        largest, order = logits.sort(dim=-1, descending=True, stable=True)
        return torch.softmax(largest[..., :k], -1), order[..., :k].clone()

    @route.backward
    def route_backward(grad_output0, logits, output0, output1):
        grad = output0 * (grad_output0 - (output0 * grad_output0).sum(-1, keepdim=True))
        return torch.zeros_like(logits).scatter(-1, output1, grad)

    record = verify(route, checks=["boundaries"])
    assert record.passed, [(f.check, f.case, f.message) for f in record.failures]


def test_tables_of_many_axes_stay_small(ns) -> None:
    """A cache of 16 x 16 x 65,601 x 16 numbers ended the process of the oracle."""

    @operator(f"{ns}::write_at")
    def write_at(
        cache: Mutates[Float[Tensor, "b h s d"]],
        new: Float[Tensor, "b h t d"],
        position: Annotated[Int64[Tensor, "t"], Index("s")],
    ) -> None:
        cache.index_copy_(2, position, new)

    for case in boundary_cases(make_target(write_at, None, None)):
        assert max(t.numel() for t in case.values) <= 2**25, case.label


def test_a_batch_whose_gradient_pytorch_refuses(ns) -> None:
    @operator(f"{ns}::shuffle")
    def shuffle(x: Float[Tensor, "b 12 h w"]) -> Float[Tensor, "b 3 2*h 2*w"]:
        return torch.nn.functional.pixel_shuffle(x, 2)

    with pytest.raises(RuntimeError, match="invalid gradient"):
        shuffle(torch.zeros(0, 12, 2, 2, requires_grad=True)).sum().backward()
    record = verify(shuffle, checks=["gradient numerics"])
    assert record.passed, [(f.case, f.message) for f in record.failures]


def test_an_axis_of_a_backward_that_is_an_option_of_its_forward(ns) -> None:
    """Its size was drawn, and the indices came from the forward with another: no case was left."""

    @operator(f"{ns}::largest", non_differentiable=["output1"])
    def largest(
        x: Float[Tensor, "*b n"], k: Annotated[int, Range(1, 8)] = 2
    ) -> tuple[Float[Tensor, "*b k"], Int64[Tensor, "*b k"]]:
        if k > x.shape[-1]:
            raise ValueError("k is larger than n")
        values, order = x.sort(dim=-1, descending=True, stable=True)
        return values[..., :k] * 2, order[..., :k].clone()

    @largest.backward
    def largest_backward(grad_output0, x, output1):
        return torch.zeros_like(x).scatter(-1, output1, grad_output0 * 2)

    record = verify(largest, checks=["backward: numerics"])
    assert record.passed, [(f.case, f.message) for f in record.failures]
    assert record.checks[0].cases > 50


@pytest.mark.parametrize(("scale", "is_right"), [("p < 1 ? 1 / (1 - p) : 0", True), ("1 / (1 - p)", False)])
def test_the_ends_of_the_domain_of_an_option(ns, scale: str, is_right: bool) -> None:
    @operator(f"{ns}::drop", cpu=HEAD + f"""
    template <typename T> void drop(View<const T, 1> x, View<const bool, 1> keep, double p, View<T, 1> output) {{
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = keep(i) ? T(double(x(i)) * ({scale})) : T(0);
    }}
    OPWRIGHT_KERNEL(drop, float)""")  # fmt: skip
    def drop(
        x: Float[Tensor, "n"], keep: Bool[Tensor, "n"], p: Annotated[float, Range(0.0, 1.0)] = 0.5
    ) -> Float[Tensor, "n"]:
        return torch.where(keep, x, 0) * (1 / (1 - p) if p < 1 else 0.0)

    record = verify(drop, checks=["boundaries"])
    assert record.passed == is_right, [(f.case, f.message) for f in record.failures]


def test_every_combination_of_three_flags() -> None:
    def pool(x: Tensor, squared: bool = False, mean: bool = False, root: bool = False) -> Tensor:
        y = x * x if squared else x.abs()
        y = y.mean(-1) if mean else y.sum(-1)
        return y.sqrt() if root else y

    def without_mean(x: Tensor, squared: bool = False, mean: bool = False, root: bool = False) -> Tensor:
        return pool(x, squared, mean and (root or not squared), root)

    contract = "(x: Float[Tensor, '*b n'], squared: bool = False, mean: bool = False, root: bool = False)"
    contract += " -> Float[Tensor, '*b']"
    assert verify(pool, reference=pool, contract=contract, checks=["numerics"]).passed
    assert not verify(without_mean, reference=pool, contract=contract, checks=["numerics"]).passed


def test_a_cast_whose_result_has_no_axes(ns) -> None:
    @operator(f"{ns}::deviation")
    def deviation(x: BFloat16[Tensor, "n"]) -> BFloat16[Tensor, ""]:
        wide = x.float()
        return (wide - wide.mean()).square().mean().sqrt().to(x.dtype)

    record = verify(deviation, checks=["numerics"])
    assert record.passed, [(f.case, f.message) for f in record.failures]


def test_samples_keep_the_order_of_their_offsets_under_vmap(ns) -> None:
    @operator(f"{ns}::starts")
    def starts(x: Float[Tensor, "n"], offsets: Int64[Tensor, "g"]) -> Float[Tensor, "g"]:
        bag = torch.searchsorted(offsets, torch.arange(x.shape[0]), right=True) - 1
        return x.new_zeros(offsets.shape[0]).index_add(0, bag, x)

    @starts.samples
    def starts_samples():
        yield torch.randn(6), torch.tensor([0, 2, 2])

    record = verify(starts, checks=["vmap"])
    assert record.passed, [(f.case, f.message) for f in record.failures]


def test_aligned_sizes_of_many_axes_are_no_gigabytes(ns) -> None:
    """Those of this contract had 134 million elements."""

    @operator(f"{ns}::windows")
    def windows(x: Float[Tensor, "b 4*p 4*q c"]) -> Float[Tensor, "b*p*q 16 c"]:
        b, h, w, c = x.shape
        return x.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)

    cases = [case for case in make_target(windows, None, None).cases() if case.label == "aligned"]
    assert cases
    assert all(2**16 < case.values[0].numel() <= 2**20 for case in cases)


@pytest.mark.parametrize("smallest", [0.0, 1e-12])
def test_a_backward_that_divides_by_a_norm(ns, smallest: float) -> None:
    """At a row of zeros it gave NaN, and no check had such a row."""

    @operator(f"{ns}::unit")
    def unit(x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        return x / (x.norm(dim=-1, keepdim=True) + 1e-3)

    @unit.backward
    def unit_backward(grad_output, x):
        norm = x.norm(dim=-1, keepdim=True)
        product = (grad_output * x).sum(-1, keepdim=True)
        return grad_output / (norm + 1e-3) - x * product / ((norm + 1e-3).square() * norm.clamp(min=smallest))

    record = verify(unit, checks=["gradient numerics"])
    assert record.passed == (smallest > 0), [(f.case, f.message) for f in record.failures]
    if not record.passed:
        assert "0 in a row of x" in record.failures[0].case
        assert "not finite, where that of the reference is" in record.failures[0].message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("output(i) += x(i, j);", "it reads its output before it has written it; the memory of an output is not zero"),
        ("output(i) = sums[i] += x(i, j);", "two calls with the same inputs give different results"),
    ],
)
def test_a_sum_that_does_not_start_from_zero(ns, body: str, message: str) -> None:
    """The out variant was blamed."""

    @operator(f"{ns}::sums", cpu=HEAD + f"""
    template <typename T> void sums(View<const T, 2> x, View<T, 1> output) {{
      static std::vector<T> sums(1 << 20);
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) {body}
    }}
    OPWRIGHT_KERNEL(sums, float)""")  # fmt: skip
    def sums(x: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
        return x.sum(-1)

    assert message in verify(sums, checks=["outputs written"]).failures[0].message


def test_a_backward_with_a_tensor_of_one_number(ns) -> None:
    @operator(f"{ns}::scaled")
    def scaled(x: Float[Tensor, "*b n"], scale: Float[Tensor, ""]) -> Float[Tensor, "*b n"]:
        return x * scale

    @scaled.backward
    def scaled_backward(grad_output, x, scale):
        return grad_output * scale, (grad_output * x).sum()

    record = verify(scaled, checks=["gradient numerics"])
    assert record.passed, [(f.case, f.message) for f in record.failures]


def test_infinities_of_a_formula_with_masks(ns) -> None:
    """Products of masks ended the search for what other formulas may give at infinities."""

    @operator(f"{ns}::added", cpu=HEAD + """
    template <typename T> void added(View<const T, 1> a, View<const T, 1> b, View<T, 1> output) {
      for (int64_t i = 0; i < a.size(0); ++i) {
        const T m = a(i) > b(i) ? a(i) : b(i);
        output(i) = m + std::log(std::exp(a(i) - m) + std::exp(b(i) - m));
      }
    }
    OPWRIGHT_KERNEL(added, float, double)""")  # fmt: skip
    def added(a: Float[Tensor, "*b"], b: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.logaddexp(a, b)

    record = verify(added, checks=["numerics"])
    assert "got nan, expected" in record.failures[0].message


def test_autocast_to_a_type_that_the_reference_does_not_take(ns) -> None:
    @operator(f"{ns}::likelihood")
    def likelihood(x: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        return torch.special.log_ndtr(x)

    record = verify(likelihood, checks=["autocast"])
    assert 'declare `autocast="float32"`' in record.failures[0].message
