"""Log-sum-exp and cross-entropy of rows of logits."""

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from opwright import Index, Mutates, Probability, operator
from opwright_ops.tensors import bytes_of, widened


@operator("opwright_ops::row_logsumexp", autocast=None, batch_invariant=True)
def row_logsumexp(input: Float[Tensor, "*batch n"]) -> Float64[Tensor, "*batch"]:
    """The logarithm of the sum of exp(input) along the last axis.

    Numerics:
        16-bit types are computed in float32. The result is float64, so that gradients of 16-bit rows do not use a
        rounded one.
    """
    return torch.logsumexp(widened(input), -1).double()


@row_logsumexp.backward
def row_logsumexp_backward(grad_output, input, output):
    x = widened(input)
    grad, normalizer = grad_output.to(x.dtype)[..., None], output.to(x.dtype)[..., None]
    return (grad * torch.exp(x - normalizer)).to(input.dtype)


@row_logsumexp.cost
def row_logsumexp_cost(input):
    return bytes_of(input), 4 * input.numel()


@row_logsumexp_backward.cost
def row_logsumexp_backward_cost(grad_output, input, output):
    return 2 * bytes_of(input), 3 * input.numel()


@row_logsumexp.baseline
def logsumexp_in_pytorch(input):
    return torch.logsumexp(input, -1).double()


class RowLosses(NamedTuple):
    """The results of `row_cross_entropy`."""

    loss: Float64[Tensor, "*batch"]
    normalizer: Float64[Tensor, "*batch"]


@operator("opwright_ops::row_cross_entropy", autocast=None, batch_invariant=True, non_differentiable=["normalizer"])
def row_cross_entropy(
    logits: Float[Tensor, "*batch n"],
    target: Annotated[Int64[Tensor, "*batch"], Index("n")],
    *,
    ignore_index: int = -100,
    label_smoothing: Annotated[float, Probability] = 0.0,
    z_loss: float = 0.0,
) -> RowLosses:
    """The cross-entropy of each row, and the log-sum-exp that its gradient needs.

    Args:
        target: the class of each row.
        ignore_index: a row with this target has the loss and the gradient 0.
        label_smoothing: the part of the target that is spread evenly over all classes.
        z_loss: is multiplied by the square of the log-sum-exp, and added.

    Numerics:
        16-bit types are computed in float32; nothing is rounded to 16 bits.

    Source:
        Label smoothing: Szegedy et al., arXiv:1512.00567, section 7; z_loss: Chowdhery et al., arXiv:2204.02311,
        section 5.
    """
    x = widened(logits)
    normalizer = torch.logsumexp(x, -1).double()
    is_counted = target != ignore_index
    picked = x.gather(-1, torch.where(is_counted, target, 0)[..., None])[..., 0].double()
    loss = normalizer - (1 - label_smoothing) * picked
    if label_smoothing:
        loss = loss - label_smoothing * x.mean(-1, dtype=torch.float64)
    if z_loss:
        loss = loss + z_loss * normalizer.square()
    return RowLosses(torch.where(is_counted, loss, 0.0), normalizer)


def _gradient(
    grad_loss: Tensor,
    logits: Tensor,
    target: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    x, is_counted = widened(logits), (target != ignore_index)[..., None]
    grad, normalizer = grad_loss.to(x.dtype)[..., None], normalizer.to(x.dtype)[..., None]
    slope = torch.exp(x - normalizer)
    if z_loss:
        slope = slope * (1 + 2 * z_loss * normalizer)
    if label_smoothing:
        slope = slope - label_smoothing / logits.shape[-1]
    at_target = torch.where(is_counted, target[..., None], 0)
    slope = slope.scatter_add(-1, at_target, torch.full_like(normalizer, label_smoothing - 1))
    return torch.where(is_counted, grad * slope, 0.0).to(logits.dtype)


@row_cross_entropy.backward
def row_cross_entropy_backward(
    grad_loss, logits, target, normalizer, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0
):
    return _gradient(grad_loss, logits, target, normalizer, ignore_index, label_smoothing, z_loss)


@row_cross_entropy.cost
def row_cross_entropy_cost(logits, target, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0):
    return bytes_of(logits, target), (5 if label_smoothing else 4) * logits.numel()


@row_cross_entropy_backward.cost
def row_cross_entropy_backward_cost(
    grad_loss, logits, target, normalizer, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0
):
    return 2 * bytes_of(logits) + bytes_of(target), 4 * logits.numel()


@row_cross_entropy.baseline
def row_cross_entropy_in_pytorch(logits, target, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0):
    classes = logits.reshape(-1, logits.shape[-1])
    loss = F.cross_entropy(
        classes, target.reshape(-1), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    normalizer = torch.logsumexp(logits, -1).double()
    return loss.reshape(target.shape).double() + z_loss * normalizer.square(), normalizer


@operator("opwright_ops::row_cross_entropy_gradient_", autocast=None)
def row_cross_entropy_gradient_(
    logits: Mutates[Float[Tensor, "*batch n"]],
    grad_loss: Float64[Tensor, "*batch"],
    target: Annotated[Int64[Tensor, "*batch"], Index("n")],
    normalizer: Float64[Tensor, "*batch"],
    *,
    ignore_index: int = -100,
    label_smoothing: Annotated[float, Probability] = 0.0,
    z_loss: float = 0.0,
) -> None:
    """Writes the gradient of `row_cross_entropy` over its logits."""
    logits.copy_(_gradient(grad_loss, logits, target, normalizer, ignore_index, label_smoothing, z_loss))


class TotalLoss(NamedTuple):
    """The results of `total_loss`."""

    total: Float64[Tensor, "*batch"]
    weight: Float64[Tensor, "*batch"]


@operator("opwright_ops::total_loss", autocast=None, non_differentiable=["weight"])
def total_loss(
    loss: Float64[Tensor, "*batch n"],
    target: Int64[Tensor, "*batch n"],
    *,
    ignore_index: int = -100,
    is_mean: bool = True,
) -> TotalLoss:
    """The sum of the losses of rows, or their mean over those that have a target; and the weight of each row in it."""
    count = (target != ignore_index).sum(-1).double()
    weight = 1 / count if is_mean else torch.ones_like(count)
    return TotalLoss(loss.sum(-1) / count if is_mean else loss.sum(-1), weight)


@total_loss.backward
def total_loss_backward(grad_total, target, weight):
    return (grad_total * weight)[..., None].expand(target.shape).clone()


row_logsumexp.sweep(batch=[(64,), (1024,)], n=[1000, 32000])
row_cross_entropy.sweep(batch=[(64,), (1024,)], n=[1000, 32000])
