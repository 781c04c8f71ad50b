"""The edges of calls to kernels: many axes, no elements, unusual tensors, many calls."""

import gc
import os
import resource
from typing import Literal

import pytest
import torch
from jaxtyping import Float
from kernel_head import HEAD
from torch import Tensor

from opwright import operator
from opwright.errors import OpwrightError

pytestmark = pytest.mark.compiler


@pytest.fixture(scope="module")
def add(ns):
    @operator(f"{ns}::add", cpu=HEAD + """
    template <typename T> void add(View<const T, 2> x, View<const T, 1> b, View<T, 2> output) {
      for (int64_t i = 0; i < x.size(0); ++i)
        for (int64_t j = 0; j < x.size(1); ++j) output(i, j) = x(i, j) + b(j);
    }
    OPWRIGHT_KERNEL(add, float)""")  # fmt: skip
    def add(x: Float[Tensor, "*batch n"], b: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
        return x + b

    return add


RANK_17 = """
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator
NAMES = "1 " * (RANK - 2) + "a b"
SOURCE = '''
#include <opwright/kernel.h>
using opwright::View;
template <typename T> void high(View<const T, RANK> x, View<const T, RANK> y, View<T, RANK> output) {
  for (int64_t i = 0; i < x.numel(); ++i) output.data()[i] = x.data()[i] + y.data()[i];
}
OPWRIGHT_KERNEL(high, float)
'''.replace("RANK", str(RANK))
try:
    @operator("limits::high", cpu=SOURCE)
    def high(x: Float[Tensor, NAMES], y: Float[Tensor, NAMES]) -> Float[Tensor, NAMES]:
        return x + y
except TypeError as error:
    print("refused:", error)
else:
    x = torch.ones([1] * (RANK - 2) + [2, 3])
    assert high(x, 2 * x).eq(3).all(), "wrong"
    print("computed")
"""


@pytest.mark.parametrize("rank", [16, 17, 33])
def test_views_of_many_axes(run_python, rank):
    # A view in the glue has room for 16.
    output = run_python(RANK_17.replace("RANK", str(rank))).stdout
    assert output == "computed\n" or (rank > 16 and output.startswith("refused") and "axes" in output)


def test_many_named_axes_are_declared_quickly(ns, entries):
    # The declaration runs the reference on a small tensor; eight different sizes do not make it a large one.
    before = resident_peak_kib()
    names = "a b c d e f g h"

    @operator(f"{ns}::eight")
    def eight(x: Float[Tensor, names]) -> Float[Tensor, names]:
        return x + x.shape[-1]

    assert resident_peak_kib() - before < 100 * 1024
    assert eight(torch.zeros(1, 1, 1, 1, 1, 1, 2, 3)).eq(3).all()


def test_many_choices(ns, entries):
    letters = [f"c{i}" for i in range(40)]

    @operator(f"{ns}::pick", cpu=HEAD + """
    template <typename T> void pick(View<const T, 1> x, Which which, View<T, 1> output) {
      output(0) = x(0) + T(which == Which::c39 ? 39 : int(which));
    }
    OPWRIGHT_KERNEL(pick, float)""")  # fmt: skip
    def pick(x: Float[Tensor, "1"], which: Literal[tuple(letters)]) -> Float[Tensor, "1"]:
        return x + letters.index(which)

    for entry in entries(pick):
        for at in (0, 31, 32, 39):
            assert entry(torch.zeros(1), letters[at]).tolist() == [at]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 0, 3), (0, 0)])
def test_no_elements(add, entries, shape):
    for entry in entries(add):
        for dtype in (torch.float32, torch.float64):
            x = torch.zeros(shape, dtype=dtype)
            y = entry(x, torch.zeros(shape[-1], dtype=dtype))
            assert (y.shape, y.dtype) == (x.shape, dtype)
            out = torch.empty(shape, dtype=dtype)
            assert add(x, torch.zeros(shape[-1], dtype=dtype), out=out) is out


@pytest.fixture(scope="module")
def halves(ns):
    @operator(f"{ns}::halves", cpu=HEAD + """
    template <typename T>
    void halves(View<const T, 1> x, int64_t k, View<T, 1> first, View<T, 1> rest, View<T, 0> product) {
      product() = 1;
      for (int64_t i = 0; i < x.size(0); ++i) {
        (i < k ? first(i) : rest(i - k)) = x(i);
        product() *= x(i);
      }
    }
    OPWRIGHT_KERNEL(halves, float)""")  # fmt: skip
    def halves(x: Float[Tensor, "n"], k: int) -> tuple[Float[Tensor, "k"], Float[Tensor, "n-k"], Float[Tensor, ""]]:
        return x[:k].clone(), x[k:].clone(), x.prod()

    return halves


@pytest.mark.parametrize("k", [0, 1, 3])
def test_one_empty_output_among_several(halves, entries, k):
    # The other results still have values: they are not what an empty one is.
    x = torch.tensor([2.0, 3.0, 4.0])
    for entry in entries(halves):
        first, rest, product = entry(x, k)
        assert first.tolist() == [2.0, 3.0, 4.0][:k]
        assert rest.tolist() == [2.0, 3.0, 4.0][k:]
        assert product == 24


def test_results_of_nothing(halves, entries):
    # The product of no numbers is 1, in the kernel (float32) as in the reference (float64).
    for entry in entries(halves):
        for dtype in (torch.float32, torch.float64):
            _, _, product = entry(torch.zeros(0, dtype=dtype), 0)
            assert product == 1


def test_writes_beside_an_empty_output(ns, entries):
    from opwright import Mutates

    @operator(f"{ns}::count", cpu=HEAD + """
    template <typename T> void count(View<const T, 1> x, View<T, 1> calls, View<T, 1> output) {
      calls(0) += 1;
      for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i);
    }
    OPWRIGHT_KERNEL(count, float)""")  # fmt: skip
    def count(x: Float[Tensor, "n"], calls: Mutates[Float[Tensor, "1"]]) -> Float[Tensor, "n"]:
        calls += 1
        return x.clone()

    for entry in entries(count):
        for dtype in (torch.float32, torch.float64):
            calls = torch.zeros(1, dtype=dtype)
            entry(torch.zeros(0, dtype=dtype), calls)
            assert calls.tolist() == [1.0], dtype


@pytest.mark.parametrize("layout", ["sparse", "mkldnn", "nested"])
def test_unusual_layouts(add, entries, layout):
    # A kernel reads strided memory. Others get an error that says so, or the result; not a crash.
    add(torch.zeros(2, 3), torch.zeros(3))
    x = torch.ones(2, 3)
    if layout == "sparse":
        x = x.to_sparse()
    elif layout == "mkldnn":
        x = x.to_mkldnn()
    else:
        x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    for entry in entries(add):
        try:
            result = entry(x, torch.ones(3))
        except RecursionError:
            pytest.fail("endless recursion between the fallback and the kernel")
        except (OpwrightError, RuntimeError, NotImplementedError, TypeError):
            continue
        result = result.to_dense() if layout != "nested" else result.to_padded_tensor(2.0)[0]
        assert torch.equal(result, torch.full((2, 3), 2.0))


def resident_peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_bytes():
    gc.collect()
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module")
def everything(ns):
    # An argument of each kind that the glue owns a handle of.
    @operator(f"{ns}::everything", cpu=HEAD + """
    template <typename T>
    void everything(View<const T, 1> x, View<const T, 1> w, List<View<const T, 1>> ys, int64_t k, double s,
                    bool b, Mode mode, View<T, 1> first, View<T, 1> second) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        first(i) = x(i) + (w.defined() ? w(i) : T(0)) + T(mode == Mode::up) + T(k) * T(s) * T(b);
        second(i) = T(ys.size());
        for (const auto& y : ys) second(i) += y(i);
      }
    }
    OPWRIGHT_KERNEL(everything, float)""")  # fmt: skip
    def everything(
        x: Float[Tensor, "n"],
        w: Float[Tensor, "n"] | None,
        ys: list[Float[Tensor, "n"]],
        k: int = 1,
        s: float = 1.0,
        b: bool = True,
        *,
        mode: Literal["up", "down"] = "up",
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        first = x + (0 if w is None else w) + (mode == "up") + k * s * b
        return first, sum(ys, x * 0) + len(ys)

    return everything


def wrong(call):
    try:
        call()
    except (RuntimeError, ValueError, TypeError):
        return
    raise AssertionError("this call is wrong and must raise")


# What is called, how often: the paths that end otherwise than in a kernel are slower.
PATHS = {
    "kernel": (100_000, lambda f, x, s: f(x, x, [x, x], mode="down")),
    "absent and empty": (50_000, lambda f, x, s: f(x, None, [])),
    "copied": (30_000, lambda f, x, s: f(s, s, [s], 2, 0.5, False)),
    "reference": (5_000, lambda f, x, s: f(x.double(), x.double(), [x.double()], mode="up")),
    "wrong list": (5_000, lambda f, x, s: wrong(lambda: f(x, x, [x, x[:1]]))),
    "wrong choice": (5_000, lambda f, x, s: wrong(lambda: f(x, x, [x], mode="a long choice " * 30))),
}


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc/self/statm")
@pytest.mark.parametrize("path", PATHS)
def test_calls_do_not_leak(everything, path):
    count, call = PATHS[path]
    # 4 KiB per tensor: one leaked handle in a hundred calls would already show. In inference mode the
    # dispatcher's entry has no Python in front, so wrong arguments and strings reach the glue.
    x = torch.ones(1024)
    s = torch.ones(2048)[::2]
    entry = everything.operator.public
    everything(x, x, [x])
    with torch.inference_mode():
        for _ in range(count // 10):
            call(entry, x, s)
        before = resident_bytes()
        for _ in range(count):
            call(entry, x, s)
    grown = resident_bytes() - before
    assert grown < max(4 << 20, 8 * count), f"{grown / count:.0f} bytes a call"
