"""The transducer's loss and joint as models use them: over the operators of rows in `op.py`."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from opwright_ops.refusals import refuse, require_tensors, shown
from opwright_ops.transducer.op import (
    check_lengths,
    transducer_columns,
    transducer_join,
    transducer_lattice,
    transducer_scores,
)

Reduction = Literal["mean", "sum", "none"]


def transducer_loss(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    blank: int = 0,
    packed: bool = False,
    delay_penalty: float = 0.0,
    eos_penalty: float = 0.0,
    eos_index: int | None = None,
    star_penalty: float = 0.0,
    star_index: int | None = None,
    fastemit: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """The loss of a transducer (RNN-T): minus the log-probability of the targets, summed over all alignments.

    The logits are read once forward, and read and written once backward; no log-softmax of their size is kept, and
    nothing waits for a GPU. Padded logits behind the lengths do not matter, and their gradient is 0.

    Args:
        logits: [B, T, U + 1, V]; packed, [sum of logit_lengths * (target_lengths + 1), V]: the rows of each
            utterance, without those behind its lengths. float32, float64, float16 or bfloat16. Without B, padded
            logits are those of one utterance.
        targets: [B, U], integers: the labels. Those behind the length may be anything.
        logit_lengths: [B], integers: the frames of each utterance, from 1 to T.
        target_lengths: [B], integers: the labels of each utterance, from 0 to U.
        blank: the index of the blank; a negative one counts from the end.
        packed: whether the logits are packed.
        delay_penalty: (T - 1) / 2 - t times this is added to the log-probability of a label in frame t of T.
        eos_penalty: the same, in addition, for the label `eos_index`.
        star_penalty: the log-probability of the blank where the last label is `star_index`, a label that stands
            for any. Its own probability is 1.
        fastemit: the gradients of all labels' log-probabilities are multiplied by 1 + `fastemit`. The loss stays.
        reduction: "mean" over the utterances, their "sum", or "none": the loss of each.

    Returns:
        a number, or [B] where nothing is reduced; float64 for float64 logits, float32 otherwise.

    Raises:
        ValueError: shapes or lengths do not fit, or `reduction` is unknown.
        IndexError: a target within its length, or `blank`, is outside of the vocabulary.
        TypeError: targets or lengths are not integers.

        Lengths and targets on a GPU that do not fit end in an assertion there, as in PyTorch's own losses. In compiled
        code lengths on the CPU that do not fit raise a RuntimeError. Under vmap over the lengths they are not detected.

    Source:
        Graves, arXiv:1211.3711; delay penalty: Kang et al., arXiv:2211.00490; FastEmit: Yu et al.,
        arXiv:2010.11148, eq. 9.
    """
    lengths = {"logit_lengths": logit_lengths, "target_lengths": target_lengths}
    require_tensors("transducer_loss", logits=logits, targets=targets, **lengths)
    is_single = not packed and logits.ndim == 3
    if is_single:
        logits, targets = logits[None], targets[None]
        logit_lengths, target_lengths = logit_lengths.reshape(1), target_lengths.reshape(1)
    check_targets("transducer_loss", targets, logit_lengths, target_lengths)
    frames = 0 if packed or logits.ndim != 4 else logits.shape[1]
    shape = tuple(logits.shape[:-1])
    expected = (shape[0],) if packed else (len(targets), frames, targets.shape[1] + 1)
    if shape != expected:
        rule = "must be [rows, V]" if packed else "must be [B, T, U + 1, V]"
        rows = ("logits", shown(logits)), ("targets", shown(targets))
        refuse(ValueError, "logits", rule, *rows, subject="transducer_loss")
    check_on_cpu(
        "transducer_loss",
        logit_lengths,
        target_lengths,
        frames=frames or shape[0],
        labels=targets.shape[1],
        rows=shape[0] if packed else None,
    )
    columns = transducer_columns(
        targets.long(),
        logit_lengths.long(),
        target_lengths.long(),
        rows=math.prod(shape),
        classes=logits.shape[-1],
        frames=frames,
        star_index=-1 if star_index is None else star_index,
    )
    scores = transducer_scores(logits, columns.reshape(shape), blank=blank)
    losses = sum_alignments(
        scores.blank_score.reshape(-1),
        scores.label_score.reshape(-1),
        targets,
        logit_lengths,
        target_lengths,
        frames=frames,
        delay_penalty=delay_penalty,
        eos_penalty=eos_penalty,
        eos_index=eos_index,
        star_penalty=star_penalty,
        star_index=star_index,
        fastemit=fastemit,
    )
    losses = losses.to(torch.promote_types(logits.dtype, torch.float32))
    return reduce(losses[0] if is_single else losses, reduction, "transducer_loss")


def check_on_cpu(subject: str, logit_lengths: Tensor, target_lengths: Tensor, **sizes: int | None) -> None:
    """Checks lengths that can be read without waiting for a GPU or another process."""
    given = logit_lengths, target_lengths
    if all(type(each) is Tensor and each.device.type == "cpu" for each in given) and not torch.compiler.is_compiling():
        check_lengths(subject, logit_lengths, target_lengths, **sizes)


def reduce(losses: Tensor, reduction: str, subject: str) -> Tensor:
    """Returns the losses of utterances reduced; of a single one, it."""
    if reduction not in ("mean", "sum", "none"):
        rows = ("got", repr(reduction)), ("expected", '"mean", "sum" or "none"')
        refuse(ValueError, "reduction", "is unknown", *rows, subject=subject)
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def check_targets(subject: str, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor) -> None:
    """Raises an error unless these are integers, and of one batch."""
    given = {"targets": targets, "logit_lengths": logit_lengths, "target_lengths": target_lengths}
    require_tensors(subject, **given)
    for name, tensor in given.items():
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
            refuse(TypeError, name, "must be integers", ("got", shown(tensor)), subject=subject)
        rank = 2 if name == "targets" else 1
        if tensor.ndim != rank or len(tensor) != len(targets):
            axes = "[B, U]" if rank == 2 else "[B]"
            rows = [(key, shown(value)) for key, value in given.items()]
            refuse(ValueError, name, f"must be {axes}", *rows, subject=subject)


def sum_alignments(
    blank_score: Tensor,
    label_score: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    *,
    eos_index: int | None,
    star_index: int | None,
    fastemit: float,
    **options: Any,
) -> Tensor:
    """Returns the loss of each utterance, in float64; the other options are those of `transducer_lattice`."""
    if fastemit:
        label_score = _ScaledGradient.apply(label_score, 1 + fastemit)
    return transducer_lattice(
        blank_score,
        label_score,
        targets.long(),
        logit_lengths.long(),
        target_lengths.long(),
        eos_index=-1 if eos_index is None else eos_index,
        star_index=-1 if star_index is None else star_index,
        **options,
    ).loss


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def transducer_joint(
    f: Tensor,
    g: Tensor,
    logit_lengths: Tensor | None = None,
    target_lengths: Tensor | None = None,
    *,
    activation: Literal["relu", "tanh"] | None = "relu",
    dropout: float = 0.0,
    packed: bool = False,
    rows: int | None = None,
) -> Tensor:
    """The joint of a transducer: the sum of each frame and each position, behind an activation.

    Args:
        f: [B, T, H], the output of the encoder.
        g: [B, U + 1, H], that of the predictor, of the type of `f`.
        logit_lengths, target_lengths: [B], integers: the frames and labels of each utterance; None: all.
        activation: "relu", "tanh" or None.
        dropout: the probability with which an element is zeroed and the others are scaled up, by PyTorch's random
            numbers; 0 in evaluation.
        packed: whether the result has only the rows within the lengths.
        rows: how many those are. None: the sum of logit_lengths * (target_lengths + 1), which waits for a GPU.

    Returns:
        [B, T, U + 1, H], 0 behind the lengths; packed, [rows, H].

    Raises:
        ValueError: shapes or lengths do not fit; `activation` or `dropout` is invalid.
        TypeError: `f` and `g` have different types, or lengths are not integers.
    """
    if activation not in ("relu", "tanh", None):
        got = ("got", repr(activation)), ("expected", '"relu", "tanh" or None')
        refuse(ValueError, "activation", "is unknown", *got, subject="transducer_joint")
    logit_lengths, target_lengths = joint_lengths("transducer_joint", f, g, logit_lengths, target_lengths)
    padded = (len(f), f.shape[1], g.shape[1])
    if not packed:
        rows = padded[0] * padded[1] * padded[2]
    elif rows is None:
        rows = int((logit_lengths * (target_lengths + 1)).sum())
    check_on_cpu(
        "transducer_joint",
        logit_lengths,
        target_lengths,
        frames=f.shape[1],
        labels=g.shape[1] - 1,
        rows=rows if packed else None,
    )
    result = transducer_join(
        f, g, logit_lengths, target_lengths, rows=rows, is_packed=packed, activation=activation or "none"
    )
    if dropout:
        result = torch.nn.functional.dropout(result, dropout)
    return result if packed else result.reshape(*padded, f.shape[2])


def joint_lengths(
    subject: str, f: Tensor, g: Tensor, logit_lengths: Tensor | None, target_lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the lengths as int64; the whole of `f` and `g` where none are given."""
    require_tensors(subject, f=f, g=g)
    if f.ndim != 3 or g.ndim != 3 or f.shape[::2] != g.shape[::2] or not g.shape[1]:
        rows = ("f", shown(f)), ("g", shown(g))
        refuse(ValueError, "f", "must be [B, T, H], and `g` [B, U + 1, H]", *rows, subject=subject)
    if logit_lengths is None:
        logit_lengths = f.new_full((len(f),), f.shape[1], dtype=torch.int64)  # distributed where `f` is
    if target_lengths is None:
        target_lengths = f.new_full((len(f),), g.shape[1] - 1, dtype=torch.int64)
    check_targets(subject, logit_lengths.new_zeros(len(f), g.shape[1] - 1), logit_lengths, target_lengths)
    return logit_lengths.long(), target_lengths.long()
