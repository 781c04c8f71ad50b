"""The extension as an operator: the reference says what it computes, cpu.cpp how."""

import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator


@operator("migrate::d_sigmoid")
def d_sigmoid(z: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """s (1 - s) with s = sigmoid(z), elementwise."""
    return torch.sigmoid(z) * torch.sigmoid(-z)


@d_sigmoid.backward
def d_sigmoid_backward(grad_output, z):
    return -grad_output * torch.sigmoid(z) * torch.sigmoid(-z) * torch.tanh(z / 2)
