"""Kernels of test_differential.py that go beyond stub_kernels.py."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x, out):
    tl.store(out, tl.load(x))


@triton.jit(do_not_specialize=["a", "p"], do_not_specialize_on_alignment=["b", "q"])
def unspecialized_kernel(a, b, c, p, q, out):
    tl.store(out, a + b + c + tl.load(p) + tl.load(q))


@triton.jit
def defaults_kernel(out, n=5, scale=0.5, flag=True, nothing=None, BLOCK: tl.constexpr = 64, NAME: tl.constexpr = "x"):
    value = n * scale
    if NAME == "x":
        value += 1
    if flag:
        value += BLOCK
    tl.store(out, value)
