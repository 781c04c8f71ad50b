"""The transducer's loss and joint on a CPU, beside the same in eager PyTorch: forward, and forward with backward.

    python benchmarks/transducer.py [ROUNDS]

Two threads. Eager takes the log-softmax, gathers the scores of blank and labels, and adds up alignments diagonal by
diagonal: the same vectorized loop as the reference, with PyTorch's own gradient. All take turns; the table has the best
time of each. Memory is the peak of a call beyond its inputs, of the process's resident memory, in a process of its own.
Two minutes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from opwright_ops import transducer_joint, transducer_loss, transducer_loss_fused
from opwright_ops.transducer.op import transducer_lattice
from summary import Figure, beside, update, write_raw
from torch import Tensor

from opwright.machine import machine_card
from opwright.records import builtins_of

THREADS = 2
# Utterances, frames, labels, vocabulary, width of the joint: characters, word pieces, and long words.
SHAPES = {"8 x 100 x 20": (8, 100, 20, 32, 256), "4 x 100 x 20": (4, 100, 20, 1024, 256)}


def eager_loss(logits: Tensor, targets: Tensor, frames: Tensor, labels: Tensor) -> Tensor:
    scores = logits.log_softmax(-1)
    at = F.pad(targets, (0, 1))[:, None, :, None].expand(-1, logits.shape[1], -1, 1)
    blank, label = scores[..., 0].double(), scores.gather(-1, at)[..., 0].double()
    lattice = transducer_lattice.operator.declaration.reference
    return lattice(blank.reshape(-1), label.reshape(-1), targets, frames, labels, frames=logits.shape[1]).loss.mean()


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    B, T, U, V, H = shape
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(T // 2, T + 1, (B,), generator=generator)
    frames[0] = T
    return {
        "f": torch.randn(B, T, H, generator=generator).to(dtype).requires_grad_(),
        "g": torch.randn(B, U + 1, H, generator=generator).to(dtype).requires_grad_(),
        "weight": (torch.randn(V, H, generator=generator) / H**0.5).to(dtype).requires_grad_(),
        "bias": torch.zeros(V, dtype=dtype).requires_grad_(),
        "targets": torch.randint(1, V, (B, U), generator=generator),
        "logit_lengths": frames,
        "target_lengths": torch.randint(U // 2, U + 1, (B,), generator=generator),
    }


def calls(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, dict[str, Callable[[bool], None]]]:
    """Returns what is timed: by what it computes, ours and eager."""
    x = inputs(shape, dtype)
    f, g, weight, bias, targets, *lengths = x.values()
    with torch.no_grad():
        logits = F.linear(transducer_joint(f, g), weight, bias)
    logits.requires_grad_()

    def whole(joint: Tensor, loss: Callable[..., Tensor]) -> Tensor:
        return loss(F.linear(joint, weight, bias), targets, *lengths)

    def run(compute: Callable[[], Tensor], of: list[Tensor]) -> Callable[[bool], None]:
        def call(has_backward: bool) -> None:
            with torch.set_grad_enabled(has_backward):
                result = compute()
            if has_backward:
                torch.autograd.grad(result.sum(), of)

        return call

    parts = [f, g, weight, bias]
    return {
        "loss": {
            "ours": run(lambda: transducer_loss(logits, targets, *lengths), [logits]),
            "eager": run(lambda: eager_loss(logits, targets, *lengths), [logits]),
        },
        "joint": {
            "ours": run(lambda: transducer_joint(f, g), [f, g]),
            "eager": run(lambda: torch.relu(f[:, :, None] + g[:, None]), [f, g]),
        },
        "joint, layer and loss": {
            "fused": run(lambda: transducer_loss_fused(f, g, weight, bias, targets, *lengths), parts),
            "not fused": run(lambda: whole(transducer_joint(f, g, *lengths), transducer_loss), parts),
            "eager": run(lambda: whole(torch.relu(f[:, :, None] + g[:, None]), eager_loss), parts),
        },
    }


def best_times(found: dict[str, Callable[[bool], None]], has_backward: bool, rounds: int) -> dict[str, float]:
    """Returns the least of the times of each, in ms; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds + 1):
        for name, call in found.items():
            started = time.perf_counter()
            call(has_backward)
            times[name].append(1e3 * (time.perf_counter() - started))
    return {name: min(each[1:]) for name, each in times.items()}


def peak_of(shape: str, dtype: str, what: str, who: str) -> float:
    """Returns the memory that a step takes beyond its inputs, in MiB."""
    program = [sys.executable, __file__, "--peak", shape, dtype, what, who]
    return json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)


def print_peak(shape: str, dtype: str, what: str, who: str) -> None:
    x = calls(SHAPES[shape], getattr(torch, dtype))[what][who]
    small = calls((1, 2, 1, 4, 4), getattr(torch, dtype))[what][who]
    small(True)  # loads what it needs
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak_resident()
    x(True)
    print(json.dumps((peak_resident() - before) / 1024))


def peak_resident() -> int:
    """Returns the peak of the resident memory of this process, in KiB."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])


def figures(result: dict[str, Any]) -> list[Figure]:
    """Returns the largest case: of the loss, and of joint, layer and loss, in float32."""
    found = []
    for row in result["rows"]:
        if row["v"] != 1024 or row["dtype"] != "float32" or row["what"] == "joint" or row["direction"] == "forward":
            continue
        name, *others = row["ms"]
        figure = f"{row['what']}, {row['shape']}, V = 1024, float32, forward and backward"
        ours = row["ms"][name]
        found.append(Figure(figure, ours, "ms", beside=beside(ours, {other: row["ms"][other] for other in others})))
    (peak,) = result["peaks"]
    others = dict(peak["mib"])
    ours = others.pop("fused")
    figure = f"{peak['what']}, {peak['shape']}, V = 1024, float32, memory of the fused loss"
    return [*found, Figure(figure, ours, "MiB", beside=beside(ours, others))]


def main() -> None:
    rounds = int(sys.argv[1]) if sys.argv[1:] else 7
    torch.set_num_threads(THREADS)
    rows, peaks = [], []
    for shape, sizes in SHAPES.items():
        for dtype in ("float32", "bfloat16"):
            for what, found in calls(sizes, getattr(torch, dtype)).items():
                for has_backward in (False, True):
                    direction = "forward and backward" if has_backward else "forward"
                    ms = best_times(found, has_backward, rounds)
                    rows.append(
                        {"shape": shape, "v": sizes[3], "dtype": dtype, "what": what, "direction": direction, "ms": ms}
                    )
                    print(rows[-1], flush=True)
    shape, what = "4 x 100 x 20", "joint, layer and loss"
    mib = {who: peak_of(shape, "float32", what, who) for who in ("fused", "not fused", "eager")}
    peaks.append({"shape": shape, "dtype": "float32", "what": what, "mib": mib})
    print(peaks[-1], flush=True)
    result = {"rows": rows, "peaks": peaks, "machine": builtins_of(machine_card())}
    write_raw("transducer", result)
    update(__file__, figures(result), result["machine"])


if __name__ == "__main__":
    print_peak(*sys.argv[2:]) if sys.argv[1:2] == ["--peak"] else main()
