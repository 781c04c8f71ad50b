"""opwright/tensor.h: kernels that call ATen."""

from typing import NamedTuple

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator
from opwright.errors import KernelError

pytestmark = pytest.mark.compiler

HEAD = """
#include <opwright/kernel.h>
#include <opwright/tensor.h>
using namespace opwright;
"""


@pytest.fixture(scope="module")
def product(ns):
    @operator(f"{ns}::product", cpu=HEAD + """
    template <typename T> void product(View<const T, 2> a, View<const T, 2> b, View<T, 2> output) {
      call("aten::mm.out", borrow(a), borrow(b), borrow(output));
    }
    OPWRIGHT_KERNEL(product, float, double, opwright::half, opwright::bfloat16)""")  # fmt: skip
    def product(a: Float[Tensor, "*m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "*m n"]:
        return a @ b

    return product


def test_into_an_output(product, check, whole):
    make = lambda d: [whole(3, 4, dtype=d), whole(4, 5, dtype=d)]  # noqa: E731
    check(product, make, lambda a, b: a @ b)


def test_in_pytorchs_systems(product, entries, count_reference):
    a, b = torch.randn(2, 3, 4, dtype=torch.double), torch.randn(4, 5, dtype=torch.double)
    for entry in entries(product):
        with count_reference(product) as runs:
            for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
                with mode():
                    torch.testing.assert_close(entry(a, b), a @ b)
            torch.testing.assert_close(torch.compile(entry, fullgraph=True, backend="aot_eager")(a, b), a @ b)
            torch.testing.assert_close(torch.vmap(entry, (0, None))(a, b), a @ b)
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(entry(a, b), a @ b)
            out = torch.zeros(2, 3, 5, dtype=torch.double)
            assert product(a, b, out=out) is out
            torch.testing.assert_close(out, a @ b)
        assert not runs
        leaf = a.clone().requires_grad_()
        (got,) = torch.autograd.grad(entry(leaf, b).sum(), leaf)
        torch.testing.assert_close(got, b.sum(-1).expand_as(a))
        compiled = torch.compile(entry, fullgraph=True, dynamic=True, backend="aot_eager")
        torch.testing.assert_close(torch.autograd.grad(compiled(leaf, b).sum(), leaf)[0], got)


def test_scaled_sums(ns, entries):
    # out = beta * c + alpha * a @ b, for matrices and for batches of them.
    @operator(f"{ns}::scaled", cpu=HEAD + """
    template <typename T>
    void scaled(View<const T, 2> c, View<const T, 2> a, View<const T, 2> b, double beta, double alpha,
                View<T, 2> once, View<T, 3> batch) {
      call("aten::addmm.out", borrow(c), borrow(a), borrow(b), beta, alpha, borrow(once));
      auto one = [](const Tensor& t) { return t.view({1, t.size(0), t.size(1)}, {0, t.stride(0), t.stride(1)}); };
      call("aten::baddbmm.out", one(borrow(c)), one(borrow(a)), one(borrow(b)), beta, alpha, borrow(batch));
    }
    OPWRIGHT_KERNEL(scaled, float, double)""")  # fmt: skip
    def scaled(
        c: Float[Tensor, "m n"], a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], beta: float, alpha: float
    ) -> tuple[Float[Tensor, "m n"], Float[Tensor, "1 m n"]]:
        return torch.zeros_like(c), torch.zeros_like(c)[None]

    c, a, b = torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5)
    for entry in entries(scaled):
        once, batch = entry(c, a, b, 0.5, -2.0)
        torch.testing.assert_close(once, 0.5 * c - 2 * a @ b)
        torch.testing.assert_close(batch[0], once)


class Parts(NamedTuple):
    doubled: Float[Tensor, "m n"]
    normal: Float[Tensor, "m n"]
    best: Float[Tensor, "m"]
    sums: Float[Tensor, "m 1"]


@pytest.fixture(scope="module")
def parts(ns):
    # Temporaries, views, lists, optional arguments, several results.
    @operator(f"{ns}::parts", cpu=HEAD + """
    template <typename T>
    void parts(View<const T, 2> a, View<const T, 1> w, View<T, 2> doubled, View<T, 2> normal, View<T, 1> best,
               View<T, 2> sums) {
      const Tensor x = borrow(a);
      Tensor turned = Tensor::empty<T>({a.size(1), a.size(0)});
      check(turned.numel() == x.numel() && turned.stride(0) == a.size(0) && turned.dim() == 2, "empty");
      call("aten::copy_", turned, x.t(), false);
      Tensor copy = turned, moved = static_cast<Tensor&&>(turned);
      check(copy.defined() && moved.data<T>() == copy.data<T>() && !turned.defined(), "copies and moves");
      turned = call("aten::cat", std::initializer_list<Tensor>{copy, moved}, 0);
      for (int64_t i = 0; i < a.size(0); ++i)
        for (int64_t j = 0; j < a.size(1); ++j) {
          const T* at = turned.data<T>() + j * turned.stride(0) + i * turned.stride(1);
          doubled(i, j) = at[0] + at[a.size(1) * a.size(0)];
        }
      auto [y, mean, rstd] = call<std::tuple<Tensor, Tensor, Tensor>>(
          "aten::native_layer_norm", x, Ints{a.size(1)}, optional(borrow(w)), none, 1e-5);
      call("aten::copy_", borrow(normal), y, false);
      auto [values, indices] = call<std::tuple<Tensor, Tensor>>("aten::max.dim", x, 1, false);
      for (int64_t i = 0; i < a.size(0); ++i) best(i) = values.data<T>()[i] + T(indices.data<int64_t>()[i]);
      call("aten::copy_", borrow(sums), call("aten::sum.dim_IntList", x, optional(Ints{1}), true, none), false);
      check(call<bool>("aten::equal", x, x), "equal");
      check(call<int64_t>("aten::size.int", x, 1) == a.size(1), "size");
      auto* room = &doubled(0, 0);
      check(borrow(room, {2, 3}).stride(0) == 3 && borrow(room, {2, 3}, {1, 2}).t().stride(1) == 1, "borrow");
    }
    OPWRIGHT_KERNEL(parts, float, double)""")  # fmt: skip
    def parts(a: Float[Tensor, "m n"], w: Float[Tensor, "n"] | None = None) -> Parts:
        values, indices = a.max(1)
        normal = torch.nn.functional.layer_norm(a, (a.shape[1],), w)
        return Parts(2 * a, normal, values + indices, a.sum(1, keepdim=True))

    return parts


def test_every_kind_of_argument_and_result(parts, entries, count_reference):
    a, w = torch.randn(4, 6), torch.randn(6)
    for entry in entries(parts):
        with count_reference(parts) as runs:
            for args in ((a,), (a, w), (a.T.contiguous().T, w)):
                wanted = parts.operator.declaration.reference(*args)
                torch.testing.assert_close(tuple(entry(*args)), tuple(wanted))
            assert not runs


@pytest.fixture(scope="module")
def wrong(ns):
    @operator(f"{ns}::wrong", cpu=HEAD + """
    template <typename T> void wrong(View<const T, 2> a, int64_t how, View<T, 2> output) {
      const Tensor x = borrow(a);
      if (how == 0) call("aten::mm", x, x);
      if (how == 1) call("aten::nothing.out", x);
      if (how == 2) call("aten::t", Tensor());
      if (how == 3) x.data<int64_t>();
      if (how == 4) Tensor().size(0);
      if (how == 5) x.transpose(0, 2);
      if (how == 6) x.size(7);
      if (how == 7) x.stride(-1);
      call("aten::copy_", borrow(output), x, false);
    }
    OPWRIGHT_KERNEL(wrong, float)""")  # fmt: skip
    def wrong(a: Float[Tensor, "m n"], how: int) -> Float[Tensor, "m n"]:
        return a.clone()

    return wrong


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (0, r"aten::mm: "),
        (1, r"aten::nothing\.out: "),
        (2, "undefined"),
        (3, "another dtype"),
        (4, "undefined"),
        (5, "no such dimension"),
        (6, "no such dimension"),
        (7, "no such dimension"),
    ],
)
def test_what_fails_says_what(wrong, entries, how, text):
    a = torch.ones(2, 3)
    for entry in entries(wrong):
        with pytest.raises((KernelError, RuntimeError), match=text):
            entry(a, how)
        assert torch.equal(entry(a, 9), a)


def test_pytorchs_own_words(wrong):
    is_handed_over = torch.__version__ >= (2, 13)  # before, PyTorch only printed the text of an error
    text = r".*cannot be multiplied \(2x3 and 2x3\)" if is_handed_over else "PyTorch refused it, and said why on stderr"
    with pytest.raises(KernelError, match=f"aten::mm: {text}"):
        wrong(torch.ones(2, 3), 0)


def test_nothing_leaks(parts, product):
    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * 4096

    def run(calls):
        for _ in range(calls):
            parts(a, w)
            product(a, b)

    a, w, b = torch.randn(64, 64), torch.randn(64), torch.randn(64, 64)
    run(300)
    before = resident()
    run(2000)
    # A handle is 8 bytes beside a tensor of 200; one temporary is 16 KB.
    assert resident() - before < 2 << 20
