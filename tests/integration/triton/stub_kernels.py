"""Kernels of every kind that a launcher treats differently, for test_stub_driver.py and the differential tests."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


def add_grid(arguments):
    return (triton.cdiv(arguments["n"], arguments["BLOCK"]),)


@triton.jit
def nothing_kernel():
    pass


@triton.jit
def values_kernel(out, flag, number, small, large, unsigned):
    tl.store(out, flag + number + small + large + unsigned.to(tl.int64))


@triton.jit
def annotated_kernel(
    out,
    a: tl.int8,
    b: tl.int16,
    c: tl.int32,
    d: tl.int64,
    e: tl.uint8,
    f: tl.uint16,
    g: tl.uint32,
    h: tl.uint64,
    i: tl.float16,
    j: tl.bfloat16,
    k: tl.float32,
    m: tl.float64,
    p: tl.int1,
):
    whole = a + b + c + d + e.to(tl.int64) + f.to(tl.int64) + g.to(tl.int64) + h.to(tl.int64) + p.to(tl.int64)
    tl.store(out, whole.to(tl.float64) + i.to(tl.float64) + j.to(tl.float64) + k.to(tl.float64) + m)


@triton.jit
def tuple_kernel(out, pairs, factor):
    x, inner = pairs
    tl.store(out, tl.load(x) * inner[0] + inner[1] + factor)


@triton.jit
def twice(x):
    return x + x


@triton.jit
def constant_kernel(out, pointer, name: tl.constexpr, dtype: tl.constexpr, function: tl.constexpr, sizes: tl.constexpr):
    value = tl.full((sizes[0],), 1, dtype)
    if name == "twice":
        value = function(value)
    if pointer is not None:
        value += tl.load(pointer).to(dtype)
    tl.store(out + tl.arange(0, sizes[0]), value)


@triton.jit
def matmul_kernel(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    total = tl.zeros((M, N), tl.float32)
    for at in range(0, K, BLOCK_K):
        left = tl.load(a + m[:, None] * K + (at + k)[None, :])
        right = tl.load(b + (at + k)[:, None] * N + n[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def host_descriptor_kernel(source, target, column):
    target.store([0, column], source.load([0, column]))


@triton.jit
def device_descriptor_kernel(x, out, rows, columns, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    at = tl.program_id(0) * BLOCK
    target.store([at, 0], source.load([at, 0]))
