"""PyTorch's own two ways to make a Triton kernel an operator, for benchmarks/triton_launch.py."""

import torch

# No `from __future__ import annotations`: torch.library reads the types themselves.


def make_peers(kernel):
    """Returns an add of 4095 elements through triton_op and through custom_op; both allocate their output."""

    @torch.library.triton_op("bench::add_triton_op", mutates_args=())
    def add_triton_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(kernel)[(4,)](x, y, out, 4095, 1024)
        return out

    @torch.library.custom_op("bench::add_custom_op", mutates_args=())
    def add_custom_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel[(4,)](x, y, out, 4095, 1024)
        return out

    return add_triton_op, add_custom_op
