"""`softmax` along any axis: the operator of rows in `op.py` along the last, PyTorch's along others."""

from __future__ import annotations

import torch
from torch import Tensor

from opwright_ops.refusals import refuse, shown
from opwright_ops.softmax.op import softmax as softmax_of_rows
from opwright_ops.tensors import is_autocast_on


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    """exp(input) over its sum along an axis, as `torch.softmax(input, dim)`.

    The kernels take rows. Along another axis PyTorch's own operator computes, which needs no copy with that axis last.

    Args:
        input: float32, float64, float16 or bfloat16, of any shape and strides.
        dim: the axis; from the last if negative.

    Returns:
        A contiguous tensor of the type of `input`; under autocast float32 for 16 bits.

    Numerics:
        The largest element along the axis is subtracted first. 16-bit types are computed in float32.

    Raises:
        IndexError: `input` has no axis `dim`.
        TypeError: `input` is not a floating-point tensor, or `dim` not an integer.
    """
    if dim == -1 and not (isinstance(input, Tensor) and input.ndim == 0):
        return softmax_of_rows(input)
    if not isinstance(input, Tensor) or not input.is_floating_point():
        refuse(TypeError, "input", "must be a floating-point tensor", ("got", shown(input)), subject="softmax")
    if not isinstance(dim, (int, torch.SymInt)):
        refuse(TypeError, "dim", "must be an integer", ("got", shown(dim)), hint="`dim=-1`", subject="softmax")
    bound = max(input.ndim, 1)
    if not -bound <= dim < bound:
        rows = ("input", shown(input)), ("dim", f"{dim}  expected {-bound} to {bound - 1}")
        refuse(IndexError, "dim", "is not an axis of `input`", *rows, subject="softmax")
    if input.ndim and dim == input.ndim - 1:
        return softmax_of_rows(input)
    # PyTorch's autocast leaves 16 bits as they are on CPUs; the operator does not.
    is_widened = input.element_size() == 2 and is_autocast_on(input)
    return torch.softmax(input, dim, dtype=torch.float32 if is_widened else None)


softmax.operator = softmax_of_rows.operator  # so that verify, bench and tests take this function, too
