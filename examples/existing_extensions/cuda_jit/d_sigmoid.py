"""A CUDA source, built at the first call, behind an autograd.Function."""

import functools
from pathlib import Path

import torch
from torch.autograd.function import once_differentiable

from opwright.cpp_extension import load


@functools.cache
def extension():
    folder = Path(__file__).parent
    return load("d_sigmoid_cuda", [folder / "bindings.cpp", folder / "d_sigmoid.cu"])


class DSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return extension().d_sigmoid(z)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (z,) = ctx.saved_tensors
        return extension().d_sigmoid_backward(grad_output, z)


def d_sigmoid(z: torch.Tensor) -> torch.Tensor:
    """Returns s (1 - s) with s = sigmoid(z), elementwise."""
    return DSigmoid.apply(z)


def check() -> None:
    z = torch.tensor([0.0, 2.0, -20.0], device="cuda")
    print("d_sigmoid:", *(f"{value:.4g}" for value in d_sigmoid(z).tolist()))
    z = torch.randn(5, 7, dtype=torch.float64, device="cuda", requires_grad=True)
    s = torch.sigmoid(z)
    torch.testing.assert_close(d_sigmoid(z), s * (1 - s))
    torch.testing.assert_close(d_sigmoid(z.mT), (s * (1 - s)).mT)
    for dtype in (torch.float16, torch.bfloat16):  # half an ulp of the result: computed in float32
        z16 = torch.randn(3_000_001, device="cuda").to(dtype)
        s = torch.sigmoid(z16.double())
        torch.testing.assert_close(d_sigmoid(z16), (s * (1 - s)).to(dtype))
    assert d_sigmoid(z[:0]).shape == (0, 7)
    print("gradcheck:", torch.autograd.gradcheck(d_sigmoid, z))


if __name__ == "__main__":
    if torch.cuda.is_available():
        check()
    else:
        print("skipped: there is no GPU, or this torch has no CUDA")
