"""Rotary position embedding of queries and keys."""

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from opwright import Mutates, operator
from opwright_ops.tensors import bytes_of, widened


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the pairs of the last axis, and rounds once, to the type of `x`."""
    wide = widened(x)
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # the same for all heads
    turned, rest = wide[..., : 2 * half], wide[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pairs = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat((turned, rest), -1).to(x.dtype)


@operator("opwright_ops::rotate", batch_invariant=True, derived_gradients=["cos", "sin"])
def rotate(
    q: Float[Tensor, "*batch heads time 2*half+rest"],
    k: Float[Tensor, "*batch key_heads time 2*half+rest"],
    cos: Float32[Tensor, "*batch time half"],
    sin: Float32[Tensor, "*batch time half"],
    *,
    interleaved: bool = False,
) -> tuple[Float[Tensor, "*batch heads time 2*half+rest"], Float[Tensor, "*batch key_heads time 2*half+rest"]]:
    """Rotates pairs of columns of queries and keys by the angles of their time: the operator behind `rope`.

    Args:
        cos, sin: of each angle, once; the columns behind the first 2 * half are copied.
        interleaved: a pair is columns 2i and 2i + 1; otherwise i and i + half.

    Numerics:
        16-bit types are computed in float32 and rounded once, at the end.

    Source:
        Su et al., arXiv:2104.09864, eq. 34.
    """
    return _turn(q, cos, sin, interleaved), _turn(k, cos, sin, interleaved)


@rotate.backward
def rotate_backward(grad_output0, grad_output1, cos, sin, *, interleaved=False):
    # The inverse of a rotation is its transpose.
    return _turn(grad_output0, cos, -sin, interleaved), _turn(grad_output1, cos, -sin, interleaved)


@operator("opwright_ops::rotate_")
def rotate_(
    q: Mutates[Float[Tensor, "*batch heads time 2*half+rest"]],
    k: Mutates[Float[Tensor, "*batch key_heads time 2*half+rest"]],
    cos: Float32[Tensor, "*batch time half"],
    sin: Float32[Tensor, "*batch time half"],
    *,
    interleaved: bool = False,
) -> None:
    """Rotates queries and keys in place: the operator behind `rope_`.

    Args:
        cos, sin, interleaved: as for `rotate`.
    """
    q.copy_(_turn(q, cos, sin, interleaved))
    k.copy_(_turn(k, cos, sin, interleaved))


@operator("opwright_ops::rotate_float64_tables")
def rotate_float64_tables(
    q: Float[Tensor, "*batch heads time 2*half+rest"],
    k: Float[Tensor, "*batch key_heads time 2*half+rest"],
    cos: Float64[Tensor, "*batch time half"],
    sin: Float64[Tensor, "*batch time half"],
    *,
    interleaved: bool = False,
) -> tuple[Float[Tensor, "*batch heads time 2*half+rest"], Float[Tensor, "*batch key_heads time 2*half+rest"]]:
    """`rotate` with tables in float64: PyTorch's operators compute, in float64.

    Args:
        cos, sin, interleaved: as for `rotate`.
    """
    return _turn(q, cos, sin, interleaved), _turn(k, cos, sin, interleaved)


@operator("opwright_ops::rotate_float64_tables_")
def rotate_float64_tables_(
    q: Mutates[Float[Tensor, "*batch heads time 2*half+rest"]],
    k: Mutates[Float[Tensor, "*batch key_heads time 2*half+rest"]],
    cos: Float64[Tensor, "*batch time half"],
    sin: Float64[Tensor, "*batch time half"],
    *,
    interleaved: bool = False,
) -> None:
    """`rotate_` with tables in float64: PyTorch's operators compute, in float64.

    Args:
        cos, sin, interleaved: as for `rotate`.
    """
    q.copy_(_turn(q, cos, sin, interleaved))
    k.copy_(_turn(k, cos, sin, interleaved))


def _table_bytes(table: Tensor) -> int:
    """Returns the bytes of a table without the axes along which it is repeated."""
    kept = (size for size, stride in zip(table.shape, table.stride(), strict=True) if stride or not size)
    return torch.Size(kept).numel() * table.element_size()


@rotate.cost
def rotate_cost(q, k, cos, sin, *, interleaved=False):
    return 2 * bytes_of(q, k) + _table_bytes(cos) + _table_bytes(sin), 3 * (q.numel() + k.numel())


@rotate_.cost
def rotate__cost(q, k, cos, sin, *, interleaved=False):
    return rotate_cost(q, k, cos, sin)


@rotate_backward.cost
def rotate_backward_cost(grad_output0, grad_output1, cos, sin, *, interleaved=False):
    return rotate_cost(grad_output0, grad_output1, cos, sin)


@rotate.baseline
def rotate_in_pytorch(q, k, cos, sin, *, interleaved=False):
    half = cos.shape[-1]

    def turn(x: Tensor) -> Tensor:
        turned, rest = x[..., : 2 * half], x[..., 2 * half :]
        if interleaved:
            c, s = (t.repeat_interleave(2, -1).unsqueeze(-3).to(x.dtype) for t in (cos, sin))
            other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        else:
            c, s = (torch.cat((t, t), -1).unsqueeze(-3).to(x.dtype) for t in (cos, sin))
            other = torch.cat((-turned[..., half:], turned[..., :half]), -1)
        turned = turned * c + other * s
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned

    return turn(q), turn(k)


for _each in (rotate, rotate_):
    _each.sweep(batch=[(1,), (4,)], heads=[32], key_heads=[8], time=[1, 512], half=[64], rest=[0])
