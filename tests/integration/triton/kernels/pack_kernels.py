"""Kernels of the tests of packs and threads: two of one signature, and one for each kind of parameter."""

import triton
import triton.language as tl


@triton.jit
def left(p, n, C: tl.constexpr):
    tl.store(p, n + 1)


@triton.jit
def right(p, n, C: tl.constexpr):
    tl.store(p, n + 2)


@triton.jit
def mixed(p, pair, scale, n, C: tl.constexpr):
    tl.store(p, pair[0] * scale + pair[1] + n)


@triton.jit
def copies(source, target, column):
    target.store([0, column], source.load([0, column]))
