import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator


@operator("examples::scale_shift")
def scale_shift(
    input: Float[Tensor, "*batch n"], scale: Float[Tensor, "n"], shift: float = 0.0
) -> Float[Tensor, "*batch n"]:
    return input * scale + shift


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    input, scale = torch.randn(64, 1000, device=device), torch.randn(1000, device=device)
    torch.testing.assert_close(scale_shift(input, scale, 2.0), input * scale + 2.0)
    print("right")
