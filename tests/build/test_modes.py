"""Operators with kernels under autocast, in modules, and called from many threads."""

import concurrent.futures
import copy
import pickle
import sys
import threading

import pytest
import torch
from jaxtyping import Float, Float32
from kernel_head import HEAD
from torch import Tensor

from opwright import operator

pytestmark = pytest.mark.compiler


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("promote", torch.float32),
        ("lower", torch.bfloat16),
        ("float32", torch.float32),
        (None, torch.float32),
    ],
)
def test_autocast(ns, policy, dtype, entries):
    name = f"cast_{policy}".lower()

    @operator(f"{ns}::{name}", cpu=HEAD + """
    template <typename T>
    void NAME(View<const T, 1> x, View<const T, 1> y, View<const float, 1> z, View<T, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(float(x(i)) * float(y(i)) + z(i));
    }
    OPWRIGHT_KERNEL(NAME, float, opwright::bfloat16, double)""".replace("NAME", name), autocast=policy)  # fmt: skip
    def cast(x: Float[Tensor, "*s"], y: Float[Tensor, "*s"], z: Float32[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return (x.float() * y.float() + z).to(x.dtype)

    low, high, z = torch.full((2,), 3.0, dtype=torch.bfloat16), torch.full((2,), 5.0), torch.ones(2)
    for entry in entries(cast):
        with torch.autocast("cpu", torch.bfloat16):
            assert entry(high, high, z).dtype == dtype
            result = entry(low, low, z)
            assert result.dtype == (torch.float32 if policy == "float32" else torch.bfloat16)
            assert result.tolist() == [10.0, 10.0]
            if policy is None:
                with pytest.raises(TypeError, match="y"):
                    entry(low, high, z)
            else:
                result = entry(low, high, z.bfloat16())
                assert result.dtype == dtype
                assert result.tolist() == [16.0, 16.0]
            leaf = high.clone().requires_grad_()
            loss = entry(leaf, high, z).sum()
        loss.backward()
        assert leaf.grad.tolist() == [5.0, 5.0]
        assert leaf.grad.dtype == torch.float32
        with pytest.raises(TypeError, match="y"):
            entry(low, high, z)


@pytest.mark.parametrize("policy", ["promote", "lower", "float32", None])
def test_autocast_under_vmap_through_the_reference(ns, policy):
    """The reference computed in the dtype that it was given, and its products in that of the region."""

    @operator(f"{ns}::product", autocast=policy)
    def product(x: Float[Tensor, "*b n"], w: Float[Tensor, "n m"]) -> Float[Tensor, "*b m"]:
        return x @ w

    x, w = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            found = torch.vmap(product)(x.to(dtype), w.to(dtype))
            torch.testing.assert_close(found[0], product(x[0].to(dtype), w[0].to(dtype)))
            other = torch.vmap(torch.vmap(product, (None, 0)), (0, None))(x.to(dtype), w.to(dtype))
            torch.testing.assert_close(other[0, 1], product(x[0].to(dtype), w[1].to(dtype)))


MODULE = """
from jaxtyping import Float
from torch import Tensor
from torch.nn import Module
from opwright import operator

@operator("NAMESPACE::thrice", cpu='''
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void thrice(View<const T, 1> x, View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(3) * x(i);
}
OPWRIGHT_KERNEL(thrice, float)
''')
def thrice(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return 3 * x

class Layer(Module):
    def __init__(self):
        super().__init__()
        self.function = thrice

    def forward(self, x):
        return self.function(x)
"""


def test_modules_that_hold_an_operator(ns, tmp_path, monkeypatch):
    (tmp_path / f"holder_{ns}.py").write_text(MODULE.replace("NAMESPACE", ns))
    monkeypatch.syspath_prepend(tmp_path)
    holder = __import__(f"holder_{ns}")
    monkeypatch.setitem(sys.modules, holder.__name__, holder)
    layer = holder.Layer()
    for other in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
        assert other(torch.ones(2)).tolist() == [3.0, 3.0]
        assert other.function is holder.thrice


def test_threads_race_for_the_first_call(ns):
    for round_ in range(3):
        name = f"race{round_}"

        @operator(f"{ns}::{name}", cpu=HEAD + """
        template <typename T> void NAME(View<const T, 1> x, View<T, 1> output) {
          for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) + T(ROUND);
        }
        OPWRIGHT_KERNEL(NAME, float)""".replace("NAME", name).replace("ROUND", str(round_)))  # fmt: skip
        def race(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
            return x - 1000  # shows if a thread gets the reference

        barrier = threading.Barrier(8)

        def work(i, race=race, name=name, round_=round_, barrier=barrier):
            entry = race if i % 2 else getattr(getattr(torch.ops, ns), name)
            barrier.wait()
            x = torch.full((5,), float(i), requires_grad=i % 3 == 0)
            return all(entry(x).eq(i + round_).all() for _ in range(200))

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))
