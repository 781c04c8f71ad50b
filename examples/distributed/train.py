"""Trains a small model with FSDP2 on any number of processes, and goes on from a checkpoint of any other number."""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from opwright_ops import LSTM, bias_gelu
from scale_shift import scale_shift
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH, STEPS, WIDTH = 8, 5, 16


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = LSTM(WIDTH, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y, _ = self.lstm(x)
        return scale_shift(bias_gelu(self.project(y), self.bias), self.scale, -0.1)


def train(first, last, folder, device):
    torch.manual_seed(0)
    model = Model().to(device)
    rank, ranks = 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        fully_shard(model, mesh=init_device_mesh(device, (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if first:
        weights, moments = get_state_dict(model, optimizer)
        checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for step in range(first, last):
        x = torch.randn(STEPS, BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        mine = x.chunk(ranks, 1)[rank].to(device)  # FSDP takes the mean over the ranks
        loss = (model(mine) - mine.roll(1, 0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if folder and not first:
        weights, moments = get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=4)
    parser.add_argument("--folder", default="")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        if options.device == "cuda":
            torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    train(options.first, options.last, options.folder, options.device)
    if dist.is_initialized():
        dist.destroy_process_group()
