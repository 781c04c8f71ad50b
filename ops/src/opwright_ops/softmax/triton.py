"""Row softmax and its gradient: a row that fits is kept in registers; a longer one is read twice."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

RESIDENT = 16384  # elements of a row that 16 warps keep: 32 registers of each thread
RESIDENT_BACKWARD = 32768  # of two rows; in float64 a quarter
TILE = 16384  # elements of a longer row that a program has at once
LANES = 4096


@triton.jit
def exponential(x, element_ty: tl.constexpr):
    # `tl.exp` is off by tens of float32's ulp far from 0, which a result of 16 bits does not show.
    if element_ty.primitive_bitwidth == 16:
        return tl.exp(x)
    return libdevice.exp(x)


@triton.jit
def softmax_kernel(input, output, n, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at = input + row * row_stride + column.to(tl.int64) * column_stride
    x = tl.load(at, mask=column < n, other=-float("inf"))
    x = x.to(tl.float64 if x.dtype == tl.float64 else tl.float32)
    e = exponential(x - tl.max(x, 0), input.dtype.element_ty)
    tl.store(output + row * n + column, (e / tl.sum(e, 0)).to(output.dtype.element_ty), mask=column < n)


@triton.jit
def long_softmax_kernel(input, output, n, row_stride, column_stride, BLOCK: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    wide = tl.float64 if input.dtype.element_ty == tl.float64 else tl.float32
    # The elements of a lane are in one thread.
    offset = tl.arange(0, BLOCK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    largest = tl.full((LANES,), -float("inf"), wide)
    total = tl.zeros((LANES,), wide)
    for block in range(0, (n - 1) // BLOCK + 1):
        column, inside = block * BLOCK + offset, offset < n - block * BLOCK
        at = input + row * row_stride + column.to(tl.int64) * column_stride
        x = tl.load(at, mask=inside, other=-float("inf"), eviction_policy="evict_last").to(wide)
        new = tl.maximum(largest, tl.max(x, 0))
        # A lane that has seen nothing but -inf keeps a sum of zero.
        shift = tl.where(new == -float("inf"), 0.0, new)
        e = exponential(x - shift[None, :], input.dtype.element_ty)
        total = total * exponential(largest - shift, input.dtype.element_ty) + tl.sum(e, 0)
        largest = new
    top = tl.max(largest, 0)
    scale = 1.0 / tl.sum(total * exponential(largest - top, input.dtype.element_ty), 0)
    for block in range(0, (n - 1) // BLOCK + 1):
        column, inside = block * BLOCK + offset, offset < n - block * BLOCK
        at = input + row * row_stride + column.to(tl.int64) * column_stride
        x = tl.load(at, mask=inside, other=-float("inf"), eviction_policy="evict_first").to(wide)
        y = exponential(x - top, input.dtype.element_ty) * scale
        to = output + row * n + column
        tl.store(to, y.to(output.dtype.element_ty), mask=inside, eviction_policy="evict_first")


@triton.jit
def softmax_backward_kernel(
    grad_output, output, grad_input, n, grad_stride, grad_column_stride, row_stride, column_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    wide = tl.float64 if output.dtype.element_ty == tl.float64 else tl.float32
    column = tl.arange(0, BLOCK)
    grads_at = grad_output + row * grad_stride + column.to(tl.int64) * grad_column_stride
    values_at = output + row * row_stride + column.to(tl.int64) * column_stride
    grads = tl.load(grads_at, mask=column < n, other=0.0).to(wide)
    values = tl.load(values_at, mask=column < n, other=0.0).to(wide)
    x = values * (grads - tl.sum(grads * values, 0))
    tl.store(grad_input + row * n + column, x.to(grad_input.dtype.element_ty), mask=column < n)


@triton.jit
def long_softmax_backward_kernel(
    grad_output, output, grad_input, n, grad_stride, grad_column_stride, row_stride, column_stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    wide = tl.float64 if output.dtype.element_ty == tl.float64 else tl.float32
    lane = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), wide)
    blocks = (n - 1) // BLOCK + 1
    for block in range(0, blocks):
        column, inside = (block * BLOCK + lane).to(tl.int64), lane < n - block * BLOCK
        grads_at = grad_output + row * grad_stride + column * grad_column_stride
        values_at = output + row * row_stride + column * column_stride
        grads = tl.load(grads_at, mask=inside, other=0.0, eviction_policy="evict_last").to(wide)
        values = tl.load(values_at, mask=inside, other=0.0, eviction_policy="evict_last").to(wide)
        products += grads * values
    total = tl.sum(products, 0)
    # From the end: what was read last is in the second-level cache.
    for done in range(0, blocks):
        block = blocks - 1 - done
        column, inside = (block * BLOCK + lane).to(tl.int64), lane < n - block * BLOCK
        grads_at = grad_output + row * grad_stride + column * grad_column_stride
        values_at = output + row * row_stride + column * column_stride
        grads = tl.load(grads_at, mask=inside, other=0.0, eviction_policy="evict_first").to(wide)
        values = tl.load(values_at, mask=inside, other=0.0, eviction_policy="evict_first").to(wide)
        x = (values * (grads - total)).to(grad_input.dtype.element_ty)
        tl.store(grad_input + row * n + column, x, mask=inside, eviction_policy="evict_first")


def softmax(input, output):
    rows, n = input.shape
    block = triton.next_power_of_2(n)
    if block <= RESIDENT:
        warps = 1 if block <= 256 else 4 if block <= 2048 else 8 if block <= 8192 else 16
        softmax_kernel[(rows,)](input, output, n, input.stride(0), input.stride(1), BLOCK=block, num_warps=warps)
    else:
        warps = 16 if input.element_size() == 2 else 32
        long_softmax_kernel[(rows,)](
            input, output, n, input.stride(0), input.stride(1), BLOCK=TILE, LANES=LANES, num_warps=warps
        )


def softmax_backward(grad_output, output, grad_input):
    rows, n = output.shape
    grad_stride, grad_column_stride = grad_output.stride(0), grad_output.stride(1)
    row_stride, column_stride = output.stride(0), output.stride(1)
    block = triton.next_power_of_2(n)
    resident = RESIDENT_BACKWARD // 4 if output.element_size() == 8 else RESIDENT_BACKWARD
    if block <= resident:
        warps = 1 if block <= 256 else 4 if block <= 2048 else 8 if block <= 8192 else 16
        softmax_backward_kernel[(rows,)](
            grad_output, output, grad_input, n, grad_stride, grad_column_stride, row_stride, column_stride,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
    else:
        long_softmax_backward_kernel[(rows,)](
            grad_output, output, grad_input, n, grad_stride, grad_column_stride, row_stride, column_stride,
            BLOCK=TILE, num_warps=32,
        )  # fmt: skip
