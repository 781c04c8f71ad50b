"""Row softmax: a row that fits is kept in registers; a longer one is read twice."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

RESIDENT = 16384  # elements of a row that 16 warps keep: 32 registers of each thread
LOOP = 4096


@triton.jit
def softmax_kernel(input, output, n, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = input + row * row_stride + column.to(tl.int64) * column_stride
    x = tl.load(at, mask=column < n, other=-float("inf"))
    x = x.to(tl.float64 if x.dtype == tl.float64 else tl.float32)
    e = libdevice.exp(x - tl.max(x, 0))
    tl.store(output + row * n + column, (e / tl.sum(e, 0)).to(output.dtype.element_ty), mask=column < n)


@triton.jit
def long_softmax_kernel(input, output, n, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    wide = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    lane = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -float("inf"), wide)
    total = tl.zeros((BLOCK,), wide)
    for block in range(0, (n - 1) // BLOCK + 1):
        column, inside = block * BLOCK + lane, lane < n - block * BLOCK
        at = input + row * row_stride + column.to(tl.int64) * column_stride
        x = tl.load(at, mask=inside, other=-float("inf")).to(wide)
        new = tl.maximum(largest, x)
        # A lane that has seen nothing but -inf keeps a sum of zero.
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * libdevice.exp(largest - shift) + libdevice.exp(x - shift)
        largest = new
    top = tl.max(largest, 0)
    total = tl.sum(total * libdevice.exp(largest - top), 0)
    for block in range(0, (n - 1) // BLOCK + 1):
        column, inside = block * BLOCK + lane, lane < n - block * BLOCK
        at = input + row * row_stride + column.to(tl.int64) * column_stride
        x = tl.load(at, mask=inside, other=-float("inf")).to(wide)
        y = libdevice.exp(x - top) / total
        tl.store(output + row * n + column, y.to(output.dtype.element_ty), mask=inside)


def softmax(input, output):
    rows, n = input.shape
    block = triton.next_power_of_2(n)
    if block <= RESIDENT:
        warps = 1 if block <= 256 else 4 if block <= 2048 else 8 if block <= 8192 else 16
        softmax_kernel[(rows,)](input, output, n, input.stride(0), input.stride(1), BLOCK=block, num_warps=warps)
    else:
        long_softmax_kernel[(rows,)](input, output, n, input.stride(0), input.stride(1), BLOCK=LOOP, num_warps=8)
