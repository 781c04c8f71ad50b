import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from opwright import operator


@operator("examples::bias_silu")
def bias_silu(input: Float[Tensor, "*batch n"], bias: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    """silu(input + bias)"""
    return F.silu(input + bias)


if __name__ == "__main__":
    input, bias = torch.randn(2, 3, 1000), torch.randn(1000)
    torch.testing.assert_close(bias_silu(input, bias), F.silu(input + bias))
    torch.testing.assert_close(bias_silu(input.double(), bias.double()), F.silu(input.double() + bias))
    print("right in float32 and float64")
    try:
        bias_silu(input, bias[1:])
    except ValueError as error:
        print(str(error).splitlines()[0])
