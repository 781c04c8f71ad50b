"""Kernels that are wrong for some options, or some lengths of a list, each with its right twin, which must pass."""

from __future__ import annotations

from typing import Annotated

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from verify_failures import failure_of

import opwright
from opwright.verify.inputs.boundaries import boundary_cases
from opwright.verify.target import make_target

pytestmark = pytest.mark.compiler

ROLL = """
#include <opwright/kernel.h>
template <typename T>
void roll(opwright::View<const T, 2> x, int64_t by, opwright::View<T, 2> output) {
  const int64_t n = x.size(1);
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < n; ++j) output(i, j) = x(i, PLACE);
}
OPWRIGHT_KERNEL(roll, float)
"""


@pytest.mark.parametrize(
    ("place", "is_right"),
    [
        ("(j - by % n + 2 * n) % n", True),
        ("(j + n - by % n) % n", True),
        ("(j - (by < 0 ? 0 : by) % n + 2 * n) % n", False),
        ("(j - int32_t(by) % n + 2 * n) % n", False),
        ("((j - (by == INT64_MIN ? 0 : by)) % n + n) % n", False),
    ],
)
def test_options_are_negative_zero_and_extreme(ns, place: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::roll", cpu=ROLL.replace("PLACE", place))
    def roll(x: Float[Tensor, "*batch n"], by: int = 1) -> Float[Tensor, "*batch n"]:
        n = x.shape[-1]
        return x[..., (torch.arange(n) - by % max(n, 1)) % max(n, 1)]

    assert (failure_of(roll, "boundaries") == "") == is_right


LARGEST = """
#include <algorithm>
#include <functional>
#include <vector>
#include <opwright/kernel.h>
constexpr int64_t kMost = MOST;
template <typename T>
void largest(opwright::View<const T, 2> x, int64_t k, opwright::View<T, 2> output) {
  opwright::check(k >= 0 && k <= x.size(1), "k is out of range");
  for (int64_t i = 0; i < x.size(0); ++i) {
    std::vector<T> row;
    for (int64_t j = 0; j < x.size(1); ++j) row.push_back(x(i, j));
    std::sort(row.begin(), row.end(), [](T a, T b) { return a > b || (a != a && b == b); });
    for (int64_t j = 0; j < k; ++j) output(i, j) = row[std::min(j, kMost - 1)];
  }
}
OPWRIGHT_KERNEL(largest, float)
"""


@pytest.mark.parametrize(("most", "is_right"), [(1 << 30, True), (16, False), (32, False), (50, False)])
def test_an_option_that_small_inputs_refuse_is_tried_on_larger_ones(ns, most: int, is_right: bool) -> None:
    @opwright.operator(f"{ns}::largest", cpu=LARGEST.replace("MOST", str(most)))
    def largest(
        x: Float[Tensor, "*batch n"], k: Annotated[int, opwright.Range(0, 64)] = 1
    ) -> Float[Tensor, "*batch k"]:
        return torch.topk(x, k).values

    assert (failure_of(largest, "boundaries") == "") == is_right


COUNT = """
#include <vector>
#include <opwright/kernel.h>
void count(opwright::View<const int64_t, 1> x, int64_t bins, opwright::View<int64_t, 1> output) {
  std::vector<COUNTER> found(bins);
  for (int64_t i = 0; i < x.size(0); ++i) {
    opwright::check(x(i) >= 0 && x(i) < bins, "out of range");
    ++found[x(i)];
  }
  for (int64_t b = 0; b < bins; ++b) output(b) = found[b];
}
OPWRIGHT_KERNEL(count)
"""


@pytest.mark.parametrize(("counter", "is_right"), [("int32_t", True), ("int16_t", False), ("uint16_t", False)])
def test_an_index_comes_more_often_than_16_bits_count(ns, counter: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::count", cpu=COUNT.replace("COUNTER", counter))
    def count(x: Annotated[Int64[Tensor, "n"], opwright.Index("bins")], bins: int = 16) -> Int64[Tensor, "bins"]:
        return torch.zeros(bins, dtype=torch.int64).index_add_(0, x, torch.ones_like(x))

    assert (failure_of(count, "boundaries") == "") == is_right


POWER = """
#include <opwright/kernel.h>
template <typename T>
void power(opwright::View<const T, 1> x, int64_t exponent, double scale, opwright::View<T, 1> output) {
  static thread_local double first = scale;
  for (int64_t i = 0; i < x.size(0); ++i) {
    double product = SCALE;
    for (int64_t k = 0; k < LIMIT; ++k) product *= double(x(i));
    output(i) = T(product);
  }
}
OPWRIGHT_KERNEL(power, float)
"""


@pytest.mark.parametrize(
    ("limit", "scale", "is_right"),
    [
        ("exponent", "scale", True),
        ("(exponent < 3 ? exponent : 3)", "scale", False),  # large ones are not finite
        ("exponent", "first", False),
    ],
)
def test_small_integers_and_a_number_that_is_kept(ns, limit: str, scale: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::power", cpu=POWER.replace("LIMIT", limit).replace("SCALE", scale))
    def power(
        x: Float[Tensor, "n"], exponent: Annotated[int, opwright.NonNegative] = 2, scale: float = 0.5
    ) -> Float[Tensor, "n"]:
        return scale * x**exponent

    assert (failure_of(power, "numerics", "boundaries") == "") == is_right


SUM_OF_LIST = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void sum_of(opwright::List<View<const T, 1>> xs, View<T, 1> output) {
  for (int64_t i = 0; i < output.size(0); ++i) {
    double sum = 0;
    for (int64_t k = 0; k < LENGTH; ++k) sum += double(xs[k](i));
    output(i) = T(sum);
  }
}
OPWRIGHT_KERNEL(sum_of, float)
"""


@pytest.mark.parametrize(("length", "is_right"), [("xs.size()", True), ("(xs.size() < 64 ? xs.size() : 64)", False)])
def test_long_lists(ns, length: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::sum_of", cpu=SUM_OF_LIST.replace("LENGTH", length))
    def sum_of(xs: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
        return torch.stack(xs).sum(0)

    assert (failure_of(sum_of, "boundaries") == "") == is_right


def test_a_kernel_may_take_an_option_that_overflows_in_the_reference(ns) -> None:
    """PyTorch cannot pass integers below -2**62 - 1 in a list: it keeps them for symbolic sizes."""

    @opwright.operator(f"{ns}::roll", cpu=ROLL.replace("PLACE", "(j - by % n + 2 * n) % n"))
    def roll(x: Float[Tensor, "*batch n"], by: int = 1) -> Float[Tensor, "*batch n"]:
        return torch.roll(x, by, -1)

    with pytest.raises(RuntimeError, match="SymInt"):
        torch.roll(torch.zeros(7), -(2**62) - 1)
    assert failure_of(roll, "boundaries") == ""


def test_what_the_contract_refuses_is_no_input(ns) -> None:
    """`torch.nn.functional.one_hot` takes -1 for as many classes as there are: no operator of this contract can."""

    @opwright.operator(f"{ns}::one_hot")
    def one_hot(index: Int64[Tensor, "k"], n: int = 7) -> Int64[Tensor, "k n"]:
        return torch.nn.functional.one_hot(index, n)

    record = opwright.verify(one_hot, checks=["boundaries"])
    assert record.passed, record.failures


COLUMN = """
#include <opwright/kernel.h>
template <typename T>
void column(opwright::View<const T, 2> x, int64_t at, opwright::View<T, 1> output) {
  const int64_t n = x.size(1);
  BEFORE;
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i, at);
}
OPWRIGHT_KERNEL(column, float)
"""


@pytest.mark.parametrize(
    ("before", "is_right"),
    [
        ("at = opwright::check_index(at, n)", True),
        ('opwright::check(0 <= at && at < n, "no such column")', False),
        ("at = at < 0 ? 0 : at < n ? at : n - 1", False),
        ("if (at < 0) at += n; at = at < n ? at : n - 1", False),
        ("at = opwright::check_index(at < n ? at : n - 1, n)", False),
    ],
)
def test_options_that_the_reference_refuses_are_refused(ns, before: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::column", cpu=COLUMN.replace("BEFORE", before))
    def column(x: Float[Tensor, "*batch n"], at: int = 1) -> Float[Tensor, "*batch"]:
        return x.select(-1, at).clone()

    assert (failure_of(column, "boundaries") == "") == is_right


SOFT = """
#include <opwright/kernel.h>
#include <cmath>
template <typename T>
void leaky(opwright::View<const T, 1> x, double slope, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = FORMULA;
}
OPWRIGHT_KERNEL(leaky, float)
"""


@pytest.mark.parametrize(
    ("formula", "is_right"),
    [("x(i) > 0 ? x(i) : T(slope) * x(i)", True), ("std::fmax(x(i), T(slope) * x(i))", False)],
)
def test_numbers_are_negative_zero_and_extreme(ns, formula: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::leaky", cpu=SOFT.replace("FORMULA", formula))
    def leaky(x: Float[Tensor, "*s"], slope: float = 0.01) -> Float[Tensor, "*s"]:
        return torch.where(x > 0, x, slope * x)

    assert (failure_of(leaky, "boundaries") == "") == is_right


STRIDED = """
#include <opwright/kernel.h>
template <typename T>
void scaled(opwright::View<const T, 2> x, opwright::View<const T, 1> w, double by, opwright::View<T, 2> output) {
  const bool is_dense = x.stride(1) == 1;
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j) {
      const T value = WITHOUT;
      output(i, j) = (w.defined() ? x(i, j) * w(j) : value) * T(BY);
    }
}
OPWRIGHT_KERNEL(scaled, float)
"""


@pytest.mark.parametrize(
    ("without", "by", "case"),
    [
        ("x(i, j)", "by", ""),
        ("x(i, j)", "(is_dense ? by : 0.5)", "by=0.48"),
        ("x.data()[i * x.stride(0) + j]", "by", "without w, "),
    ],
)
def test_strides_meet_other_options_and_what_is_absent(ns, without: str, by: str, case: str) -> None:
    @opwright.operator(f"{ns}::scaled", cpu=STRIDED.replace("WITHOUT", without).replace("BY", by))
    def scaled(
        x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"] | None = None, by: float = 0.5
    ) -> Float[Tensor, "*batch n"]:
        return (x if w is None else x * w) * by

    record = opwright.verify(scaled, checks=["numerics"])
    assert record.passed == (not case)
    assert record.passed or case in record.failures[0].case


def test_a_kernel_need_not_refuse_what_gives_an_empty_output(ns) -> None:
    """It is not called for one."""

    @opwright.operator(f"{ns}::counts", cpu="""
    #include <opwright/kernel.h>
    void counts(opwright::View<const int64_t, 1> x, int64_t bins, opwright::View<int64_t, 1> output) {
      opwright::check(bins > 0, "`bins` must be positive");
      for (int64_t i = 0; i < bins; ++i) output(i) = 0;
      for (int64_t i = 0; i < x.size(0); ++i) output((x(i) % bins + bins) % bins) += 1;
    }
    OPWRIGHT_KERNEL(counts)""")  # fmt: skip
    def counts(x: Int64[Tensor, "n"], bins: int = 16) -> Int64[Tensor, "bins"]:
        return torch.bincount(x % bins, minlength=bins)

    assert not failure_of(counts, "boundaries")


def test_labels_that_a_loss_leaves_out(ns) -> None:
    """-100, which lies beyond labels that are refused."""

    @opwright.operator(f"{ns}::likelihood", cpu="""
    #include <opwright/kernel.h>
    template <typename T>
    void likelihood(opwright::View<const T, 2> x, opwright::View<const int64_t, 1> y, opwright::View<T, 0> output) {
      double sum = 0;
      for (int64_t i = 0; i < x.size(0); ++i) {
        opwright::check(y(i) == -100 || (y(i) >= 0 && y(i) < x.size(1)), "a label is out of bounds");
        if (y(i) != -100) sum -= double(x(i, y(i)));
      }
      output() = T(sum / double(x.size(0)));
    }
    OPWRIGHT_KERNEL(likelihood, float)""")  # fmt: skip
    def likelihood(x: Float[Tensor, "n c"], y: Int64[Tensor, "n"]) -> Float[Tensor, ""]:
        return torch.nn.functional.nll_loss(x, y)

    record = opwright.verify(likelihood, checks=["boundaries"])
    assert any("-100 among them" in failure.case for failure in record.failures)


def test_a_kernel_that_is_slow_on_long_axes_gets_no_longer_one(ns, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes the square of 131,075 steps took 15 s for that case alone."""
    now = [0.0]
    monkeypatch.setattr("opwright.verify.inputs.budget.time.perf_counter", lambda: now[0])

    @opwright.operator(f"{ns}::twice")
    def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    def longest(seconds: float) -> int:
        target = make_target(twice, None, None)

        def call(values):
            now[0] += seconds * (len(values[0]) > 10_000)
            return [values[0] * 2]

        target.call = call
        return max(len(case.values[0]) for case in boundary_cases(target))

    assert longest(0.0) > 2**17
    assert longest(1.0) < 2**17


FOLDED = """
#include <opwright/kernel.h>
template <typename T>
void folded(opwright::View<const T, 2> x, int64_t r, opwright::View<T, 2> output) {
  for (int64_t i = 0; i < output.size(0); ++i)
    for (int64_t j = 0; j < output.size(1); ++j) {
      double sum = 0;
      for (int64_t k = 0; k < COUNT; ++k) sum += double(x(i, k * output.size(1) + j));
      output(i, j) = T(sum);
    }
}
OPWRIGHT_KERNEL(folded, float)
"""


@pytest.mark.parametrize(
    ("count", "is_right"),
    [("r", True), ("2", False), ("(r > 2 ? 2 : r)", False), ("(r < 2 ? 0 : r)", False), ("(r == 9 ? 0 : r)", False)],
)
def test_an_option_that_is_a_factor_of_a_size_has_other_values(ns, count: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::folded", cpu=FOLDED.replace("COUNT", count))
    def folded(x: Float[Tensor, "*b r*c"], r: Annotated[int, opwright.Range(1, 9)] = 2) -> Float[Tensor, "*b c"]:
        return x.unflatten(-1, (r, x.shape[-1] // r)).sum(-2)

    numerics, boundaries = (failure_of(folded, check) for check in ("numerics", "boundaries"))
    assert (numerics == boundaries == "") == is_right
    assert (numerics != "") == (count in ("2", "(r > 2 ? 2 : r)"))  # at the second value; the others at ends


@pytest.mark.parametrize("most", [9, 2**40])
def test_the_size_of_an_axis_that_an_option_gives_is_drawn(ns, most: int) -> None:
    @opwright.operator(f"{ns}::weighted")
    def weighted(
        x: Float[Tensor, "n k*k"], w: Float[Tensor, "k"], k: Annotated[int, opwright.Range(0, most)] = 0
    ) -> Float[Tensor, "n k"]:
        return x.unflatten(-1, (k, k)) @ w

    target = make_target(weighted, None, None)
    assert {case.options["k"] for case in target.cases()} == {0, 1}
    shapes = [tuple(tuple(v.shape) for v in c.values[:2]) for c in boundary_cases(target) if c.label.startswith("k of")]
    sizes = [w[0] for _, w in shapes]
    assert all(x[1] == w[0] ** 2 for x, w in shapes)
    assert set(sizes) >= {1, 2, 3, 4, 5, 8, *([9] if most == 9 else [17])}
    assert max(sizes) < 1000


PRODUCTS = """
#include <algorithm>
#include <opwright/kernel.h>
using opwright::List, opwright::View;
template <typename T>
void products(List<View<const T, 2>> xs, List<View<const T, 2>> ys, View<T, 1> output) {
  for (int64_t j = 0; j < output.size(0); ++j) {
    double sum = 0;
    for (size_t k = 0; k < xs.size(); ++k)
      for (int64_t i = 0; i < ROWS; ++i) sum += double(xs[k](i, j)) * double(ys[k](i, j));
    output(j) = T(sum);
  }
}
OPWRIGHT_KERNEL(products, float)
"""


@pytest.mark.parametrize(
    ("rows", "is_right"),
    [
        ("xs[k].size(0)", True),
        ("std::min(xs[0].size(0), xs[k].size(0))", False),
        ("(xs[k].size(0) > 1000 ? 1000 : xs[k].size(0))", False),
    ],
)
def test_tensors_of_a_list_have_sizes_of_their_own(ns, rows: str, is_right: bool) -> None:
    """The tensors at one place of two lists have the same sizes: else the reference refuses them."""

    @opwright.operator(f"{ns}::products", cpu=PRODUCTS.replace("ROWS", rows))
    def products(xs: list[Float[Tensor, "_ d"]], ys: list[Float[Tensor, "_ d"]]) -> Float[Tensor, "d"]:
        return torch.stack([(x * y).sum(0) for x, y in zip(xs, ys, strict=True)]).sum(0)

    record = opwright.verify(products, checks=["numerics", "guard bands"])
    assert record.passed == is_right, record.failures
    assert not record.notes


def test_tensors_of_a_list_with_any_axes_have_sizes_of_their_own(ns) -> None:
    @opwright.operator(f"{ns}::sums")
    def sums(xs: list[Float[Tensor, "... d"]], y: Float[Tensor, "... d"]) -> Float[Tensor, "d"]:
        return torch.stack([x.reshape(-1, x.shape[-1]).sum(0) for x in (*xs, y)]).sum(0)

    shapes = {tuple(tuple(x.shape) for x in case.values[0]) for case in make_target(sums, None, None).cases()}
    assert {((2, 3, 7), (2, 1, 7), (2, 7, 7)), ((2, 5, 7), (2, 0, 7), (2, 2, 7))} <= shapes
