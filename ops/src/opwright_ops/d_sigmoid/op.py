"""The derivative of the logistic function, as an operator of its own."""

import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator


@operator("opwright_ops::d_sigmoid")
def d_sigmoid(z: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """(1 - s) * s with s = sigmoid(z), elementwise.

    Numerics:
        sigmoid(z) * sigmoid(-z): the same value without the difference 1 - s, which is 0 from z = 17
        on in float32. 16-bit types are computed in float32.
    """
    return torch.sigmoid(z) * torch.sigmoid(-z)


@d_sigmoid.backward
def d_sigmoid_backward(grad_output, z):
    # d/dz s(1 - s) = s(1 - s)(1 - 2s), and 1 - 2s = -tanh(z / 2).
    return -grad_output * torch.sigmoid(z) * torch.sigmoid(-z) * torch.tanh(z / 2)


@d_sigmoid.baseline
def d_sigmoid_in_pytorch(z):
    s = torch.sigmoid(z)
    return (1 - s) * s
