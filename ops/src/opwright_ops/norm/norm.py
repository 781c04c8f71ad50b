"""The norms, with a weight of the type of the rows or of float32: the operators are in `op.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opwright_ops.norm import op
from opwright_ops.norm.op import OF_ONE_TYPE, WITH_FLOAT32_WEIGHT, AddRmsNormOutputs, Norms
from opwright_ops.tensors import is_autocast_on

_HALVES = (torch.float16, torch.bfloat16)


def _norms_for(input: Any, columns: Any) -> Norms:
    """Returns the operators that take rows with a weight or bias of another type, or refuse it."""
    is_mixed = getattr(columns, "dtype", None) == torch.float32 and getattr(input, "dtype", None) in _HALVES
    # Autocast makes float32 of both.
    return WITH_FLOAT32_WEIGHT if is_mixed and not is_autocast_on(input) else OF_ONE_TYPE


def _into(out: Any) -> dict[str, Any]:
    return {} if out is None else {"out": out}


def rms_norm(input: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """Divides each row by the root of its mean square, and multiplies it by `weight`.

    Args:
        input: (..., n), float32, float64, float16 or bfloat16, of any strides.
        weight: (n,), the gain of each column, of the type of `input`, or float32 beside 16 bits; 1 without it.
        eps: is added to the mean square.
        out: takes the result.

    Returns:
        A tensor of the shape and type of `input`; under autocast float32.

    Numerics:
        16-bit types are computed in float32 and rounded once, at the end. A row has the same bits in every batch.

    Raises:
        DtypeError, ShapeError: `weight` does not fit.

    Source:
        Zhang and Sennrich, arXiv:1910.07467, eq. 4.
    """
    if out is None and (weight is None or getattr(weight, "dtype", None) is getattr(input, "dtype", None)):
        return op.rms_norm(input, weight, eps=eps)
    return _norms_for(input, weight).rms_norm(input, weight, eps=eps, **_into(out))


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    out: tuple[Tensor, Tensor] | None = None,
) -> AddRmsNormOutputs:
    """Adds `residual` to `input`, and returns `rms_norm` of the sum, and the sum.

    Args:
        input, residual: (..., n), of one type.
        weight, eps: as for `rms_norm`.
        out: two tensors that take the results.

    Returns:
        `output` and `sum`, of the shape and type of `input`.

    Numerics:
        The sum is rounded to the type of `input`; that is what is normalised.

    Raises:
        DtypeError, ShapeError: `residual` or `weight` does not fit.
    """
    if out is None and (weight is None or getattr(weight, "dtype", None) is getattr(input, "dtype", None)):
        return op.add_rms_norm(input, residual, weight, eps=eps)
    return _norms_for(input, weight).add_rms_norm(input, residual, weight, eps=eps, **_into(out))


def layer_norm(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    out: Tensor | None = None,
) -> Tensor:
    """Subtracts from each row its mean, divides it by its standard deviation, and scales and shifts it.

    Args:
        input: (..., n), float32, float64, float16 or bfloat16, of any strides.
        weight: (n,), the gain of each column, of the type of `input`, or float32 beside 16 bits; 1 without it.
        bias: (n,), is added to each column, of the type of `weight`; 0 without it.
        eps: is added to the variance, which is the mean of the squares.
        out: takes the result.

    Returns:
        A tensor of the shape and type of `input`; under autocast float32.

    Numerics:
        16-bit types are computed in float32 and rounded once, at the end. The variance is the mean square of
        the differences to the mean, so that it does not cancel. A row has the same bits in every batch.

    Raises:
        DtypeError, ShapeError: `weight` or `bias` does not fit.

    Source:
        Ba, Kiros and Hinton, arXiv:1607.06450, eq. 4.
    """
    columns = bias if weight is None else weight
    if out is None and (columns is None or getattr(columns, "dtype", None) is getattr(input, "dtype", None)):
        return op.layer_norm(input, weight, bias, eps=eps)
    return _norms_for(input, columns).layer_norm(input, weight, bias, eps=eps, **_into(out))


# So that verify, bench and tests take these functions, too.
for _function in (rms_norm, add_rms_norm, layer_norm):
    _function.operator = getattr(OF_ONE_TYPE, _function.__name__).operator
