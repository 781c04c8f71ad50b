"""Softmax over the last axis."""

import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator
from opwright_ops.tensors import bytes_of


@operator("opwright_ops::softmax", autocast="float32")
def softmax(input: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """exp(input) over its sum along the last axis.

    Numerics:
        The largest element of each row is subtracted first. 16-bit types are computed in float32.
    """
    return torch.softmax(input, -1)


@softmax.backward
def softmax_backward(grad_output, output):
    return output * (grad_output - (grad_output * output).sum(-1, keepdim=True))


@softmax.cost
def softmax_cost(input):
    return 2 * bytes_of(input), 5 * input.numel()


@softmax_backward.cost
def softmax_backward_cost(grad_output, output):
    return 3 * bytes_of(output), 4 * output.numel()


softmax.sweep(batch=[(1,), (64,), (4096,)], n=[64, 1000, 4096])
