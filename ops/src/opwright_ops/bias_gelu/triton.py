"""bias_gelu as a Triton kernel: `@operator(..., cuda="triton.py")` takes it instead of cuda.cu. Forward only."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

COLUMNS = 1024  # of a program: 8 elements for each of 128 threads, two 16-byte loads in 16 bits, four in float32


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
        if APPROXIMATE == "tanh":
            v = 1.5957691216057308 * size * (1 + 0.044715 * size * size)
        else:
            v = 1.702 * size
        half = libdevice.exp(-0.5 * v)
        tail = x * (half / (1 + half * half)) * half
    y = tl.where(x > 0, x - tail, tail)
    y = tl.where((x == float("inf")) | (x != x), x, y)
    return tl.where(x == -float("inf"), 0.0, y)


@triton.jit
def bias_gelu_kernel(
    input, bias, output, n, row_stride, column_stride, bias_stride, APPROXIMATE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    x = tl.load(input + row * row_stride + column.to(tl.int64) * column_stride, mask=inside)
    b = tl.load(bias + column.to(tl.int64) * bias_stride, mask=inside)
    wide = tl.float64 if x.dtype == tl.float64 else tl.float32
    y = gelu(x.to(wide) + b.to(wide), APPROXIMATE)
    tl.store(output + row * n + column, y.to(output.dtype.element_ty), mask=inside)


def bias_gelu(input, bias, approximate, output):
    rows, n = input.shape
    block = min(triton.next_power_of_2(n), COLUMNS)
    bias_gelu_kernel[(rows, triton.cdiv(n, block))](
        input,
        bias,
        output,
        n,
        input.stride(0),
        input.stride(1),
        bias.stride(0),
        APPROXIMATE=approximate,
        BLOCK=block,
    )
