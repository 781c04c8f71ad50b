"""Norms over the last axis: RMS norm, the same behind a residual sum, and layer norm."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor

from opwright import operator
from opwright_ops.tensors import bytes_of, widened


def _sum_of_rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).sum(0)


def _rms_norm_gradients(grad_output: Tensor, input: Tensor, weight: Tensor | None, eps: float):
    """Returns the gradients of `rms_norm`, not yet rounded."""
    x, grad = widened(input), widened(grad_output)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = x * scale
    to_y = grad if weight is None else grad * weight
    grad_input = scale * (to_y - y * (to_y * y).mean(-1, keepdim=True))
    return grad_input, None if weight is None else _sum_of_rows(grad * y).to(weight.dtype)


class AddRmsNormOutputs(NamedTuple):
    """What `add_rms_norm` returns."""

    output: Float[Tensor, "*batch n"]
    sum: Float[Tensor, "*batch n"]


class Norms(NamedTuple):
    """The operators for weights of one family, and their gradients."""

    rms_norm: Any
    rms_norm_backward: Any
    add_rms_norm: Any
    add_rms_norm_backward: Any
    layer_norm: Any
    layer_norm_backward: Any


def _declare(suffix: str, Weight: Any) -> Norms:
    """Declares the operators for weights and biases of a family."""

    @operator("opwright_ops::rms_norm" + suffix, autocast="float32", batch_invariant=True)
    def rms_norm(
        input: Float[Tensor, "*batch n"], weight: Weight[Tensor, "n"] | None = None, *, eps: float = 1e-6
    ) -> Float[Tensor, "*batch n"]:
        """Divides each row by the root of its mean square, and multiplies it by `weight`.

        Args:
            weight: the gain of each column; 1 without it.
            eps: is added to the mean square.

        Numerics:
            16-bit types are computed in float32 and rounded once, at the end.

        Source:
            Zhang and Sennrich, arXiv:1910.07467, eq. 4.
        """
        x = widened(input)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (y if weight is None else y * weight).to(input.dtype)

    @rms_norm.backward
    def rms_norm_backward(grad_output, input, weight, *, eps=1e-6):
        grad_input, grad_weight = _rms_norm_gradients(grad_output, input, weight, eps)
        return grad_input.to(input.dtype), grad_weight

    @rms_norm.cost
    def rms_norm_cost(input, weight=None, *, eps=1e-6):
        return 2 * bytes_of(input) + bytes_of(weight), 4 * input.numel()

    @rms_norm_backward.cost
    def rms_norm_backward_cost(grad_output, input, weight, *, eps=1e-6):
        return 3 * bytes_of(input) + 2 * bytes_of(weight), 11 * input.numel()

    @rms_norm.baseline
    def rms_norm_in_pytorch(input, weight=None, *, eps=1e-6):
        return F.rms_norm(input, input.shape[-1:], weight, eps)

    @operator(
        "opwright_ops::add_rms_norm" + suffix,
        autocast="float32",
        batch_invariant=True,
        shared_gradients=[("input", "residual")],
    )
    def add_rms_norm(
        input: Float[Tensor, "*batch n"],
        residual: Float[Tensor, "*batch n"],
        weight: Weight[Tensor, "n"] | None = None,
        *,
        eps: float = 1e-6,
    ) -> AddRmsNormOutputs:
        """Adds `residual` to `input`, and returns `rms_norm` of the sum, and the sum.

        Args:
            weight, eps: as for `rms_norm`.

        Numerics:
            The sum is rounded to the type of `input`; that is what is normalised.
        """
        total = input + residual
        x = widened(total)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return AddRmsNormOutputs((y if weight is None else y * weight).to(input.dtype), total)

    @add_rms_norm.backward
    def add_rms_norm_backward(grad_output, grad_sum, weight, sum, *, eps=1e-6):
        to_sum, grad_weight = _rms_norm_gradients(grad_output, sum, weight, eps)
        return (to_sum + widened(grad_sum)).to(sum.dtype), grad_weight

    @add_rms_norm.cost
    def add_rms_norm_cost(input, residual, weight=None, *, eps=1e-6):
        return 4 * bytes_of(input) + bytes_of(weight), 5 * input.numel()

    @add_rms_norm_backward.cost
    def add_rms_norm_backward_cost(grad_output, grad_sum, weight, sum, *, eps=1e-6):
        return 4 * bytes_of(sum) + 2 * bytes_of(weight), 12 * sum.numel()

    @add_rms_norm.baseline
    def add_rms_norm_in_pytorch(input, residual, weight=None, *, eps=1e-6):
        total = input + residual
        return F.rms_norm(total, total.shape[-1:], weight, eps), total

    @operator("opwright_ops::layer_norm" + suffix, autocast="float32", batch_invariant=True)
    def layer_norm(
        input: Float[Tensor, "*batch n"],
        weight: Weight[Tensor, "n"] | None = None,
        bias: Weight[Tensor, "n"] | None = None,
        *,
        eps: float = 1e-5,
    ) -> Float[Tensor, "*batch n"]:
        """Subtracts from each row its mean, divides it by its standard deviation, and scales and shifts it.

        Args:
            weight: the gain of each column; 1 without it.
            bias: is added to each column; 0 without it.
            eps: is added to the variance, which is the mean of the squares.

        Numerics:
            16-bit types are computed in float32 and rounded once, at the end. The variance is the mean square of
            the differences to the mean, so that it does not cancel.

        Source:
            Ba, Kiros and Hinton, arXiv:1607.06450, eq. 4.
        """
        x = widened(input)
        centred = x - x.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(input.dtype)

    @layer_norm.backward
    def layer_norm_backward(grad_output, input, weight, bias, *, eps=1e-5):
        x, grad = widened(input), widened(grad_output)
        centred = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
        y = centred * scale
        to_y = grad if weight is None else grad * weight
        grad_input = scale * (to_y - to_y.mean(-1, keepdim=True) - y * (to_y * y).mean(-1, keepdim=True))
        grad_weight = None if weight is None else _sum_of_rows(grad * y).to(weight.dtype)
        grad_bias = None if bias is None else _sum_of_rows(grad).to(bias.dtype)
        return grad_input.to(input.dtype), grad_weight, grad_bias

    @layer_norm.cost
    def layer_norm_cost(input, weight=None, bias=None, *, eps=1e-5):
        return 2 * bytes_of(input) + bytes_of(weight, bias), 7 * input.numel()

    @layer_norm_backward.cost
    def layer_norm_backward_cost(grad_output, input, weight, bias, *, eps=1e-5):
        return 3 * bytes_of(input) + 2 * bytes_of(weight) + bytes_of(bias), 15 * input.numel()

    @layer_norm.baseline
    def layer_norm_in_pytorch(input, weight=None, bias=None, *, eps=1e-5):
        return F.layer_norm(input, input.shape[-1:], weight, bias, eps)

    for norm in (rms_norm, add_rms_norm, layer_norm):
        norm.sweep(batch=[(1,), (512,), (4096,)], n=[768, 4096])
    return Norms(rms_norm, rms_norm_backward, add_rms_norm, add_rms_norm_backward, layer_norm, layer_norm_backward)


OF_ONE_TYPE = _declare("", Float)
WITH_FLOAT32_WEIGHT = _declare("_float32_weight", Float32)
rms_norm, rms_norm_backward, add_rms_norm, add_rms_norm_backward, layer_norm, layer_norm_backward = OF_ONE_TYPE
