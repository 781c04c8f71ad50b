"""Kernels of test_triton_from_cpp.py."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


def add_grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


@triton.jit
def copy_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


@triton.jit
def values_kernel(out, flag, number, small, large):
    tl.store(out, flag.to(tl.float64))
    tl.store(out + 1, number.to(tl.float64))
    tl.store(out + 2, small.to(tl.float64) if not isinstance(small, int) else 1.0)
    tl.store(out + 3, large.to(tl.float64))


@triton.jit
def annotated_kernel(
    out, a: tl.int8, b: tl.int16, c: tl.uint32, d: tl.int64, h: tl.float16, i: tl.bfloat16, j: tl.float32, k: tl.float64
):
    tl.store(out, a.to(tl.float64))
    tl.store(out + 1, b.to(tl.float64))
    tl.store(out + 2, c.to(tl.float64))
    tl.store(out + 3, d.to(tl.float64))
    tl.store(out + 4, h.to(tl.float64))
    tl.store(out + 5, i.to(tl.float64))
    tl.store(out + 6, j.to(tl.float64))
    tl.store(out + 7, k)


@triton.jit
def square(x):
    return x * x


@triton.jit
def constants_kernel(out, pairs, name: tl.constexpr, dtype: tl.constexpr, function: tl.constexpr, sizes: tl.constexpr):
    x, inner = pairs
    value = tl.load(x).to(dtype) * inner[0] + inner[1]
    if name == "squared":
        value = function(value)
    tl.store(out + tl.arange(0, sizes[0]), tl.full((sizes[0],), 0, tl.float32) + value.to(tl.float32))


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
    target.store([tl.program_id(0) * 64, column], source.load([tl.program_id(0) * 64, column]))


@triton.jit
def device_descriptor_kernel(x, out, rows, columns, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    at = tl.program_id(0) * BLOCK
    target.store([at, 0], source.load([at, 0]))


@triton.jit
def dependent_kernel(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait()
    value = tl.load(x + at, mask=at < n)
    tl.store(x + at, value * 1.5 + 1, mask=at < n)
    gdc_launch_dependents()


@triton.jit
def barrier_kernel(out, counter, PROGRAMS: tl.constexpr):
    # Right only if all programs run at once, which a cooperative launch promises.
    tl.atomic_add(counter, 1)
    while tl.atomic_add(counter, 0) < PROGRAMS:
        pass
    tl.store(out + tl.program_id(0), tl.atomic_add(counter, 0))


@triton.autotune(
    configs=[triton.Config({"BLOCK": 256}, num_warps=2), triton.Config({"BLOCK": 1024}, num_warps=8)], key=["n"]
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x, out, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + at, tl.load(x + at) + 1)
    else:
        tl.store(out + at, tl.load(x + at, mask=at < n) + 2, mask=at < n)


def tuned_grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)
