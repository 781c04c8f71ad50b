"""Log-sum-exp and cross-entropy as models use them: over the operators of rows in `op.py`."""

import math
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from opwright_ops.cross_entropy.op import row_cross_entropy, row_cross_entropy_gradient_, row_logsumexp, total_loss
from opwright_ops.refusals import refuse, require_tensors, shown
from opwright_ops.tensors import is_autocast_on


def logsumexp(input: Tensor) -> Tensor:
    """The logarithm of the sum of exp(input) along the last axis, as `torch.logsumexp(input, -1)`.

    The gradient of 16-bit types is that of the sum in float32, not of its rounded logarithm.

    Args:
        input: `*batch n`, float32, float64, float16 or bfloat16, of any strides.

    Returns:
        `*batch`, of the type of `input`.
    """
    return row_logsumexp(input).to(input.dtype)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    inplace_backward: bool = False,
) -> Tensor:
    """The cross-entropy of logits and classes, as in `torch.nn.functional`, with the classes in the last axis.

    The logits are read once forward, and read and written once backward. Nothing else of their size is
    kept for the backward.

    Args:
        logits: `*batch n`, float32, float64, float16 or bfloat16, of any strides.
        target: `*batch`, int64: the class of each row, from 0 to n - 1.
        ignore_index: a row with this target is not counted; its loss and gradient are 0.
        label_smoothing: the part of the target that is spread evenly over all classes, from 0 to 1.
        z_loss: is multiplied by the square of the log-sum-exp of each row, and added.
        reduction: "mean" over the rows that are counted, their "sum", or "none": the loss of each row.
        inplace_backward: the backward writes the gradient into the memory of `logits`. Other backwards that need
            them then raise PyTorch's error for tensors that were changed in place. Not with `create_graph=True`, nor
            under torch.func transforms.

    Returns:
        a number, or `*batch` where nothing is reduced; of the type of `logits`, under autocast float32 for 16 bits.

    Raises:
        IndexError: on the CPU, where a target is neither a class nor `ignore_index`. On a GPU that is a failed
            assertion of the device, as in PyTorch.
        ValueError: `reduction` is unknown; `label_smoothing` is not from 0 to 1; `inplace_backward` is asked for a leaf
            or a view of one, whose values would be lost.
        RuntimeError: the backward of `inplace_backward` runs with `create_graph=True`.
    """
    if reduction not in ("mean", "sum", "none"):
        rows = ("got", repr(reduction)), ("expected", '"mean", "sum" or "none"')
        refuse(ValueError, "reduction", "is unknown", *rows, subject="cross_entropy")
    if not 0 <= label_smoothing <= 1:
        refuse(
            ValueError, "label_smoothing", "must be from 0 to 1", ("got", str(label_smoothing)), subject="cross_entropy"
        )
    require_tensors("cross_entropy", logits=logits, target=target)
    if target.is_floating_point() or (not torch.compiler.is_compiling() and logits.shape[:-1] != target.shape):
        _refuse_target(logits, target)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
    if inplace_backward and torch.is_grad_enabled() and logits.requires_grad:
        loss = _losses_with_inplace_backward(logits, target, options)
    else:
        loss = row_cross_entropy(logits, target, **options).loss
    if reduction != "none":
        weighting = {"ignore_index": ignore_index, "is_mean": reduction == "mean"}
        loss = total_loss(loss.reshape(-1), target.reshape(-1), **weighting).total
    is_short = logits.element_size() == 2
    return loss.to(torch.float32 if is_short and is_autocast_on(logits) else logits.dtype)


def _refuse_target(logits: Tensor, target: Tensor) -> NoReturn:
    """Explains a target that `torch.nn.functional.cross_entropy` takes, or one of another shape."""
    batch = list(logits.shape[:-1])
    rows = ("logits", shown(logits)), ("target", f"{shown(target)}  expected int64{batch}")
    if target.is_floating_point():
        hint = "`torch.nn.functional.cross_entropy` takes probabilities of classes"
        refuse(TypeError, "target", "must be the class of each row", *rows, hint=hint, subject="cross_entropy")
    hint = ""
    if logits.ndim > 2 and logits.movedim(1, -1).shape[:-1] == target.shape:
        hint = "classes are the last axis: `logits.movedim(1, -1)`, if they are axis 1 as in `torch.nn.functional`"
    elif target.numel() == math.prod(batch):
        hint = f"`target.reshape({batch})`"
    rule = "must have the shape of `logits` without its last axis"
    refuse(ValueError, "target", rule, *rows, hint=hint, subject="cross_entropy")


def _losses_with_inplace_backward(logits: Tensor, target: Tensor, options: dict[str, Any]) -> Tensor:
    base = logits if logits._base is None else logits._base
    if logits.is_leaf or (base.is_leaf and base.requires_grad):
        refuse(
            ValueError,
            "inplace_backward=True",
            "would overwrite `logits`, which is a leaf"
            if logits.is_leaf
            else "would overwrite a leaf: `logits` is a view of it",
            hint="omit `inplace_backward`, or pass logits that a model computed",
            subject="cross_entropy",
        )
    return _InPlaceBackward.apply(logits, target, *options.values())


class _InPlaceBackward(torch.autograd.Function):
    """`row_cross_entropy` with a backward that takes the memory of the logits."""

    @staticmethod
    def forward(ctx, logits, target, ignore_index, label_smoothing, z_loss):
        ctx.options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss}
        loss, normalizer = row_cross_entropy(logits, target, **ctx.options)
        ctx.save_for_backward(logits, target, normalizer)
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        if torch.is_grad_enabled():  # a second derivative follows, of logits that are overwritten here
            refuse(
                RuntimeError,
                "inplace_backward=True",
                "has no second derivative: the gradient overwrites `logits`",
                hint="omit `inplace_backward`, or `create_graph=True`",
                subject="cross_entropy",
            )
        logits, target, normalizer = ctx.saved_tensors
        gradient = logits.detach()  # the same memory and version counter
        row_cross_entropy_gradient_(gradient, grad_loss, target, normalizer, **ctx.options)
        return gradient, None, None, None, None
