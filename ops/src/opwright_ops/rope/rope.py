"""`rope` and `rope_`: the operators `rotate` and `rotate_`, for tables as they come."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from opwright_ops.refusals import refuse, require_tensors, shown
from opwright_ops.rope.op import rotate, rotate_, rotate_float64_tables, rotate_float64_tables_


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotates pairs of columns of queries and keys by the angles of their time.

    Queries and keys may have any strides, such as parts of a joint projection; they are read in one launch.

    Args:
        q: queries, [*batch, heads, time, dim].
        k: keys, [*batch, key_heads, time, dim], of the type of `q`.
        cos, sin: [time, half], or with leading axes that broadcast to those of `q`, such as [batch, time, half]. Each
            angle is listed once. The columns of `q` and `k` behind the first 2 * half are copied.
        interleaved: a pair is columns 2i and 2i + 1; otherwise i and i + half.

    Numerics:
        16-bit types are computed in float32 and rounded once, at the end. Tables in float32 beside 16-bit `q` and `k`
        are the most precise. With tables in float64, PyTorch's operators compute, in float64.

    Source:
        Su et al., arXiv:2104.09864, eq. 34.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: types do not fit.
    """
    cos, sin = _prepare("rope", q, k, cos, sin)
    call = rotate_float64_tables if cos.dtype == torch.float64 else rotate
    return call(q, k, cos, sin, interleaved=interleaved)


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> None:
    """Rotates queries and keys in place, as `rope` does; there is no gradient.

    Args:
        q, k, cos, sin, interleaved: as for `rope`.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: types do not fit.
        RuntimeError: a tensor requires a gradient.
    """
    cos, sin = _prepare("rope_", q, k, cos, sin)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        refuse(
            RuntimeError,
            "q",
            "or `k` requires a gradient, and there is no gradient of what is written into",
            hint="`rope`",
            subject="rope_",
        )
    call = rotate_float64_tables_ if cos.dtype == torch.float64 else rotate_
    call(q, k, cos, sin, interleaved=interleaved)


def _prepare(name: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tables with the batch axes of `q`, in float32 if they are in 16 bits."""
    require_tensors(name, q=q, k=k, cos=cos, sin=sin)
    if cos.dtype != sin.dtype:
        refuse(TypeError, "sin", "must have the type of `cos`", ("cos", shown(cos)), ("sin", shown(sin)), subject=name)
    _check_ranks(name, q, cos)
    if cos.shape != sin.shape:
        refuse(
            ValueError, "sin", "must have the shape of `cos`", ("cos", shown(cos)), ("sin", shown(sin)), subject=name
        )
    if 2 * cos.shape[-1] > q.shape[-1]:
        refuse(
            ValueError,
            "cos",
            "has more angles than `q` has pairs of columns",
            ("q", shown(q)),
            ("cos", f"{shown(cos)}  expected at most {q.shape[-1] // 2} columns"),
            hint="a table that has each angle twice: `cos[..., :half], sin[..., :half]` with "
            "`half = cos.shape[-1] // 2`; `cos[..., ::2], sin[..., ::2]` for `interleaved=True`",
            subject=name,
        )
    if not torch.compiler.is_compiling() and cos.shape[-2] != q.shape[-2]:
        _refuse_times(name, q, cos)
    if cos.element_size() == 2:
        cos, sin = cos.float(), sin.float()
    batch = q.shape[:-3]
    if cos.shape[:-2] == batch:
        return cos, sin
    try:
        shape = torch.broadcast_shapes(batch, cos.shape[:-2])
    except RuntimeError:
        shape = None
    if shape != batch:
        refuse(
            ValueError,
            "cos",
            "must have leading axes that broadcast to those of `q`",
            ("q", shown(q)),
            ("cos", f"{shown(cos)}  expected [{', '.join([*map(str, batch), str(q.shape[-2]), 'half'])}]"),
            hint="`q` is [*batch, heads, time, dim]; `q.transpose(1, 2)` makes that of [batch, time, heads, dim]",
            subject=name,
        )
    return cos.expand(*batch, *cos.shape[-2:]), sin.expand(*batch, *sin.shape[-2:])


def _check_ranks(name: str, q: Tensor, cos: Tensor) -> None:
    if q.ndim < 3:
        refuse(ValueError, "q", "must be [*batch, heads, time, dim]", ("got", shown(q)), subject=name)
    if cos.ndim < 2:
        refuse(ValueError, "cos", "must be [time, half] at its end", ("got", shown(cos)), subject=name)


def _refuse_times(name: str, q: Tensor, cos: Tensor) -> NoReturn:
    time, found = q.shape[-2], cos.shape[-2]
    if q.shape[-3] == found:
        hint = (
            "`q` and `k` are [*batch, heads, time, dim]; `q.transpose(-3, -2)` makes that of [*batch, time, heads, dim]"
        )
    elif found > time:
        hint = f"`cos[..., :{time}, :], sin[..., :{time}, :]`"
    else:
        hint = f"tables with the angles of {time} times"
    rows = ("q", f"{shown(q)}  time = {time}"), ("cos", f"{shown(cos)}  time = {found}")
    refuse(ValueError, "cos", "must have as many times as `q`", *rows, hint=hint, subject=name)
