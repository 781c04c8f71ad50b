"""opwright_ops.LSTM beside nn.LSTM (cuDNN) on a GPU: microseconds per time step, the product for the inputs included.

    python benchmarks/lstm_cuda.py

Both as they are called, and forward from a CUDA graph, where the host's time does not count. Minima of rounds in which
the two take turns. TF32 as PyTorch has it by default: cuDNN may use it, products may not. Writes
results/lstm_cuda.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from opwright_ops import LSTM
from torch import nn

from opwright.records import builtins_of
from opwright.verify.machine import machine_card

RESULT = Path(__file__).resolve().parent / "results" / "lstm_cuda.json"
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
# dtype, H, B, T, options of the modules
CASES = [
    (bf16, 512, 1, 256, {}), (bf16, 512, 12, 256, {}), (bf16, 768, 16, 1024, {}), (bf16, 1024, 32, 1024, {}),
    (bf16, 1536, 16, 256, {}), (bf16, 2048, 16, 256, {}), (bf16, 2048, 128, 256, {}), (f16, 768, 16, 1024, {}),
    (f16, 1024, 32, 1024, {}), (f32, 1024, 16, 256, {}), (bf16, 520, 32, 256, {}),
    (bf16, 512, 32, 256, {"bidirectional": True}), (bf16, 512, 32, 256, {"num_layers": 2}),
    (bf16, 1024, 32, 256, {"proj_size": 512}),
]  # fmt: skip


def fastest(calls: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Returns the milliseconds of the fastest call of each."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            best[name] = min(best[name], start.elapsed_time(end))
    return best


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(dtype: torch.dtype, H: int, B: int, T: int, options: dict[str, object]) -> dict[str, object]:
    theirs = nn.LSTM(H, H, device="cuda", dtype=dtype, **options)
    modules = {"nn.LSTM": theirs, "opwright": LSTM.from_torch(theirs)}
    x = torch.randn(T, B, H, device="cuda", dtype=dtype)
    with torch.no_grad():
        forward = {name: (lambda module=module: module(x)) for name, module in modules.items()}
        plain, graphs = fastest(forward), fastest({name: graph_of(call) for name, call in forward.items()})
    leaf = x.clone().requires_grad_()
    grad = torch.randn_like(modules["opwright"](x)[0])
    both = {
        name: (lambda module=module: torch.autograd.backward(module(leaf)[0], grad)) for name, module in modules.items()
    }
    row: dict[str, object] = {"dtype": str(dtype).removeprefix("torch."), "H": H, "B": B, "T": T, **options}
    for title, times in (("forward", plain), ("forward in a graph", graphs), ("forward and backward", fastest(both))):
        row[f"{title}, us per step"] = {name: round(1e3 * value / T, 2) for name, value in times.items()}
    return row


def main() -> None:
    rows = []
    for case in CASES:
        rows.append(measure(*case))
        print(json.dumps(rows[-1]), flush=True)
    RESULT.write_text(json.dumps({"machine": builtins_of(machine_card()), "cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
