import torch
from jaxtyping import Float
from torch import Tensor, nn

from opwright import operator

KERNEL = """
#include <opwright/kernel.h>
#include <opwright/math.h>
using opwright::View;

template <typename T>
void gelu_bias(View<const T, 2> input, View<const T, 1> bias, View<T, 2> output) {
  for (int64_t i = 0; i < input.size(0); ++i)
    for (int64_t j = 0; j < input.size(1); ++j)
      output(i, j) = opwright::gelu_none(input(i, j) + bias(j));
}
OPWRIGHT_KERNEL(gelu_bias, float, double)
"""


@operator("examples::gelu_bias", cpu=KERNEL)
def gelu_bias(input: Float[Tensor, "*batch n"], bias: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    return nn.functional.gelu(input + bias)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 16, bias=False), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return gelu_bias(self.linear(x), self.bias)


torch.manual_seed(0)
block, x = Block(), torch.randn(5, 8)
expected = nn.functional.gelu(block.linear(x) + block.bias)
compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
exported = torch.export.export(block, (x,)).module()
for name, function in (("module", block), ("compiled", compiled), ("exported", exported)):
    print(f"{name}: {torch.allclose(function(x), expected, atol=1e-6)}")
biases = torch.randn(3, 16)
batched = torch.vmap(gelu_bias, in_dims=(None, 0))(block.linear(x), biases)
print(f"vmap over biases: {tuple(batched.shape)}")
