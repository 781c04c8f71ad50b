"""Backwards derived from the reference: recorded where there is a kernel, PyTorch's own graph where there is none."""

import gc
import weakref

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from opwright import operator

pytestmark = pytest.mark.compiler

KERNEL = """
#include <cmath>
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void NAME(View<const T, 2> x, View<const T, 1> w, double power, View<T, 2> output) {
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = T(std::tanh(x(i, j)) * std::pow(w(j), power));
}
OPWRIGHT_KERNEL(NAME, float, double)
"""


def plain(x, w, power=2.0):
    return torch.tanh(x) * w**power


@pytest.fixture(scope="module")
def bent(ns):
    @operator(f"{ns}::bent", cpu=KERNEL.replace("NAME", "bent"))
    def bent(x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"], power: float = 2.0) -> Float[Tensor, "*batch n"]:
        return plain(x, w, power)

    return bent


@pytest.fixture(scope="module")
def bare(ns):
    @operator(f"{ns}::bare")
    def bare(x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"], power: float = 2.0) -> Float[Tensor, "*batch n"]:
        return plain(x, w, power)

    return bare


@pytest.fixture(params=["kernel", "no kernel"])
def op(request):
    """An operator without a declared backward."""
    return request.getfixturevalue("bent" if request.param == "kernel" else "bare")


@pytest.fixture(autouse=True)
def recorded_at_once():
    import torch._dynamo  # noqa: F401  # a recording waits for it, or for some backwards


def inputs(*shape, wants=(True, True), dtype=torch.double):
    x, w = torch.randn(shape, dtype=dtype), torch.rand(shape[-1], dtype=dtype) + 0.5
    return x.requires_grad_(wants[0]), w.requires_grad_(wants[1])


def gradients(function, tensors, weights):
    wanted = [t for t in tensors if t.requires_grad]
    return torch.autograd.grad(function(*tensors), wanted, weights)


def recordings(op):
    return [trace for trace in op.operator.traces.found.values() if trace]


@pytest.mark.parametrize("wants", [(True, False), (False, True), (True, True)])
def test_gradients_are_those_of_the_reference(op, entries, wants):
    for shape in [(3, 4), (2, 3, 4), (4,), (0, 4), (1, 1)]:
        for entry in entries(op):
            for power in (2.0, 3.0):
                tensors = inputs(*shape, wants=wants)
                for weights in (torch.randn(shape).double(), torch.ones(()).double().expand(shape)):
                    expected = gradients(lambda x, w, power=power: plain(x, w, power), tensors, weights)
                    for _ in range(3):
                        got = gradients(lambda x, w, entry=entry, power=power: entry(x, w, power), tensors, weights)
                        torch.testing.assert_close(got, expected)


def test_a_recording_is_made_once_for_a_signature_and_runs_no_reference(bent):
    x, w = inputs(6, 5)
    runs = []
    reference = bent.operator.reference
    call = reference.call
    bent.operator.traces.clear()
    reference.call = lambda values: runs.append(values) or call(values)
    try:
        for _ in range(4):
            gradients(bent, (x, w), torch.ones(6, 5).double())
    finally:
        reference.call = call
    assert len(runs) == 1  # on tensors without data
    assert len(recordings(bent)) == 1
    # `tanh` again for its derivative and the gradient of `w`, `pow` again for that of `x`, but not their product.
    assert set(recordings(bent)[0].recomputed) == {"tanh", "pow"}


def test_values_that_are_equal_but_not_the_same_have_a_recording_each(ns):
    @operator(f"{ns}::over", cpu="""
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void over(View<const T, 1> x, double shift, View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(1 / (x(i) + shift));
}
OPWRIGHT_KERNEL(over, double)""")  # fmt: skip
    def over(x: Float[Tensor, "n"], shift: float = 0.0) -> Float[Tensor, "n"]:
        return torch.atan2(torch.full_like(x, shift), x) + x if shift == 0 else 1 / (x + shift)

    x = torch.tensor([-1.0], dtype=torch.double, requires_grad=True)
    for shift in (0.0, -0.0, 2, 2.0):
        over(x, shift).sum().backward()
    assert len(over.operator.traces.found) == 4


def test_second_derivatives(op, entries):
    for entry in entries(op):
        tensors = inputs(2, 3)
        for _ in range(2):
            gradients(entry, tensors, torch.ones(2, 3).double())  # recorded before
        assert torch.autograd.gradcheck(entry, tensors)
        assert torch.autograd.gradgradcheck(entry, tensors)


def test_a_graph_that_is_kept(op):
    tensors = inputs(3, 4)
    y = op(*tensors)
    first = torch.autograd.grad(y, tensors, torch.ones_like(y), retain_graph=True)
    second = torch.autograd.grad(y, tensors, torch.ones_like(y))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, tensors, torch.ones_like(y))


def test_an_input_that_was_written_into(op):
    for _ in range(3):
        leaf, w = inputs(3, 4)
        v = w * 1
        y = op(leaf, v)
        with torch.no_grad():
            v.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace"):
            y.sum().backward()


def test_memory_is_free_after_the_backward(op):
    for _ in range(3):
        leaf, w = inputs(3, 4)
        x = leaf * 1
        y = op(x, w)
        kept = weakref.ref(x.untyped_storage())
        held = weakref.ref(x)
        del x
        y.sum().backward()
        gc.collect()
        assert held() is None
        assert kept() is None
        assert leaf.grad is not None


def test_hooks_of_saved_tensors_see_them(op):
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.clone()

    tensors = inputs(3, 4)
    weights = torch.randn(3, 4).double()
    expected = gradients(plain, tensors, weights)
    for _ in range(3):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = op(*tensors)
        assert packed
        torch.testing.assert_close(torch.autograd.grad(y, tensors, weights), expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(op, use_reentrant):
    tensors = inputs(3, 4)
    weights = torch.randn(3, 4).double()

    def again(x, w):
        return torch.utils.checkpoint.checkpoint(op, x, w, use_reentrant=use_reentrant)

    y = again(*tensors)
    y.backward(weights)
    torch.testing.assert_close([t.grad for t in tensors], list(gradients(plain, tensors, weights)))


def test_an_operator_stays_one_under_compile_and_vmap(op):
    tensors = inputs(3, 4)
    weights = torch.randn(3, 4).double()
    expected = gradients(plain, tensors, weights)
    graphs = []

    def note(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    compiled = torch.compile(op, fullgraph=True, backend=note)
    torch.testing.assert_close(compiled(*tensors), plain(*tensors))
    assert any(op.operator.declaration.name in target for target in graphs[0])
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, tensors, weights), expected)
    exported = torch.export.export(_Module(op), tensors)
    assert any(op.operator.declaration.qualified_name.split("::")[1] in str(n.target) for n in exported.graph.nodes)

    x, w = (t.detach() for t in tensors)
    one = torch.func.grad(lambda x: plain(x, w).sum())
    torch.testing.assert_close(torch.vmap(torch.func.grad(lambda x: op(x, w).sum()))(x), torch.vmap(one)(x))
    torch.testing.assert_close(torch.func.jacrev(lambda w: op(x, w))(w), torch.func.jacrev(lambda w: plain(x, w))(w))
    torch.testing.assert_close(torch.func.jvp(op, (x, w), (x, w))[1], torch.func.jvp(plain, (x, w), (x, w))[1])


class _Module(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x, w):
        return self.op(x, w)


def test_autocast_around_the_backward(op):
    x, w = inputs(3, 4, dtype=torch.float32)
    expected = gradients(plain, (x, w), torch.ones(3, 4))
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            got = gradients(op, (x, w), torch.ones(3, 4))
        torch.testing.assert_close(got, expected)


def test_autocast_of_a_device_that_is_not_here_around_the_backward(op):
    """It recursed without end."""
    x, w = inputs(3, 4, dtype=torch.float32)
    expected = gradients(plain, (x, w), torch.ones(3, 4))
    torch.set_autocast_enabled("xpu", True)
    try:
        got = gradients(op, (x, w), torch.ones(3, 4))
    finally:
        torch.set_autocast_enabled("xpu", False)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_product_has_the_dtype_of_the_forward_in_its_backward_under_autocast(ns, create_graph):
    """It was computed in bfloat16."""

    @operator(
        f"{ns}::product",
        cpu="""
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void product(View<const T, 2> x, View<const T, 2> w, View<T, 2> output) {
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < w.size(1); ++j) {
      output(i, j) = T(0);
      for (int64_t k = 0; k < w.size(0); ++k) output(i, j) += x(i, k) * w(k, j);
    }
}
OPWRIGHT_KERNEL(product, float)""",
    )
    def product(x: Float[Tensor, "m k"], w: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
        return x @ w

    x, w = (torch.randn(4, 5).requires_grad_(), torch.randn(5, 3).requires_grad_())
    seed = torch.randn(4, 3)
    expected = torch.autograd.grad(x @ w, (x, w), seed)
    for _ in range(3):  # the later ones take what was recorded
        with torch.autocast("cpu", torch.bfloat16):
            got = torch.autograd.grad(product(x, w), (x, w), seed, create_graph=create_graph)
        torch.testing.assert_close(got, expected)


def test_a_reference_that_looks_at_its_data_is_not_recorded(ns):
    @operator(f"{ns}::fold", cpu="""
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void fold(View<const T, 1> x, View<T, 1> output) {
  T sum = 0;
  for (int64_t i = 0; i < x.size(0); ++i) sum += x(i);
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = sum > 0 ? 2 * x(i) : 3 * x(i);
}
OPWRIGHT_KERNEL(fold, double)""")  # fmt: skip
    def fold(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 2 * x if sum(x.tolist()) > 0 else 3 * x

    for _ in range(3):
        for sign, factor in ((1.0, 2.0), (-1.0, 3.0)):
            x = torch.full((4,), sign, dtype=torch.double, requires_grad=True)
            fold(x).sum().backward()
            assert x.grad.tolist() == [factor] * 4
    assert not recordings(fold)


def test_a_reference_with_constants_writes_and_several_outputs(ns):
    def formula(x, at):
        scale = torch.tensor([2.0, 3.0], dtype=x.dtype)
        scale += 1
        y = x.clone()
        y[..., 0].mul_(scale[0])
        low, high = y.mul(scale[1]).split(2, -1)
        return low * high, high.exp(), at + 1

    source = """
#include <cmath>
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void halves(View<const T, 2> x, View<const int64_t, 1> at, View<T, 2> a, View<T, 2> b, View<int64_t, 1> c) {
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t j = 0; j < 2; ++j) {
      a(i, j) = (j ? 4 : 12) * x(i, j) * 4 * x(i, j + 2);
      b(i, j) = std::exp(4 * x(i, j + 2));
    }
  for (int64_t i = 0; i < at.size(0); ++i) c(i) = at(i) + 1;
}
OPWRIGHT_KERNEL(halves, double)"""

    @operator(f"{ns}::halves", cpu=source)
    def halves(
        x: Float[Tensor, "m 4"], at: Int64[Tensor, "k"]
    ) -> tuple[Float[Tensor, "m 2"], Float[Tensor, "m 2"], Int64[Tensor, "k"]]:
        return formula(x, at)

    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    at = torch.arange(2)

    def total(function, which):
        results = function(x, at)
        return sum(results[i].sin().sum() for i in which)

    for which in ((0, 1), (0,), (1,)):
        (expected,) = torch.autograd.grad(total(formula, which), x)
        for _ in range(3):
            (got,) = torch.autograd.grad(total(halves, which), x)
            torch.testing.assert_close(got, expected)
    assert recordings(halves)


def test_results_without_a_kernel_are_tensors_of_their_own(ns):
    @operator(f"{ns}::parts")
    def parts(x: Float[Tensor, "m 4"]) -> tuple[Float[Tensor, "m 2"], Float[Tensor, "m 4"]]:
        return (x * 2).split(2, -1)[0], x

    x = torch.randn(1, 4, requires_grad=True)
    half, same = parts(x)
    half.mul_(3)
    same.mul_(5)
    torch.testing.assert_close(same, 5 * x)
    (gradient,) = torch.autograd.grad(half.sum() + same.sum(), x)
    assert gradient.tolist() == [[11.0, 11.0, 5.0, 5.0]]


def test_a_result_that_no_gradient_reaches(ns):
    @operator(f"{ns}::steps")
    def steps(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return (x > 0).to(x.dtype)

    x = torch.randn(3, requires_grad=True)
    for function in (steps, torch.compile(steps, backend="aot_eager")):  # a graph cannot know that it needs none
        y = function(x)
        assert y.requires_grad
        assert torch.equal(y, (x > 0).float())
        y.sum().backward()
        assert x.grad is None or not x.grad.any()


def test_a_new_declaration_of_an_operator_inside_the_reference(ns):
    outer_source = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void outer(View<const T, 1> x, View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i);
}
OPWRIGHT_KERNEL(outer, double)"""

    def declare(factor):
        @operator(f"{ns}::inner")
        def inner(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
            return factor * x

        return inner

    inner = declare(2.0)

    @operator(f"{ns}::outer", cpu=outer_source)
    def outer(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return inner(x)

    for factor in (2.0, 7.0):
        declare(factor)
        for _ in range(2):
            x = torch.ones(2, dtype=torch.double, requires_grad=True)
            outer(x).sum().backward()
            assert x.grad.tolist() == [factor] * 2


def test_sizes_that_change_with_every_call_are_not_recorded_for_ever(bent):
    from opwright.dispatch.backward_trace import MAX_RECORDED_AT_ONCE

    bent.operator.traces.clear()
    for n in range(1, MAX_RECORDED_AT_ONCE + 10):
        tensors = inputs(1, n)
        weights = torch.ones(1, n).double()
        torch.testing.assert_close(gradients(bent, tensors, weights), gradients(plain, tensors, weights))
    assert len(recordings(bent)) == MAX_RECORDED_AT_ONCE
    gradients(bent, tensors, weights)  # the last sizes come again
    assert len(recordings(bent)) == MAX_RECORDED_AT_ONCE + 1


def test_wrong_arguments_of_a_gradient_call_without_a_kernel(bare):
    from opwright.errors import ShapeError

    x, _ = inputs(3, 4)
    for _ in range(2):
        with pytest.raises(ShapeError):
            bare(x, torch.ones(5, dtype=torch.double))
    bare(x, torch.ones(4, dtype=torch.double))


def test_the_remark_on_a_backward(bent, bare, ns):
    text = bent.operator.gradient.describe()
    assert "computes `tanh`, `pow` of the forward again; `@bent.backward` with a kernel would save that" in text
    assert bent.operator.gradient.describe([*inputs(3, 4), 2.0]) == text
    assert bare.operator.gradient.describe() == "autograd of the reference: as slow as without an operator"

    @operator(f"{ns}::product", cpu=KERNEL.replace("NAME", "product"))
    def product(x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"], power: float = 2.0) -> Float[Tensor, "*batch n"]:
        return x * w

    assert "without the forward" in product.operator.gradient.describe()

    @product.backward
    def product_backward(grad_output, x, w):
        return grad_output * w, (grad_output * x).reshape(-1, w.shape[0]).sum(0)

    assert product.operator.gradient.describe() == f"{ns}::product_backward"
