"""opwright/parallel.h: what a chunk may do, and what becomes of its exceptions."""

import pytest
import torch
from jaxtyping import Float64
from torch import Tensor

from opwright import operator
from opwright.errors import KernelError

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(torch.get_num_threads() < 2, reason="PyTorch has one thread"),
]

HEAD = """
#include <opwright/kernel.h>
#include <opwright/scratch.h>
#include <opwright/tensor.h>
#include <stdexcept>
#include <string>
using namespace opwright;
"""


def test_chunks_call_pytorch_and_take_scratch_memory(ns) -> None:
    """They are of the same call whatever thread they run on."""

    @operator(f"{ns}::products", cpu=HEAD + """
    void products(View<const double, 3> a, View<const double, 3> b, View<double, 3> output) {
      parallel_for(a.size(0), 1, [&](int64_t begin, int64_t end) {
        const int64_t m = a.size(1), k = a.size(2), n = b.size(2);
        double* doubled = scratch<double>(m * k);
        for (int64_t i = begin; i < end; ++i) {
          for (int64_t j = 0; j < m * k; ++j) doubled[j] = 2 * (&a(i, 0, 0))[j];
          call("aten::mm.out", borrow(doubled, {m, k}), borrow(&b(i, 0, 0), {k, n}),
               borrow(&output(i, 0, 0), {m, n}));
        }
      });
    }
    OPWRIGHT_KERNEL(products)""")  # fmt: skip
    def products(a: Float64[Tensor, "batch m k"], b: Float64[Tensor, "batch k n"]) -> Float64[Tensor, "batch m n"]:
        return torch.zeros_like(a @ b)  # not what the kernel gives

    a, b = torch.randn(12, 3, 4, dtype=torch.double), torch.randn(12, 4, 5, dtype=torch.double)
    for _ in range(50):
        torch.testing.assert_close(products(a, b), 2 * a @ b)


def test_scratch_memory_is_taken_a_hundred_times_in_a_call(ns) -> None:
    """The ninth piece of a call was refused."""

    @operator(f"{ns}::steps", cpu=HEAD + """
    void steps(View<const double, 1> x, View<double, 1> output) {
      for (int64_t i = 0; i < x.size(0); ++i) {
        double* kept = scratch<double>(1);
        kept[0] = 2 * x(i);
        output(i) = kept[0];
      }
    }
    OPWRIGHT_KERNEL(steps)""")  # fmt: skip
    def steps(x: Float64[Tensor, "n"]) -> Float64[Tensor, "n"]:
        return torch.zeros_like(x)  # not what the kernel gives

    x = torch.randn(100, dtype=torch.double)
    torch.testing.assert_close(steps(x), 2 * x, rtol=0, atol=0)


@pytest.mark.parametrize("chunk", [0, 7], ids=["the first", "the last"])
def test_the_text_of_an_exception_in_a_chunk(ns, chunk) -> None:
    @operator(f"{ns}::broken", cpu=HEAD + """
    void broken(View<const double, 1> x, int64_t chunk, View<double, 1> output) {
      parallel_for(8, 1, [&](int64_t begin, int64_t end) {
        if (begin <= chunk && chunk < end) throw std::runtime_error("step " + std::to_string(chunk) + " gave up");
      });
      output(0) = x(0);
    }
    OPWRIGHT_KERNEL(broken)""")  # fmt: skip
    def broken(x: Float64[Tensor, "1"], chunk: int) -> Float64[Tensor, "1"]:
        return x.clone()

    one = torch.ones(1, dtype=torch.double)
    for _ in range(3):
        with pytest.raises(KernelError, match=f"step {chunk} gave up"):
            broken(one, chunk)
    assert broken(one, 8) == 1
