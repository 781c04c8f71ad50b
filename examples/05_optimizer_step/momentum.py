import torch
from jaxtyping import Float, Float32
from torch import Tensor

from opwright import Mutates, operator

KERNEL = """
#include <opwright/kernel.h>
using opwright::View;

template <typename T>
void momentum_step(View<T, 1> param, View<const T, 1> grad, View<float, 1> velocity, double lr, double decay) {
  opwright::parallel_for(param.size(0), opwright::grain_of(1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      velocity(i) = float(decay) * velocity(i) + float(grad(i));
      param(i) = T(float(param(i)) - float(lr) * velocity(i));
    }
  });
}
OPWRIGHT_KERNEL(momentum_step, float, opwright::bfloat16)
"""


@operator("examples::momentum_step", cpu=KERNEL, autocast=None)
def momentum_step(
    param: Mutates[Float[Tensor, "*s"]],
    grad: Float[Tensor, "*s"],
    velocity: Mutates[Float32[Tensor, "*s"]],
    lr: float = 0.01,
    decay: float = 0.9,
) -> None:
    velocity.mul_(decay).add_(grad)
    param.copy_(param.float() - lr * velocity)


param = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
velocity = torch.zeros(2)
version = param._version
for step in range(3):
    momentum_step(param, grad=param.clone(), velocity=velocity, lr=0.5)
    print(f"step {step}: {param.tolist()}")
print("autograd was told of each:", param._version - version)
