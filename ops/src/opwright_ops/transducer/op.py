"""The parts of a transducer's loss: scores of rows, the sum over alignments, and the joint.

A row belongs to an utterance b, a frame t and a position u: the label u is next there. Rows are sorted by b, t and u.
Padded, there are frames * (U + 1) rows for each utterance; packed, only those with t < logit_lengths[b] and
u <= target_lengths[b].
"""

from __future__ import annotations

import itertools
from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from opwright import Index, Mutates, operator
from opwright_ops.refusals import refuse
from opwright_ops.tensors import bytes_of, widened


class RowScores(NamedTuple):
    """The results of `transducer_scores`."""

    blank_score: Float64[Tensor, "*rows"]
    label_score: Float64[Tensor, "*rows"]
    normalizer: Float64[Tensor, "*rows"]


@operator("opwright_ops::transducer_scores", autocast=None, non_differentiable=["normalizer"])
def transducer_scores(
    logits: Float[Tensor, "*rows v"], labels: Annotated[Int64[Tensor, "*rows"], Index("v+2")], *, blank: int = 0
) -> RowScores:
    """The logarithm of the softmax of each row at two columns: that of the blank, and that of a label.

    Args:
        labels: the label of each row; v: the row has none, and its score is 0. v + 1: the row is not read, and all
            of its results are 0.
        blank: the column of the blank.

    Numerics:
        16-bit types are computed in float32; nothing is rounded to 16 bits.
    """
    x, v = widened(logits), logits.shape[-1]
    is_used = labels != v + 1
    normalizer = torch.logsumexp(x, -1).double()
    has_label = is_used & (labels != v)
    at = torch.where(has_label, labels, 0)
    label_score = torch.where(has_label, x.gather(-1, at[..., None])[..., 0].double() - normalizer, 0.0)
    blank_score = torch.where(is_used, x[..., blank].double() - normalizer, 0.0)
    return RowScores(blank_score, label_score, torch.where(is_used, normalizer, 0.0))


def _gradient_of_rows(
    of_blank: Tensor, of_label: Tensor, logits: Tensor, labels: Tensor, normalizer: Tensor, blank: int
) -> Tensor:
    x, v = widened(logits), logits.shape[-1]
    is_used, has_label = (labels != v + 1), (labels < v)
    by_blank = of_blank.to(x.dtype)
    by_label = torch.where(has_label, of_label, 0.0).to(x.dtype)
    grad = -torch.exp(x - normalizer.to(x.dtype)[..., None]) * (by_blank + by_label)[..., None]
    at = torch.where(has_label, labels, 0)
    grad = grad.scatter_add(-1, at[..., None], by_label[..., None])
    column = torch.arange(v, device=at.device)[blank].expand(at.shape)
    grad = grad.scatter_add(-1, column[..., None], by_blank[..., None])
    return torch.where(is_used[..., None], grad, 0.0).to(logits.dtype)


@transducer_scores.backward
def transducer_scores_backward(grad_blank_score, grad_label_score, logits, labels, normalizer, *, blank=0):
    return _gradient_of_rows(grad_blank_score, grad_label_score, logits, labels, normalizer, blank)


@operator("opwright_ops::transducer_scores_gradient_", autocast=None)
def transducer_scores_gradient_(
    logits: Mutates[Float[Tensor, "*rows v"]],
    grad_blank_score: Float64[Tensor, "*rows"],
    grad_label_score: Float64[Tensor, "*rows"],
    labels: Annotated[Int64[Tensor, "*rows"], Index("v+2")],
    normalizer: Float64[Tensor, "*rows"],
    *,
    blank: int = 0,
) -> None:
    """Writes the gradient of `transducer_scores` over its logits."""
    logits.copy_(_gradient_of_rows(grad_blank_score, grad_label_score, logits, labels, normalizer, blank))


@transducer_scores.cost
def transducer_scores_cost(logits, labels, *, blank=0):
    return bytes_of(logits, labels), 4 * logits.numel()


@transducer_scores_backward.cost
def transducer_scores_backward_cost(grad_blank_score, grad_label_score, logits, labels, normalizer, *, blank=0):
    return 2 * bytes_of(logits) + bytes_of(labels), 3 * logits.numel()


transducer_scores.sweep(rows=[(64,), (1024,)], v=[33, 1024])


class Places(NamedTuple):
    """Where each row lies, as indices [rows], and whether it is used."""

    entry: Tensor
    frame: Tensor
    position: Tensor
    is_used: Tensor


def place_rows(targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, rows: int, frames: int) -> Places:
    """Returns the places of all rows; packed if `frames` is 0."""
    at = torch.arange(rows, device=targets.device)
    if frames:
        width = torch.full_like(at, targets.shape[1] + 1)
        entry, rest = at // (frames * width), at % (frames * width)
    else:
        sizes = (target_lengths + 1) * logit_lengths
        ends = sizes.cumsum(0)
        entry = (at[:, None] >= ends).sum(-1).clamp(max=len(targets) - 1)
        rest, width = at - (ends - sizes)[entry], (target_lengths + 1)[entry]
    frame, position = rest // width, rest % width
    is_used = (frame < logit_lengths[entry]) & (position <= target_lengths[entry])
    return Places(entry, frame, position, is_used)


def labels_of_rows(targets: Tensor, target_lengths: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """Returns the label that is next in each row, and the one before; -1 where there is none."""
    padded = torch.nn.functional.pad(targets, (1, 1), value=-1)
    label = padded[places.entry, places.position + 1]
    is_last = places.position >= target_lengths[places.entry]
    return torch.where(is_last, -1, label), padded[places.entry, places.position]


@operator("opwright_ops::transducer_columns", autocast=None)
def transducer_columns(
    targets: Int64[Tensor, "b u"],
    logit_lengths: Int64[Tensor, "b"],
    target_lengths: Int64[Tensor, "b"],
    *,
    rows: int,
    classes: int,
    frames: int = 0,
    star_index: int = -1,
) -> Int64[Tensor, "rows"]:
    """The label of each row as `transducer_scores` takes it.

    Args:
        rows: how many rows there are.
        classes: the size of the vocabulary.
        frames, star_index: as for `transducer_lattice`. The score of the label `star_index` is not needed.

    Returns:
        the label; `classes` where none follows, `classes` + 1 in rows that are not used, `classes` + 2 for labels
        outside of the vocabulary.
    """
    check_rows("transducer_columns", targets, logit_lengths, target_lengths, rows, frames)
    places = place_rows(targets, logit_lengths, target_lengths, rows, frames)
    label, _ = labels_of_rows(targets, target_lengths, places)
    is_unscored = (label == star_index) & (star_index >= 0)
    is_unscored |= places.position >= target_lengths[places.entry]
    label = torch.where((label < 0) | (label >= classes), classes + 2, label)
    return torch.where(places.is_used, torch.where(is_unscored, classes, label), classes + 1)


@transducer_columns.samples
def transducer_columns_samples():
    for (_, _, targets, *lengths), options in transducer_lattice_samples():
        rows = int((lengths[0] * (lengths[1] + 1)).sum())
        if options["frames"]:
            rows = len(targets) * options["frames"] * (targets.shape[1] + 1)
        given = {"frames": options["frames"], "star_index": options.get("star_index", -1)}
        yield (targets, *lengths), {"rows": rows, "classes": 3, **given}


class Lattice(NamedTuple):
    """The results of `transducer_lattice`."""

    loss: Float64[Tensor, "b"]
    beta: Float64[Tensor, "rows"]


@operator("opwright_ops::transducer_lattice", autocast=None, non_differentiable=["beta"])
def transducer_lattice(
    blank_score: Float64[Tensor, "rows"],
    label_score: Float64[Tensor, "rows"],
    targets: Int64[Tensor, "b u"],
    logit_lengths: Int64[Tensor, "b"],
    target_lengths: Int64[Tensor, "b"],
    *,
    frames: int = 0,
    delay_penalty: float = 0.0,
    eos_penalty: float = 0.0,
    eos_index: int = -1,
    star_penalty: float = 0.0,
    star_index: int = -1,
) -> Lattice:
    """Minus the logarithm of the sum of exp(score) over all alignments of each utterance.

    Args:
        blank_score, label_score: the scores of the two steps from each row: to the next frame, and to the next
            position.
        targets: the labels; those behind the length are not read.
        logit_lengths: frames of each utterance, at least 1.
        target_lengths: labels of each utterance.
        frames: the number of frames of every utterance that has rows; 0: rows are packed.
        delay_penalty: (T - 1) / 2 - t times this is added to the score of a label in frame t of T.
        eos_penalty: the same for the label `eos_index` alone, in addition.
        star_penalty: replaces the blank's score where the label before is `star_index`. That of this label itself
            is 0.

    Returns:
        `loss`, and the logarithm of the sum over the paths from each row to the end, `beta`.

    Source:
        Graves, arXiv:1211.3711, eq. 18; delay penalty: Kang et al., arXiv:2211.00490, eq. 19.
    """
    penalties = delay_penalty, eos_penalty, eos_index, star_penalty, star_index
    grid = _lay_out(blank_score, label_score, targets, logit_lengths, target_lengths, frames, penalties)
    betas = [torch.full_like(grid.blank[0], -torch.inf)]
    for blank, label, is_end in zip(grid.blank[::-1], grid.label[::-1], grid.is_end[::-1], strict=True):
        ahead = torch.where(is_end, 0.0, betas[-1]) + blank
        betas.append(_log_sum(ahead, label + _from_next(betas[-1])))
    beta = torch.nn.functional.pad(torch.stack(betas[:0:-1], 1).reshape(-1), (0, 1))
    return Lattice(-betas[-1][:, 0], beta[grid.of_row])


@transducer_lattice.backward
def transducer_lattice_backward(
    grad_loss,
    blank_score,
    label_score,
    targets,
    logit_lengths,
    target_lengths,
    beta,
    *,
    frames=0,
    delay_penalty=0.0,
    eos_penalty=0.0,
    eos_index=-1,
    star_penalty=0.0,
    star_index=-1,
):
    penalties = delay_penalty, eos_penalty, eos_index, star_penalty, star_index
    grid = _lay_out(blank_score, label_score, targets, logit_lengths, target_lengths, frames, penalties)
    shape = len(targets), len(grid.blank), targets.shape[1] + 1
    betas = beta.new_full((shape[0] * shape[1] * shape[2] + 1,), -torch.inf)
    betas = [*betas.index_put((grid.of_row,), beta)[:-1].reshape(shape).unbind(1)]
    betas.append(torch.full_like(betas[0], -torch.inf))
    # The part of all alignments that pass each cell of a diagonal, and those of them that take either step.
    part = (torch.arange(shape[2], device=targets.device) == 0).double().expand(shape[0], -1)
    by_blank, by_label = [], []
    for blank, label, is_end, behind in zip(grid.blank, grid.label, grid.is_end, betas[1:], strict=True):
        ahead, up = blank + torch.where(is_end, 0.0, behind), label + _from_next(behind)
        by_blank.append(part * _share(ahead, up))
        by_label.append(part * _share(up, ahead))
        part = torch.where(is_end, 0.0, by_blank[-1]) + torch.nn.functional.pad(by_label[-1][:, :-1], (1, 0))
    steps = (torch.nn.functional.pad(torch.stack(each, 1).reshape(-1), (0, 1)) for each in (by_blank, by_label))
    of_blank, of_label = (each[grid.of_row] * -grad_loss[grid.places.entry] for each in steps)
    label, before = labels_of_rows(targets, target_lengths, grid.places)
    if star_index >= 0:
        of_blank = torch.where(before == star_index, 0.0, of_blank)
        of_label = torch.where(label == star_index, 0.0, of_label)
    return of_blank, of_label


class _Grid(NamedTuple):
    """The rows by diagonals: cell d, u is frame d - u.

    Attributes:
        of_row: the cell of each row; rows that are not used share one behind the others.
        blank, label: the scores of the steps of each diagonal, [b, u + 1]; minus infinity where there is none.
        is_end: whether an alignment ends in a cell.
    """

    places: Places
    of_row: Tensor
    blank: list[Tensor]
    label: list[Tensor]
    is_end: list[Tensor]


def _lay_out(
    blank_score: Tensor,
    label_score: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    frames: int,
    penalties: tuple[float, float, int, float, int],
) -> _Grid:
    rows, width = len(blank_score), targets.shape[1] + 1
    longest = check_rows("transducer_lattice", targets, logit_lengths, target_lengths, rows, frames)
    diagonals = longest + targets.shape[1]
    places = place_rows(targets, logit_lengths, target_lengths, rows, frames)
    scores = _penalize(blank_score, label_score, targets, logit_lengths, target_lengths, places, *penalties)
    cells = len(targets) * diagonals * width
    of_row = (places.entry * diagonals + places.frame + places.position) * width + places.position
    of_row = torch.where(places.is_used, of_row, cells)
    empty = torch.full((cells + 1,), -torch.inf, dtype=torch.float64, device=targets.device)
    blank, label = ([*empty.index_put((of_row,), each)[:-1].reshape(-1, diagonals, width).unbind(1)] for each in scores)
    last = logit_lengths - 1 + target_lengths
    ends = torch.arange(width, device=targets.device) == target_lengths[:, None]
    return _Grid(places, of_row, blank, label, [ends & (last == d)[:, None] for d in range(diagonals)])


def _from_next(scores: Tensor) -> Tensor:
    """Returns those of the next position; minus infinity behind the last."""
    return torch.nn.functional.pad(scores[:, 1:], (0, 1), value=-torch.inf)


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    """The logarithm of exp(a) + exp(b), whose gradient is 0 where both are minus infinity."""
    top = torch.maximum(a, b).detach()
    top = torch.where(top == -torch.inf, 0.0, top)
    total = torch.exp(a - top) + torch.exp(b - top)
    return torch.where(total == 0, -torch.inf, top + torch.where(total == 0, 1.0, total).log())


def check_rows(
    subject: str, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, rows: int, frames: int
) -> int:
    """Returns the frames of the longest utterance, or more, as `check_lengths` does; packed if `frames` is 0."""
    b, u = targets.shape
    if frames and rows != b * frames * (u + 1):
        found = ("got", str(rows)), ("expected", f"{b} * {frames} * {u + 1}")
        refuse(ValueError, "rows", "are not as many as the shapes make", *found, subject=subject)
    sizes = {"frames": frames or rows, "labels": u, "rows": None if frames else rows}
    return check_lengths(subject, logit_lengths, target_lengths, **sizes)


def check_lengths(
    subject: str, logit_lengths: Tensor, target_lengths: Tensor, *, frames: int, labels: int, rows: int | None
) -> int:
    """Returns the frames of the longest utterance; under vmap, where numbers cannot be read or checked, all.

    Args:
        frames, labels: the most that an utterance may have.
        rows: the number of packed rows; None: rows are padded.

    Raises:
        ValueError: the lengths do not fit.
    """
    try:
        shortest, longest = int(logit_lengths.min()), int(logit_lengths.max())
        fewest, most = int(target_lengths.min()), int(target_lengths.max())
        wanted = int((logit_lengths * (target_lengths + 1)).sum())
    except RuntimeError:
        return frames
    if shortest < 1 or longest > frames:
        found = ("got", f"{shortest} to {longest}"), ("expected", f"1 to {frames}")
        refuse(
            ValueError, "logit_lengths", "must be at least 1, and at most the number of frames", *found, subject=subject
        )
    if fewest < 0 or most > labels:
        found = ("got", f"{fewest} to {most}"), ("expected", f"0 to {labels}")
        refuse(
            ValueError,
            "target_lengths",
            "must be at least 0, and at most the number of labels",
            *found,
            subject=subject,
        )
    if rows is not None and rows != wanted:
        found = ("got", str(rows)), ("expected", f"{wanted}, the sum of logit_lengths * (target_lengths + 1)")
        refuse(ValueError, "rows", "are not as many as the lengths make", *found, subject=subject)
    return longest


def _share(a: Tensor, b: Tensor) -> Tensor:
    """The part of exp(a) in exp(a) + exp(b)."""
    is_none = a == -torch.inf
    return torch.where(is_none, 0.0, torch.sigmoid(torch.where(is_none, 0.0, a - b)))


def _penalize(
    blank_score: Tensor,
    label_score: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    places: Places,
    delay_penalty: float,
    eos_penalty: float,
    eos_index: int,
    star_penalty: float,
    star_index: int,
) -> tuple[Tensor, Tensor]:
    """Returns the scores of the steps to the next frame and to the next label."""
    label, before = labels_of_rows(targets, target_lengths, places)
    early = (logit_lengths[places.entry] - 1).double() / 2 - places.frame
    to_blank = torch.where(before == star_index, star_penalty, blank_score) if star_index >= 0 else blank_score
    to_label = torch.where(label == star_index, 0.0, label_score) if star_index >= 0 else label_score
    to_label = to_label + delay_penalty * early
    if eos_index >= 0:
        to_label = torch.where(label == eos_index, to_label + eos_penalty * early, to_label)
    return to_blank, torch.where(label < 0, -torch.inf, to_label)


@transducer_lattice.samples
def transducer_lattice_samples():
    options = [
        {},
        {"delay_penalty": 0.01, "eos_penalty": 0.1, "eos_index": 1},
        {"star_penalty": -0.5, "star_index": 2},
    ]
    # One row; no labels; one frame; ragged lengths; more frames than labels, and columns of targets to spare.
    shapes = [([1], [0], 0), ([4], [0], 0), ([1], [3], 3), ([5, 1, 3], [2, 4, 0], 4), ([12, 7], [5, 3], 6)]
    generator = torch.Generator().manual_seed(0)
    for (times, counts, u), is_packed in itertools.product(shapes, (False, True)):
        frames = 0 if is_packed else max(times) + 1
        packed_rows = sum(t * (c + 1) for t, c in zip(times, counts, strict=True))
        rows = packed_rows if is_packed else len(times) * frames * (u + 1)
        targets = torch.randint(0, 4, (len(times), u), generator=generator)
        for option in options if len(times) == 3 else options[:1]:
            scores = torch.randn(2, rows, dtype=torch.float64, generator=generator) - 3
            yield (*scores, targets, torch.tensor(times), torch.tensor(counts)), {"frames": frames, **option}


@operator("opwright_ops::transducer_join", autocast="promote")
def transducer_join(
    f: Float[Tensor, "b t h"],
    g: Float[Tensor, "b w h"],
    logit_lengths: Int64[Tensor, "b"],
    target_lengths: Int64[Tensor, "b"],
    *,
    rows: int,
    is_packed: bool = False,
    activation: Literal["none", "relu", "tanh"] = "relu",
) -> Float[Tensor, "rows h"]:
    """The sum of a frame and a position for each row of a transducer, behind an activation; 0 in unused rows.

    Args:
        f: the encoder's output.
        g: the predictor's output, for w = U + 1 positions.
        logit_lengths, target_lengths: frames and labels of each utterance.
        rows: b * t * w; packed, the sum of logit_lengths * (target_lengths + 1).
    """
    places = _place_join(f, g, logit_lengths, target_lengths, rows, is_packed)
    total = widened(f)[places.entry, places.frame] + widened(g)[places.entry, places.position]
    result = {"none": total, "relu": torch.relu(total), "tanh": torch.tanh(total)}[activation]
    return torch.where(places.is_used[:, None], result, 0.0).to(f.dtype)


def _place_join(
    f: Tensor, g: Tensor, logit_lengths: Tensor, target_lengths: Tensor, rows: int, is_packed: bool
) -> Places:
    labels = logit_lengths.new_zeros(len(f), g.shape[1] - 1)
    check_lengths(
        "transducer_join",
        logit_lengths,
        target_lengths,
        frames=f.shape[1],
        labels=labels.shape[1],
        rows=rows if is_packed else None,
    )
    return place_rows(labels, logit_lengths, target_lengths, rows, 0 if is_packed else f.shape[1])


@transducer_join.backward
def transducer_join_backward(
    grad_output, f, g, logit_lengths, target_lengths, *, rows, is_packed=False, activation="relu"
):
    places = _place_join(f, g, logit_lengths, target_lengths, rows, is_packed)
    at_f = places.entry * f.shape[1] + places.frame.clamp(max=f.shape[1] - 1)
    at_g = places.entry * g.shape[1] + places.position
    x, y = widened(f).reshape(-1, f.shape[2]), widened(g).reshape(-1, g.shape[2])
    total, grad = x[at_f] + y[at_g], widened(grad_output)
    if activation == "relu":
        grad = torch.where(total > 0, grad, 0.0)
    elif activation == "tanh":
        grad = grad * (1 - torch.tanh(total).square())
    grad = torch.where(places.is_used[:, None], grad, 0.0)
    grad_f, grad_g = torch.zeros_like(x).index_add(0, at_f, grad), torch.zeros_like(y).index_add(0, at_g, grad)
    return grad_f.reshape(f.shape).to(f.dtype), grad_g.reshape(g.shape).to(g.dtype)


@transducer_join.samples
def transducer_join_samples():
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 1, 1, 3), (2, 5, 4, 1), (3, 7, 5, 33), (2, 40, 12, 80)]
    for (b, t, w, h), is_packed, activation in itertools.product(shapes, (False, True), ("none", "relu", "tanh")):
        logit_lengths = torch.randint(1, t + 1, (b,), generator=generator)
        target_lengths = torch.randint(0, w, (b,), generator=generator)
        rows = int((logit_lengths * (target_lengths + 1)).sum()) if is_packed else b * t * w
        f, g = torch.randn(b, t, h, generator=generator), torch.randn(b, w, h, generator=generator)
        yield (f, g, logit_lengths, target_lengths), {"rows": rows, "is_packed": is_packed, "activation": activation}
