"""The transducer's loss and joint against an enumeration of all alignments."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import opwright
from opwright_ops import transducer_joint, transducer_loss, transducer_loss_fused
from opwright_ops.transducer import fused
from opwright_ops.transducer.op import transducer_join, transducer_lattice, transducer_scores

# Each test runs on a CPU and on a GPU.
pytestmark = pytest.mark.usefixtures("device")
# On a GPU nothing waits for lengths or targets, so what is wrong in them ends in an assertion there.
ON_CPU = pytest.mark.parametrize("device", ["cpu"], indirect=True)
# Ragged: a whole utterance, one without labels, one with more labels than frames.
FRAMES, LABELS, V = [5, 2, 2], [4, 0, 3], 7
OPTIONS = [
    {},
    {"blank": 3},
    {"blank": -1},
    {"delay_penalty": 0.1},
    {"delay_penalty": 0.1, "eos_penalty": 0.3, "eos_index": 2},
    {"star_index": 5, "star_penalty": -0.4},
    {"star_index": 99, "delay_penalty": 0.1},  # a label outside of the vocabulary, whose score is not needed
]


def lengths() -> tuple[Tensor, Tensor]:
    return torch.tensor(FRAMES), torch.tensor(LABELS)


def example(dtype: torch.dtype = torch.float64, star: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    shape = len(FRAMES), max(FRAMES), max(LABELS) + 1, V
    logits = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(1, V, (len(FRAMES), max(LABELS)), generator=generator)
    targets[0, 1], targets[0, 2], targets[2, 0] = star, star, 2
    return logits, targets


def pack(padded: Tensor) -> Tensor:
    parts = zip(padded, FRAMES, LABELS, strict=True)
    return torch.cat([each[:t, : u + 1].flatten(0, 1) for each, t, u in parts])


def enumerate_alignments(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return enumerate_scores(logits.log_softmax(-1), targets, **options)


def enumerate_scores(
    scores: Tensor,
    targets: Tensor,
    blank: int = 0,
    delay_penalty: float = 0.0,
    eos_penalty: float = 0.0,
    eos_index: int | None = None,
    star_penalty: float = 0.0,
    star_index: int | None = None,
) -> Tensor:
    """Adds up the probabilities of all ways to place labels in frames, one after the other."""
    losses = []
    for own, labels, T, U in zip(scores, targets.tolist(), FRAMES, LABELS, strict=True):
        sums = []
        for places in itertools.combinations_with_replacement(range(T), U):
            score, u = own.new_zeros(()), 0
            for t in range(T):
                early = (T - 1) / 2 - t
                while u < U and places[u] == t:
                    label = labels[u]
                    score = score + (0 if label == star_index else own[t, u, label]) + delay_penalty * early
                    score = score + (eos_penalty * early if label == eos_index else 0)
                    u += 1
                is_behind_star = u > 0 and labels[u - 1] == star_index
                score = score + (star_penalty if is_behind_star else own[t, u, blank])
            sums.append(score)
        losses.append(-torch.logsumexp(torch.stack(sums), 0))
    return torch.stack(losses)


def with_gradient(losses: Tensor, logits: Tensor) -> list[Tensor]:
    weights = torch.arange(1, len(losses) + 1).to(losses)
    return [losses.detach(), torch.autograd.grad(losses, logits, weights)[0]]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_all_alignments(options: dict[str, Any], packed: bool) -> None:
    logits, targets = example(star=options.get("star_index", 5))
    wanted = with_gradient(enumerate_alignments(logits, targets, **options), logits)
    rows = pack(logits) if packed else logits
    losses = transducer_loss(rows, targets, *lengths(), packed=packed, reduction="none", **options)
    torch.testing.assert_close(with_gradient(losses, logits), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_short_types(dtype: torch.dtype) -> None:
    """The losses have the errors of float32, and the gradient is rounded to its type once."""
    logits, targets = example(dtype)
    exact = logits.detach().double().requires_grad_()
    loss, grad = with_gradient(transducer_loss(logits, targets, *lengths(), reduction="none"), logits)
    wanted = with_gradient(enumerate_alignments(exact, targets), exact)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), wanted[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(grad.double(), wanted[1], rtol=torch.finfo(dtype).eps, atol=2e-6)


def test_long_utterances_against_a_recursion() -> None:
    """Sums that no other factor than the logarithm holds: a probability of e^-3000."""
    T, U, v = 200, 40, 50
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    logits = (8 * torch.randn(1, T, U + 1, v, dtype=torch.float64, generator=generator)).requires_grad_()
    targets = torch.randint(1, v, (1, U), generator=generator)
    scores = logits.log_softmax(-1)[0]
    blank, label = scores[..., 0], scores[:, :U].gather(-1, targets[0].expand(T, -1)[..., None])[..., 0]
    alpha = [torch.cat([blank.new_zeros(1), label[0].cumsum(0)])]
    for t in range(1, T):
        row = [alpha[-1][0] + blank[t - 1, 0]]
        for u in range(1, U + 1):
            row.append(torch.logaddexp(alpha[-1][u] + blank[t - 1, u], row[-1] + label[t, u - 1]))
        alpha.append(torch.stack(row))
    wanted = -(alpha[-1][U] + blank[T - 1, U])
    assert wanted > 2000
    loss = transducer_loss(logits, targets, torch.tensor([T]), torch.tensor([U]))
    torch.testing.assert_close(loss, wanted)
    found, exact = (torch.autograd.grad(each, logits)[0] for each in (loss, wanted))
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-12)


def test_reductions() -> None:
    logits, targets = example()
    losses = transducer_loss(logits, targets, *lengths(), reduction="none")
    assert losses.shape == (3,)
    torch.testing.assert_close(transducer_loss(logits, targets, *lengths()), losses.mean())
    torch.testing.assert_close(transducer_loss(logits, targets, *lengths(), reduction="sum"), losses.sum())


def test_fastemit_scales_the_gradients_of_labels() -> None:
    logits, targets = example()
    scores = logits.detach().log_softmax(-1)
    plain, more = (
        with_gradient(transducer_loss(logits, targets, *lengths(), reduction="none", fastemit=each), logits)
        for each in (0.0, 0.5)
    )
    torch.testing.assert_close(more[0], plain[0])
    # What is added is the gradient of the labels' log-probabilities alone, taken back through the softmax.
    leaf = scores.clone().requires_grad_()
    weights = torch.arange(1, 4).double()
    (of_scores,) = torch.autograd.grad((enumerate_scores(leaf, targets) * weights).sum(), leaf)
    of_labels = of_scores.clone()
    of_labels[..., 0] = 0  # no label of the example is the blank
    added = of_labels - scores.exp() * of_labels.sum(-1, keepdim=True)
    torch.testing.assert_close(more[1], plain[1] + 0.5 * added)


def test_rows_behind_the_lengths_are_not_read() -> None:
    logits, targets = example()
    is_used = torch.zeros(logits.shape[:3], dtype=torch.bool)
    for i, (t, u) in enumerate(zip(FRAMES, LABELS, strict=True)):
        is_used[i, :t, : u + 1] = True
        targets[i, u:] = -1000
    spoilt = torch.where(is_used[..., None], logits.detach(), torch.nan).requires_grad_()
    loss, grad = with_gradient(transducer_loss(spoilt, targets, *lengths(), reduction="none"), spoilt)
    assert loss.isfinite().all()
    assert not grad[~is_used].any()
    torch.testing.assert_close(grad[is_used], with_gradient(enumerate_alignments(logits, targets), logits)[1][is_used])


def test_a_label_that_is_masked_out() -> None:
    """An infinite logit forbids some alignments; where none is left the loss is infinite and the gradient 0."""
    logits, targets = example()
    masked = logits.detach().clone()
    masked[0, :2, 0, targets[0, 0]] = -torch.inf
    masked[2, :, 0, targets[2, 0]] = -torch.inf
    masked.requires_grad_()
    loss, grad = with_gradient(transducer_loss(masked, targets, *lengths(), reduction="none"), masked)
    torch.testing.assert_close(loss, enumerate_alignments(masked, targets).detach())
    assert loss[2] == torch.inf
    assert grad.isfinite().all()
    assert not grad[2].any()


def test_one_utterance_and_vmap() -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    logits, targets = torch.randn(4, 5, 4, V, generator=generator), torch.randint(0, V, (4, 3), generator=generator)
    frames, labels = torch.tensor([5, 4, 1, 2]), torch.tensor([3, 0, 2, 1])
    wanted = transducer_loss(logits, targets, frames, labels, reduction="none")
    singly = [transducer_loss(*each) for each in zip(logits, targets, frames, labels, strict=True)]
    torch.testing.assert_close(torch.stack(singly), wanted)
    torch.testing.assert_close(torch.vmap(transducer_loss)(logits, targets, frames, labels), wanted)
    grads = torch.vmap(torch.func.grad(transducer_loss))(logits, targets, frames, labels)
    x = logits.clone().requires_grad_()
    transducer_loss(x, targets, frames, labels, reduction="sum").backward()
    torch.testing.assert_close(grads, x.grad)


def test_no_utterances() -> None:
    """And no elements in the joint."""
    none, targets = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3, dtype=torch.int64)
    for shape, packed in (((0, 5, 4, V), False), ((0, V), True)):
        logits = torch.zeros(shape, requires_grad=True)
        losses = transducer_loss(logits, targets, none, none, packed=packed, reduction="none")
        assert losses.shape == (0,)
        assert torch.autograd.grad(losses.sum(), logits)[0].shape == shape
    f, g, weight = (torch.zeros(s, requires_grad=True) for s in ((0, 5, 6), (0, 4, 6), (V, 6)))
    assert transducer_joint(f, g).shape == (0, 5, 4, 6)
    loss = transducer_loss_fused(f, g, weight, None, targets, none, none, reduction="sum")
    assert loss == 0
    assert not torch.autograd.grad(loss, weight)[0].any()
    assert transducer_joint(torch.zeros(2, 5, 0), torch.zeros(2, 4, 0)).shape == (2, 5, 4, 0)


@pytest.mark.compiler
def test_compile() -> None:
    logits, targets = example(torch.float32)
    compiled = torch.compile(transducer_loss, fullgraph=True)
    arguments = (targets, *lengths())
    wanted = [each(logits, *arguments, fastemit=0.01, star_index=5) for each in (transducer_loss, compiled)]
    torch.testing.assert_close(*wanted)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits)[0] for each in wanted))


def test_second_gradients() -> None:
    logits, targets = example()
    options = {"star_index": 5, "star_penalty": -0.4, "delay_penalty": 0.1}
    torch.autograd.gradgradcheck(
        lambda x: transducer_loss(x, targets, *lengths(), **options), (logits,), fast_mode=True
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_integers_of_other_widths(dtype: torch.dtype) -> None:
    logits, targets = example()
    given = [each.to(dtype) for each in (targets, *lengths())]
    torch.testing.assert_close(transducer_loss(logits, *given), transducer_loss(logits, targets, *lengths()))


@pytest.mark.parametrize("layout", ["transposed", "sliced", "columns apart"])
def test_strided_logits(layout: str) -> None:
    logits, targets = example()
    wanted = transducer_loss(logits, targets, *lengths())
    wide = F.pad(logits.detach(), (0, 3))
    strided = {
        "transposed": logits.detach().transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": wide[..., :V],
        "columns apart": logits.detach().repeat_interleave(2, -1)[..., ::2],
    }[layout]
    torch.testing.assert_close(transducer_loss(strided, targets, *lengths()), wanted.detach())


def case(**changes: Any) -> dict[str, Any]:
    logits, targets = example()
    return {
        "logits": logits,
        "targets": targets,
        "logit_lengths": torch.tensor(FRAMES),
        "target_lengths": torch.tensor(LABELS),
    } | changes


@ON_CPU
@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"logits": torch.zeros(3, 5, 4, V)}, ValueError, r"`logits` must be \[B, T, U \+ 1, V\]"),
        ({"logits": torch.zeros(9, V), "packed": True}, ValueError, "`rows` are not as many"),
        ({"logits": torch.zeros(3, 5, 5, V), "packed": True}, ValueError, r"must be \[rows, V\]"),
        ({"targets": torch.zeros(3, 4)}, TypeError, "`targets` must be integers"),
        ({"target_lengths": torch.tensor([4, 0])}, ValueError, r"`target_lengths` must be \[B\]"),
        ({"logit_lengths": torch.tensor([5, 0, 2])}, ValueError, "`logit_lengths` must be at least 1"),
        ({"logit_lengths": torch.tensor([6, 1, 2])}, ValueError, "at most the number of frames"),
        ({"target_lengths": torch.tensor([5, 0, 2])}, ValueError, "at most the number of labels"),
        ({"target_lengths": torch.tensor([-1, 0, 2])}, ValueError, "`target_lengths` must be at least 0"),
        ({"targets": torch.full((3, 4), V)}, IndexError, "outside of the vocabulary"),
        ({"targets": torch.full((3, 4), -1)}, IndexError, "outside of the vocabulary"),
        ({"blank": V}, IndexError, "out of bounds"),
        ({"reduction": "batch"}, ValueError, "`reduction` is unknown"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(changes: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        transducer_loss(**case(**changes))


# --- the joint -----------------------------------------------------------------------------------------------


def join(f: Tensor, g: Tensor, activation: str | None) -> Tensor:
    total = f[:, :, None] + g[:, None]
    return {"relu": torch.relu, "tanh": torch.tanh, None: lambda x: x}[activation](total)


@pytest.mark.parametrize("activation", ["relu", "tanh", None])
@pytest.mark.parametrize("h", [1, 8, 37])
def test_joint(activation: str | None, h: int) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(h)
    f, g = (torch.randn(3, n, h, dtype=torch.float64, generator=generator).requires_grad_() for n in (5, 5))
    everything = transducer_joint(f, g, activation=activation)
    torch.testing.assert_close(everything, join(f, g, activation))
    packed = transducer_joint(f, g, *lengths(), activation=activation, packed=True)
    torch.testing.assert_close(packed, pack(join(f, g, activation)))
    seed = torch.randn(packed.shape, dtype=torch.float64, generator=generator)
    wanted = torch.autograd.grad(pack(join(f, g, activation)), (f, g), seed)
    torch.testing.assert_close(torch.autograd.grad(packed, (f, g), seed), wanted)
    padded = transducer_joint(f, g, *lengths(), activation=activation)
    torch.testing.assert_close(pack(padded), packed)
    torch.testing.assert_close(padded.abs().sum(), packed.abs().sum())  # the rest is 0
    torch.testing.assert_close(torch.autograd.grad(pack(padded), (f, g), seed), wanted)


def test_dropout_of_the_joint() -> None:
    f, g = torch.ones(2, 50, 64), torch.ones(2, 30, 64)
    torch.manual_seed(0)
    dropped = transducer_joint(f, g, dropout=0.25)
    torch.testing.assert_close(dropped.unique(), torch.tensor([0.0, 2 / 0.75]))
    assert abs((dropped == 0).double().mean() - 0.25) < 0.005  # five standard deviations


@ON_CPU
@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"activation": "gelu"}, ValueError, "`activation` is unknown"),
        ({"g": torch.zeros(3, 5, 4)}, ValueError, r"must be \[B, T, H\]"),
        ({"logit_lengths": torch.tensor([6, 1, 1])}, ValueError, "number of frames"),
        ({"logit_lengths": torch.tensor([1.0, 1, 1])}, TypeError, "must be integers"),
    ],
    ids=str,
)
def test_what_the_joint_refuses(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    given = {"f": torch.zeros(3, 5, 8), "g": torch.zeros(3, 5, 8)} | change
    with pytest.raises(kind, match=text):
        transducer_joint(**given)


# --- from the joint's inputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("activation", ["relu", "tanh", None])
@pytest.mark.parametrize("most", [1, 60, 80, 2**24])
def test_fused(monkeypatch: pytest.MonkeyPatch, most: int, activation: str | None, with_bias: bool) -> None:
    """Blocks of one frame, of some, of some whole utterances, and of all."""
    monkeypatch.setattr(fused, "MAX_LOGITS", most)
    monkeypatch.setattr(fused, "MAX_LOGITS_ON_CPU", most)
    generator = torch.Generator(torch.get_default_device()).manual_seed(4)
    shapes = [(3, 6, 11), (3, 5, 11), (V, 11), (V,)][: 3 + with_bias]
    parts = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    f, g, weight, bias = (*parts, None)[:4]
    _, targets = example()
    options = {"blank": 1, "fastemit": 0.1, "star_index": 5, "delay_penalty": 0.1, "reduction": "none"}
    logits = F.linear(join(f, g, activation)[:, :5], weight, bias)
    wanted = transducer_loss(logits, targets, *lengths(), **options)
    found = transducer_loss_fused(f, g, weight, bias, targets, *lengths(), activation=activation, **options)
    torch.testing.assert_close(found, wanted)
    seed = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(found, parts, seed), torch.autograd.grad(wanted, parts, seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_fused_in_short_types(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Joint, logits and their gradient are rounded; sums over blocks are not."""
    monkeypatch.setattr(fused, "MAX_LOGITS", 60)
    monkeypatch.setattr(fused, "MAX_LOGITS_ON_CPU", 60)
    generator = torch.Generator(torch.get_default_device()).manual_seed(4)
    shapes = (3, 6, 16), (3, 5, 16), (V, 16), (V,)
    parts = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    exact = [x.detach().double().requires_grad_() for x in parts]
    _, targets = example()
    found, wanted = (transducer_loss_fused(*each, targets, *lengths()) for each in (parts, exact))
    assert found.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=4 * eps, atol=0)
    for grad, other in zip(torch.autograd.grad(found, parts), torch.autograd.grad(wanted, exact), strict=True):
        assert (grad.double() - other).abs().max() <= 4 * eps * other.abs().max()


@pytest.mark.parametrize("at", range(3), ids=["targets", "logit_lengths", "target_lengths"])
def test_integers_of_the_fused_loss_that_change_before_the_backward(at: int) -> None:
    """The gradient would be that of another loss."""
    f, g, weight = (torch.randn(s, requires_grad=True) for s in ((3, 5, 2), (3, 5, 2), (V, 2)))
    integers = [example()[1], *lengths()]
    loss = transducer_loss_fused(f, g, weight, None, *integers)
    integers[at].copy_(integers[at].flip(0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_frame_of_the_fused_loss_that_has_more_rows_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MAX_LOGITS", 2 * V)
    monkeypatch.setattr(fused, "MAX_LOGITS_ON_CPU", 2 * V)
    f, g, weight = (torch.randn(s) for s in ((2, 1, 6), (2, 5, 6), (V, 6)))
    integers = torch.randint(1, V, (2, 4)), torch.tensor([1, 1]), torch.tensor([4, 2])
    wanted = transducer_loss(F.linear(transducer_joint(f, g), weight), *integers)
    torch.testing.assert_close(transducer_loss_fused(f, g, weight, None, *integers), wanted)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=lambda each: each.__name__)
def test_the_fused_loss_refuses_transforms(transform: Any) -> None:
    g, weight, targets = torch.zeros(3, 5, 8), torch.zeros(V, 8), torch.zeros(3, 4).long()
    with pytest.raises(NotImplementedError, match="do not support transforms"):
        transform(lambda f: transducer_loss_fused(f, g, weight, None, targets, *lengths()))(torch.zeros(3, 5, 8))


def test_second_gradients_of_the_fused_loss() -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(5)
    shapes = (3, 5, 2), (3, 5, 2), (V, 2), (V,)
    parts = [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
    _, targets = example()
    torch.autograd.gradgradcheck(
        lambda *each: transducer_loss_fused(*each, targets, *lengths(), activation="tanh"), parts, fast_mode=True
    )


def test_the_fused_loss_under_autocast(device: str) -> None:
    generator = torch.Generator(torch.get_default_device()).manual_seed(6)
    parts = [torch.randn(s, generator=generator).requires_grad_() for s in ((3, 5, 16), (3, 5, 16), (V, 16), (V,))]
    _, targets = example()
    with torch.autocast(device, torch.bfloat16):
        loss = transducer_loss_fused(*parts, targets, *lengths())
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, parts)
    short = [each.detach().bfloat16().requires_grad_() for each in parts]
    torch.testing.assert_close(loss, transducer_loss_fused(*short, targets, *lengths()))
    assert {each.dtype for each in grads} == {torch.float32}


@ON_CPU
@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"activation": "gelu"}, ValueError, "`activation` is unknown"),
        ({"weight": torch.zeros(V, 9)}, ValueError, r"`weight` must be \[V, H\]"),
        ({"bias": torch.zeros(V + 1)}, ValueError, r"`weight` must be \[V, H\]"),
        ({"weight": torch.zeros(V, 8).double()}, TypeError, "must have the type of `f`"),
        ({"targets": torch.zeros(3, 5).long()}, ValueError, r"`targets` must be \[B, U\]"),
        ({"targets": torch.full((3, 4), V)}, IndexError, "outside of the vocabulary"),
        ({"logit_lengths": torch.tensor([6, 1, 1])}, ValueError, "number of frames"),
    ],
    ids=str,
)
def test_what_the_fused_loss_refuses(change: dict[str, Any], kind: type[Exception], text: str) -> None:
    given = {
        "f": torch.zeros(3, 5, 8),
        "g": torch.zeros(3, 5, 8),
        "weight": torch.zeros(V, 8),
        "bias": torch.zeros(V),
        "targets": torch.zeros(3, 4).long(),
        "logit_lengths": torch.tensor(FRAMES),
        "target_lengths": torch.tensor(LABELS),
    } | change
    with pytest.raises(kind, match=text):
        transducer_loss_fused(**given)


# --- the operators -----------------------------------------------------------------------------------------------


@pytest.mark.compiler
@pytest.mark.parametrize("operator", [transducer_scores, transducer_lattice, transducer_join], ids=lambda o: o.__name__)
def test_numerics(operator: Any, device: str) -> None:
    with torch.device("cpu"):
        record = opwright.verify(operator, checks=["numerics", "gradients", "second gradients"], devices=[device])
    assert record.passed, record.failures
    assert device in record.backends


@ON_CPU
def test_operators_of_the_joint_check_packed_lengths() -> None:
    """The number of rows fits the lengths, which have more frames than `f`."""
    f, g = torch.randn(2, 3, 8), torch.randn(2, 2, 8)
    lengths = torch.tensor([4, 2]), torch.tensor([1, 0])
    with pytest.raises(RuntimeError, match="at most the number of frames of `f`"):
        transducer_join(f, g, *lengths, rows=10, is_packed=True)
    with pytest.raises(RuntimeError, match="at most the number of frames of `f`"):
        torch.ops.opwright_ops.transducer_join_backward(torch.randn(10, 8), f, g, *lengths, rows=10, is_packed=True)
