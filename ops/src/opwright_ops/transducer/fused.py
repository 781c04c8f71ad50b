"""The transducer's loss from the inputs of its joint: logits exist for some thousand rows at a time."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from opwright_ops.refusals import refuse, require_tensors, shown
from opwright_ops.tensors import is_autocast_on
from opwright_ops.transducer.loss import (
    Reduction,
    check_targets,
    joint_lengths,
    reduce,
    transducer_joint,
    transducer_loss,
)
from opwright_ops.transducer.op import (
    check_lengths,
    transducer_columns,
    transducer_join,
    transducer_join_backward,
    transducer_lattice,
    transducer_lattice_backward,
    transducer_scores,
    transducer_scores_gradient_,
)

# Elements of the logits that exist at a time, from which on products of matrices are at full speed.
MAX_LOGITS = 2**25
MAX_LOGITS_ON_CPU = 2**21
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

    Joint and logits are computed for up to 2^25 logits at a time, on a CPU 2^21, and again in the backward. The result
    is exact: nothing is pruned. Rows behind the lengths are not computed. On a GPU a step takes 1.6 times as long as
    with `transducer_joint`, a linear layer and `transducer_loss`, and a fiftieth of the memory.

    It reads the lengths, so `torch.compile(fullgraph=True)` and `torch.export` do not take it. Transforms of torch.func
    (vmap, grad, jvp) and forward-mode gradients are not supported either. The three calls above support all of these.

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
        TypeError: types do not fit, or a tensor is a DTensor.
        NotImplementedError: a transform of torch.func is active.
    """
    if torch._C._are_functorch_transforms_active():
        hint = "`transducer_loss(linear(transducer_joint(f, g), weight, bias), ...)`"
        rule = "do not support transforms of torch.func"
        refuse(NotImplementedError, "f, g, weight", rule, hint=hint, subject=_SUBJECT)
    if activation not in ("relu", "tanh", None):
        got = ("got", repr(activation)), ("expected", '"relu", "tanh" or None')
        refuse(ValueError, "activation", "is unknown", *got, subject=_SUBJECT)
    arguments = {"f": f, "g": g, "weight": weight, "bias": bias, "targets": targets}
    for name, value in (arguments | {"logit_lengths": logit_lengths, "target_lengths": target_lengths}).items():
        if hasattr(value, "device_mesh"):  # a DTensor, whose module need not be loaded
            hint = (
                "`transducer_loss(linear(transducer_joint(f, g), weight, bias), ...)` takes DTensors, also sharded ones"
            )
            refuse(TypeError, name, "must not be a DTensor", ("got", shown(value)), subject=_SUBJECT, hint=hint)
    check_targets(_SUBJECT, targets, logit_lengths, target_lengths)
    require_tensors(_SUBJECT, weight=weight)
    joint_lengths(_SUBJECT, f, g, logit_lengths, target_lengths)
    if weight.ndim != 2 or weight.shape[1] != f.shape[2] or (bias is not None and bias.shape != weight.shape[:1]):
        rows = ("f", shown(f)), ("weight", shown(weight)), ("bias", shown(bias))
        refuse(ValueError, "weight", "must be [V, H], and `bias` [V]", *rows, subject=_SUBJECT)
    if len(targets) != len(f) or targets.shape[1] + 1 != g.shape[1]:
        rows = ("g", shown(g)), ("targets", shown(targets))
        refuse(ValueError, "targets", "must be [B, U] where `g` is [B, U + 1, H]", *rows, subject=_SUBJECT)
    if is_autocast_on(f):
        dtype = torch.get_autocast_dtype(f.device.type)
        f, g, weight, bias = (x if x is None else x.to(dtype) for x in (f, g, weight, bias))
    given = {"f": f, "g": g, "weight": weight} | ({} if bias is None else {"bias": bias})
    if len({x.dtype for x in given.values()}) > 1:
        rows = [(name, shown(x)) for name, x in given.items()]
        refuse(TypeError, "weight", "must have the type of `f`, and so must `g` and `bias`", *rows, subject=_SUBJECT)
    if not len(f):  # no blocks
        logits = torch.nn.functional.linear(transducer_joint(f, g, activation=activation), weight, bias)
        return transducer_loss(logits, targets, logit_lengths, target_lengths, blank=blank, reduction=reduction)
    lengths = torch.stack([logit_lengths.long(), target_lengths.long()], 1).cpu()
    check_lengths(_SUBJECT, *lengths.unbind(1), frames=f.shape[1], labels=targets.shape[1], rows=None)
    call = _Call(
        activation=activation,
        blank=blank,
        fastemit=fastemit,
        penalties={
            "delay_penalty": delay_penalty,
            "eos_penalty": eos_penalty,
            "eos_index": -1 if eos_index is None else eos_index,
            "star_penalty": star_penalty,
            "star_index": -1 if star_index is None else star_index,
        },
        blocks=_divide(lengths.tolist(), len(weight), f.device),
    )
    integers = (each.to(f.device).long() for each in (targets, logit_lengths, target_lengths))
    with torch.autocast(f.device.type, enabled=False) if is_autocast_on(f) else nullcontext():
        losses = _FusedLoss.apply(f, g, weight, bias, call, *integers)
    return reduce(losses.to(torch.promote_types(f.dtype, torch.float32)), reduction, _SUBJECT)


class _Block(NamedTuple):
    """Rows of the packed logits that are computed together.

    They are those of some whole utterances, or of some frames of one.

    Attributes:
        frames: the number of frames of each utterance in this block, on the device.
    """

    rows: slice
    entries: slice
    start: int
    stop: int
    positions: int
    frames: Tensor


def _divide(lengths: list[list[int]], v: int, device: torch.device) -> list[_Block]:
    """Returns the blocks of a batch, each with as many rows as may exist at a time."""
    most = max((MAX_LOGITS_ON_CPU if device.type == "cpu" else MAX_LOGITS) // v, 1)
    counts = [frames * (labels + 1) for frames, labels in lengths]
    parts, entry = [], 0  # utterances from, to, frames from, to
    while entry < len(lengths):
        frames, positions = lengths[entry][0], lengths[entry][1] + 1
        step = max(most // positions, 1)
        if step < frames:
            parts += [(entry, entry + 1, start, min(start + step, frames)) for start in range(0, frames, step)]
            entry += 1
            continue
        end, rows = entry + 1, counts[entry]  # one frame with many positions may be more by itself
        while end < len(lengths) and (rows := rows + counts[end]) <= most:
            end += 1
        parts.append((entry, end, 0, max(each[0] for each in lengths[entry:end])))
        entry = end
    # One copy to the device for all blocks.
    sizes = [min(frames, stop) - start for a, b, start, stop in parts for frames, _ in lengths[a:b]]
    on_device = iter(torch.tensor(sizes, device=device).split([b - a for a, b, _, _ in parts]))
    blocks, row = [], 0
    for a, b, start, stop in parts:
        count = sum((min(frames, stop) - start) * (labels + 1) for frames, labels in lengths[a:b])
        positions = max(labels for _, labels in lengths[a:b]) + 1
        blocks.append(_Block(slice(row, row + count), slice(a, b), start, stop, positions, next(on_device)))
        row += count
    return blocks


class _Call(NamedTuple):
    """What a call is given beside tensors, and how it is divided."""

    activation: Literal["relu", "tanh"] | None
    blank: int
    fastemit: float
    penalties: dict[str, Any]
    blocks: list[_Block]

    def columns(self, integers: tuple[Tensor, ...], v: int) -> Tensor:
        """Returns the labels of all rows, as `transducer_scores` takes them."""
        rows, star = self.blocks[-1].rows.stop, self.penalties["star_index"]
        return transducer_columns(*integers, rows=rows, classes=v, star_index=star)

    def join_arguments(
        self, f: Tensor, g: Tensor, target_lengths: Tensor, block: _Block
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Returns what `transducer_join` is given for a block."""
        frames, positions = f[block.entries, block.start : block.stop], g[block.entries, : block.positions]
        options = {
            "rows": block.rows.stop - block.rows.start,
            "is_packed": True,
            "activation": self.activation or "none",
        }
        return (frames, positions, block.frames, target_lengths[block.entries]), options


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to a matrix in a wider type; on a GPU without rounding the product first."""
    if total.is_cuda and total.dtype != a.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


class _FusedLoss(torch.autograd.Function):
    """The loss of each utterance; the backward computes joint and logits again."""

    @staticmethod
    def forward(
        ctx: Any, f: Tensor, g: Tensor, weight: Tensor, bias: Tensor | None, call: _Call, *integers: Tensor
    ) -> Tensor:
        columns, found = call.columns(integers, len(weight)), []
        for block in call.blocks:
            arguments, options = call.join_arguments(f, g, integers[2], block)
            logits = torch.nn.functional.linear(transducer_join(*arguments, **options), weight, bias)
            found.append(transducer_scores(logits, columns[block.rows], blank=call.blank))
            del logits
        scores = [torch.cat(each) for each in zip(*found, strict=True)]
        loss, beta = transducer_lattice(*scores[:2], *integers, **call.penalties)
        ctx.save_for_backward(f, g, weight, bias, columns, *scores, beta, *integers)
        ctx.call = call
        return loss

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        f, g, weight, bias, columns, blank_score, label_score, normalizer, beta, *integers = ctx.saved_tensors
        call, needed = ctx.call, ctx.needs_input_grad
        if torch.is_grad_enabled():  # a second derivative follows
            return (*_derive_from_whole(call, f, g, weight, bias, integers, grad_losses, needed), *[None] * 4)
        of_blank, of_label = transducer_lattice_backward(
            grad_losses, blank_score, label_score, *integers, beta, **call.penalties
        )
        of_label = of_label * (1 + call.fastemit)
        wide = torch.promote_types(f.dtype, torch.float32)
        # Each frame is in one block: its gradient is complete.
        grad_f = torch.zeros_like(f) if needed[0] else None
        grad_g = torch.zeros_like(g, dtype=wide) if needed[1] else None
        # The gradient of the bias is that of a weight for ones: columns behind the joint, which keep its rows aligned.
        h, ones = f.shape[2], 16 // f.element_size() if bias is not None and needed[3] else 0
        one = 20.0 if call.activation == "tanh" else 1.0  # before the activation
        f_ones, g_ones = (torch.nn.functional.pad(x, (0, ones), value=v) for x, v in ((f, one), (g, 0.0)))
        grad_linear = torch.zeros(len(weight), h + ones, dtype=wide, device=f.device)
        for block in call.blocks:
            rows = block.rows
            arguments, options = call.join_arguments(f_ones, g_ones, integers[2], block)
            joint = transducer_join(*arguments, **options)
            grad = torch.nn.functional.linear(joint[:, :h], weight, bias)
            transducer_scores_gradient_(
                grad, of_blank[rows], of_label[rows], columns[rows], normalizer[rows], blank=call.blank
            )
            if needed[2] or ones:
                _add_product(grad_linear, grad.T, joint)
            if grad_f is not None or grad_g is not None:
                arguments, options = call.join_arguments(f, g, integers[2], block)
                of_frames, of_positions = transducer_join_backward(grad @ weight, *arguments, **options)
                if grad_f is not None:
                    grad_f[block.entries, block.start : block.stop] = of_frames
                if grad_g is not None:
                    grad_g[block.entries, : block.positions] += of_positions
            del grad, joint  # before those of the next block
        grad_weight = grad_linear[:, :h] if needed[2] else None
        grad_bias = grad_linear[:, h] if ones else None
        found = [grad_f, grad_g, grad_weight, grad_bias]
        return (*(x if x is None else x.to(f.dtype).contiguous() for x in found), *[None] * 4)


def _derive_from_whole(
    call: _Call,
    f: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    integers: list[Tensor],
    grad: Tensor,
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Returns the gradients by way of all logits, as tensors that can be differentiated again."""
    joint = transducer_joint(f, g, *integers[1:], activation=call.activation)
    logits = torch.nn.functional.linear(joint, weight, bias)
    losses = transducer_loss(
        logits,
        *integers,
        blank=call.blank,
        fastemit=call.fastemit,
        reduction="none",
        **call.penalties,
    )
    inputs = [x for x, is_needed in zip((f, g, weight, bias), needed, strict=False) if is_needed]
    found = iter(torch.autograd.grad(losses, inputs, grad.to(losses.dtype), create_graph=True))
    return [next(found) if is_needed else None for is_needed in needed[:4]]
