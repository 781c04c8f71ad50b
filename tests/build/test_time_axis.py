"""A recurrence over a leading axis: an output that may be left out, vmap of an axis in the middle."""

from typing import NamedTuple

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator, verify

pytestmark = pytest.mark.compiler

SOURCE = """
#include <cmath>
#include <opwright/kernel.h>
using opwright::View;

// y[t] = sin(w * y[t-1]) + x[t]; kept: y[t-1] and cos(w * y[t-1]).
template <typename T>
void swing(View<const T, 3> x, View<const T, 2> start, View<const T, 1> w, int64_t keep, View<T, 3> y,
           View<T, 2> last, View<T, 3> kept) {
  opwright::check(kept.defined() && kept.size(0) == keep * x.size(0), "kept has another size");
  const int64_t H = x.size(2);
  for (int64_t b = 0; b < x.size(1); ++b)
    for (int64_t h = 0; h < H; ++h) {
      T state = start(b, h);
      for (int64_t t = 0; t < x.size(0); ++t) {
        if (keep) kept(t, b, h) = state, kept(t, b, H + h) = std::cos(w(h) * state);
        y(t, b, h) = state = std::sin(w(h) * state) + x(t, b, h);
      }
      last(b, h) = state;
    }
}
OPWRIGHT_KERNEL(swing, float, double)

template <typename T>
void swing_backward(View<const T, 3> grad_y, View<const T, 2> grad_last, View<const T, 2> start,
                    View<const T, 1> w, View<const T, 3> y, View<const T, 3> kept, int64_t keep,
                    View<T, 3> grad_x, View<T, 2> grad_start, View<T, 1> grad_w) {
  const int64_t H = y.size(2);
  for (int64_t h = 0; h < H; ++h) {
    grad_w(h) = 0;
    for (int64_t b = 0; b < y.size(1); ++b) {
      T carried = grad_last(b, h);
      for (int64_t t = y.size(0) - 1; t >= 0; --t) {
        const T before = keep ? kept(t, b, h) : t ? y(t - 1, b, h) : start(b, h);
        const T slope = keep ? kept(t, b, H + h) : std::cos(w(h) * before);
        grad_x(t, b, h) = carried += grad_y(t, b, h);
        grad_w(h) += carried * slope * before;
        carried *= slope * w(h);
      }
      grad_start(b, h) = carried;
    }
  }
}
OPWRIGHT_KERNEL(swing_backward, float, double)
"""


class Swing(NamedTuple):
    y: Float[Tensor, "T *B H"]
    last: Float[Tensor, "*B H"]
    kept: Float[Tensor, "keep*T *B 2*H"]


def plain(x, start, w, keep=0):
    state, ys, kept = start, [], []
    for step in x:
        kept.append(torch.cat([state, torch.cos(w * state)], -1))
        state = torch.sin(w * state) + step
        ys.append(state)
    rows = torch.stack(kept) if kept else start.new_empty(0, *start.shape[:-1], 2 * start.shape[-1])
    return torch.stack(ys) if ys else torch.empty_like(x), state, rows[: keep * len(x)]


@pytest.fixture(scope="module")
def swing(ns):
    @operator(f"{ns}::swing", cpu=SOURCE, non_differentiable=["kept"])
    def swing(x: Float[Tensor, "T *B H"], start: Float[Tensor, "*B H"], w: Float[Tensor, "H"], keep: int = 0) -> Swing:
        return Swing(*plain(x, start, w, keep))

    @swing.backward
    def swing_backward(grad_y, grad_last, start, w, y, kept, keep=0):
        before = torch.cat([start[None], y])[: len(y)]
        slope = torch.cos(w * before)
        carried, found = grad_last, []
        for t in reversed(range(len(y))):
            found.insert(0, carried + grad_y[t])
            carried = found[0] * slope[t] * w
        grad_x = torch.stack(found) if found else torch.empty_like(y)
        return grad_x, carried, (grad_x * slope * before).flatten(0, -2).sum(0)

    swing(*arguments())  # built before references are counted
    return swing


def arguments(*batch, steps=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(steps)
    shapes = (steps, *batch, 3), (*batch, 3), (3,)
    return [torch.randn(*s, dtype=dtype, generator=generator) for s in shapes]


@pytest.fixture
def reference_runs(swing, count_reference):
    with count_reference(swing) as runs, count_reference(swing.operator.backward_operator.function) as more:
        yield lambda: len(runs) + len(more)


def gradients(f, args, keep):
    args = [a.clone().requires_grad_() for a in args]
    y, last = f(*args, keep)[:2]
    return torch.autograd.grad(y.square().sum() + last.sin().sum(), args)


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3)])
def test_an_output_that_is_left_out(swing, entries, reference_runs, keep, batch):
    args = arguments(*batch)
    for entry in entries(swing):
        torch.testing.assert_close(tuple(entry(*args, keep)), plain(*args, keep))
        torch.testing.assert_close(gradients(entry, args, keep), gradients(plain, args, keep))
    out = tuple(torch.full_like(t, 9.0) for t in plain(*args, keep))
    assert swing(*args, keep, out=out) is out
    torch.testing.assert_close(out, plain(*args, keep))
    assert not reference_runs()


@pytest.mark.parametrize("keep", [0, 1])
def test_no_steps_are_the_references(swing, entries, reference_runs, keep):
    args = arguments(2, steps=0)
    for count, entry in enumerate(entries(swing), 1):
        torch.testing.assert_close(tuple(entry(*args, keep)), plain(*args, keep))
        assert reference_runs() == count


def test_nothing_but_left_out_outputs_computes_nothing(ns, entries):
    source = """
    #include <opwright/kernel.h>
    using opwright::View;
    template <typename T> void parts(View<const T, 1> x, int64_t keep, View<T, 1> output) {
      opwright::check(output.size(0) > 0, "called for an empty output");
      for (int64_t i = 0; i < output.size(0); ++i) output(i) = x(i);
    }
    OPWRIGHT_KERNEL(parts, float)"""

    @operator(f"{ns}::parts", cpu=source)
    def parts(x: Float[Tensor, "n"], keep: int) -> Float[Tensor, "keep*n"]:
        return x[: keep * len(x)].clone()

    for entry in entries(parts):
        assert entry(torch.ones(3), 0).shape == (0,)
        assert entry(torch.ones(3), 1).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("keep", [0, 1])
def test_a_left_out_output_compiled(swing, entries, reference_runs, keep):
    for entry in entries(swing):
        compiled = torch.compile(entry, fullgraph=True, dynamic=True, backend="aot_eager")
        for steps in (4, 6):
            args = arguments(2, steps=steps)
            torch.testing.assert_close(tuple(compiled(*args, keep)), plain(*args, keep))
            torch.testing.assert_close(gradients(compiled, args, keep), gradients(plain, args, keep))
    assert not reference_runs()


def test_second_derivatives_through_what_was_kept(swing):
    args = [a.requires_grad_() for a in arguments(2)]
    for keep in (0, 1):
        assert torch.autograd.gradgradcheck(lambda *a, keep=keep: tuple(swing(*a, keep)[:2]), args)


def test_verified(swing):
    # The sizes of a sweep are long for a loop in Python.
    samples = [(*arguments(2, 2, dtype=d), keep) for keep in (0, 1) for d in (torch.float32, torch.float64)]
    checks = ["numerics", "independence", "gradients", "second gradients", "vmap", "opcheck"]
    record = verify(swing, samples=samples, checks=checks)
    assert record.passed, record.failures
    assert all(check.outcome == "passed" for check in record.checks), record.checks


def batches():
    x, start, w = arguments(4, 2)
    vmap = torch.vmap
    return {
        "all": lambda f: vmap(lambda x, s: tuple(f(x, s, w, 1)), (1, 0), 1)(x, start),
        "the last dims": lambda f: vmap(lambda x, s: tuple(f(x, s, w)), -1)(x.movedim(1, -1), start.movedim(0, -1)),
        "x alone": lambda f: vmap(lambda x: tuple(f(x, start[0], w, 1)), 2)(x.movedim(1, 2)),
        "start alone": lambda f: vmap(lambda s: tuple(f(x[:, 0], s, w, 1)))(start),
        "nested": lambda f: vmap(vmap(lambda x, s: tuple(f(x, s, w, 1)), (1, 0)), (1, 0), 2)(x, start),
        "nested over different arguments": lambda f: vmap(vmap(lambda x, s: tuple(f(x, s, w)), (None, 0)), (1, None))(
            x, start
        ),
    }


@pytest.mark.parametrize("case", list(batches()))
def test_vmap_of_an_axis_in_the_middle(swing, entries, reference_runs, case):
    for entry in entries(swing):
        torch.testing.assert_close(batches()[case](entry), batches()[case](plain))
    assert not reference_runs()


def test_vmap_against_a_loop(swing):
    x, start, w = arguments(4, 2)
    got = torch.vmap(lambda x, s: tuple(swing(x, s, w, 1)), (1, 0))(x, start)
    for i in range(4):
        torch.testing.assert_close([g[i] for g in got], list(swing(x[:, i], start[i], w, 1)), rtol=0, atol=0)


def test_vmap_of_grad(swing, entries, count_reference):
    x, start, w = arguments(4, 2)
    for entry in entries(swing):

        def pull(f, wrt):
            total = lambda x, s, w: sum(o.square().sum() for o in f(x, s, w, 1)[:2])  # noqa: E731
            return torch.vmap(torch.func.grad(total, wrt), (1, 0, None))(x, start, w)

        torch.testing.assert_close(pull(entry, (0, 1, 2)), pull(plain, (0, 1, 2)))


def test_vmap_over_two_variadic_axes_mixes_nothing(ns, entries):
    # An entry of *a sees all entries of *b, but only those of its own vmapped call.
    @operator(f"{ns}::scores")
    def scores(q: Float[Tensor, "*a n"], k: Float[Tensor, "*b n"]) -> Float[Tensor, "*a n"]:
        return q * k.flatten(0, -2).sum(0)

    q, k = torch.randn(3, 2, 4), torch.randn(3, 5, 4)
    wanted = torch.stack([a * b.sum(0) for a, b in zip(q, k, strict=True)])
    for entry in entries(scores):
        torch.testing.assert_close(torch.vmap(entry)(q, k), wanted)
