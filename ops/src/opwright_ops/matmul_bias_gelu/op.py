"""A linear layer and its GELU in one kernel."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from opwright import operator

Approximate = Literal["none", "tanh"]


@operator("opwright_ops::matmul_bias_gelu", autocast="lower")
def matmul_bias_gelu(
    input: Float[Tensor, "*batch k"],
    weight: Float[Tensor, "n k"],
    bias: Float[Tensor, "n"],
    *,
    approximate: Approximate = "none",
) -> Float[Tensor, "*batch n"]:
    """GELU(input @ weight.T + bias), with the weight as `nn.Linear` has it.

    Numerics:
        The kernel sums products in float32 and takes the GELU of that sum; only the result is rounded to 16 bits. float32
        uses no TF32. In the reference the sum is PyTorch's, rounded to 16 bits.
    """
    x = F.linear(input, weight, bias)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if approximate == "none":
        y = 0.5 * x * torch.erfc(-x / math.sqrt(2))
    else:
        y = x * torch.sigmoid(math.sqrt(8 / math.pi) * x * (1 + 0.044715 * x * x))
    return torch.where(x == -math.inf, torch.zeros_like(x), y).to(input.dtype)


@matmul_bias_gelu.cost
def matmul_bias_gelu_cost(input, weight, bias, *, approximate="none"):
    rows, (n, k) = input.numel() // max(input.shape[-1], 1), weight.shape
    size = input.element_size()
    return size * (input.numel() + weight.numel() + bias.numel() + rows * n), 2 * rows * n * k


@matmul_bias_gelu.baseline
def matmul_bias_gelu_in_pytorch(input, weight, bias, *, approximate="none"):
    return F.gelu(F.linear(input, weight, bias), approximate=approximate)


matmul_bias_gelu.sweep(batch=[(16,), (512,), (4096,)], n=[4096], k=[1024])
