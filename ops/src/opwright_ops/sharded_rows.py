"""Softmax, losses and norms of rows whose last axis is sharded: each rank has a part of every row.

The ranks exchange sums and maxima, one to three numbers a row, and never the rows. A rank may have no elements; it
takes part in every exchange.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opwright_ops.cross_entropy.op import (
    row_cross_entropy,
    row_cross_entropy_backward,
    row_cross_entropy_gradient_,
    row_logsumexp,
    total_loss,
    total_loss_backward,
)
from opwright_ops.norm.op import OF_ONE_TYPE, WITH_FLOAT32_WEIGHT
from opwright_ops.softmax.op import softmax, softmax_backward
from opwright_ops.tensors import widened
from opwright_ops.transducer.op import (
    transducer_scores,
    transducer_scores_backward,
    transducer_scores_gradient_,
)

# --- softmax and the log-sum-exp ------------------------------------------------------------------------


def _logsumexp(ranks: Any, part: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    """Returns the log-sum-exp of whole rows, and the sums over the ranks of other numbers of each row."""
    own = row_logsumexp(part)
    # An infinite maximum would make NaN of infinities; NaN itself spreads by the sum.
    origin = ranks.max(own).nan_to_num(0, 0, 0)
    if not numbers:
        return (origin + ranks.sum(torch.exp(own - origin)).log(),)
    total, *others = ranks.sum(torch.exp(own - origin), *numbers)
    return origin + total.log(), *others


@row_logsumexp.exchange("n")
def _row_logsumexp(ranks, input):
    return _logsumexp(ranks, input)[0]


@softmax.exchange("n")
def _softmax(ranks, input):
    # The log-sum-exp would not do for the origin: beside a large maximum it lacks the logarithm.
    wide = torch.promote_types(input.dtype, torch.float32)
    rows, n = input.shape[:-1], input.shape[-1]
    largest = input.amax(-1) if n else input.new_full(rows, -torch.inf)
    exponentials = (input - ranks.max(largest.to(wide))[..., None]).exp_()
    return exponentials.mul_(1 / ranks.sum(exponentials.sum(-1))[..., None]).to(input.dtype)


@softmax_backward.exchange("n")
def _softmax_backward(ranks, grad_output, output):
    grad, y = widened(grad_output), widened(output)
    product = ranks.sum((grad * y).sum(-1))
    return (y * (grad - product[..., None])).to(output.dtype)


# --- losses ---------------------------------------------------------------------------------------------


def _place(ranks: Any, target: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Returns whether the class of each row is among the n of this rank, and its index, which is 0 elsewhere."""
    index = target - ranks.start
    is_here = (index >= 0) & (index < n)
    return is_here, torch.where(is_here, index, 0)


def _pick(logits: Tensor, is_here: Tensor, index: Tensor) -> Tensor:
    """Returns the logit of each row at an index that `_place` returned, in float64; 0 where it is not here."""
    if not logits.shape[-1]:
        return torch.zeros(index.shape, dtype=torch.float64, device=logits.device)
    return torch.where(is_here, logits.gather(-1, index[..., None])[..., 0].double(), 0.0)


def _check(is_right: Tensor, message: str) -> None:
    try:
        torch._assert_async(is_right.all(), message)
    except RuntimeError:
        raise IndexError(message) from None


@row_cross_entropy.exchange("n")
def _row_cross_entropy(ranks, logits, target, *, ignore_index, label_smoothing, z_loss):
    is_counted, n = target != ignore_index, logits.shape[-1]
    is_class = (target >= 0) & (target < ranks.size)
    _check(~is_counted | is_class, "a target is neither a class, from 0 to n - 1, nor ignore_index")
    picked = _pick(logits, *_place(ranks, target, n))
    numbers = [picked, logits.sum(-1, dtype=torch.float64)] if label_smoothing else [picked]
    normalizer, picked, *sums = _logsumexp(ranks, logits, *numbers)
    loss = normalizer - (1 - label_smoothing) * picked
    if label_smoothing:
        loss = loss - label_smoothing / ranks.size * sums[0]
    if z_loss:
        loss = loss + z_loss * normalizer.square()
    return torch.where(is_counted, loss, 0.0), normalizer


def _write_gradient(
    compute, ranks, grad_loss, logits, target, normalizer, *, ignore_index, label_smoothing, z_loss
) -> Tensor:
    """Runs a kernel as if the classes of this rank were all, and corrects the entry of one class in each row.

    The kernel subtracts the smoothing over the classes that it sees from each entry, and what that leaves of 1 from
    the entry of the target. Of the two, the first is right here.

    Args:
        compute: the kernel; takes the arguments that depend on the classes by name and returns the gradient.
    """
    n = logits.shape[-1]
    if not n:
        return logits
    is_counted = target != ignore_index
    is_here, index = _place(ranks, target, n)
    at = index[..., None]
    slope = torch.exp(logits.gather(-1, at)[..., 0].double() - normalizer) * (1 + 2 * z_loss * normalizer)
    slope = slope - label_smoothing / ranks.size - torch.where(is_here, 1 - label_smoothing, 0.0)
    entry = torch.where(is_counted, grad_loss * slope, 0.0).to(logits.dtype)
    gradient = compute(
        grad_loss=grad_loss,
        logits=logits,
        target=torch.where(is_counted, index, -1),
        normalizer=normalizer,
        ignore_index=-1,
        label_smoothing=label_smoothing * n / ranks.size,
        z_loss=z_loss,
    )
    return gradient.scatter_(-1, at, entry[..., None])


@row_cross_entropy_backward.exchange("n")
def _row_cross_entropy_backward(ranks, grad_loss, logits, target, normalizer, **options):
    return _write_gradient(row_cross_entropy_backward, ranks, grad_loss, logits, target, normalizer, **options)


@row_cross_entropy_gradient_.exchange("n")
def _row_cross_entropy_gradient_(ranks, logits, grad_loss, target, normalizer, **options):
    def overwrite(**arguments: Any) -> Tensor:
        row_cross_entropy_gradient_(**arguments)
        return logits

    _write_gradient(overwrite, ranks, grad_loss, logits, target, normalizer, **options)


@total_loss.exchange("n")
def _total_loss(ranks, loss, target, *, ignore_index, is_mean):
    total, count = ranks.sum(loss.sum(-1), (target != ignore_index).sum(-1, dtype=torch.float64))
    return (total / count, 1 / count) if is_mean else (total, torch.ones_like(count))


@total_loss_backward.exchange("n")
def _total_loss_backward(ranks, grad_total, target, weight):
    return (grad_total * weight)[..., None].expand(target.shape)


# --- the transducer's loss ------------------------------------------------------------------------------


def _place_columns(ranks: Any, labels: Tensor, blank: int, v: int) -> tuple[Any, Any]:
    """Returns what `_place` does for the blank and for the label of each row. The blank counts as any other class."""
    column = torch.full_like(labels, blank + ranks.size if blank < 0 else blank)
    return _place(ranks, column, v), _place(ranks, torch.where(labels < ranks.size, labels, -1), v)


@transducer_scores.exchange("v")
def _transducer_scores(ranks, logits, labels, *, blank):
    if not -ranks.size <= blank < ranks.size:
        raise IndexError(f"blank {blank} is outside of the vocabulary of {ranks.size}")
    _check((labels >= 0) & (labels < ranks.size + 2), "a label is outside of the vocabulary")
    is_used, has_label = labels != ranks.size + 1, labels < ranks.size
    columns = _place_columns(ranks, labels, blank, logits.shape[-1])
    normalizer, *picked = _logsumexp(ranks, logits, *(_pick(logits, *each) for each in columns))
    scores = (torch.where(m, x - normalizer, 0.0) for m, x in zip((is_used, has_label), picked, strict=True))
    return *scores, torch.where(is_used, normalizer, 0.0)


def _write_gradient_of_scores(compute, ranks, of_blank, of_label, logits, labels, normalizer, *, blank) -> Tensor:
    """Runs a kernel that subtracts the softmax from each entry, and corrects up to three entries of each row.

    For the kernel, rows have no label, and the steps to the label count among those by the blank in column 0.

    Args:
        compute: the kernel; takes the arguments of `transducer_scores_backward` by name and returns the gradient.
    """
    v = logits.shape[-1]
    if not v:
        return logits
    is_used = labels != ranks.size + 1
    by_blank, by_label = torch.where(is_used, of_blank, 0.0), torch.where(labels < ranks.size, of_label, 0.0)
    (blank_is_here, blank_at), (label_is_here, label_at) = _place_columns(ranks, labels, blank, v)
    at = torch.stack([torch.zeros_like(labels), blank_at, label_at], -1)
    entries = -torch.exp(logits.gather(-1, at).double() - normalizer[..., None]) * (by_blank + by_label)[..., None]
    for is_here, index, part in (blank_is_here, blank_at, by_blank), (label_is_here, label_at, by_label):
        entries = entries + torch.where(is_here[..., None] & (at == index[..., None]), part[..., None], 0.0)
    gradient = compute(
        grad_blank_score=by_blank + by_label,
        grad_label_score=torch.zeros_like(by_label),
        logits=logits,
        labels=torch.where(is_used, v, v + 1),
        normalizer=normalizer,
        blank=0,
    )
    return gradient.scatter_(-1, at, torch.where(is_used[..., None], entries, 0.0).to(logits.dtype))


@transducer_scores_backward.exchange("v")
def _transducer_scores_backward(ranks, grad_blank_score, grad_label_score, logits, labels, normalizer, *, blank):
    given = grad_blank_score, grad_label_score, logits, labels, normalizer
    return _write_gradient_of_scores(transducer_scores_backward, ranks, *given, blank=blank)


@transducer_scores_gradient_.exchange("v")
def _transducer_scores_gradient_(ranks, logits, grad_blank_score, grad_label_score, labels, normalizer, *, blank):
    def overwrite(**arguments: Any) -> Tensor:
        transducer_scores_gradient_(**arguments)
        return logits

    given = grad_blank_score, grad_label_score, logits, labels, normalizer
    _write_gradient_of_scores(overwrite, ranks, *given, blank=blank)


# --- norms ----------------------------------------------------------------------------------------------


def _sum_of_rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2).sum(0) if x.ndim > 1 else x


def _scaled(x: Tensor, scale: Tensor, weight: Tensor | None) -> Tensor:
    y = x * scale[..., None]
    return y if weight is None else y * weight


def _rms_norm(ranks, input, weight, *, eps):
    x = widened(input)
    scale = torch.rsqrt(ranks.sum(x.square().sum(-1)) / ranks.size + eps)
    return _scaled(x, scale, weight).to(input.dtype)


def _rms_norm_gradients(ranks: Any, grad_output: Tensor, input: Tensor, weight: Tensor | None, eps: float):
    """Returns the gradients of `rms_norm`, that of the input not yet rounded."""
    x, grad = widened(input), widened(grad_output)
    to_y = grad if weight is None else grad * weight
    squares, products = ranks.sum(x.square().sum(-1), (to_y * x).sum(-1))
    scale = torch.rsqrt(squares / ranks.size + eps)
    y = x * scale[..., None]
    grad_input = scale[..., None] * (to_y - y * (scale * products / ranks.size)[..., None])
    return grad_input, None if weight is None else _sum_of_rows(grad * y).to(weight.dtype)


def _rms_norm_backward(ranks, grad_output, input, weight, *, eps):
    grad_input, grad_weight = _rms_norm_gradients(ranks, grad_output, input, weight, eps)
    return grad_input.to(input.dtype), grad_weight


def _add_rms_norm(ranks, input, residual, weight, *, eps):
    total = input + residual
    return _rms_norm(ranks, total, weight, eps=eps), total


def _add_rms_norm_backward(ranks, grad_output, grad_sum, weight, sum, *, eps):
    to_sum, grad_weight = _rms_norm_gradients(ranks, grad_output, sum, weight, eps)
    return (to_sum + widened(grad_sum)).to(sum.dtype), grad_weight


def _layer_norm(ranks, input, weight, bias, *, eps):
    x = widened(input)
    centred = x - (ranks.sum(x.sum(-1)) / ranks.size)[..., None]
    scale = torch.rsqrt(ranks.sum(centred.square().sum(-1)) / ranks.size + eps)
    y = _scaled(centred, scale, weight)
    return (y if bias is None else y + bias).to(input.dtype)


def _layer_norm_backward(ranks, grad_output, input, weight, bias, *, eps):
    x, grad = widened(input), widened(grad_output)
    to_y = grad if weight is None else grad * weight
    mean, mean_grad = (each[..., None] / ranks.size for each in ranks.sum(x.sum(-1), to_y.sum(-1)))
    centred = x - mean
    squares, products = ranks.sum(centred.square().sum(-1), (to_y * centred).sum(-1))
    scale = torch.rsqrt(squares / ranks.size + eps)[..., None]
    y = centred * scale
    grad_input = scale * (to_y - mean_grad - y * (scale * (products / ranks.size)[..., None]))
    grad_weight = None if weight is None else _sum_of_rows(grad * y).to(weight.dtype)
    grad_bias = None if bias is None else _sum_of_rows(grad).to(bias.dtype)
    return grad_input.to(input.dtype), grad_weight, grad_bias


for norms in (OF_ONE_TYPE, WITH_FLOAT32_WEIGHT):
    norms.rms_norm.exchange("n")(_rms_norm)
    norms.rms_norm_backward.exchange("n")(_rms_norm_backward)
    norms.add_rms_norm.exchange("n")(_add_rms_norm)
    norms.add_rms_norm_backward.exchange("n")(_add_rms_norm_backward)
    norms.layer_norm.exchange("n")(_layer_norm)
    norms.layer_norm_backward.exchange("n")(_layer_norm_backward)
