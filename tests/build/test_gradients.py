"""Gradients of operators with kernels: declared and derived, first and second order."""

import pytest
import torch
from jaxtyping import Float, Int64
from kernel_head import HEAD
from torch import Tensor

from opwright import operator
from opwright.errors import BackwardError

pytestmark = pytest.mark.compiler


def grads(function, *inputs):
    """Returns function's value and the gradients of its weighted sum, None for inputs that want none."""
    inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
    value = function(*inputs)
    weights = torch.arange(1.0, value.numel() + 1).reshape(value.shape).to(value)
    wanted = [t for t in inputs if t.requires_grad]
    return value.detach(), torch.autograd.grad(value, wanted, weights)


@pytest.fixture(scope="module")
def gated(ns):
    # out = x * w ** power + b, its backward in the same source, for float and double.
    @operator(f"{ns}::gated", cpu=HEAD + """
    template <typename T>
    void gated(View<const T, 2> x, View<const T, 1> w, View<const T, 1> b, int64_t power, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j)
          output(i, j) = T(x(i, j) * std::pow(w(j), T(power)) + (b.defined() ? b(j) : T(0)));
    }
    template <typename T>
    void gated_backward(View<const T, 2> grad_output, View<const T, 2> x, View<const T, 1> w,
                        View<const T, 1> b, int64_t power, View<T, 2> grad_x, View<T, 1> grad_w,
                        View<T, 1> grad_b) {
      for (int64_t j = 0; j < x.size(1); ++j) {
        grad_w(j) = 0;
        if (b.defined()) grad_b(j) = 0;
        for (int64_t i = 0; i < x.size(0); ++i) {
          grad_x(i, j) = grad_output(i, j) * std::pow(w(j), T(power));
          grad_w(j) += grad_output(i, j) * x(i, j) * T(power) * std::pow(w(j), T(power - 1));
          if (b.defined()) grad_b(j) += grad_output(i, j);
        }
      }
    }
    OPWRIGHT_KERNEL(gated, float, double)
    OPWRIGHT_KERNEL(gated_backward, float, double)""")  # fmt: skip
    def gated(
        x: Float[Tensor, "*batch n"],
        w: Float[Tensor, "n"],
        b: Float[Tensor, "n"] | None = None,
        *,
        power: int = 2,
    ) -> Float[Tensor, "*batch n"]:
        y = x * w**power
        return y if b is None else y + b

    @gated.backward
    def gated_backward(grad_output, x, w, b, *, power=2):
        rows = (grad_output * x).reshape(-1, x.shape[-1]).sum(0)
        grad_b = None if b is None else grad_output.reshape(-1, x.shape[-1]).sum(0)
        return grad_output * w**power, rows * power * w ** (power - 1), grad_b

    return gated


def plain_gated(x, w, b=None, power=2):
    y = x * w**power
    return y if b is None else y + b


@pytest.mark.parametrize("subset", ["x", "w", "b", "xw", "xb", "wb", "xwb"])
@pytest.mark.parametrize("power", [2, 3])
def test_declared_backward_for_each_subset(gated, entries, count_reference, subset, power):
    x, w, b = torch.randn(2, 3, 4), torch.rand(4) + 0.5, torch.randn(4)
    for name, t in (("x", x), ("w", w), ("b", b)):
        t.requires_grad_(name in subset)
    wanted = grads(lambda x, w, b: plain_gated(x, w, b, power), x, w, b)
    for entry in entries(gated):
        gated(x.detach(), w.detach())  # built before the count
        backward = gated.operator.backward_operator.function
        with count_reference(gated) as runs, count_reference(backward) as more:
            got = grads(lambda x, w, b, entry=entry: entry(x, w, b, power=power), x, w, b)
        assert not runs
        assert not more
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_declared_backward_without_the_optional(gated, entries, dtype):
    # bfloat16 has no kernel: the reference of the backward runs.
    x, w = torch.randint(-3, 4, (3, 4)).to(dtype), torch.randint(1, 3, (4,)).to(dtype)
    x.requires_grad_()
    w.requires_grad_()
    wanted = grads(plain_gated, x, w)
    for entry in entries(gated):
        torch.testing.assert_close(grads(entry, x, w), wanted)
        got = grads(lambda x, w, entry=entry: entry(x.mT.contiguous().mT, w), x, w)
        torch.testing.assert_close(got, wanted)


def test_arguments_that_are_keyword_only_in_the_backward_alone(ns):
    """They were passed by position."""

    @operator(f"{ns}::scaled", cpu=HEAD + """
    template <typename T> void scaled(View<const T, 1> x, double factor, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(x(i) * x(i) * factor);
    }
    template <typename T>
    void scaled_backward(View<const T, 1> grad_output, double factor, View<const T, 1> x, View<T, 1> grad_x) {
      for (int64_t i = 0; i < x.size(0); ++i) grad_x(i) = T(2 * x(i) * factor * grad_output(i));
    }
    OPWRIGHT_KERNEL(scaled, float)
    OPWRIGHT_KERNEL(scaled_backward, float)""")  # fmt: skip
    def scaled(x: Float[Tensor, "n"], factor: float) -> Float[Tensor, "n"]:
        return x * x * factor

    @scaled.backward
    def scaled_backward(grad_output, *, factor, x):
        return 2 * x * factor * grad_output

    for dtype in (torch.float32, torch.float64):  # with a kernel and without
        x = torch.tensor([1.0, 3.0], dtype=dtype, requires_grad=True)
        for function in (scaled, torch.compile(scaled, backend="aot_eager")):
            assert torch.autograd.grad(function(x, 2.0).sum(), x)[0].tolist() == [4.0, 12.0]


def test_gradients_of_expanded_and_unused_results(gated, entries):
    for entry in entries(gated):
        x, w = torch.randn(2, 3, requires_grad=True), torch.rand(3, requires_grad=True)
        entry(x, w).sum().backward()  # the gradient comes in with strides of 0
        torch.testing.assert_close(x.grad, (w**2).expand(2, 3))
        torch.testing.assert_close(w.grad, (2 * w * x.sum(0)))


def test_gradcheck_with_kernels(gated, entries):
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    w = (torch.rand(3, dtype=torch.double) + 0.5).requires_grad_()
    b = torch.randn(3, dtype=torch.double, requires_grad=True)
    for entry in entries(gated):
        assert torch.autograd.gradcheck(lambda x, w, b, entry=entry: entry(x, w, b, power=3), (x, w, b))
        assert torch.autograd.gradgradcheck(lambda x, w, b, entry=entry: entry(x, w, b, power=3), (x, w, b))
        assert torch.autograd.gradgradcheck(lambda x, w, entry=entry: entry(x, w, power=3), (x, w))


@pytest.fixture(scope="module")
def logistic(ns):
    @operator(f"{ns}::logistic", cpu=HEAD + """
    template <typename T> void logistic(View<const T, 1> x, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(1 / (1 + std::exp(-x(i))));
    }
    template <typename T>
    void logistic_backward(View<const T, 1> grad_output, View<const T, 1> output, View<T, 1> grad_x) {
      for (int64_t i = 0; i < output.size(0); ++i) grad_x(i) = grad_output(i) * output(i) * (1 - output(i));
    }
    OPWRIGHT_KERNEL(logistic, float, double)
    OPWRIGHT_KERNEL(logistic_backward, float, double)""")  # fmt: skip
    def logistic(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return torch.sigmoid(x)

    @logistic.backward
    def logistic_backward(grad_output, output):
        return grad_output * output * (1 - output)

    return logistic


def test_backward_from_the_saved_output(logistic, entries):
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    for entry in entries(logistic):
        torch.testing.assert_close(grads(entry, x), grads(torch.sigmoid, x))
        assert torch.autograd.gradcheck(entry, x)
        assert torch.autograd.gradgradcheck(entry, x)
        # Only the output is kept: the input may be overwritten, the output may not.
        y = x.detach().clone().requires_grad_()
        z = y * 1
        out = entry(z)
        with torch.no_grad():
            z.zero_()
        out.sum().backward()
        torch.testing.assert_close(y.grad, torch.sigmoid(x) * torch.sigmoid(-x))
        out = entry(y)
        with torch.no_grad():
            out.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            out.sum().backward()


@pytest.fixture(scope="module")
def best(ns):
    # Two outputs, one of them no float; the backward reads the index that the forward found.
    @operator(f"{ns}::best", cpu=HEAD + """
    template <typename T> void best(View<const T, 2> x, View<T, 1> values, View<int64_t, 1> indices) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        int64_t at = 0;
        for (int64_t j = 1; j < x.size(1); ++j) if (x(i, j) > x(i, at)) at = j;
        values(i) = x(i, at);
        indices(i) = at;
      }
    }
    template <typename T>
    void best_backward(View<const T, 1> grad_output0, View<const int64_t, 1>, View<const T, 2> x,
                       View<const int64_t, 1> output1, View<T, 2> grad_x) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) grad_x(i, j) = j == output1(i) ? grad_output0(i) : T(0);
    }
    OPWRIGHT_KERNEL(best, float, double)
    OPWRIGHT_KERNEL(best_backward, float, double)""")  # fmt: skip
    def best(x: Float[Tensor, "*batch n"]) -> tuple[Float[Tensor, "*batch"], Int64[Tensor, "*batch"]]:
        values, indices = x.max(-1)
        return values, indices

    @best.backward
    def best_backward(grad_output0, grad_output1, x, output1):
        return torch.zeros_like(x).scatter(-1, output1[..., None], grad_output0[..., None])

    return best


def test_backward_with_an_integer_output(best, entries):
    x = torch.randn(2, 3, 4, dtype=torch.double, requires_grad=True)
    for entry in entries(best):
        values, indices = entry(x)
        assert not indices.requires_grad
        assert torch.equal(indices, x.argmax(-1))
        (got,) = torch.autograd.grad(values.square().sum(), x)
        (wanted,) = torch.autograd.grad(x.amax(-1).square().sum(), x)
        torch.testing.assert_close(got, wanted)
        assert torch.autograd.gradgradcheck(lambda x, entry=entry: entry(x)[0], x)


@pytest.fixture(scope="module")
def derived(ns):
    @operator(f"{ns}::derived", cpu=HEAD + """
    template <typename T>
    void derived(View<const T, 2> x, List<View<const T, 1>> ws, View<const T, 1> b, View<T, 2> first,
                 View<T, 1> second) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        second(i) = 0;
        for (int64_t j = 0; j < x.size(1); ++j) {
          first(i, j) = x(i, j);
          for (const auto& w : ws) first(i, j) *= w(j);
          second(i) += x(i, j) * x(i, j) + (b.defined() ? b(j) : T(0));
        }
      }
    }
    OPWRIGHT_KERNEL(derived, float, double)""")  # fmt: skip
    def derived(
        x: Float[Tensor, "*batch n"], ws: list[Float[Tensor, "n"]], b: Float[Tensor, "n"] | None = None
    ) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch"]]:
        return plain_derived(x, ws, b)

    return derived


def plain_derived(x, ws, b=None):
    first = x * 1
    for w in ws:
        first = first * w
    return first, ((x * x) if b is None else (x * x + b)).sum(-1)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("has_b", [True, False])
def test_derived_backward(derived, entries, count, has_b):
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    ws = [torch.randn(3, dtype=torch.double, requires_grad=i != 1) for i in range(count)]
    b = torch.randn(3, dtype=torch.double, requires_grad=True) if has_b else None
    wanted_by = [x, *(w for w in ws if w.requires_grad), *([b] if has_b else [])]

    def total(function):
        first, second = function(x, ws, b)
        value = (first * first).sum() + second.sin().sum()
        found = torch.autograd.grad(value, wanted_by, create_graph=True)
        second_order = torch.autograd.grad(sum(g.square().sum() for g in found), wanted_by, allow_unused=True)
        return value, found, [torch.zeros(()) if g is None else g for g in second_order]

    for entry in entries(derived):
        torch.testing.assert_close(total(entry), total(plain_derived))


def test_derived_backward_of_one_output(derived, entries):
    # The other output's gradient is zero, not missing.
    for entry in entries(derived):
        x = torch.randn(2, 3, requires_grad=True)
        w = torch.randn(3, requires_grad=True)
        _, second = entry(x, [w])
        got = torch.autograd.grad(second.sum(), [x, w], allow_unused=True)
        torch.testing.assert_close(got[0], 2 * x.detach())
        assert got[1] is None or not got[1].any()


def test_list_gradient_beside_a_declared_backward(ns, entries):
    # A declared backward has no place for the gradients of a list: they must not vanish in silence.
    @operator(f"{ns}::weighted", cpu=HEAD + """
    template <typename T> void weighted(View<const T, 1> x, List<View<const T, 1>> ws, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        output(i) = x(i);
        for (const auto& w : ws) output(i) *= w(i);
      }
    }
    OPWRIGHT_KERNEL(weighted, float)""")  # fmt: skip
    def weighted(x: Float[Tensor, "n"], ws: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
        return x * torch.stack([torch.ones_like(x), *ws]).prod(0)

    try:

        @weighted.backward
        def weighted_backward(grad_output, x, ws):
            return grad_output * torch.stack([torch.ones_like(x), *ws]).prod(0)

    except BackwardError:
        return  # one way not to lose them
    for entry in entries(weighted):
        x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
        entry(x, [w]).sum().backward()
        assert x.grad.tolist() == [2.0] * 3
        assert w.grad is not None, "the gradient of `ws` is lost"
        assert w.grad.tolist() == [1.0] * 3


@pytest.fixture(scope="module")
def dropped(ns):
    @operator(f"{ns}::dropped", random=True)
    def dropped(x: Float[Tensor, "*s"], p: float = 0.5) -> Float[Tensor, "*s"]:
        return x * (torch.rand_like(x) < p)

    return dropped


def test_operators_that_draw_random_numbers(dropped, entries):
    for entry in entries(dropped):
        x = torch.ones(1000)
        torch.manual_seed(3)
        first = entry(x)
        torch.manual_seed(3)
        again = entry(x)
        assert torch.equal(first, again)
        assert 400 < first.sum() < 600
        assert not torch.equal(first, entry(x))


def test_gradient_of_an_operator_that_draws_random_numbers(dropped, entries):
    for entry in entries(dropped):
        # The gradient belongs to the numbers that were drawn, not to new ones.
        x = torch.ones(1000, requires_grad=True)
        y = entry(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, y.detach())


def test_vmap_of_an_operator_that_draws_random_numbers(dropped, entries):
    # vmap's own promises about random numbers hold for operators, too.
    for entry in entries(dropped):
        x = torch.ones(3, 1000)
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(entry)(x)
        same = torch.vmap(entry, randomness="same")(x)
        assert torch.equal(same[0], same[1])
        different = torch.vmap(entry, randomness="different")(x)
        assert not torch.equal(different[0], different[1])


def test_operators_with_sizes_from_the_data(ns, entries):
    @operator(f"{ns}::positives", data_dependent=["k"])
    def positives(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "k"], Int64[Tensor, "k"]]:
        (at,) = (x > 0).nonzero(as_tuple=True)
        return x[at], at

    x = torch.tensor([1.0, -2.0, 3.0])
    for entry in entries(positives):
        values, at = entry(x)
        assert values.tolist() == [1.0, 3.0]
        assert at.tolist() == [0, 2]
        assert entry(-x.abs())[0].shape == (0,)
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((entry(leaf)[0] ** 2).sum(), leaf)
        assert gradient.tolist() == [2.0, 0.0, 6.0]

        @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        def doubled(x, entry=entry):
            values, at = entry(x)
            return values * 2, at

        assert doubled(x)[0].tolist() == [2.0, 6.0]
        assert doubled(x.repeat(3))[1].tolist() == [0, 2, 3, 5, 6, 8]


KERNELS = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void doubled(View<const T, 1> x, View<T, 1> output) {
  for (int64_t i = 0; i < output.size(0); ++i) output(i) = 2 * x(i);
}
template <typename T>
void chosen_backward(View<const T, 1> grad_output, View<const T, 1> x, View<T, 1> grad_x) {
  for (int64_t i = 0, k = 0; i < x.size(0); ++i) grad_x(i) = x(i) > 0 ? grad_output(k++) : T(0);
}
OPWRIGHT_KERNEL(doubled, float)
OPWRIGHT_KERNEL(chosen_backward, float)
"""


def test_an_operator_with_sizes_from_the_data_beside_kernels_of_others(ns, tmp_path):
    (tmp_path / "kernels.cpp").write_text(KERNELS)

    @operator(f"{ns}::doubled", cpu=tmp_path / "kernels.cpp")
    def doubled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    @operator(f"{ns}::chosen", cpu=tmp_path / "kernels.cpp", data_dependent=["k"])
    def chosen(x: Float[Tensor, "n"]) -> Float[Tensor, "k"]:
        return x[x > 0]

    @chosen.backward
    def chosen_backward(grad_output, x):
        raise AssertionError("the kernel runs")

    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    assert doubled(x.detach()).tolist() == [2.0, -4.0, 6.0]
    (gradient,) = torch.autograd.grad((chosen(x) ** 2).sum(), x)
    assert gradient.tolist() == [2.0, 0.0, 6.0]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # which Dynamo itself reads
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_a_graph_that_breaks_at_an_operator_leaves_what_runs_there_uncompiled(ns, entries, needs_gradient):
    @operator(f"{ns}::kept", data_dependent=["k"])
    def kept(x: Float[Tensor, "n"]) -> Float[Tensor, "k"]:
        return x[x > 0]

    for entry in entries(kept):
        graphs = []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(graph)
            return graph

        @torch.compile(backend=backend)
        def doubled(x, entry=entry):
            return entry(x * 2) + 1

        for n in range(3, 20):  # with more sizes than there may be graphs for
            x = torch.randn(n, requires_grad=needs_gradient)
            expected = 2 * x[x > 0] + 1
            found = doubled(x)
            torch.testing.assert_close(found, expected)
            if needs_gradient:
                (gradient,) = torch.autograd.grad(found.sum(), x)
                assert torch.equal(gradient, 2.0 * (x > 0))
        assert len(graphs) <= 6  # two of each part, for a first and for any size; a call of the operator is one
