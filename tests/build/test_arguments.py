"""Operators with kernels and every kind of argument: options, optionals, lists, scalars."""

import math
from typing import Literal

import pytest
import torch
from jaxtyping import Float, Float32, Float64, Int
from kernel_head import COMPILED, HEAD
from torch import Tensor

from opwright import operator
from opwright.build.glue import kernel_signature
from opwright.errors import AxisError, ContractError, OptionTypeError

pytestmark = pytest.mark.compiler


def test_arguments_with_names_of_c(ns, entries):
    def reference(
        new: Float[Tensor, "n"], signed: int, default: Literal["up", "int"] = "up", T: float = 1.0, stream: float = 0.0
    ) -> Float[Tensor, "n"]:
        return new * T + signed + stream + (default == "int")

    declared = kernel_signature(operator(f"{ns}::as_in_c")(reference).operator.declaration, "cuda")
    assert declared.endswith(
        "as_in_c(View<const T, 1> new_, int64_t signed_, Default default_, double T_, double stream_, "
        "View<T, 1> output, cudaStream_t stream)"
    )
    source = (
        declared.replace(", cudaStream_t stream", "")
        + """ {
      const double more = default_ == Default::int_;
      for (int64_t i = 0; i < output.size(0); ++i) output(i) = T(double(new_(i)) * T_ + signed_ + stream_ + more);
    }
    OPWRIGHT_KERNEL(as_in_c, float)"""
    )
    op = operator(f"{ns}_c::as_in_c", cpu=HEAD + source)(reference)
    for entry in entries(op):
        assert entry(torch.ones(2), 3, "int", 2.0, 5.0).tolist() == [11.0, 11.0]


@pytest.fixture(scope="module")
def options(ns):
    # "default" is not a name in Python, "2x" is not one in C++, "half-up" in neither; `mode` has a default,
    # `rounding` has none and is keyword-only.
    @operator(f"{ns}::options", cpu=HEAD + """
    template <typename T>
    void options(View<const T, 1> x, int64_t shift, double scale, bool negate, Mode mode, int64_t power,
                 double slope, bool ceil, Rounding rounding, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        double v = double(C<T>(x(i))) * scale + double(shift);
        if (mode == Mode::square) v *= v;
        if (mode == Mode::default_ || mode == Mode::_2x) v *= mode == Mode::default_ ? 3 : 2;
        if (v < 0) v *= slope;
        for (int64_t k = 1; k < power; ++k) v *= double(C<T>(x(i)));
        if (ceil) v += 10;
        if (rounding == Rounding::half_up) v += 20;
        output(i) = T(C<T>(negate ? -v : v));
      }
    }
    OPWRIGHT_KERNEL(options, THREE)""")  # fmt: skip
    def options(
        x: Float[Tensor, "*s"],
        shift: int,
        scale: float,
        negate: bool = False,
        mode: Literal["none", "square", "default", "2x"] = "none",
        *,
        power: int = -1,
        slope: float = 1,
        ceil: bool,
        rounding: Literal["half-up", "down"],
    ) -> Float[Tensor, "*s"]:
        return _options(x.double(), shift, scale, negate, mode, power, slope, ceil, rounding).to(x.dtype)

    return options


def _options(x, shift, scale, negate=False, mode="none", power=-1, slope=1, ceil=None, rounding=None):
    v = x * scale + shift
    v = {"none": lambda: v, "square": lambda: v * v, "default": lambda: v * 3, "2x": lambda: v * 2}[mode]()
    v = (v > 0) * v + (v < 0) * v * slope
    v = v * x ** max(power - 1, 0) + 10 * ceil + 20 * (rounding == "half-up")
    return -v if negate else v


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((1, 2.0), {"ceil": False, "rounding": "down"}),
        ((-3, 0.5, True), {"ceil": True, "rounding": "half-up"}),
        ((0, 1, False, "square"), {"ceil": False, "rounding": "down", "power": 2}),  # an int as a float
        ((0, -1.0), {"ceil": False, "rounding": "half-up", "mode": "default", "slope": 0.5}),
        ((2, 1.0), {"negate": True, "mode": "2x", "slope": -2, "rounding": "down", "ceil": True}),
    ],
)
def test_options(options, check, args, kwargs):
    def make(dtype):
        return [torch.tensor([[0, 2, -2], [4, -4, 1]]).to(dtype), *args]

    check(options, make, lambda x, *rest: _options(x, *rest, **kwargs), compiled=COMPILED, **kwargs)


def test_wrong_options(options, entries):
    x = torch.zeros(2)
    good = {"ceil": False, "rounding": "down"}
    for entry in entries(options):
        with pytest.raises(ValueError, match="half-up"):
            entry(x, 1, 1.0, ceil=False, rounding="half-down")
        with pytest.raises((TypeError, RuntimeError), match="ceil"):
            entry(x, 1, 1.0)
        # torch.ops gives PyTorch's own message, of class RuntimeError.
        with pytest.raises((TypeError, RuntimeError), match="shift"):
            entry(x, 1.5, 1.0, **good)
        with pytest.raises((TypeError, RuntimeError), match="scale"):
            entry(x, 1, "2", **good)
    with pytest.raises(OptionTypeError, match="`shift` does not fit in 64 bits"):
        options(x, 2**63, 1.0, **good)
    with pytest.raises(OptionTypeError, match="`scale` does not fit in 64 bits"):
        options(x, 1, 10**400, **good)


def test_extreme_numbers(ns, entries):
    # int64 and float64 arrive whole; a default may be tiny, a value infinite.
    @operator(f"{ns}::extreme", cpu=HEAD + """
    void extreme(View<const double, 1> x, int64_t big, double low, double tiny, View<double, 1> output) {
      output(0) = double(big % 1000);
      output(1) = low;
      output(2) = tiny;
      output(3) = x(0);
    }
    OPWRIGHT_KERNEL(extreme)""")  # fmt: skip
    def extreme(
        x: Float64[Tensor, "1"], big: int = 2**62 + 1, low: float = -1e300, tiny: float = 1e-300
    ) -> Float64[Tensor, "4"]:
        return torch.tensor([big % 1000, low, tiny, float(x)], dtype=torch.float64)

    x = torch.tensor([0.1], dtype=torch.float64)
    for entry in entries(extreme):
        assert entry(x).tolist() == [float((2**62 + 1) % 1000), -1e300, 1e-300, 0.1]
        assert entry(x, -7, -math.inf, 5e-324).tolist() == [-7.0, -math.inf, 5e-324, 0.1]
        assert math.isnan(entry(x, 0, math.nan)[1])


@pytest.mark.parametrize("default", [math.inf, -math.inf, math.nan])
def test_a_default_that_no_schema_can_say_is_refused(ns, default):
    with pytest.raises(TypeError, match="a schema cannot say inf or nan"):

        @operator(f"{ns}::endless")
        def endless(x: Float64[Tensor, "n"], low: float = default) -> Float64[Tensor, "n"]:
            return x + low


@pytest.fixture(scope="module")
def optional(ns):
    @operator(f"{ns}::optional", cpu=HEAD + """
    template <typename T>
    void optional(View<const T, 2> x, View<const T, 1> w, View<const int64_t, 1> index, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) {
          const int64_t k = index.defined() ? index(j) : j;
          output(i, j) = T(C<T>(x(i, k)) * (w.defined() ? C<T>(w(j)) : C<T>(1)));
        }
    }
    OPWRIGHT_KERNEL(optional, THREE)""")  # fmt: skip
    def optional(
        x: Float[Tensor, "*batch n"],
        w: Float[Tensor, "n"] | None,
        index: Int[Tensor, "n"] | None = None,
    ) -> Float[Tensor, "*batch n"]:
        x = x if index is None else x[..., index.long()]
        return x.clone() if w is None else x * w

    return optional


@pytest.mark.parametrize("has_w", [True, False])
@pytest.mark.parametrize("has_index", [True, False])
def test_optional_tensors(optional, check, whole, has_w, has_index):
    def make(dtype):
        index = torch.tensor([2, 0, 1], dtype=torch.int32) if has_index else None
        return [whole(2, 3, dtype=dtype), whole(3, dtype=dtype) if has_w else None, index]

    def expected(x, w, index):
        x = x if index is None else x[:, index]
        return x if w is None else x * w

    check(optional, make, expected, compiled=COMPILED)


def test_empty_optional_is_given(optional, entries):
    # A given tensor without elements is defined, an absent one is not.
    for entry in entries(optional):
        assert entry(torch.ones(2, 3), None).sum() == 6
        assert entry(torch.ones(2, 0), torch.ones(0)).shape == (2, 0)
        with pytest.raises(ValueError, match="3"):
            entry(torch.ones(2, 3), torch.ones(0))


@pytest.fixture(scope="module")
def lists(ns):
    @operator(f"{ns}::lists", cpu=HEAD + """
    template <typename T>
    void lists(View<const T, 1> x, List<View<const T, 2>> rows, List<View<const int64_t, 1>> ks,
               View<T, 1> output) {
      for (int64_t j = 0; j < x.size(0); ++j) {
        C<T> sum = C<T>(x(j));
        for (const auto& row : rows)
          for (int64_t i = 0; i < row.size(0); ++i) sum += C<T>(row(i, j));
        for (int64_t k = 0; k < ks.size(); ++k) sum += C<T>(ks[k](j)) * C<T>(k + 1);
        output(j) = T(sum);
      }
    }
    OPWRIGHT_KERNEL(lists, THREE)""")  # fmt: skip
    def lists(
        x: Float[Tensor, "n"], rows: list[Float[Tensor, "_ n"]], ks: list[Int[Tensor, "n"]]
    ) -> Float[Tensor, "n"]:
        total = x.clone()
        for row in rows:
            total = total + row.sum(0)
        for i, k in enumerate(ks):
            total = total + ((i + 1) * k).to(x.dtype)
        return total

    return lists


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 3), (3, 2)])
def test_lists_of_tensors(lists, check, whole, counts):
    def make(dtype):
        rows = [whole(i + 1, 3, dtype=dtype) for i in range(counts[0])]
        return [whole(3, dtype=dtype), rows, [whole(3, dtype=torch.int32) for _ in range(counts[1])]]

    def expected(x, rows, ks):
        return x + sum(r.sum(0) for r in rows) + sum((i + 1) * k for i, k in enumerate(ks))

    check(lists, make, expected, compiled=COMPILED)


def test_wrong_items_of_lists(lists, entries):
    for entry in entries(lists):
        with pytest.raises(ValueError, match="rows"):
            entry(torch.zeros(3), [torch.zeros(1, 3), torch.zeros(1, 4)], [])
        with pytest.raises(TypeError, match="rows"):
            entry(torch.zeros(3), [torch.zeros(1, 3).double()], [])
        # The next good call is not disturbed by the failed ones.
        assert entry(torch.ones(3), [torch.ones(2, 3)], []).tolist() == [3.0] * 3


def test_axes_with_names_for_readers_alone(ns, entries):
    """`_rows` bound a size, where jaxtyping checks nothing."""

    @operator(f"{ns}::rows_sum", cpu=HEAD + """
    template <typename T> void rows_sum(View<const T, 2> x, View<const T, 2> y, View<T, 1> output) {
      for (int64_t j = 0; j < output.size(0); ++j) {
        output(j) = T(0);
        for (int64_t i = 0; i < x.size(0); ++i) output(j) += x(i, j);
        for (int64_t i = 0; i < y.size(0); ++i) output(j) += y(i, j);
      }
    }
    OPWRIGHT_KERNEL(rows_sum, float)""")  # fmt: skip
    def rows_sum(x: Float[Tensor, "_rows n"], y: Float[Tensor, "*_rows n"]) -> Float[Tensor, "n"]:
        return x.sum(0) + y.reshape(-1, y.shape[-1]).sum(0)

    for entry in entries(rows_sum):
        assert entry(torch.ones(2, 3), torch.ones(4, 1, 3)).tolist() == [6.0] * 3
    with pytest.raises(AxisError, match="`_rows` does not say which size it has"):

        @operator(f"{ns}::same_rows")
        def same_rows(x: Float[Tensor, "_rows n"]) -> Float[Tensor, "_rows n"]:
            return x * 2


def test_a_list_that_alone_gives_the_size(ns, entries):
    @operator(f"{ns}::total", cpu=HEAD + """
    template <typename T> void total(List<View<const T, 1>> xs, View<T, 1> output) {
      for (int64_t j = 0; j < output.size(0); ++j) {
        output(j) = T(0);
        for (const auto& x : xs) output(j) = T(C<T>(output(j)) + C<T>(x(j)));
      }
    }
    OPWRIGHT_KERNEL(total, THREE)""")  # fmt: skip
    def total(xs: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
        return torch.stack(xs).sum(0)

    for entry in entries(total):
        assert entry([torch.ones(3), torch.full((3,), 2.0)]).tolist() == [3.0] * 3
        # Nothing says what n, the dtype and the device would be: an error that says so.
        with pytest.raises((ContractError, ValueError, TypeError, NotImplementedError)):
            entry([])


def test_no_tensor_at_all(ns, entries):
    @operator(f"{ns}::nothing")
    def nothing(x: Float32[Tensor, "n"] | None, k: int) -> Float32[Tensor, "k"]:
        return torch.ones(k) if x is None else x[:k].clone()

    for entry in entries(nothing):
        with pytest.raises((ContractError, ValueError, TypeError, NotImplementedError)):
            entry(None, 2)


def test_arguments_named_as_words_of_the_implementation(ns, entries):
    @operator(f"{ns}::words", cpu=HEAD + """
    template <typename T>
    void words(View<const T, 1> self, View<const T, 1> error, int64_t result, double values,
               View<T, 1> output) {
      for (int64_t i = 0; i < self.size(0); ++i) output(i) = self(i) + error(i) * T(result) * T(values);
    }
    OPWRIGHT_KERNEL(words, float)""")  # fmt: skip
    def words(
        self: Float[Tensor, "n"], error: Float[Tensor, "n"], result: int = 1, values: float = 1.0
    ) -> Float[Tensor, "n"]:
        return self + error * result * values

    for entry in entries(words):
        assert entry(self=torch.ones(2), error=torch.ones(2), result=2, values=3.0).tolist() == [7.0, 7.0]
        with pytest.raises(ValueError, match="`error` must have n = 2"):
            entry(torch.ones(2), torch.ones(3))


def test_an_input_named_out_is_refused(ns):
    # `out=` is where results go.
    with pytest.raises(TypeError, match="out"):

        @operator(f"{ns}::outer")
        def outer(x: Float[Tensor, "n"], out: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return x + out


@pytest.mark.parametrize("choices", [['qu"ote'], ["back\\slash"], [""], ["ä"], ["a-b", "a_b"]])
def test_choices_without_a_name_in_c_are_refused(ns, choices):
    with pytest.raises(TypeError, match="no distinct names"):

        @operator(f"{ns}::spell")
        def spell(x: Float[Tensor, "1"], mode: Literal[tuple(choices)]) -> Float[Tensor, "1"]:
            return x + choices.index(mode)


def test_choices_that_are_no_identifiers(ns, entries):
    choices = ["zero-fill", "2d", "default"]

    @operator(f"{ns}::pad", cpu=HEAD + """
    template <typename T> void pad(View<const T, 1> x, Mode mode, View<T, 1> output) {
      output(0) = x(0) + T(mode == Mode::zero_fill ? 1 : mode == Mode::_2d ? 2 : mode == Mode::default_ ? 3 : 0);
    }
    OPWRIGHT_KERNEL(pad, float)""")  # fmt: skip
    def pad(x: Float[Tensor, "1"], mode: Literal[tuple(choices)] = "2d") -> Float[Tensor, "1"]:
        return x + choices.index(mode) + 1

    for entry in entries(pad):
        assert entry(torch.zeros(1)).tolist() == [2]
        assert [entry(torch.zeros(1), choice).item() for choice in choices] == [1, 2, 3]


def test_scalar_tensors(ns, check, whole):
    @operator(f"{ns}::affine", cpu=HEAD + """
    template <typename T> void affine(View<const T, 0> x, View<const T, 0> y, View<T, 0> output) {
      output() = T(2 * C<T>(x()) - C<T>(*y.data()));
    }
    OPWRIGHT_KERNEL(affine, THREE)""")  # fmt: skip
    def affine(x: Float[Tensor, ""], y: Float[Tensor, ""]) -> Float[Tensor, ""]:
        return 2 * x - y

    make = lambda d: [whole(dtype=d), whole(dtype=d)]  # noqa: E731
    check(affine, make, lambda x, y: 2 * x - y, compiled=COMPILED)
