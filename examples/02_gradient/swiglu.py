import torch
from jaxtyping import Float
from torch import Tensor

from opwright import operator

KERNEL = """
#include <opwright/kernel.h>
#include <opwright/math.h>
using opwright::View;

template <typename T>
void swiglu(View<const T, 1> gate, View<const T, 1> value, View<T, 1> output) {
  for (int64_t i = 0; i < gate.size(0); ++i)
    output(i) = gate(i) * opwright::sigmoid(gate(i)) * value(i);
}
OPWRIGHT_KERNEL(swiglu, float, double)

template <typename T>
void swiglu_backward(View<const T, 1> grad_output, View<const T, 1> gate, View<const T, 1> value,
                     View<T, 1> grad_gate, View<T, 1> grad_value) {
  for (int64_t i = 0; i < gate.size(0); ++i) {
    const T s = opwright::sigmoid(gate(i)), rest = opwright::sigmoid(-gate(i));
    grad_gate(i) = grad_output(i) * value(i) * s * (1 + gate(i) * rest);
    grad_value(i) = grad_output(i) * gate(i) * s;
  }
}
OPWRIGHT_KERNEL(swiglu_backward, float, double)
"""


@operator("examples::swiglu", cpu=KERNEL)
def swiglu(gate: Float[Tensor, "*s"], value: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return gate * torch.sigmoid(gate) * value


@swiglu.backward
def swiglu_backward(grad_output, gate, value):
    s, rest = torch.sigmoid(gate), torch.sigmoid(-gate)
    return grad_output * value * s * (1 + gate * rest), grad_output * gate * s


inputs = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
print("gradient:", torch.autograd.gradcheck(swiglu, inputs))
print("gradient of the gradient:", torch.autograd.gradgradcheck(swiglu, inputs))
