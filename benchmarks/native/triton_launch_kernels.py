"""The kernels of benchmarks/triton_launch.py: they do next to nothing, so that the host's time is what counts."""

import triton
import triton.language as tl


@triton.jit
def nop0():
    pass


@triton.jit
def add3(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def nop19(
    a, b, c, d, e, i0, i1, i2, i3, i4, i5, i6, i7, i8,
    C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr, C3: tl.constexpr, C4: tl.constexpr,
):  # fmt: skip
    pass
