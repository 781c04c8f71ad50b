"""Training with FSDP2 on one GPU and on more, with as many inputs on each: time of a step beside that of one GPU.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/weak_scaling.py

Four LSTM layers of 1,024 units, a linear layer with `bias_gelu`, AdamW; bfloat16, 500 steps of 64 entries for each GPU.
Beside it the same model of PyTorch's own operators. Rank 0 first trains without FSDP while the others wait, then all
train together. A training step is timed in two ways: in blocks of ten, as in training, where the host prepares one
step while the GPU computes another; and alone, with the GPU idle before it. Medians; two minutes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from opwright_ops import LSTM, bias_gelu
from summary import Figure, update, write_raw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from opwright.machine import machine_card
from opwright.records import builtins_of

WIDTH, LAYERS, STEPS, BATCH = 1024, 4, 500, 64
BLOCK, BLOCKS, WARM_UP = 10, 8, 10


class Model(nn.Module):
    def __init__(self, lstm: type[nn.Module], gelu: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.lstm = lstm(WIDTH, WIDTH, LAYERS)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.gelu(self.project(y), self.bias)


MODELS = {
    "opwright_ops": partial(Model, LSTM, partial(bias_gelu, approximate="tanh")),
    "PyTorch": partial(Model, nn.LSTM, lambda x, bias: F.gelu(x + bias, approximate="tanh")),
}


def time_steps(make: Callable[[], nn.Module], is_sharded: bool) -> dict[str, float]:
    """Returns the time of a training step in milliseconds, in blocks and alone."""
    torch.manual_seed(0)
    model = make().to("cuda", torch.bfloat16)
    if is_sharded:
        # As a whole: with each layer gathered while the one before it computes, steps took 9 % longer.
        fully_shard(model, mesh=init_device_mesh("cuda", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(STEPS, BATCH, WIDTH, device="cuda", dtype=torch.bfloat16)

    def time_block(count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started) / count

    time_block(WARM_UP)
    return {
        "in blocks": statistics.median(time_block(BLOCK) for _ in range(BLOCKS)),
        "alone": statistics.median(time_block(1) for _ in range(BLOCK * BLOCKS // 2)),
    }


def figures(result: dict[str, Any]) -> list[Figure]:
    """Returns the share of one GPU's speed that each of several has in training."""
    return [
        Figure(f"FSDP2 on {result['gpus']} GPUs, {model}: speed of each, one GPU is 1", shares["in blocks"], "of one")
        for model, shares in result["shares"].items()
    ]


def main() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    is_first = dist.get_rank() == 0
    card = builtins_of(machine_card(torch.device("cuda", 0)))
    result: dict[str, Any] = {"machine": card, "gpus": dist.get_world_size(), "shares": {}, "ms": {}}
    for name, make in MODELS.items():
        one = time_steps(make, is_sharded=False) if is_first else {}
        dist.barrier()
        several = time_steps(make, is_sharded=True)
        if is_first:
            result["ms"][name] = {"one GPU": one, "several": several}
            result["shares"][name] = {way: one[way] / several[way] for way in one}
            for way, share in result["shares"][name].items():
                print(f"{name:12} steps {way:9}  one GPU {one[way]:.3f} ms, FSDP {several[way]:.3f} ms: {share:.3f}")
    if is_first:
        write_raw("weak_scaling", result)
        update(__file__, figures(result), card)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
