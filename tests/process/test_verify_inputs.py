"""Kernels that are wrong at inputs beside the usual ones, each with its right twin, which must pass."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import pytest
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor
from verify_failures import failure_of

import opwright
from opwright import Range
from opwright.contract.sources import Source
from opwright.errors import KernelError, OutOfBoundsError
from opwright.verify.inputs.boundaries import _sizes_in

pytestmark = pytest.mark.compiler


# --- integer tensors ---------------------------------------------------------------------------------------

GATHER = """
#include <opwright/kernel.h>
template <typename T>
void gather(opwright::View<const T, 2> x, opwright::View<const int64_t, 1> index, opwright::View<T, 2> output) {
  for (int64_t i = 0; i < index.size(0); ++i) {
    const int64_t n = x.size(0);
    int64_t row = index(i);
    ROW;
    for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = x(row, j);
  }
}
OPWRIGHT_KERNEL(gather, float)
"""
RIGHT_ROW = "row = opwright::check_index(row, n)"
ROWS = {
    "right": RIGHT_ROW,
    "right, in its own words": 'opwright::check(-n <= row && row < n, "index out of range"); row += row < 0 ? n : 0',
    "negative ones are row 0": 'opwright::check(-n <= row && row < n, "range"); row = row < 0 ? 0 : row',
    "-n refused": 'opwright::check(-n < row && row < n, "range"); row += row < 0 ? n : 0',
    "16 bits": RIGHT_ROW + "; row = int16_t(row) < 0 ? 0 : int16_t(row)",
    "wrong from row 40000 on": RIGHT_ROW + "; row = row < 40000 ? row : 0",
    "wraps around": "row = ((row % n) + n) % n",
    "not looked at": "row += row < 0 ? n : 0",
    "the last row is the first": RIGHT_ROW + "; row = row == n - 1 ? 0 : row",
    "32 bits": "row = opwright::check_index(int32_t(row), n)",
}


def make_gather(ns: str, kernel: str):
    @opwright.operator(f"{ns}::gather", cpu=kernel)
    def gather(x: Float[Tensor, "n k"], index: Int64[Tensor, "m"]) -> Float[Tensor, "m k"]:
        return x[index]

    return gather


@pytest.mark.parametrize("kind", ROWS)
def test_indices_of_the_whole_range_and_beyond_it(ns, kind: str) -> None:
    found = failure_of(make_gather(ns, GATHER.replace("ROW", ROWS[kind])), "boundaries")
    assert found.startswith("" if "right" in kind else "boundaries"), found
    assert bool(found) == ("right" not in kind), found


def test_an_index_out_of_bounds_is_an_index_error_in_every_dtype(ns) -> None:
    gather = make_gather(ns, GATHER.replace("ROW", RIGHT_ROW))
    for dtype in (torch.float32, torch.float64):  # the kernel, the reference
        for index in (5, -6):
            with pytest.raises(IndexError, match=rf"index {index} is out of bounds for .*dimension .*size 5"):
                gather(torch.zeros(5, 2, dtype=dtype), torch.tensor([0, index]))
    with pytest.raises(OutOfBoundsError, match=r"OPW213"):
        gather(torch.zeros(5, 2), torch.tensor([7]))


def test_a_kernel_that_refuses_an_index_in_its_own_words_raises_an_index_error(ns) -> None:
    """It was a KernelError in float32 and the reference's IndexError in float64."""
    gather = make_gather(ns, GATHER.replace("ROW", ROWS["right, in its own words"]))
    for dtype in (torch.float32, torch.float64):  # the kernel, the reference
        for call in (gather, lambda *values: gather(*values, out=torch.zeros(2, 2, dtype=values[0].dtype))):
            with pytest.raises(IndexError, match=r"out of (range|bounds)"):
                call(torch.zeros(5, 2, dtype=dtype), torch.tensor([0, 5]))


def test_a_kernel_that_gives_up_where_its_reference_does_not_is_no_index_error(ns) -> None:
    gather = make_gather(ns, GATHER.replace("ROW", 'opwright::check(row < 0, "out of memory")'))
    with pytest.raises(KernelError, match="out of memory") as raised:
        gather(torch.zeros(5, 2), torch.tensor([0]))
    assert not isinstance(raised.value, IndexError)


LENGTHS = """
#include <opwright/kernel.h>
template <typename T>
void first_sum(opwright::View<const T, 2> x, opwright::View<const int64_t, 1> lengths, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) {
    double sum = 0;
    const int64_t n = x.size(1);
    for (int64_t j = 0; LOOP; ++j) sum += x(i, j);
    output(i) = T(sum);
  }
}
OPWRIGHT_KERNEL(first_sum, float)
"""


@pytest.mark.parametrize(
    ("loop", "is_right"),
    [
        ("j < lengths(i) && j < n", True),
        ("j < int32_t(lengths(i)) && j < n", False),
        ("j != lengths(i) && j < n", False),
    ],
)
def test_integers_that_are_no_indices_take_every_value(ns, loop: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::first_sum", cpu=LENGTHS.replace("LOOP", loop))
    def first_sum(x: Float[Tensor, "m n"], lengths: Int64[Tensor, "m"]) -> Float[Tensor, "m"]:
        return torch.where(torch.arange(x.shape[1]) < lengths[:, None], x, 0).sum(-1)

    assert (failure_of(first_sum, "boundaries") == "") == is_right


# --- special values ----------------------------------------------------------------------------------------

ROW_MAX = """
#include <opwright/kernel.h>
template <typename T>
void row_max(opwright::View<const T, 2> x, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) {
    const int64_t n = x.size(1);
    T best = x(i, 0);
    for (int64_t j = 1; j < n; ++j) {
      const bool is_nan = x(i, j) != x(i, j);
      if (WHERE && is_nan) continue;
      if (!(best >= x(i, j)) && best == best) best = x(i, j);
    }
    output(i) = best;
  }
}
OPWRIGHT_KERNEL(row_max, float)
"""


@pytest.mark.parametrize("where", ["false", "j >= 4", "j >= 16", "j == n - 1", "j >= n / 16 * 16", "j >= 1500"])
def test_special_values_at_every_place_of_a_row(ns, where: str) -> None:
    @opwright.operator(f"{ns}::row_max", cpu=ROW_MAX.replace("WHERE", where))
    def row_max(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        return x.amax(-1)

    assert (failure_of(row_max, "boundaries") == "") == (where == "false")


LOG_SUM = """
#include <opwright/kernel.h>
#include <cmath>
template <typename T>
void log_sum(opwright::View<const T, 2> x, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) {
    double most = -INFINITY, sum = 0;
    for (int64_t j = 0; j < x.size(1); ++j) most = x(i, j) > most || x(i, j) != x(i, j) ? double(x(i, j)) : most;
    const double shift = SHIFT;
    for (int64_t j = 0; j < x.size(1); ++j) sum += std::exp(double(x(i, j)) - shift);
    output(i) = T(shift + std::log(sum));
  }
}
OPWRIGHT_KERNEL(log_sum, float)
"""


@pytest.mark.parametrize(
    ("shift", "is_right"), [("std::isinf(most) ? 0 : most", True), ("most == INFINITY ? 0 : most", False)]
)
def test_rows_of_one_special_value(ns, shift: str, is_right: bool) -> None:
    """A row of -inf, which is masked as a whole, has the logarithm of 0."""

    @opwright.operator(f"{ns}::log_sum", cpu=LOG_SUM.replace("SHIFT", shift))
    def log_sum(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        return x.logsumexp(-1)

    assert (failure_of(log_sum, "boundaries") == "") == is_right


SHIFT = """
#include <opwright/kernel.h>
template <typename T>
void shift(opwright::View<const T, 2> x, opwright::View<const T, 1> bias, opwright::View<T, 2> output) {
  const int64_t m = x.size(0), n = x.size(1);
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      const T value = x(i, j) + bias(j);
      output(i, j) = WRONG ? T(0.5) : value;
    }
}
OPWRIGHT_KERNEL(shift, float)
"""


def make_shift(ns: str, wrong: str):
    @opwright.operator(f"{ns}::shift", cpu=SHIFT.replace("WRONG", wrong))
    def shift(x: Float[Tensor, "*batch n"], bias: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
        return x + bias

    return shift


@pytest.mark.parametrize(
    "wrong",
    [
        "j >= 16 && bias(j) - bias(j) != 0",
        "j == n - 1 && bias(j) != bias(j)",
        "j % 16 == 5 && x(i, j) > 3e38f && x(i, j) - x(i, j) == 0",
        "j > 40 && x(i, j) != 0 && x(i, j) < 1e-38f && x(i, j) > -1e-38f",
        "j > 40 && x(i, j) == -1.0f / 0.0f",
    ],
)
def test_special_values_after_the_first_vector(ns, wrong: str) -> None:
    assert failure_of(make_shift(ns, wrong), "boundaries").startswith("boundaries")


# --- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        "n == 192 && j == 191",
        "n % 96 == 0 && j == n - 1",
        "n == 65 && j == 64",
        "n == 1023 && j == 5",
        "m % 64 == 0 && n % 64 == 0 && i == m - 1",
        "(m == 191 || m == 193) && m + n == 384 && i == m - 1",
        "m == 384 && i > 380",
        "i * n + j >= 1 << 17",
        "i * n + j == (1 << 18) + 1",
        "j == 1 << 17",
    ],
)
def test_sizes_at_the_multiples_of_tiles(ns, wrong: str) -> None:
    assert failure_of(make_shift(ns, wrong), "boundaries").startswith("boundaries")


@pytest.mark.parametrize(
    "wrong",
    [
        "n >= 100 && n % 100 == 0 && j == 50",
        "m == 1'000 && i == m - 1",
        "n > 5000u && j > 5000",
        "i * n + j == 1L << 13 && n > 1L << 13",
        "m % 80 == 0 && n % 80 == 0 && j == n - 1 && m > 0",
        "m % 24 == 0 && n % 40 == 0 && m > 0 && j == n - 1",
        "n % (7 * 8) == 0 && j == 9",
    ],
)
def test_sizes_that_the_source_names(ns, wrong: str) -> None:
    assert failure_of(make_shift(ns, wrong), "boundaries").startswith("boundaries")


def test_sizes_have_numbers_of_their_own(ns) -> None:
    """A kernel that is wrong for one input in three passed, because the same row came with every size."""
    wrong = "n < 40 && i == 17 && j == n - 1 && x(17, 0) < x(16, 0) && x(16, 0) < x(15, 0)"
    assert failure_of(make_shift(ns, wrong), "boundaries").startswith("boundaries")
    other = wrong.replace("<", ">").replace("n > 40", "n < 40")
    assert failure_of(make_shift(ns, other), "boundaries").startswith("boundaries")


def test_only_integers_of_the_code_are_sizes() -> None:
    """Numbers in comments, names, other numbers' digits, and those that every sweep has are not sizes."""
    text = "// 99\nfloat a10 = 11.5f, b = 1e13, c = 0x6f, d = 70.; /* 71\n72 */ int e = 74, f[75u], g = 1'000, h = 5 * 14; // 76"
    assert _sizes_in(Source("cpu", None, text, "a.cpp")) == [14, 70, 74, 75, 1000]


def test_right_kernels_pass_at_all_boundaries(ns) -> None:
    assert failure_of(make_shift(ns, "false"), "boundaries") == ""


WEIGHT_GRADIENT = """
#include <cmath>
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void weight_gradient(View<const T, 2> grad_output, View<const T, 2> x, View<T, 1> grad_weight) {
  for (int64_t j = 0; j < x.size(1); ++j) {
    SUM sum = 0;
    for (int64_t i = 0; i < x.size(0); ++i) {
      const float v = float(x(i, j));
      sum = SUM(float(sum) + float(grad_output(i, j)) * v / (1 + std::exp(-v)));
    }
    grad_weight(j) = T(sum);
  }
}
OPWRIGHT_KERNEL(weight_gradient, float, opwright::bfloat16)
"""


@pytest.mark.parametrize(("kept_in", "is_right"), [("float", True), ("T", False)])
def test_a_sum_of_many_rows_in_16_bits(ns, kept_in: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::weight_gradient", cpu=WEIGHT_GRADIENT.replace("SUM", kept_in))
    def weight_gradient(grad_output: Float[Tensor, "*batch n"], x: Float[Tensor, "*batch n"]) -> Float[Tensor, "n"]:
        return (grad_output * x * torch.sigmoid(x)).sum_to_size(x.shape[-1:])

    assert (failure_of(weight_gradient, "numerics") == "") == is_right


# --- outputs in other memory -------------------------------------------------------------------------------


def write_densely(values, outs, right) -> None:
    """Takes a strided output for a dense one."""
    outs.as_strided(outs.shape, right.stride()).copy_(right)


def write_around(values, outs, right) -> None:
    outs.copy_(right)
    memory = outs.as_strided((outs.untyped_storage().nbytes() // outs.element_size(),), (1,), 0)
    kept = torch.zeros_like(memory, dtype=torch.bool)
    kept.as_strided(outs.shape, outs.stride(), outs.storage_offset()).fill_(True)
    if not outs.is_contiguous():
        memory[~kept] = 0


def write_first(values, outs, right) -> None:
    """Writes into the output before it has read all of its input."""
    outs.zero_()
    outs.copy_(values[0] + values[1])


@pytest.mark.parametrize("write", [write_densely, write_around, write_first])
def test_outputs_of_every_layout_and_in_the_memory_of_an_argument(ns, write, monkeypatch) -> None:
    shift = make_shift(ns, "false")

    def call_with_out(values, out):
        write(values, out, values[0] + values[1])
        return out

    assert failure_of(shift, "outputs written") == ""
    monkeypatch.setattr(shift.operator, "call_with_out", call_with_out)
    assert failure_of(shift, "outputs written").startswith("outputs written")


@pytest.mark.parametrize(("error", "is_right"), [(2**-23, True), (2**-12, False)])
def test_a_kernel_may_round_otherwise_where_its_output_lies_otherwise(ns, error, is_right, monkeypatch) -> None:
    shift = make_shift(ns, "false")

    whole = shift.operator.call_with_out

    def call_with_out(values, out):
        whole(values, out)
        return out if out.data_ptr() % 64 == 0 else out.mul_(1 + error)

    monkeypatch.setattr(shift.operator, "call_with_out", call_with_out)
    assert (failure_of(shift, "outputs written") == "") == is_right


def test_an_output_that_shares_memory_with_itself_must_be_refused(ns, monkeypatch) -> None:
    shift = make_shift(ns, "false")
    whole = shift.operator.call_with_out
    seen = []

    def call_with_out(values, out):
        if 0 in out.stride():
            seen.append(out)
            return out
        return whole(values, out)

    monkeypatch.setattr(shift.operator, "call_with_out", call_with_out)
    assert "expanded `out=`: it is accepted, although its elements share memory" in failure_of(shift, "outputs written")


PRODUCT = """
#include <opwright/kernel.h>
template <typename T>
void product(opwright::View<const T, 1> x, opwright::View<const T, 1> y, opwright::View<T, 1> output) {
  const bool is_shared = y.data() > x.data() && y.data() < x.data() + x.size(0);
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) * y(WRONG ? 0 : i);
}
OPWRIGHT_KERNEL(product, float)
"""


@pytest.mark.parametrize("wrong", ["false", "is_shared"])
def test_arguments_that_overlap(ns, wrong: str) -> None:
    @opwright.operator(f"{ns}::product", cpu=PRODUCT.replace("WRONG", wrong))
    def product(x: Float[Tensor, "*s"], y: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x * y

    assert (failure_of(product, "determinism") == "") == (wrong == "false")


# --- chunks ------------------------------------------------------------------------------------------------

NEIGHBOURS = """
#include <opwright/kernel.h>
template <typename T>
void double_(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  const int64_t n = x.size(0);
  opwright::parallel_for(n, opwright::grain_of(1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) output(i) = WRONG ? T(0) : T(2) * x(i);
  });
}
OPWRIGHT_KERNEL(double_, float)
"""


@pytest.mark.parametrize(
    "wrong",
    ["false", "begin > 100000000", "begin > 0 && i == begin", "end < n && i == end - 1", "begin % 16 && i > 900"],
)
def test_boundaries_of_chunks_fall_everywhere(ns, wrong: str) -> None:
    @opwright.operator(f"{ns}::double_", cpu=NEIGHBOURS.replace("WRONG", wrong))
    def double_(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return 2 * x

    found = failure_of(double_, "chunks")
    assert found.startswith("" if wrong in ("false", "begin > 100000000") else "chunks: "), found
    assert bool(found) == (wrong not in ("false", "begin > 100000000"))


# --- layouts -----------------------------------------------------------------------------------------------

ADD_ROWS = """
#include <opwright/kernel.h>
template <typename T>
void add_rows(opwright::View<T, 2> sum, opwright::View<const T, 2> x) {
  T* to = sum.data();
  const T* from = x.data();
  const int64_t row = sum.stride(0), column = sum.stride(1);
  const int64_t x_row = x.stride(0), x_column = x.stride(1);
  for (int64_t i = 0; i < sum.size(0); ++i)
    for (int64_t j = 0; j < sum.size(1); ++j) to[TO] += from[FROM];
}
OPWRIGHT_KERNEL(add_rows, float)
"""
STRIDES = {
    "right": ("i * row + j * column", "i * x_row + j * x_column"),
    "rows without gaps": ("column == 1 ? i * sum.size(1) + j : i * row + j * column", "i * x_row + j * x_column"),
    "x is transposed where the argument is": ("i * row + j * column", "row == 1 ? i + j * x_column : i * x_row + j * x_column"),
}  # fmt: skip


@pytest.mark.parametrize("kind", STRIDES)
def test_strides_of_a_mutated_argument(ns, kind: str) -> None:
    to, source = STRIDES[kind]

    @opwright.operator(f"{ns}::add_rows", cpu=ADD_ROWS.replace("TO", to).replace("FROM", source))
    def add_rows(sum: opwright.Mutates[Float[Tensor, "m n"]], x: Float[Tensor, "m n"]) -> None:
        sum.add_(x)

    assert (failure_of(add_rows, "numerics") == "") == (kind == "right")


# --- results wider than what they are computed from ---------------------------------------------------------

NORM = """
#include <cmath>
#include <opwright/kernel.h>
template <typename T>
void norm(opwright::View<const T, 2> x, opwright::View<double, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) {
    SUM sum = 0;
    for (int64_t j = 0; j < x.size(1); ++j) sum += SUM(x(i, j)) * SUM(x(i, j));
    output(i) = std::sqrt(sum);
  }
}
OPWRIGHT_KERNEL(norm, float)
"""


@pytest.mark.parametrize("kernel", ["float", "double"])
@pytest.mark.parametrize("reference", ["float", "double"])
def test_a_float64_result_has_the_precision_of_its_reference(ns, kernel: str, reference: str) -> None:
    """A sum in float32 is right where the reference adds up in float32, and wrong where it does so in float64."""
    is_wide = reference == "double"

    @opwright.operator(f"{ns}::norm", cpu=NORM.replace("SUM", kernel))
    def norm(x: Float[Tensor, "*batch n"]) -> Float64[Tensor, "*batch"]:
        x = x.double() if is_wide else x
        return x.square().sum(-1).sqrt().double()

    record = opwright.verify(norm, checks=["numerics"])
    assert record.backends == ["cpu"]
    assert record.passed == (kernel == "double" or not is_wide), record.failures


class LargestOutputs(NamedTuple):
    value: Float[Tensor, "m"]
    place: Int64[Tensor, "m"]


def test_a_backward_of_what_its_forward_refuses(ns) -> None:
    """`argmax` of no elements is an error, so no backward takes it: that is not the end of the other checks."""

    @opwright.operator(f"{ns}::largest", non_differentiable=["place"])
    def largest(x: Float[Tensor, "m n"]) -> LargestOutputs:
        place = x.argmax(1)
        return LargestOutputs(x.gather(1, place[:, None])[:, 0], place)

    @largest.backward
    def largest_backward(grad_value, x, place):
        return torch.zeros_like(x).scatter(1, place[:, None], grad_value[:, None])

    record = opwright.verify(largest, checks=["numerics"])
    assert record.passed, record.failures
    assert {check.name for check in record.checks if check.outcome == "passed"} == {"numerics", "backward: numerics"}


ADD_LISTS = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void add_lists(opwright::List<View<T, 1>> sums, opwright::List<View<const T, 1>> xs) {
  for (int64_t k = 0; k < sums.size(); ++k) {
    for (int64_t i = 0; i < sums[k].size(0); ++i) sums[k](i) += xs[k](i) * (k ? T(FACTOR) : T(1));
  }
}
OPWRIGHT_KERNEL(add_lists, float, double)
"""


@pytest.mark.parametrize("factor", ["1", "1.5"])
def test_mutated_lists(ns, factor: str) -> None:
    @opwright.operator(f"{ns}::add_lists", cpu=ADD_LISTS.replace("FACTOR", factor))
    def add_lists(sums: opwright.Mutates[list[Float[Tensor, "..."]]], xs: list[Float[Tensor, "..."]]) -> None:
        for sum, x in zip(sums, xs, strict=True):
            sum.add_(x)

    @add_lists.samples
    def add_lists_samples():
        # A sorted one stays sorted, and where it lies.
        yield [torch.randn(3), torch.randn(2, 5)], [torch.tensor([1.0, 2.0, 3.0]), torch.randn(2, 5)]

    found = failure_of(add_lists, "numerics", "fresh data")
    assert ("numerics" in found and "`sums[1]`" in found) if factor == "1.5" else not found, found


def test_a_mutated_argument_with_gaps_gets_its_values_back(ns) -> None:
    """Between two calls of `fresh data`: PyTorch cannot tell quickly whether such a tensor overlaps itself."""
    kernel = ADD_ROWS.replace("TO", STRIDES["right"][0]).replace("FROM", STRIDES["right"][1])

    @opwright.operator(f"{ns}::add_rows", cpu=kernel)
    def add_rows(sum: opwright.Mutates[Float[Tensor, "m n"]], x: Float[Tensor, "m n"]) -> None:
        sum.add_(x)

    @add_rows.samples
    def add_rows_samples():
        yield torch.randn(3, 10)[:, :5], torch.randn(3, 5)

    assert not failure_of(add_rows, "fresh data")


# --- places where a mistake hides -------------------------------------------------------------------------


ARGMAX = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void largest(View<const T, 2> x, View<int64_t, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) {
    INDEX best = 0;
    for (int64_t j = 1; j < x.size(1); ++j)
      if (!(x(i, best) != x(i, best)) && (x(i, j) > x(i, best) || x(i, j) != x(i, j))) best = j;
    output(i) = best;
  }
}
OPWRIGHT_KERNEL(largest, float)
"""


@pytest.mark.parametrize(("index", "is_right"), [("int64_t", True), ("uint16_t", False)])
def test_the_largest_number_is_the_last_of_a_long_row(ns, index: str, is_right: bool) -> None:
    @opwright.operator(f"{ns}::largest", cpu=ARGMAX.replace("INDEX", index))
    def largest(x: Float[Tensor, "*b n"]) -> Int64[Tensor, "*b"]:
        return x.argmax(-1)

    assert (failure_of(largest, "boundaries") == "") == is_right


@pytest.mark.parametrize("is_right", [True, False])
def test_ties_between_two_integers(is_right: bool) -> None:
    def away_from_zero(x: Tensor, scale: float = 1.0) -> Tensor:
        return ((x / scale).abs() + 0.5).floor().copysign(x)

    def quantised(x: Tensor, scale: float = 1.0) -> Tensor:
        return (x / scale).round().nan_to_num(0).clamp(-9, 9).to(torch.int8)

    def candidate(x: Tensor, scale: float = 1.0) -> Tensor:
        return quantised(x if is_right else away_from_zero(x, scale) * scale, scale)

    contract = "(x: Float32[Tensor, '*b n'], scale: Annotated[float, Range(0.5, 2)] = 1.0) -> Int8[Tensor, '*b n']"
    record = opwright.verify(candidate, reference=quantised, contract=contract, checks=["numerics"])
    assert record.passed == is_right


def test_nan_in_a_tensor_of_one_number() -> None:
    def candidate(x: Tensor, low: Tensor) -> Tensor:
        return x.clamp(min=torch.where(low.isnan(), -torch.inf, low))

    contract = "(x: Float32[Tensor, 'n'], low: Float32[Tensor, '']) -> Float32[Tensor, 'n']"
    record = opwright.verify(
        candidate, reference=lambda x, low: torch.clamp(x, min=low), contract=contract, checks=["numerics"]
    )
    assert "NaN in low" in record.failures[0].case


def test_one_element_with_each_option() -> None:
    def mean_of_three(x: Tensor, whole: bool = True) -> Tensor:
        sums, counts = (
            torch.nn.functional.pad(each, (1, 1)).unfold(-1, 3, 1).sum(-1) for each in (x, torch.ones_like(x))
        )
        return sums / (3 if whole else counts)

    def candidate(x: Tensor, whole: bool = True) -> Tensor:
        return mean_of_three(x, whole) * (0.5 if not whole and x.shape[-1] == 1 else 1)

    contract = "(x: Float32[Tensor, '*b n'], whole: bool = True) -> Float32[Tensor, '*b n']"
    record = opwright.verify(candidate, reference=mean_of_three, contract=contract, checks=["numerics"])
    assert not record.passed


def test_sorted_numbers_of_a_sample_stay_sorted(ns) -> None:
    @opwright.operator(f"{ns}::bucket", cpu="""
    #include <opwright/kernel.h>
    using opwright::View;
    void bucket(View<const float, 1> x, View<const float, 1> edges, View<int64_t, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        output(i) = 0;
        while (output(i) < edges.size(0) && edges(output(i)) < x(i)) ++output(i);
      }
    }
    OPWRIGHT_KERNEL(bucket)""")  # fmt: skip
    def bucket(x: Float32[Tensor, "n"], edges: Float32[Tensor, "k"]) -> Int64[Tensor, "n"]:
        return torch.bucketize(x, edges)

    bucket.samples(lambda: [(torch.randn(n), torch.randn(k).sort().values) for n, k in ((5, 3), (70, 12))])
    record = opwright.verify(bucket, checks=["fresh data", "vmap"])
    assert record.passed, [(f.case, f.message) for f in record.failures]


def test_sizes_for_which_an_output_has_none(ns) -> None:
    """A size formula that is negative on an empty axis ended the run."""

    @opwright.operator(f"{ns}::frames")
    def frames(
        x: Float32[Tensor, "*b n"], size: Annotated[int, Range(1, 4)] = 3
    ) -> Float32[Tensor, "*b (n-size)//2+1 size"]:
        return x.unfold(-1, size, 2).clone()

    record = opwright.verify(frames, checks=["numerics", "refusals"])
    assert record.passed, [(f.case, f.message) for f in record.failures]


def test_two_arguments_alike_are_not_blamed() -> None:
    """A kernel that is wrong everywhere was said to be wrong where two arguments are one tensor."""
    contract = "(a: Float32[Tensor, 'n'], b: Float32[Tensor, 'n']) -> Float32[Tensor, 'n']"
    checks = ["determinism", "numerics"]
    record = opwright.verify(lambda a, b: a - b, reference=lambda a, b: a + b, contract=contract, checks=checks)
    assert [f.check for f in record.failures][:1] == ["numerics"]
