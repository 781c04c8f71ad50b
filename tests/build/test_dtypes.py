"""One operator with a kernel for each kind of dtype family, against numpy."""

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float, Float32, Int, Int64, Integer, Num, Shaped, UInt8
from kernel_head import HEAD
from torch import Tensor

from opwright import operator

pytestmark = pytest.mark.compiler

INTS = (torch.int64, torch.int32, torch.int16, torch.int8)


def test_every_float(ns, check, whole):
    @operator(f"{ns}::line", cpu=HEAD + """
    template <typename T> void line(View<const T, 1> x, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(2 * C<T>(x(i)) + 1);
    }
    OPWRIGHT_KERNEL(line, FLOATS)""")  # fmt: skip
    def line(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return 2 * x + 1

    check(line, lambda d: [whole(2, 3, dtype=d)], lambda x: 2 * x + 1)


def test_int_family(ns, check, whole):
    # int8 is not compiled: the reference runs.
    @operator(f"{ns}::below", cpu=HEAD + """
    template <typename T> void below(View<const T, 1> x, View<T, 1> output) {
      T sum = 0;
      for (int64_t i = 0; i < x.size(0); ++i) { output(i) = sum; sum = T(sum + x(i)); }
    }
    OPWRIGHT_KERNEL(below, int64_t, int32_t, int16_t)""")  # fmt: skip
    def below(x: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
        return (x.cumsum(0) - x).to(x.dtype)

    check(below, lambda d: [whole(5, dtype=d)], lambda x: x.cumsum() - x, dtypes=INTS, compiled=INTS[:3])


def test_unsigned_and_signed_integers(ns, check, whole):
    @operator(f"{ns}::half_up", cpu=HEAD + """
    template <typename T> void half_up(View<const T, 1> x, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = T((int64_t(x(i)) + 1) / 2);
    }
    OPWRIGHT_KERNEL(half_up, uint8_t, int64_t)""")  # fmt: skip
    def half_up(x: Integer[Tensor, "*s"]) -> Integer[Tensor, "*s"]:
        return ((x.long() + 1) // 2).to(x.dtype)

    # 255 shows that uint8 is read without a sign.
    check(
        half_up,
        lambda d: [torch.tensor([[0, 1, 2], [3, 100, 255]]).to(d)],
        lambda x: (x.astype(np.int64) + 1) // 2,
        dtypes=(torch.uint8, torch.int64, torch.int32),
        compiled=(torch.uint8, torch.int64),
    )


def test_bool(ns, check, whole):
    @operator(f"{ns}::both", cpu=HEAD + """
    void both(View<const bool, 1> a, View<const bool, 1> b, View<bool, 1> output) {
      for (int64_t i = 0; i < a.size(0); ++i) output(i) = a(i) && b(i);
    }
    OPWRIGHT_KERNEL(both)""")  # fmt: skip
    def both(a: Bool[Tensor, "*s"], b: Bool[Tensor, "*s"]) -> Bool[Tensor, "*s"]:
        return a & b

    check(
        both,
        lambda d: [whole(3, 5, low=0, high=2, dtype=d), whole(3, 5, low=0, high=2, dtype=d)],
        np.logical_and,
        dtypes=(torch.bool,),
        compiled=(torch.bool,),
    )


def test_shaped_family(ns, check, whole):
    # Floats, integers and bool in one template; float16 is not compiled.
    compiled = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)

    @operator(f"{ns}::reverse", cpu=HEAD + """
    template <typename T> void reverse(View<const T, 1> x, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(x.size(0) - 1 - i);
    }
    OPWRIGHT_KERNEL(reverse, float, opwright::bfloat16, int64_t, int8_t, uint8_t, bool)""")  # fmt: skip
    def reverse(x: Shaped[Tensor, "n"]) -> Shaped[Tensor, "n"]:
        return x.flip(0)

    check(
        reverse,
        lambda d: [whole(5, low=0, high=3, dtype=d)],
        lambda x: x[::-1].copy(),
        dtypes=(*compiled, torch.float16),
        compiled=compiled,
    )


@pytest.mark.parametrize("family", [Num, Shaped])
def test_gradient_of_a_family_with_floats_and_integers(ns, family):
    # These are not float families, but their float tensors have gradients all the same.
    name = f"square_{family.__name__.lower()}"

    @operator(f"{ns}::{name}", cpu=HEAD + """
    template <typename T> void NAME(View<const T, 1> x, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(x(i) * x(i));
    }
    OPWRIGHT_KERNEL(NAME, float, int64_t)""".replace("NAME", name))  # fmt: skip
    def square(x: family[Tensor, "n"]) -> family[Tensor, "n"]:
        return x * x

    x = torch.tensor([1.0, 2.0, -3.0], requires_grad=True)
    for entry in (square, getattr(getattr(torch.ops, ns), name)):
        (gradient,) = torch.autograd.grad(entry(x).sum(), x)
        assert gradient.tolist() == [2.0, 4.0, -6.0]
    assert square(torch.tensor([3])).tolist() == [9]


def test_single_dtypes_have_no_template(ns, check, whole):
    @operator(f"{ns}::weigh", cpu=HEAD + """
    void weigh(View<const float, 1> x, View<const int64_t, 1> n, View<const uint8_t, 1> u,
               View<float, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) * float(n(i)) + float(u(i));
    }
    OPWRIGHT_KERNEL(weigh)""")  # fmt: skip
    def weigh(x: Float32[Tensor, "*s"], n: Int64[Tensor, "*s"], u: UInt8[Tensor, "*s"]) -> Float32[Tensor, "*s"]:
        return x * n + u

    check(
        weigh,
        lambda d: [whole(2, 3, dtype=d), whole(2, 3).long(), whole(2, 3, low=0, high=256).to(torch.uint8)],
        lambda x, n, u: x * n + u,
        dtypes=(torch.float32,),
    )
    for entry in (weigh, getattr(torch.ops, ns).weigh):
        with pytest.raises(TypeError, match="x"):
            entry(torch.zeros(1).double(), torch.zeros(1).long(), torch.zeros(1).to(torch.uint8))


@pytest.fixture(scope="module")
def gather(ns):
    @operator(f"{ns}::gather", cpu=HEAD + """
    template <typename T>
    void gather(View<const T, 2> x, View<const int64_t, 1> index, View<T, 2> rows, View<int64_t, 1> next) {
      for (int64_t i = 0; i < index.size(0); ++i) {
        for (int64_t j = 0; j < x.size(1); ++j) rows(i, j) = x(index(i), j);
        next(i) = index(i) + 1;
      }
    }
    OPWRIGHT_KERNEL(gather, float, double, opwright::half)""")  # fmt: skip
    def gather(x: Float[Tensor, "n d"], index: Int[Tensor, "m"]) -> tuple[Float[Tensor, "m d"], Int[Tensor, "m"]]:
        return x[index.long()], index + 1

    return gather


@pytest.mark.parametrize("index_dtype", INTS)
def test_index_of_any_int_dtype_is_int64_in_the_kernel(gather, check, whole, index_dtype):
    # The family of the template is Float: tensors of Int are converted, on the way in and out.
    def make(dtype):
        return [whole(6, 3, dtype=dtype), whole(4, low=0, high=6, dtype=index_dtype)]

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        check(
            gather,
            make,
            lambda x, index: (x[index], index + 1),
            dtypes=(dtype,),
            compiled=(torch.float32, torch.float64, torch.float16),
            out_dtypes=(dtype, index_dtype),
        )


@pytest.mark.parametrize("index_dtype", INTS)
def test_out_of_a_converted_dtype(gather, entries, index_dtype):
    x, index = torch.arange(12.0).reshape(4, 3), torch.tensor([3, 0], dtype=index_dtype)
    for entry in entries(gather):
        rows = torch.full((2, 6), -1.0)[:, ::2]
        after = torch.full((4,), -1, dtype=index_dtype)[::2]
        if entry is gather:
            entry(x, index, out=(rows, after))
        else:
            entry.out(x, index, out0=rows, out1=after)
        assert rows.tolist() == [[9.0, 10.0, 11.0], [0.0, 1.0, 2.0]]
        assert after.tolist() == [4, 1]


def test_outputs_of_fixed_dtypes(ns, check, whole):
    @operator(f"{ns}::facts", cpu=HEAD + """
    template <typename T>
    void facts(View<const T, 2> x, View<float, 1> sum, View<bool, 2> positive, View<int64_t, 1> argmax) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        float s = 0;
        int64_t best = 0;
        for (int64_t j = 0; j < x.size(1); ++j) {
          s += float(x(i, j));
          positive(i, j) = C<T>(x(i, j)) > 0;
          if (C<T>(x(i, j)) > C<T>(x(i, best))) best = j;
        }
        sum(i) = s;
        argmax(i) = best;
      }
    }
    OPWRIGHT_KERNEL(facts, float, opwright::half, opwright::bfloat16)""")  # fmt: skip
    def facts(
        x: Float[Tensor, "*batch n"],
    ) -> tuple[Float32[Tensor, "*batch"], Bool[Tensor, "*batch n"], Int64[Tensor, "*batch"]]:
        return x.float().sum(-1), x > 0, x.argmax(-1)

    # bfloat16 cannot hold 257 + 256: the sum really is in float32.
    row = torch.tensor([[1.0, 256.0, -2.0, 257.0 - 1], [-1.0, -3.0, -2.0, 256.0]])
    check(
        facts,
        lambda d: [row.to(d)],
        lambda x: (x.sum(-1), x > 0, x.argmax(-1)),
        compiled=(torch.float32, torch.float16, torch.bfloat16),
        out_dtypes=(torch.float32, torch.bool, torch.int64),
    )


def test_error_of_the_reference_reaches_the_caller(ns, entries):
    # A dtype without a kernel runs the reference; what the reference raises must not be lost.
    @operator(f"{ns}::only", cpu=HEAD + """
    template <typename T> void only(View<const T, 1> x, View<T, 1> output) { output(0) = x(0); }
    OPWRIGHT_KERNEL(only, float)""")  # fmt: skip
    def only(x: Float[Tensor, "1"]) -> Float[Tensor, "1"]:
        if x.dtype == torch.float64:
            raise NotImplementedError("float64 is too wide")
        return x.clone()

    assert only(torch.ones(1)).tolist() == [1.0]
    for entry in entries(only):
        with pytest.raises(Exception, match="float64 is too wide"):
            entry(torch.ones(1, dtype=torch.float64))
