"""A C++ source, built when it is imported, behind an autograd.Function."""

from pathlib import Path

import torch
from torch.autograd.function import once_differentiable

from opwright.cpp_extension import load

extension = load("d_sigmoid", [Path(__file__).with_name("d_sigmoid.cpp")])


class DSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return extension.d_sigmoid(z)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (z,) = ctx.saved_tensors
        return extension.d_sigmoid_backward(grad_output, z)


def d_sigmoid(z: torch.Tensor) -> torch.Tensor:
    """Returns s (1 - s) with s = sigmoid(z), elementwise."""
    return DSigmoid.apply(z)


if __name__ == "__main__":
    print("d_sigmoid:", *(f"{value:.4g}" for value in d_sigmoid(torch.tensor([0.0, 2.0, -20.0])).tolist()))
    z = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    s = torch.sigmoid(z)
    torch.testing.assert_close(d_sigmoid(z), s * (1 - s))
    torch.testing.assert_close(d_sigmoid(z.mT), (s * (1 - s)).mT)
    print("gradcheck:", torch.autograd.gradcheck(d_sigmoid, z))
