"""The transducer's loss from the inputs of its joint: logits exist for some thousand rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from opwright_ops.refusals import refuse, shown
from opwright_ops.transducer.loss import (
    Reduction,
    check_targets,
    joint_lengths,
    reduce,
    sum_alignments,
    transducer_joint,
    transducer_loss,
)
from opwright_ops.transducer.op import (
    check_lengths,
    transducer_columns,
    transducer_scores,
    transducer_scores_backward,
)

# Elements of the logits that exist at a time; products of matrices are at full speed from some million on.
MAX_LOGITS = 2**24
_SUBJECT = "transducer_loss_fused"


def transducer_loss_fused(
    f: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    activation: Literal["relu", "tanh"] | None = "relu",
    blank: int = 0,
    delay_penalty: float = 0.0,
    eos_penalty: float = 0.0,
    eos_index: int | None = None,
    star_penalty: float = 0.0,
    star_index: int | None = None,
    fastemit: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`transducer_loss` of `activation(f + g) @ weight.T + bias`, without a tensor of all logits.

    Joint and logits are computed for up to `MAX_LOGITS` elements at a time, and again in the backward. The result is
    exact: nothing is pruned. Rows behind the lengths are not computed.

    Args:
        f: [B, T, H], the output of the encoder.
        g: [B, U + 1, H], that of the predictor.
        weight: [V, H], of the layer behind the joint.
        bias: [V] or None.
        targets, logit_lengths, target_lengths: as for `transducer_loss`. Lengths on a GPU are copied to the CPU,
            which waits for the GPU; those on the CPU are not.
        activation: "relu", "tanh" or None.
        blank, delay_penalty, eos_penalty, eos_index, star_penalty, star_index, fastemit, reduction: as for
            `transducer_loss`.

    Returns:
        a number, or [B] where nothing is reduced; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError: shapes or lengths do not fit; `activation` or `reduction` is unknown.
        IndexError: a target within its length, or `blank`, is outside of the vocabulary.
        TypeError: types do not fit.
    """
    if activation not in ("relu", "tanh", None):
        got = ("got", repr(activation)), ("expected", '"relu", "tanh" or None')
        refuse(ValueError, "activation", "is unknown", *got, subject=_SUBJECT)
    check_targets(_SUBJECT, targets, logit_lengths, target_lengths)
    joint_lengths(_SUBJECT, f, g, logit_lengths, target_lengths)
    if weight.ndim != 2 or weight.shape[1] != f.shape[2] or (bias is not None and bias.shape != weight.shape[:1]):
        rows = ("f", shown(f)), ("weight", shown(weight)), ("bias", shown(bias))
        refuse(ValueError, "weight", "must be [V, H], and `bias` [V]", *rows, subject=_SUBJECT)
    if len(targets) != len(f) or targets.shape[1] + 1 != g.shape[1]:
        rows = ("g", shown(g)), ("targets", shown(targets))
        refuse(ValueError, "targets", "must be [B, U] where `g` is [B, U + 1, H]", *rows, subject=_SUBJECT)
    if torch.is_autocast_enabled(f.device.type):
        dtype = torch.get_autocast_dtype(f.device.type)
        f, g, weight, bias = (x if x is None else x.to(dtype) for x in (f, g, weight, bias))
    given = {"f": f, "g": g, "weight": weight} | ({} if bias is None else {"bias": bias})
    if len({x.dtype for x in given.values()}) > 1:
        rows = [(name, shown(x)) for name, x in given.items()]
        refuse(TypeError, "weight", "must have the type of `f`, and so must `g` and `bias`", *rows, subject=_SUBJECT)
    options = {
        "blank": blank,
        "delay_penalty": delay_penalty,
        "eos_penalty": eos_penalty,
        "eos_index": eos_index,
        "star_penalty": star_penalty,
        "star_index": star_index,
        "fastemit": fastemit,
    }
    lengths = torch.stack([logit_lengths.long(), target_lengths.long()], 1).cpu()
    check_lengths(_SUBJECT, *lengths.unbind(1), frames=f.shape[1], labels=targets.shape[1], rows=None)
    call = _Call(activation, options, targets, logit_lengths, target_lengths, lengths.tolist())
    with torch.autocast(f.device.type, enabled=False):
        losses = _FusedLoss.apply(f, g, weight, bias, call)
    return reduce(losses.to(torch.promote_types(f.dtype, torch.float32)), reduction, _SUBJECT)


class _Block(NamedTuple):
    """Frames `start` to `stop` of an utterance, with all of its positions: `rows` of the packed logits."""

    entry: int
    start: int
    stop: int
    positions: int
    rows: slice


class _Call(NamedTuple):
    """What a call is given beside the tensors that have a gradient."""

    activation: str | None
    options: dict[str, Any]
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor
    lengths: list[list[int]]

    def blocks(self, v: int) -> Iterator[_Block]:
        row = 0
        for entry, (frames, labels) in enumerate(self.lengths):
            positions = labels + 1
            step = max(MAX_LOGITS // (positions * v), 1)
            for start in range(0, frames, step):
                stop = min(start + step, frames)
                count = (stop - start) * positions
                yield _Block(entry, start, stop, positions, slice(row, row + count))
                row += count

    def columns(self, v: int) -> Tensor:
        """Returns the labels of all rows, as `transducer_scores` takes them."""
        rows = sum(frames * (labels + 1) for frames, labels in self.lengths)
        star = self.options["star_index"]
        return transducer_columns(*self.integers(), rows=rows, classes=v, star_index=-1 if star is None else star)

    def integers(self) -> tuple[Tensor, Tensor, Tensor]:
        device = self.targets.device
        return self.targets.long(), self.logit_lengths.to(device).long(), self.target_lengths.to(device).long()

    def losses(self, blank_score: Tensor, label_score: Tensor) -> Tensor:
        options = {name: value for name, value in self.options.items() if name != "blank"}
        return sum_alignments(blank_score, label_score, *self.integers(), frames=0, **options)

    def sum_joint(self, f: Tensor, g: Tensor, block: _Block) -> Tensor:
        """Returns the joint of a block before its activation, [frames, positions, H]."""
        return f[block.entry, block.start : block.stop, None] + g[block.entry, None, : block.positions]

    def activate(self, total: Tensor) -> Tensor:
        """Returns the activation, as rows."""
        return {"relu": torch.relu, "tanh": torch.tanh, None: torch.clone}[self.activation](total).flatten(0, 1)


class _FusedLoss(torch.autograd.Function):
    """The loss of each utterance; the backward computes joint and logits again."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        columns, blank = call.columns(len(weight)), call.options["blank"]
        scores = torch.empty(2, len(columns), dtype=torch.float64, device=f.device)
        for block in call.blocks(len(weight)):
            logits = torch.nn.functional.linear(call.activate(call.sum_joint(f, g, block)), weight, bias)
            found = transducer_scores(logits, columns[block.rows], blank=blank)
            scores[0, block.rows], scores[1, block.rows] = found.blank_score, found.label_score
        ctx.save_for_backward(f, g, weight, bias, scores, columns)
        ctx.call = call
        return call.losses(scores[0], scores[1])

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        f, g, weight, bias, scores, columns = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative follows
            return (*_derive_from_whole(ctx.call, f, g, weight, bias, grad_losses, ctx.needs_input_grad), None)
        call, blank = ctx.call, ctx.call.options["blank"]
        with torch.enable_grad():
            blank_score, label_score = (each.detach().requires_grad_() for each in scores)
            losses = call.losses(blank_score, label_score)
        of_blank, of_label = torch.autograd.grad(losses, (blank_score, label_score), grad_losses)
        wide = torch.promote_types(f.dtype, torch.float32)
        grad_f, grad_g, grad_weight = (torch.zeros_like(x, dtype=wide) for x in (f, g, weight))
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        for block in call.blocks(len(weight)):
            total = call.sum_joint(f, g, block)
            joint = call.activate(total)
            logits = torch.nn.functional.linear(joint, weight, bias)
            normalizer = transducer_scores(logits, columns[block.rows], blank=blank).normalizer
            grad = transducer_scores_backward(
                of_blank[block.rows], of_label[block.rows], logits, columns[block.rows], normalizer, blank=blank
            )
            del logits
            grad_weight += grad.T @ joint
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
            grad_joint = (grad @ weight).reshape(total.shape)
            if call.activation == "relu":
                grad_joint = torch.where(total > 0, grad_joint, 0.0)
            elif call.activation == "tanh":
                grad_joint = grad_joint * (1 - joint.reshape(total.shape).square())
            grad_f[block.entry, block.start : block.stop] = grad_joint.sum(1, dtype=wide)
            grad_g[block.entry, : block.positions] += grad_joint.sum(0, dtype=wide)
        found = [grad_f, grad_g, grad_weight, grad_bias]
        return (*(x if x is None else x.to(f.dtype) for x in found), None)


def _derive_from_whole(
    call: _Call, f: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, needed: tuple[bool, ...]
) -> list[Tensor | None]:
    """Returns the gradients by way of all logits, as tensors that can be differentiated again."""
    targets, logit_lengths, target_lengths = call.integers()
    joint = transducer_joint(f, g, logit_lengths, target_lengths, activation=call.activation)
    logits = torch.nn.functional.linear(joint, weight, bias)
    losses = transducer_loss(logits, targets, logit_lengths, target_lengths, **call.options, reduction="none")
    inputs = [x for x, is_needed in zip((f, g, weight, bias), needed, strict=False) if is_needed]
    found = iter(torch.autograd.grad(losses, inputs, grad.to(losses.dtype), create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed[:4]]
