"""A tiled matrix product whose epilogue adds the bias and takes the GELU. One program computes one tile."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

DTYPES = ("float32", "float16", "bfloat16")  # tl.dot has no float64 on every GPU: the reference runs it
GROUP = 8  # rows of tiles that run side by side, so that tiles of the weight are found in L2


@triton.jit
def gelu(x, APPROXIMATE: tl.constexpr):
    """x * Phi(x), from the side on which nothing cancels; -inf gives 0.

    The exponential is taken of half the exponent and multiplied twice, the second time last: libdevice flushes small
    results to zero and a product does not. The rounding error of x * x is put back: in the tail it would be 100 ulp.
    """
    size = tl.minimum(tl.abs(x), 10000.0)  # beyond it the tail is zero in every dtype, and the square overflows
    if APPROXIMATE == "none":
        square = size * size
        lost = tl.fma(size, size, -square)
        half = libdevice.exp(-0.25 * square)
        tail = x * (0.5 * libdevice.erfcx(size * 0.7071067811865476) * (1 - 0.5 * lost) * half) * half
    else:
        v = 1.5957691216057308 * size * (1 + 0.044715 * size * size)
        half = libdevice.exp(-0.5 * v)
        tail = x * (half / (1 + half * half)) * half
    y = tl.where(x > 0, x - tail, tail)
    y = tl.where((x == float("inf")) | (x != x), x, y)
    return tl.where(x == -float("inf"), 0.0, y)


@triton.jit
def matmul_bias_gelu_kernel(
    input,
    weight,
    bias,
    output,
    m,
    n,
    k,
    input_row,
    input_column,
    weight_row,
    weight_column,
    bias_stride,
    APPROXIMATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    program = tl.program_id(0)
    tiles_m, tiles_n = (m - 1) // BLOCK_M + 1, (n - 1) // BLOCK_N + 1  # no sum beyond m and n, which may be 2^31 - 1
    group = program // (GROUP * tiles_n)
    first_m = group * GROUP
    group_rows = min(tiles_m - first_m, GROUP)
    tile_m = first_m + program % (GROUP * tiles_n) % group_rows
    tile_n = program % (GROUP * tiles_n) // group_rows

    # Triton's integers have the 32 bits that each of them needs, their products need 64: a transposed input has
    # columns of millions of elements.
    input_row, input_column = tl.cast(input_row, tl.int64), tl.cast(input_column, tl.int64)
    weight_row, weight_column = tl.cast(weight_row, tl.int64), tl.cast(weight_column, tl.int64)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a = input + (rows % m)[:, None] * input_row + depth[None, :] * input_column
    b = weight + (columns % n)[None, :] * weight_row + depth[:, None] * weight_column
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, tl.cast(k, tl.int64), BLOCK_K):
        if EVEN_K:
            left, right = tl.load(a), tl.load(b)
        else:
            inside = depth < k - first
            left = tl.load(a, mask=inside[None, :], other=0.0)
            right = tl.load(b, mask=inside[:, None], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
        a += BLOCK_K * input_column
        b += BLOCK_K * weight_column

    x = total + tl.load(bias + columns.to(tl.int64) * bias_stride, mask=columns < n).to(tl.float32)[None, :]
    y = gelu(x, APPROXIMATE)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.store(output + rows[:, None].to(tl.int64) * n + columns[None, :], y.to(output.dtype.element_ty), mask=inside)


def matmul_bias_gelu(input, weight, bias, approximate, output):
    m, k = input.shape
    n = weight.size(0)
    # float32 has no tensor cores without TF32: its tiles are bound by registers.
    if input.element_size() == 4:
        block_m, block_n, block_k, warps, stages = 64, 64, 32, 4, 2
    elif m <= 32:
        block_m, block_n, block_k, warps, stages = 16, 32, 256, 4, 4
    elif m <= 1024:
        block_m, block_n, block_k, warps, stages = 64, 128, 64, 4, 4
    else:
        block_m, block_n, block_k, warps, stages = 128, 128, 64, 4, 3
    matmul_bias_gelu_kernel[(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)](
        input,
        weight,
        bias,
        output,
        m,
        n,
        k,
        input.stride(0),
        input.stride(1),
        weight.stride(0),
        weight.stride(1),
        bias.stride(0),
        APPROXIMATE=approximate,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP=GROUP,
        EVEN_K=k % block_k == 0,
        num_warps=warps,
        num_stages=stages,
    )
