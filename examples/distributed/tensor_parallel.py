"""A feed-forward block whose hidden features are spread over the processes, with `parallelize_module`."""

import sys

import torch
import torch.distributed as dist
from opwright_ops import bias_gelu
from scale_shift import scale_shift
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, HIDDEN = 16, 24


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.bias = nn.Parameter(torch.randn(HIDDEN))
        self.scale = nn.Parameter(torch.randn(HIDDEN))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        hidden = bias_gelu(self.up(x), self.bias)
        return self.down(scale_shift(hidden, self.scale, 0.5))


def spread(block, mesh):
    """The features that one process has of `up` are those that `bias_gelu`, `scale_shift` and `down` get there."""
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    parallelize_module(block, mesh, plan)
    for name in ("bias", "scale"):
        whole = getattr(block, name)
        setattr(block, name, nn.Parameter(distribute_tensor(whole.data, mesh, [Shard(0)])))
    return block


def run(block, x):
    y = block(x)
    y.square().mean().backward()
    return y, [p.grad for p in block.parameters()]


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    block, x = Block().to(device), torch.randn(8, 5, WIDTH).to(device)
    y, gradients = run(block, x)
    block.zero_grad()
    y_spread, gradients_spread = run(spread(block, mesh), x)
    torch.testing.assert_close(y_spread, y)
    for got, wanted in zip(gradients_spread, gradients):
        torch.testing.assert_close(got.full_tensor(), wanted)
    if dist.get_rank() == 0:
        with torch.no_grad():
            hidden = bias_gelu(block.up(x), block.bias)
        print(
            f"hidden: {list(hidden.shape)} in all, {list(hidden.to_local().shape)} on each process, {hidden.placements}"
        )
        print("result and gradients are those of one process")
    dist.destroy_process_group()
