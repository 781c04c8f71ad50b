"""The derivative of the logistic function, bound by pybind11."""

import torch  # its libraries must be there before the extension's
from torch.autograd.function import once_differentiable

from pybind_d_sigmoid import _C

__all__ = ["d_sigmoid"]


class DSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return _C.d_sigmoid(z)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (z,) = ctx.saved_tensors
        return _C.d_sigmoid_backward(grad_output, z)


def d_sigmoid(z: torch.Tensor) -> torch.Tensor:
    """Returns s (1 - s) with s = sigmoid(z), elementwise, for float32 and float64 on the CPU."""
    return DSigmoid.apply(z)
