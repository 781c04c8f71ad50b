"""One operator with a kernel for each kind of axis, against numpy."""

import numpy as np
import pytest
import torch
from jaxtyping import Float, Num
from kernel_head import COMPILED, HEAD
from torch import Tensor

from opwright import operator

pytestmark = pytest.mark.compiler


def test_named_axes(ns, check, whole):
    @operator(f"{ns}::outer", cpu=HEAD + """
    template <typename T> void outer(View<const T, 2> x, View<const T, 2> y, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < y.size(0); ++j) {
          C<T> sum = 0;
          for (int64_t k = 0; k < x.size(1); ++k) sum += C<T>(x(i, k)) * C<T>(y(j, k));
          output(i, j) = T(sum);
        }
    }
    OPWRIGHT_KERNEL(outer, THREE)""")  # fmt: skip
    def outer(x: Float[Tensor, "m k"], y: Float[Tensor, "n k"]) -> Float[Tensor, "m n"]:
        return x @ y.mT

    def make(dtype):
        return [whole(3, 4, dtype=dtype), whole(2, 4, dtype=dtype)]

    check(outer, make, lambda x, y: np.einsum("mk,nk->mn", x, y), compiled=COMPILED)


def test_fixed_axes(ns, check, whole):
    @operator(f"{ns}::cross", cpu=HEAD + """
    template <typename T> void cross(View<const T, 1> a, View<const T, 1> b, View<T, 1> output) {
      for (int i = 0; i < 3; ++i) {
        const int j = (i + 1) % 3, k = (i + 2) % 3;
        output(i) = T(C<T>(a(j)) * C<T>(b(k)) - C<T>(a(k)) * C<T>(b(j)));
      }
    }
    OPWRIGHT_KERNEL(cross, THREE)""")  # fmt: skip
    def cross(a: Float[Tensor, "3"], b: Float[Tensor, "3"]) -> Float[Tensor, "3"]:
        return torch.linalg.cross(a.double(), b.double()).to(a.dtype)

    def make(dtype):
        return [whole(3, dtype=dtype), whole(3, dtype=dtype)]

    check(cross, make, np.cross, compiled=COMPILED)


# A variadic axis of 0 to 3 dimensions, one of which is 1: the glue collapses it or copies.
SHAPES = [(), (3,), (2, 3), (2, 1, 3)]


@pytest.fixture(scope="module")
def leading(ns):
    @operator(f"{ns}::leading", cpu=HEAD + """
    template <typename T> void leading(View<const T, 2> x, View<const T, 1> b, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = T(C<T>(x(i, j)) * C<T>(b(j)));
    }
    OPWRIGHT_KERNEL(leading, THREE)""")  # fmt: skip
    def leading(x: Float[Tensor, "*batch n"], b: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
        return x * b

    return leading


@pytest.mark.parametrize("shape", SHAPES)
def test_variadic_leading(leading, check, whole, shape):
    def make(dtype):
        return [whole(*shape, 4, dtype=dtype), whole(4, dtype=dtype)]

    check(leading, make, lambda x, b: x * b, compiled=COMPILED)


@pytest.fixture(scope="module")
def trailing(ns):
    @operator(f"{ns}::trailing", cpu=HEAD + """
    template <typename T> void trailing(View<const T, 2> x, View<const T, 1> b, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = T(C<T>(x(i, j)) + C<T>(b(i)));
    }
    OPWRIGHT_KERNEL(trailing, THREE)""")  # fmt: skip
    def trailing(x: Float[Tensor, "n *rest"], b: Float[Tensor, "n"]) -> Float[Tensor, "n *rest"]:
        return x + b.reshape(-1, *[1] * (x.ndim - 1))

    return trailing


@pytest.mark.parametrize("shape", SHAPES)
def test_variadic_trailing(trailing, check, whole, shape):
    def make(dtype):
        return [whole(4, *shape, dtype=dtype), whole(4, dtype=dtype)]

    check(trailing, make, lambda x, b: (x.T + b).T, compiled=COMPILED)


@pytest.fixture(scope="module")
def middle(ns):
    @operator(f"{ns}::middle", cpu=HEAD + """
    template <typename T> void middle(View<const T, 3> x, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t k = 0; k < x.size(2); ++k) {
          C<T> sum = 0;
          for (int64_t j = 0; j < x.size(1); ++j) sum += C<T>(x(i, j, k));
          output(i, k) = T(sum);
        }
    }
    OPWRIGHT_KERNEL(middle, THREE)""")  # fmt: skip
    def middle(x: Float[Tensor, "b *mid c"]) -> Float[Tensor, "b c"]:
        return x.reshape(x.shape[0], x.shape[1:-1].numel(), x.shape[-1]).sum(1)

    return middle


@pytest.mark.parametrize("shape", [*SHAPES, (2, 0)])
def test_variadic_in_the_middle(middle, check, whole, shape):
    def make(dtype):
        return [whole(4, *shape, 5, dtype=dtype)]

    check(middle, make, lambda x: x.sum(axis=tuple(range(1, x.ndim - 1))), compiled=COMPILED)


@pytest.mark.parametrize("shape", SHAPES)
def test_variadic_alone(alone, check, whole, shape):
    check(alone, lambda dtype: [whole(*shape, dtype=dtype)], lambda x: x * x, compiled=COMPILED)


@pytest.fixture(scope="module")
def alone(ns):
    @operator(f"{ns}::alone", cpu=HEAD + """
    template <typename T> void alone(View<const T, 1> x, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(C<T>(x(i)) * C<T>(x(i)));
    }
    OPWRIGHT_KERNEL(alone, THREE)""")  # fmt: skip
    def alone(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x * x

    return alone


def test_axes_without_names(ns, check, whole):
    # Two `...` of different shapes and a `_`: none of them constrains another.
    @operator(f"{ns}::total", cpu=HEAD + """
    template <typename T>
    void total(View<const T, 1> x, View<const T, 2> y, View<const T, 2> z, View<T, 1> output) {
      C<T> sum = 0;
      for (int64_t i = 0; i < x.size(0); ++i) sum += C<T>(x(i));
      for (int64_t i = 0; i < y.size(0); ++i) sum += C<T>(y(i, 0)) - C<T>(y(i, 1));
      for (int64_t i = 0; i < z.size(0); ++i) {
        C<T> row = sum;
        for (int64_t j = 0; j < z.size(1); ++j) row += C<T>(z(i, j));
        output(i) = T(row);
      }
    }
    OPWRIGHT_KERNEL(total, THREE)""")  # fmt: skip
    def total(x: Float[Tensor, "..."], y: Float[Tensor, "... 2"], z: Float[Tensor, "n _"]) -> Float[Tensor, "n"]:
        return x.sum() + (y[..., 0] - y[..., 1]).sum() + z.sum(1)

    def make(dtype):
        return [whole(2, 3, dtype=dtype), whole(4, 2, dtype=dtype), whole(3, 5, dtype=dtype)]

    def expected(x, y, z):
        return x.sum() + y[:, 0].sum() - y[:, 1].sum() + z.sum(1)

    check(total, make, expected, compiled=COMPILED)


def test_computed_axis_of_an_input(ns, check, whole):
    # `4*h` comes before the argument that binds h.
    @operator(f"{ns}::gates", cpu=HEAD + """
    template <typename T> void gates(View<const T, 2> g, View<const T, 2> c, View<T, 2> output) {
      const int64_t h = c.size(1);
      for (int64_t b = 0; b < c.size(0); ++b)
        for (int64_t j = 0; j < h; ++j)
          output(b, j) = T(C<T>(c(b, j)) + C<T>(g(b, j)) - C<T>(g(b, 3 * h + j)));
    }
    OPWRIGHT_KERNEL(gates, THREE)""")  # fmt: skip
    def gates(g: Float[Tensor, "b 4*h"], c: Float[Tensor, "b h"]) -> Float[Tensor, "b h"]:
        first, _, _, last = g.chunk(4, 1)
        return c + first - last

    def make(dtype):
        return [whole(2, 12, dtype=dtype), whole(2, 3, dtype=dtype)]

    check(gates, make, lambda g, c: c + g[:, :3] - g[:, 9:], compiled=COMPILED)
    for entry in (gates, getattr(torch.ops, ns).gates):
        with pytest.raises(ValueError, match="12"):
            entry(torch.zeros(2, 13), torch.zeros(2, 3))


def test_axis_that_only_an_expression_binds(ns, check, whole):
    @operator(f"{ns}::quarter", cpu=HEAD + """
    template <typename T> void quarter(View<const T, 1> x, View<T, 1> output) {
      const int64_t h = output.size(0);
      for (int64_t j = 0; j < h; ++j) {
        C<T> sum = 0;
        for (int64_t i = 0; i < 4; ++i) sum += C<T>(x(i * h + j));
        output(j) = T(sum);
      }
    }
    OPWRIGHT_KERNEL(quarter, THREE)""")  # fmt: skip
    def quarter(x: Float[Tensor, "4*h"]) -> Float[Tensor, "h"]:
        return x.reshape(4, -1).sum(0)

    check(quarter, lambda d: [whole(12, dtype=d)], lambda x: x.reshape(4, -1).sum(0), compiled=COMPILED)
    for entry in (quarter, getattr(torch.ops, ns).quarter):
        with pytest.raises(ValueError, match=r"4\*h"):
            entry(torch.zeros(13))


def test_two_axes_bound_by_expressions(ns, check, whole):
    # `h+k` holds two names that no axis of their own binds: `2*h` gives h, so `h+k` gives k.
    @operator(f"{ns}::tail", cpu=HEAD + """
    template <typename T> void tail(View<const T, 1> x, View<const T, 1> y, View<T, 1> output) {
      const int64_t h = x.size(0) / 2;
      for (int64_t j = 0; j < output.size(0); ++j) output(j) = y(h + j);
    }
    OPWRIGHT_KERNEL(tail, THREE)""")  # fmt: skip
    def tail(x: Float[Tensor, "2*h"], y: Float[Tensor, "h+k"]) -> Float[Tensor, "k"]:
        return y[x.shape[0] // 2 :].clone()

    def make(dtype):
        return [whole(6, dtype=dtype), whole(8, dtype=dtype)]

    check(tail, make, lambda x, y: y[3:], compiled=COMPILED)


def test_computed_axes_of_outputs(ns, check, whole):
    @operator(f"{ns}::shapes", cpu=HEAD + """
    template <typename T>
    void shapes(View<const T, 1> x, View<const T, 1> y, int64_t k, View<T, 1> pairs, View<T, 1> windows,
                View<T, 1> joined, View<T, 1> least) {
      for (int64_t i = 0; i < pairs.size(0); ++i) pairs(i) = T(C<T>(x(2 * i)) + C<T>(x(2 * i + 1)));
      for (int64_t i = 0; i < windows.size(0); ++i) {
        C<T> sum = 0;
        for (int64_t j = 0; j < k; ++j) sum += C<T>(x(i + j));
        windows(i) = T(sum);
      }
      for (int64_t i = 0; i < joined.size(0); ++i) joined(i) = i < x.size(0) ? x(i) : y(i - x.size(0));
      for (int64_t i = 0; i < least.size(0); ++i) least(i) = T(C<T>(x(i)) * C<T>(y(i)));
    }
    OPWRIGHT_KERNEL(shapes, THREE)""")  # fmt: skip
    def shapes(
        x: Float[Tensor, "a"], y: Float[Tensor, "b"], k: int = 2
    ) -> tuple[Float[Tensor, "a//2"], Float[Tensor, "a-k+1"], Float[Tensor, "a+b"], Float[Tensor, "min(a,b)"]]:
        half, least = x.shape[0] // 2, min(x.shape[0], y.shape[0])
        pairs = x[: 2 * half].reshape(half, 2).sum(1)
        return pairs, x.unfold(0, k, 1).sum(1), torch.cat([x, y]), x[:least] * y[:least]

    def expected(x, y, k):
        pairs = x[: len(x) // 2 * 2].reshape(-1, 2).sum(1)
        windows = np.lib.stride_tricks.sliding_window_view(x, k).sum(1)
        return pairs, windows, np.concatenate([x, y]), x[: len(y)] * y[: len(x)]

    for a, b, k in ((7, 4, 3), (4, 6, 1)):
        check(
            shapes,
            lambda d, a=a, b=b, k=k: [whole(a, dtype=d), whole(b, dtype=d), k],
            expected,
            compiled=COMPILED,
        )
    for entry in (shapes, getattr(torch.ops, ns).shapes):
        with pytest.raises((ValueError, RuntimeError), match="a-k"):
            entry(torch.zeros(3), torch.zeros(3), 5)  # a-k+1 = -1


def test_a_second_family_reaches_the_kernel_only_as_whole_numbers(ns, count_reference):
    """A float was cut off to an int64."""

    @operator(f"{ns}::add", cpu=HEAD + """
    template <typename T> void add(View<const T, 1> x, View<const int64_t, 1> y, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) + T(y(i));
    }
    OPWRIGHT_KERNEL(add, float)""")  # fmt: skip
    def add(x: Float[Tensor, "n"], y: Num[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x + y.to(x.dtype)

    x = torch.tensor([1.0, 2.0])
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.uint8):
        y = torch.tensor([0.5, 3.0]).to(dtype)
        with count_reference(add) as runs:
            assert add(x, y).tolist() == [1 + y.tolist()[0], 5.0]
        assert bool(runs) == dtype.is_floating_point
