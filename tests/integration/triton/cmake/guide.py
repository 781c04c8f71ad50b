"""The kernels of docs/guides/triton-from-cpp.md."""

import triton
import triton.language as tl


@triton.jit
def relu(x):
    return tl.maximum(x, 0)


@triton.jit
def linear_kernel(x, bias, out, n, scale=1.0, activation: tl.constexpr = None, BLOCK: tl.constexpr = 256):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside) * scale
    if bias is not None:
        value += tl.load(bias + at, mask=inside)
    if activation is not None:
        value = activation(value)
    tl.store(out + at, value, mask=inside)


def blocks(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@triton.jit
def copy_kernel(source, target):
    target.store([0, 0], source.load([0, 0]))
