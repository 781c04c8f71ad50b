"""What a call on distributed tensors costs the host: `opwright_ops.bias_gelu` beside PyTorch's own GELU.

    python benchmarks/distributed_call.py [ROUNDS]

The tensors have two elements on each of two ranks, and need not be moved, so nearly all of a call is overhead. The rule
is chosen and kept before the first sample. Both take turns; one thread. Half a minute. Other ranks are not there: the
process group is PyTorch's fake one.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from opwright_ops import bias_gelu, d_sigmoid
from summary import Figure, beside, update, write_raw
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from opwright.machine import machine_card
from opwright.records import builtins_of

COUNT = 100  # calls of a sample


class BareNode(torch.autograd.Function):
    """The least that a node in Python takes: it records a call of GELU, and has no backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")


def pairs_of() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Returns what is timed by the name of its figure: the operator, then PyTorch's own."""
    mesh = init_device_mesh("cpu", (2,))
    x, b = torch.randn(2, 2), torch.randn(2)
    there = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Replicate()])
    needing = [t.detach().requires_grad_() for t in there]
    return {
        "call, no gradient": (
            lambda: bias_gelu(*there, approximate="tanh"),
            lambda: F.gelu(there[0], approximate="tanh"),
        ),
        "call of one tensor, no gradient": (lambda: d_sigmoid(there[0]), lambda: F.gelu(there[0], approximate="tanh")),
        "call that records a gradient": (
            lambda: bias_gelu(*needing, approximate="tanh"),
            lambda: F.gelu(needing[0], approximate="tanh"),
        ),
        "call that records a gradient, beside add and GELU": (
            lambda: bias_gelu(*needing, approximate="tanh"),
            lambda: F.gelu(needing[0] + needing[1], approximate="tanh"),
        ),
        "call that records a gradient, beside GELU in a bare autograd.Function": (
            lambda: bias_gelu(*needing, approximate="tanh"),
            lambda: BareNode.apply(needing[0]),
        ),
        "call and backward, beside add and GELU": (
            lambda: bias_gelu(*needing, approximate="tanh").backward(there[0]),
            lambda: F.gelu(needing[0] + needing[1], approximate="tanh").backward(there[0]),
        ),
        "plain tensors, no gradient": (
            lambda: bias_gelu(x, b, approximate="tanh"),
            lambda: F.gelu(x, approximate="tanh"),
        ),
    }


def sample_us(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    for _ in range(COUNT):
        call()
    return 1e6 * (time.perf_counter() - started) / COUNT


def compare(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, Any]:
    for _ in range(20):
        ours(), theirs()
    times: dict[str, list[float]] = {"operator": [], "pytorch": []}
    for i in range(rounds):
        turns = [("operator", ours), ("pytorch", theirs)]
        for name, call in turns if i % 2 else reversed(turns):
            times[name].append(sample_us(call))
    return {
        name: {"best_us": min(each), "median_us": statistics.median(each), "samples_us": each}
        for name, each in times.items()
    }


def figures(result: dict[str, Any]) -> list[Figure]:
    """Returns the best time of each call."""
    found = []
    for name, times in result["calls"].items():
        ours, theirs = times["operator"]["best_us"], times["pytorch"]["best_us"]
        found.append(Figure(name, ours, "us", ours, times["operator"]["median_us"], beside(ours, {"pytorch": theirs})))
    return found


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2)
    calls = {name: compare(*pair, rounds) for name, pair in pairs_of().items()}
    dist.destroy_process_group()
    for name, times in calls.items():
        ours, theirs = times["operator"]["best_us"], times["pytorch"]["best_us"]
        print(f"{name:70} operator {ours:7.2f} us   PyTorch {theirs:7.2f} us   {ours / theirs:.2f}x")
    result = {"machine": builtins_of(machine_card()), "rounds": rounds, "calls": calls}
    write_raw("distributed_call", result)
    update(__file__, figures(result), result["machine"])


if __name__ == "__main__":
    main()
