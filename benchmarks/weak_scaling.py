"""Training with FSDP2 on one GPU and on more, with as many inputs on each: time of a step beside that of one GPU.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/weak_scaling.py

Four LSTM layers of 1,024 units, a linear layer with `bias_gelu`, AdamW; bfloat16, 500 steps of 64 entries for each GPU.
Rank 0 first trains without FSDP while the others wait, then all train together. Medians of 40 training steps. A minute.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from opwright_ops import LSTM, bias_gelu
from summary import Figure, update, write_raw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from opwright.machine import machine_card
from opwright.records import builtins_of

WIDTH, LAYERS, STEPS, BATCH = 1024, 4, 500, 64
ROUNDS, WARM_UP = 40, 10


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = LSTM(WIDTH, WIDTH, LAYERS)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return bias_gelu(self.project(y), self.bias, approximate="tanh")


def step_ms(is_sharded: bool) -> float:
    """Returns the time of a training step in milliseconds."""
    torch.manual_seed(0)
    model = Model().to("cuda", torch.bfloat16)
    if is_sharded:
        # As a whole: with each layer gathered while the one before it computes, steps took 9 % longer.
        fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(STEPS, BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(WARM_UP + ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[WARM_UP:])


def figures(result: dict[str, Any]) -> list[Figure]:
    """Returns the share of one GPU's speed that each of several has."""
    name = f"FSDP2 on {result['gpus']} GPUs: speed of each, one GPU without FSDP is 1"
    return [Figure(name, result["alone_ms"] / result["together_ms"], "of one")]


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    alone_ms = step_ms(is_sharded=False) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    together_ms = step_ms(is_sharded=True)
    if dist.get_rank() == 0:
        card = builtins_of(machine_card(torch.device("cuda", 0)))
        result = {"machine": card, "gpus": dist.get_world_size(), "alone_ms": alone_ms, "together_ms": together_ms}
        print(
            f"one GPU {alone_ms:.3f} ms, together {together_ms:.3f} ms: {alone_ms / together_ms:.3f} of one GPU's speed"
        )
        write_raw("weak_scaling", result)
        update(__file__, figures(result), card)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
