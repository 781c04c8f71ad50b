"""Bias and GELU in one pass."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from opwright import operator
from opwright_ops.tensors import bytes_of

Approximate = Literal["none", "tanh", "quick"]


# Beyond these the slope is 0 or 1: exp(-v) is below the numbers of float64.
_SATURATED = {"tanh": 30.0, "quick": 500.0}


def _exponent(x: Tensor, approximate: str) -> tuple[Tensor, Tensor | float]:
    """Returns v with gelu(x) = x * sigmoid(v), and dv/dx, for the two forms that have one."""
    if approximate == "quick":
        return 1.702 * x, 1.702
    a, c = math.sqrt(8 / math.pi), 0.044715
    return a * x * (1 + c * x * x), a * (1 + 3 * c * x * x)


@operator("opwright_ops::bias_gelu")
def bias_gelu(
    input: Float[Tensor, "*batch n"],
    bias: Float[Tensor, "n"],
    *,
    approximate: Approximate = "none",
) -> Float[Tensor, "*batch n"]:
    """GELU(input + bias) in one pass over the input.

    Args:
        approximate: "none" is x * Phi(x); "tanh" the usual approximation; "quick" x * sigmoid(1.702 x).

    Numerics:
        "tanh" is x * sigmoid(2u), "none" is x * erfc(-x / sqrt(2)) / 2: neither cancels in the negative
        tail, where 1 + tanh(u) and 1 + erf do. gelu(-inf) is 0, gelu(inf) is inf. 16-bit types are
        computed in float32, and the sum input + bias is not rounded to 16 bits.
    """
    x = input + bias
    if approximate == "none":
        y = 0.5 * x * torch.erfc(-x / math.sqrt(2))
    else:
        v, _ = _exponent(x, approximate)
        y = x * torch.sigmoid(v)
    # At -inf the product above is -inf * 0.
    return torch.where(x == -math.inf, torch.zeros_like(x), y)


@bias_gelu.backward
def bias_gelu_backward(grad_output, input, bias, *, approximate="none"):
    x = input + bias
    if approximate == "none":
        # Phi(x) + x * phi(x)
        slope = 0.5 * torch.erfc(-x / math.sqrt(2)) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    else:
        # s + x s (1 - s) v', with s = sigmoid(v) and 1 - s = sigmoid(-v). Beyond the limit s is 0 or 1, in
        # float64 too; there v' would be infinite, and the second term infinity times 0.
        x = x.clamp(-_SATURATED[approximate], _SATURATED[approximate])
        v, dv = _exponent(x, approximate)
        s = torch.sigmoid(v)
        slope = s + x * s * torch.sigmoid(-v) * dv
    slope = torch.where(torch.isinf(x), (x > 0).to(x.dtype), slope)
    grad_input = grad_output * slope
    rows = grad_input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    return grad_input, rows.sum(0)


# Operations per element of the formulas of <opwright/math.h>, with a fused multiply-add as two: the sum, the
# exponent, 2^t by a polynomial of degree 6, the quotient.
_FORWARD_FLOP = {"tanh": 24, "none": 46, "quick": 20}
_BACKWARD_FLOP = {"tanh": 36, "none": 50, "quick": 30}


@bias_gelu.cost
def bias_gelu_cost(input, bias, *, approximate="none"):
    return 2 * bytes_of(input) + bytes_of(bias), _FORWARD_FLOP[approximate] * input.numel()


@bias_gelu_backward.cost
def bias_gelu_backward_cost(grad_output, input, bias, *, approximate="none"):
    return 3 * bytes_of(input) + 2 * bytes_of(bias), _BACKWARD_FLOP[approximate] * input.numel()


@bias_gelu.baseline
def bias_gelu_in_pytorch(input, bias, *, approximate="none"):
    x = input + bias
    return x * torch.sigmoid(1.702 * x) if approximate == "quick" else F.gelu(x, approximate=approximate)


bias_gelu.sweep(batch=[(1,), (16,), (512,), (4096,)], n=[4096])
