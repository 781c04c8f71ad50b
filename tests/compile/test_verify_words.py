"""What verify says: outputs and arguments by their names, the cause first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opwright
from opwright import Mutates, operator

pytestmark = pytest.mark.compiler

torch.manual_seed(0)


def said_of(target: Any, reference: Callable[..., Any] | None = None, samples: Any = None, **how: Any) -> dict[str, str]:
    """Returns what each failed check says."""
    record = opwright.verify(target, reference, samples, quick=True, devices=["cpu"], **how)
    return {failure.check: failure.message for failure in record.failures}


# --- names -------------------------------------------------------------------------------------------------


def test_a_mutated_argument_has_its_name() -> None:
    @operator(
        "verify_words::momentum",
        cpu="""
        #include <opwright/kernel.h>
        template <typename T>
        void momentum(opwright::View<T, 1> weight, opwright::View<const T, 1> grad, opwright::View<T, 1> buffer) {
          for (int64_t i = 0; i < weight.size(0); ++i) {
            buffer(i) = T(T(0.91) * buffer(i) + grad(i));
            weight(i) = T(weight(i) - grad(i));
          }
        }
        OPWRIGHT_KERNEL(momentum, float, double)
        """,
    )
    def momentum(weight: Mutates[Float[Tensor, "*s"]], grad: Float[Tensor, "*s"], buffer: Mutates[Float[Tensor, "*s"]]) -> None:
        buffer.mul_(0.9).add_(grad)
        weight.sub_(grad)

    assert said_of(momentum, checks=["numerics"])["numerics"].startswith("`buffer`: ")


def test_a_mutated_argument_of_a_callable_has_its_name() -> None:
    def wrong(weight: Tensor, state: Tensor) -> None:
        state.add_(1.01 * weight)

    def right(weight: Tensor, state: Tensor) -> None:
        state.add_(weight)

    said = said_of(wrong, right, [(torch.randn(5), torch.randn(5))], checks=["numerics"])
    assert said["numerics"].startswith("`state`: ")


class Loss(NamedTuple):
    loss: Tensor
    parts: list[Tensor]


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda x, y: x + y, "`output`"),
        (lambda x, y: (x, x + y), "`output[1]`"),
        (lambda x, y: {"aux": x, "loss": x + y}, "`output['loss']`"),
        (lambda x, y: Loss(x, [x, x + y]), "`output.parts[1]`"),
    ],
)
def test_a_result_is_named_as_one_would_write_it(wrap: Callable[..., Any], name: str) -> None:
    samples = [(torch.randn(4, 5), torch.randn(4, 5))]
    said = said_of(lambda x, y: wrap(x, 1.001 * y), lambda x, y: wrap(x, y), samples, checks=["numerics"])
    assert said["numerics"].startswith(f"{name}: "), said


def test_a_gradient_has_the_name_of_its_argument() -> None:
    @operator("verify_words::shifted")
    def shifted(input: Float[Tensor, "n"], bias: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return input + bias

    @shifted.backward
    def shifted_backward(grad_output):
        return grad_output, 1.01 * grad_output

    said = said_of(shifted, checks=["gradients", "gradient numerics"])
    assert said["gradient numerics"].startswith("gradient of `bias`: ")
    assert said["gradients"].startswith("the gradient of `output` by `bias` is wrong: ")

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, input, scale):
            return input + 2 * scale

        @staticmethod
        def backward(ctx, grad):
            return grad, 2.1 * grad

    samples = [(torch.randn(4), torch.randn(4))]
    said = said_of(Doubled.apply, lambda input, scale: input + 2 * scale, samples, checks=["gradient numerics"])
    assert said["gradient numerics"].startswith("gradient of `scale`: ")


def test_a_parameter_of_a_module_has_its_path() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, by: float = 1.0) -> None:
            super().__init__()
            self.inner, self.by = torch.nn.Linear(5, 3), by

        def forward(self, x: Tensor) -> Tensor:
            if self.by != 1 and torch.is_grad_enabled():
                return torch.nn.functional.linear(x, self.inner.weight, self.inner.bias.detach())
            return self.inner(x)

    said = said_of(Layer(2.0), Layer(), [(torch.randn(4, 5),)], checks=["gradient numerics"])
    assert said["gradient numerics"].startswith("gradient of `inner.bias`: ")


def test_what_shares_memory_has_names() -> None:
    said = said_of(lambda x, y: y, lambda x, y: y.clone(), [(torch.randn(4), torch.randn(4))], checks=["numerics"])
    assert said["numerics"].startswith("`output` shares memory with `y`")
