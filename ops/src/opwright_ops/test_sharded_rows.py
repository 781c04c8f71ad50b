"""Rows whose last axis is sharded: processes give what PyTorch gives in one, and send sums and maxima alone.

This file is the test and, run as a program, one of its processes.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import opwright_ops
from opwright_ops.cross_entropy.loss import cross_entropy, logsumexp

DEVICE, RANKS = (sys.argv[3], int(sys.argv[4])) if __name__ == "__main__" else ("", 0)
R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
ROWS = 6
# Before 2.13, PyTorch replicates the copy that autograd makes where two leaves get one gradient, if shards are uneven.
# It also refuses to flatten a tensor that is sharded along an axis other than its first.
IS_OLD = torch.__version__ < (2, 13)
# Uneven shards, an empty one, and even ones.
WIDTHS = [13, 3, 16]


# --- the operators of PyTorch ---------------------------------------------------------------------------


def cross_entropy_in_pytorch(
    logits: Tensor, target: Tensor, *, z_loss: float = 0.0, reduction: str = "mean", ignore_index: int = -100, **options
) -> Tensor:
    classes, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = F.cross_entropy(classes, flat, reduction="none", ignore_index=ignore_index, **options)
    is_counted = flat != ignore_index
    loss = loss + torch.where(is_counted, z_loss * torch.logsumexp(classes, -1).square(), 0.0)
    if reduction == "none":
        return loss.reshape(target.shape)
    return loss.sum() / is_counted.sum() if reduction == "mean" else loss.sum()


def add_rms_norm_in_pytorch(input: Tensor, residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = input + residual
    return F.rms_norm(total, total.shape[-1:], weight, 1e-6), total


class Call(NamedTuple):
    """An operator, what it is in PyTorch, and its arguments: `r` rows, `w` weights, `t` targets.

    Attributes:
        forward: the bytes that it sends for each row of float64.
        backward: those that its gradient sends.
    """

    function: Callable[..., Any]
    in_pytorch: Callable[..., Any]
    arguments: str
    forward: int
    backward: int
    options: dict[str, Any] = {}  # noqa: RUF012


LOSSES = [
    Call(cross_entropy, cross_entropy_in_pytorch, "rt", 8 + 16, 0, {"reduction": "none"}),
    Call(cross_entropy, cross_entropy_in_pytorch, "rt", 8 + 16, 0),
    Call(cross_entropy, cross_entropy_in_pytorch, "rt", 8 + 16, 0, {"reduction": "sum", "z_loss": 0.1}),
    Call(cross_entropy, cross_entropy_in_pytorch, "rt", 8 + 24, 0, {"label_smoothing": 0.1, "z_loss": 0.01}),
    Call(cross_entropy, cross_entropy_in_pytorch, "rt", 8 + 16, 0, {"ignore_index": 2}),  # one that is a class too
]
# Sums are exchanged in the type of the rows, here float64, those of the log-sum-exp always in float64.
CALLS = [
    Call(opwright_ops.softmax, lambda x: torch.softmax(x, -1), "r", 8 + 8, 8),
    Call(logsumexp, lambda x: torch.logsumexp(x, -1), "r", 8 + 8, 0),
    *LOSSES,
    Call(opwright_ops.rms_norm, lambda x, w=None: F.rms_norm(x, x.shape[-1:], w, 1e-6), "r", 8, 16),
    Call(opwright_ops.rms_norm, lambda x, w=None: F.rms_norm(x, x.shape[-1:], w, 1e-6), "rw", 8, 16),
    Call(opwright_ops.add_rms_norm, add_rms_norm_in_pytorch, "rr", 8, 16),
    Call(opwright_ops.add_rms_norm, add_rms_norm_in_pytorch, "rrw", 8, 16),
    Call(opwright_ops.layer_norm, lambda x, *p: F.layer_norm(x, x.shape[-1:], *p), "r", 16, 32),
    Call(opwright_ops.layer_norm, lambda x, *p: F.layer_norm(x, x.shape[-1:], *p), "rww", 16, 32),
]


# --- what each process does -----------------------------------------------------------------------------


class Sent(CommDebugMode):
    """Adds up the bytes that go into collectives, by their names."""

    def __enter__(self):
        self.bytes: dict[str, int] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        if func.namespace == "_c10d_functional" and "wait_tensor" not in name and "wrap_tensor" not in name:
            tensors = [a for a in args if isinstance(a, Tensor)]
            self.bytes[name] = self.bytes.get(name, 0) + sum(t.numel() * t.element_size() for t in tensors)
        return super().__torch_dispatch__(func, types, args, kwargs)


def make(call: Call, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    n = shape[-1]
    made = []
    for kind in call.arguments:
        if kind == "t":
            target = torch.arange(math.prod(shape[:-1])).reshape(shape[:-1]) * 5 % n  # on each of the ranks
            target.view(-1)[1] = call.options.get("ignore_index", -100)
            made.append(target)
        else:
            made.append((3 * torch.randn(n if kind == "w" else shape, dtype=torch.float64)).to(dtype))
    return made


def differentiate(call: Callable[..., Any], tensors: Sequence[Tensor], options: dict[str, Any], place=None):
    """Returns results, gradients, and what was sent forward and backward."""
    given = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    with Sent() as forward:
        found = call(*given, **options)
    results = found if isinstance(found, tuple) else (found,)
    seeds = [torch.linspace(-1, 2, r.numel(), dtype=torch.float64).to(r.dtype).reshape(r.shape) for r in results]
    if place is not None:
        seeds = [place(seed, r) for seed, r in zip(seeds, results, strict=True)]
    with Sent() as backward:
        torch.autograd.backward(results, seeds)
    return results, [t.grad for t in given if t.is_floating_point()], (forward.bytes, backward.bytes)


def hold(call: Call, mesh: DeviceMesh, shape: Sequence[int], rows: Sequence[Any], is_weight_sharded: bool) -> None:
    """Asserts that a call on shards gives the numbers of PyTorch, and says how many bytes it sent."""
    last = len(shape) - 1
    placements = {
        "r": list(rows),
        "t": [R if p == Shard(last) else p for p in rows],
        "w": [S0 if is_weight_sharded and p == Shard(last) else R for p in rows],
    }
    tensors = make(call, shape)
    spread = [distribute_tensor(t, mesh, placements[k]) for t, k in zip(tensors, call.arguments, strict=True)]

    def place(seed: Tensor, result: DTensor) -> DTensor:
        wanted = [R if p.is_partial() else p for p in result.placements]
        return distribute_tensor(seed, mesh, wanted)

    wanted, wanted_gradients, _ = differentiate(call.in_pytorch, tensors, call.options)
    plain = call.function(*[t.detach() for t in spread], **call.options)  # without a mode, which takes another way
    got, gradients, sent = differentiate(call.function, spread, call.options, place)
    for alone in (plain if isinstance(plain, tuple) else (plain,), got):
        for g, w in zip(alone, wanted, strict=True):
            torch.testing.assert_close(g.full_tensor().detach(), w.detach())
    for g, w in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(g.full_tensor(), w)
    if IS_OLD and call.function is opwright_ops.add_rms_norm and shape[-1] % mesh.size():
        return
    kinds = [k for k in call.arguments if k != "t"]
    for g, kind in zip(gradients, kinds, strict=True):
        if kind == "r":
            assert g.placements == tuple(rows), (g.placements, rows)
    exchanges = sum(p == Shard(last) for p in rows)
    local = math.prod(s // mesh.size(rows.index(Shard(d))) if Shard(d) in rows else s for d, s in enumerate(shape[:-1]))
    is_reduced = call.function is cross_entropy and call.options.get("reduction") != "none"
    # Rows that are sharded are added up: their sum and their number.
    batch = [p for p in rows if isinstance(p, Shard) and p != Shard(last)] if is_reduced else []
    is_inner = any(p.dim > 0 for p in batch)
    total = 0 if is_inner else 16 * len(batch)
    if is_inner:  # what there is one of for each row is gathered where PyTorch cannot flatten its shards
        assert all(each.pop("all_gather_into_tensor") <= 16 * local for each in sent)
    assert sent[0] == {"all_reduce": local * exchanges * call.forward + total}, (call, sent[0])
    assert sent[1] == ({"all_reduce": local * exchanges * call.backward} if call.backward else {}), (call, sent[1])


def check_every_operator() -> None:
    line = init_device_mesh(DEVICE, (RANKS,))
    square = init_device_mesh(DEVICE, (2, 2)) if RANKS == 4 else None
    for call in CALLS:
        for n, is_weight_sharded in itertools.product(WIDTHS, (True, False) if "w" in call.arguments else (True,)):
            hold(call, line, (ROWS, n), [S1], is_weight_sharded)
        hold(call, line, (2, 3, 13), [S2], True)
        if square is None:
            continue
        for rows in ([S0, S1], [S1, S0], [R, S1], [S1, S1]):
            hold(call, square, (ROWS, 13), rows, True)
        hold(call, square, (ROWS, 3), [S1, S1], False)
        hold(call, square, (2, 3, 13), [S0, S2], True)
        if not (IS_OLD and call.function is cross_entropy):
            hold(call, square, (2, 4, 13), [S1, S2], True)


def check_special_rows() -> None:
    """Rows that are -inf on one rank, on all, that have NaN or inf, and logits near the largest number."""
    mesh = init_device_mesh(DEVICE, (RANKS,))
    x = torch.randn(8, 13, dtype=torch.float64)
    x[0, 4:8] = -math.inf
    x[1] = -math.inf
    x[2, 5], x[3, 11] = math.nan, math.inf
    x[4, :12] = -math.inf
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        rows = x.to(dtype)
        rows[5], rows[6, 3] = torch.finfo(dtype).min, torch.finfo(dtype).max
        spread = distribute_tensor(rows, mesh, [S1])
        for function, plain in (
            (opwright_ops.softmax, torch.softmax),
            (logsumexp, torch.logsumexp),
        ):
            found = function(spread).full_tensor()
            torch.testing.assert_close(found, plain(rows.double(), -1).to(dtype), equal_nan=True)
        target = torch.tensor([5, 0, 1, 2, 12, 3, 4, -100])
        there = distribute_tensor(target, mesh, [R])
        options = {"reduction": "none"}
        found = cross_entropy(spread, there, **options).full_tensor()
        wanted = cross_entropy(rows, target, **options)  # PyTorch has NaN for a row with inf
        torch.testing.assert_close(found, wanted, equal_nan=True)
        ignored = distribute_tensor(torch.full_like(target, -100), mesh, [R])
        needing = spread.detach().requires_grad_()
        loss = cross_entropy(needing, ignored, reduction="sum", label_smoothing=0.1, z_loss=0.1)
        loss.backward()
        assert loss.full_tensor() == 0
        assert not needing.grad.full_tensor().any()


def check_types() -> None:
    """16 bits and float32 are as near to float64 as one process is, but for the order of sums."""
    mesh = init_device_mesh(DEVICE, (RANKS,))
    for call, dtype in itertools.product(CALLS, (torch.float32, torch.float16, torch.bfloat16)):
        tensors = make(call, (ROWS, 1001), dtype)
        rows = {"r": [S1], "t": [R], "w": [S0]}
        spread = [distribute_tensor(t, mesh, rows[k]) for t, k in zip(tensors, call.arguments, strict=True)]

        def place(seed: Tensor, result: DTensor) -> DTensor:
            return distribute_tensor(seed, mesh, result.placements)

        got, gradients, sent = differentiate(call.function, spread, call.options, place)
        part = 1 if call.function in (cross_entropy, logsumexp) else 2  # of the bytes of float64
        if not (IS_OLD and call.function is opwright_ops.add_rms_norm):
            assert [sum(each.values()) for each in sent] == [ROWS * b // part for b in (call.forward, call.backward)]
        alone, alone_gradients, _ = differentiate(call.function, tensors, call.options)
        exact, exact_gradients, _ = differentiate(
            call.in_pytorch, [t.double() if t.is_floating_point() else t for t in tensors], call.options
        )
        for g, a, e in zip((*got, *gradients), (*alone, *alone_gradients), (*exact, *exact_gradients), strict=True):
            assert g.dtype == a.dtype == dtype
            scale = max(e.abs().max(), *(result.abs().max() for result in exact))  # a gradient's terms, which cancel
            own = (a.double() - e).abs().max()
            off = (g.full_tensor().double() - e).abs().max()
            # The result is rounded to its type; sums over ranks, scales and their products are rounded in float32.
            allowed = 2 * own + (torch.finfo(dtype).eps + 8 * torch.finfo(torch.float32).eps) * scale
            assert off <= allowed, (call, dtype, off, own)


def check_a_transducer() -> None:
    """The logits stay, and 4 numbers go for each row: a maximum and three sums. The loss is that of one process."""
    line = init_device_mesh(DEVICE, (RANKS,))
    meshes = [(line, [])] + ([(init_device_mesh(DEVICE, (2, 2)), [S0])] if RANKS == 4 else [])
    targets, frames, lengths = torch.tensor([[1, 12, 1], [5, 3, 0]]), torch.tensor([4, 3]), torch.tensor([3, 2])
    penalties = {"delay_penalty": 0.1, "eos_penalty": 0.2, "eos_index": 3, "fastemit": 0.05, "reduction": "sum"}
    star = {"star_penalty": -0.5, "star_index": 5, "blank": -1}
    for (mesh, batch), packed, options in itertools.product(meshes, (False, True), ({}, penalties, star)):
        rows = [int((frames * (lengths + 1)).sum())] if packed else [2, 4, 4]
        logits = torch.randn(*rows, 13, dtype=torch.float64)
        placements = [*([R] if packed else batch)[: len(batch)], Shard(len(rows))]
        given = [distribute_tensor(each, mesh, [R] * mesh.ndim) for each in (targets, frames, lengths)]
        found = []
        for x, rest in (
            (logits, (targets, frames, lengths)),
            (distribute_tensor(logits, mesh, placements), given),
        ):
            x = x.requires_grad_()
            with Sent() as sent:
                loss = opwright_ops.transducer_loss(x, *rest, packed=packed, **options)
            loss.backward()
            found.append((loss, x.grad))
        (wanted, wanted_gradient), (loss, gradient) = found
        assert gradient.placements == tuple(placements)
        torch.testing.assert_close(loss.full_tensor(), wanted)
        torch.testing.assert_close(gradient.full_tensor(), wanted_gradient)
        if not batch:
            assert sent.bytes == {"all_reduce": math.prod(rows) * (8 + 24)}, sent.bytes
    with pytest.raises(IndexError, match="outside of the vocabulary"):
        opwright_ops.transducer_loss(distribute_tensor(logits, mesh, placements), *given, packed=True, blank=13)


def check_a_joint() -> None:
    """A joint and a layer whose vocabulary is sharded give the fused loss, which itself names them in its refusal."""
    mesh = init_device_mesh(DEVICE, (RANKS,))
    shapes = (2, 4, 8), (2, 4, 8), (13, 8), (13,)
    layers = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    rest = [torch.tensor([[1, 12, 1], [5, 3, 0]]), torch.tensor([4, 4]), torch.tensor([3, 2])]
    wanted = opwright_ops.transducer_loss_fused(*layers, *rest)
    wanted.backward()
    placements = [R], [R], [S0], [S0]
    spread = [distribute_tensor(x.detach(), mesh, p).requires_grad_() for x, p in zip(layers, placements, strict=True)]
    there = [distribute_tensor(x, mesh, [R]) for x in rest]
    f, g, weight, bias = spread
    loss = opwright_ops.transducer_loss(F.linear(opwright_ops.transducer_joint(f, g), weight, bias), *there)
    loss.backward()
    torch.testing.assert_close(loss.full_tensor(), wanted)
    for found, layer in zip(spread, layers, strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), layer.grad)
    with pytest.raises(TypeError, match="`weight` must not be a DTensor"):
        opwright_ops.transducer_loss_fused(*layers[:2], weight, None, *rest)


def check_a_backward_in_place() -> None:
    mesh = init_device_mesh(DEVICE, (RANKS,))
    call = LOSSES[3]
    logits, target = make(call, (ROWS, 13))
    (_, (wanted,), _) = differentiate(call.in_pytorch, [logits, target], call.options)
    x = distribute_tensor(logits, mesh, [S1]).requires_grad_()
    computed = x * 1
    loss = cross_entropy(computed, distribute_tensor(target, mesh, [R]), inplace_backward=True, **call.options)
    seed = distribute_tensor(torch.tensor(-1.0, dtype=torch.float64), mesh, [R])
    with Sent() as sent:
        (gradient,) = torch.autograd.grad(loss, x, seed)
    assert sent.bytes == {}
    torch.testing.assert_close(gradient.full_tensor(), wanted)
    torch.testing.assert_close(computed.full_tensor().detach(), wanted)


def check_targets_that_are_no_classes() -> None:
    mesh = init_device_mesh(DEVICE, (RANKS,))
    logits = distribute_tensor(torch.randn(3, 13), mesh, [S1])
    for wrong in (-1, 13):
        with pytest.raises(IndexError, match="neither a class"):
            cross_entropy(logits, distribute_tensor(torch.tensor([0, wrong, 2]), mesh, [R]))


def check_ranks_that_take_no_part() -> None:
    mesh = DeviceMesh(DEVICE, [*range(RANKS - 1)])
    for call in CALLS[:3]:
        tensors = make(call, (ROWS, 13))
        rows = {"r": [S1], "t": [R]}
        spread = [distribute_tensor(t, mesh, rows[k]) for t, k in zip(tensors, call.arguments, strict=True)]

        def place(seed: Tensor, result: DTensor) -> DTensor:
            return distribute_tensor(seed, mesh, result.placements)

        (got,), (gradient,), _ = differentiate(call.function, spread, call.options, place)
        (wanted,), (wanted_gradient,), _ = differentiate(call.in_pytorch, tensors, call.options)
        if mesh.get_coordinate() is None:
            assert got.to_local().numel() == gradient.to_local().numel() == 0
        else:
            torch.testing.assert_close(got.full_tensor(), wanted)
            torch.testing.assert_close(gradient.full_tensor(), wanted_gradient)


def check_compiled() -> None:
    """Traced whole, with the numbers of the call that is not compiled."""
    mesh = init_device_mesh(DEVICE, (RANKS,))
    for call in CALLS[-1], LOSSES[3], CALLS[0]:
        torch._dynamo.reset()
        rows = {"r": [S1], "t": [R], "w": [S0]}
        tensors = make(call, (ROWS, 13))
        spread = [distribute_tensor(t, mesh, rows[k]) for t, k in zip(tensors, call.arguments, strict=True)]
        found = []
        for function in (call.function, torch.compile(call.function, backend="aot_eager", fullgraph=True)):
            given = [t.detach().requires_grad_(t.is_floating_point()) for t in spread]
            result = function(*given, **call.options)
            result.backward(distribute_tensor(torch.ones(result.shape, dtype=result.dtype), mesh, result.placements))
            gradients = [t.grad for t in given if t.is_floating_point()]
            assert gradients[0].placements == (S1,)
            found.append([result.full_tensor().detach(), *(g.full_tensor() for g in gradients)])
        torch.testing.assert_close(*found)


def check_second_derivatives() -> None:
    mesh = init_device_mesh(DEVICE, (RANKS,))
    for call in CALLS:
        tensors = make(call, (ROWS, 13))
        rows = {"r": [S1], "t": [R], "w": [S0]}

        def second(function, given):
            needing = [t.detach().requires_grad_() if t.is_floating_point() else t for t in given]
            leaves = [t for t in needing if t.requires_grad]
            results = function(*needing, **call.options)  # noqa: B023
            results = results if isinstance(results, tuple) else (results,)
            first = torch.autograd.grad(sum(r.square().sum() for r in results), leaves, create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

        spread = [distribute_tensor(t, mesh, rows[k]) for t, k in zip(tensors, call.arguments, strict=True)]
        for g, w in zip(second(call.function, spread), second(call.in_pytorch, tensors), strict=True):
            torch.testing.assert_close(g.full_tensor(), w)


CHECKS = [
    check_every_operator,
    check_special_rows,
    check_types,
    check_a_transducer,
    check_a_joint,
    check_a_backward_in_place,
    check_targets_that_are_no_classes,
    check_ranks_that_take_no_part,
    check_compiled,
    check_second_derivatives,
]


# --- the tests ------------------------------------------------------------------------------------------


NEEDS_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.compiler
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPUS])])
def test_processes(where: str, tmp_path: Path) -> None:
    """Four, by gloo; by NCCL four or two."""
    meeting, count = tmp_path / "meeting", 4 if where == "cpu" or torch.cuda.device_count() >= 4 else 2
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(meeting), where, str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count, "".join(output[-2000:] for output in outputs)


if __name__ == "__main__":
    torch.set_num_threads(1)
    own = int(sys.argv[1])
    if DEVICE == "cuda":
        torch.cuda.set_device(own)
        torch.set_default_device(torch.device("cuda", own))
        CHECKS.remove(check_targets_that_are_no_classes)  # they end in an assertion on the GPU
        # There PyTorch makes gradients of ranks that take no part on the CPU, which its engine does not expect.
        CHECKS.remove(check_ranks_that_take_no_part)
    kind = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(kind, init_method="file://" + sys.argv[2], rank=own, world_size=RANKS)
    torch.manual_seed(0)
    for check in CHECKS:
        if len(sys.argv) < 6 or sys.argv[5] in check.__name__:
            check()
            if dist.get_rank() == 0:
                print(check.__name__, flush=True)
    dist.destroy_process_group()
