"""The transducer's loss and joint on a GPU: against the bytes that must move, and fused against not fused.

    python benchmarks/transducer_cuda.py [--rivals FOLDER]

32 utterances of 250 frames and 60 labels, 4096 classes, H = 640, bfloat16, packed: 488,000 rows, 4 GB of logits. A copy
of the logits gives the limit: they are read once forward, and read and written once backward. Forward and backward are
timed by events, the least of 7; the backward goes through `torch.autograd.grad`. Memory is the peak beyond the inputs.

`caiman` is the loss of caiman-asr (`rnnt_ext`), if it can be imported; FOLDER is put in front of sys.path. A minute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from opwright_ops import transducer_joint, transducer_loss, transducer_loss_fused
from summary import Figure, beside, update, write_raw
from torch import Tensor

from opwright.machine import machine_card
from opwright.records import builtins_of

B, T, U, V, H = 32, 250, 60, 4096, 640
ROWS = B * T * (U + 1)
Call = Callable[[], Any]


def least_ms(call: Call, rounds: int = 7) -> float:
    call()
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return min(found)


def peak_gb(call: Call) -> float:
    """Returns the most memory that a call holds beyond what is there before it."""
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def caiman() -> Callable[..., Tensor] | None:
    try:
        from rnnt_ext.transducer.loss import TransducerLoss
    except ImportError as error:
        print(f"caiman is not measured: {error}")
        return None
    loss = TransducerLoss(packed_input=True)

    def call(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
        frames, labels = frames.int(), labels.int()
        ends = torch.cumsum(frames * (labels + 1), 0)
        return loss(logits, targets.int(), frames, labels, 0, batch_offset=ends, max_f_len=T).mean()

    return call


def ours(logits: Tensor, *integers: Tensor) -> Tensor:
    return transducer_loss(logits, *integers, packed=True)


def compare_losses(integers: tuple[Tensor, ...]) -> dict[str, Any]:
    logits = torch.randn(ROWS, V, device="cuda", dtype=torch.bfloat16)
    other = torch.empty_like(logits)
    result: dict[str, Any] = {"copy": least_ms(lambda: other.copy_(logits))}
    del other
    losses = {"opwright": ours, "caiman": caiman()}
    for name, loss in losses.items():
        if loss is None:
            continue
        x = logits.detach().requires_grad_()
        with torch.no_grad():
            forward = least_ms(lambda loss=loss, x=x: loss(x, *integers))
        y = loss(x, *integers)
        backward = least_ms(lambda x=x, y=y: torch.autograd.grad(y, x, retain_graph=True))
        value = y.item()
        del y
        peak = peak_gb(lambda loss=loss, x=x: torch.autograd.grad(loss(x, *integers), x))
        gradient = ROWS * V * 2 / 1e9
        result[name] = {
            "loss": value,
            "forward": forward,
            "backward": backward,
            "GB beyond logits and gradient": peak - gradient,
        }
        print(name, result[name], flush=True)
    return result


def compare_joints(integers: tuple[Tensor, ...]) -> dict[str, Any]:
    def of(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    f, g, weight, bias = (x.requires_grad_() for x in (of(B, T, H), of(B, U + 1, H), of(V, H) / H**0.5, of(V)))
    on_cpu = [x.cpu() for x in integers[1:]]

    def not_fused() -> Tensor:
        joint = transducer_joint(f, g, *integers[1:], packed=True, rows=ROWS)
        return ours(F.linear(joint, weight, bias), *integers)

    def eager() -> Tensor:
        """Every utterance has all frames and labels here, so packed rows are padded ones."""
        joint = torch.relu(f[:, :, None] + g[:, None]).reshape(ROWS, H)
        return ours(F.linear(joint, weight, bias), *integers)

    calls = {
        "fused": lambda: transducer_loss_fused(f, g, weight, bias, integers[0], *on_cpu),
        "not fused": not_fused,
        "not fused, eager joint": eager,
    }
    result: dict[str, Any] = {}
    for name, call in calls.items():
        with torch.no_grad():
            forward = least_ms(call)

        def both(call: Call = call) -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(), (f, g, weight, bias))

        result[name] = {"forward": forward, "both": least_ms(both), "GB": peak_gb(both), "loss": call().item()}
        print(name, result[name], flush=True)
    joint = transducer_joint(f, g, packed=True, rows=ROWS)
    grad, other = torch.randn_like(joint), torch.empty_like(joint)
    result["joint"] = {
        "copy": least_ms(lambda: other.copy_(grad)),
        "forward": least_ms(lambda: transducer_joint(f, g, packed=True, rows=ROWS)),
        "backward": least_ms(lambda: torch.autograd.grad(joint, (f, g), grad, retain_graph=True)),
    }
    print("joint", result["joint"], flush=True)
    return result


def figures(result: dict[str, Any]) -> list[Figure]:
    losses, joints = result["losses"], result["joints"]
    found = []
    for part, limit in (("forward", losses["copy"] / 2), ("backward", losses["copy"])):
        mine = losses["opwright"][part]
        others = {"caiman": losses["caiman"][part]} if "caiman" in losses else {}
        name = f"transducer_loss bfloat16, {ROWS} x {V}, {part}"
        found.append(Figure(name, mine, "ms", beside=beside(mine, {"limit": limit} | others)))
    fused, plain = joints["fused"], joints["not fused"]
    name = "transducer_loss_fused, H = 640, forward and backward"
    found.append(Figure(name, fused["both"], "ms", beside=beside(fused["both"], {"not fused": plain["both"]})))
    name = "transducer_loss_fused, H = 640, memory"
    found.append(Figure(name, fused["GB"], "GB", beside=beside(fused["GB"], {"not fused": plain["GB"]})))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rivals", help="a folder in which rnnt_ext is")
    options = parser.parse_args()
    if options.rivals:
        sys.path.insert(0, options.rivals)
    torch.manual_seed(0)
    frames, labels = (torch.full((B,), n, device="cuda") for n in (T, U))
    integers = torch.randint(1, V, (B, U), device="cuda"), frames, labels
    card = builtins_of(machine_card(torch.device("cuda", 0)))
    result = {"losses": compare_losses(integers), "joints": compare_joints(integers), "machine": card}
    write_raw("transducer_cuda", result)
    update(__file__, figures(result), card)


if __name__ == "__main__":
    main()
