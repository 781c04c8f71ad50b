"""What verify says: outputs and arguments by their names, the cause first."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opwright
from opwright import Mutates, operator
from opwright.verify.target import make_target

pytestmark = pytest.mark.compiler

torch.manual_seed(0)


def said_of(
    target: Any, reference: Callable[..., Any] | None = None, samples: Any = None, **how: Any
) -> dict[str, str]:
    """Returns what each failed check says."""
    record = opwright.verify(target, reference, samples, quick=True, devices=["cpu"], **how)
    return {failure.check: failure.message for failure in record.failures}


# --- names -------------------------------------------------------------------------------------------------


def test_a_mutated_argument_has_its_name() -> None:
    @operator("verify_words::momentum", cpu="""
        #include <opwright/kernel.h>
        template <typename T>
        void momentum(opwright::View<T, 1> weight, opwright::View<const T, 1> grad, opwright::View<T, 1> buffer) {
          for (int64_t i = 0; i < weight.size(0); ++i) {
            buffer(i) = T(T(0.91) * buffer(i) + grad(i));
            weight(i) = T(weight(i) - grad(i));
          }
        }
        OPWRIGHT_KERNEL(momentum, float, double)
        """)  # fmt: skip
    def momentum(
        weight: Mutates[Float[Tensor, "*s"]], grad: Float[Tensor, "*s"], buffer: Mutates[Float[Tensor, "*s"]]
    ) -> None:
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


# --- the cause comes first ---------------------------------------------------------------------------------


def first_failure(candidate: Callable[..., Any], reference: Callable[..., Any]) -> tuple[str, str]:
    record = opwright.verify(candidate, reference, [(torch.randn(5, 33),)], quick=True)
    return record.failures[0].check, record.failures[0].message


def test_an_order_that_changes_from_call_to_call_reads_nothing_outside() -> None:
    turn = itertools.count()
    said = said_of(
        lambda x: (x if next(turn) % 2 else x.flip(-1)).sum(-1),
        lambda x: x.sum(-1),
        [(torch.randn(5, 33),)],
        checks=["determinism", "guard bands", "numerics", "fresh data"],
    )
    assert list(said) == ["determinism"]
    assert said["determinism"].startswith("two calls with the same inputs give different results; ")


def test_an_output_in_memory_of_its_own_is_missed_by_name() -> None:
    kept: dict = {}

    def doubled(x: Tensor) -> Tensor:
        return torch.mul(x, 2, out=kept.setdefault((x.shape, x.dtype), torch.empty(x.shape, dtype=x.dtype)))

    check, message = first_failure(doubled, lambda x: x * 2)
    assert (check, message.partition(" (")[0]) == (
        "determinism",
        "its outputs lie in memory that the next call writes into",
    )


def test_a_cache_is_the_cause_of_wrong_values() -> None:
    by_address: dict = {}
    check, message = first_failure(
        lambda x: by_address.setdefault((x.data_ptr(), x.shape), x * 2).clone(), lambda x: x * 2
    )
    assert check == "determinism"
    # The allocator decides which of the two calls gets memory that another input had.
    assert "it goes by their address" in message or "it keeps something from call to call" in message
    by_ends: dict = {}

    def cumulated(x: Tensor) -> Tensor:
        key = (x.shape, x.dtype, *x.flatten()[:1].tolist(), round(float(x.sum()), 2))  # in any order of the sum
        return by_ends.setdefault(key, x.cumsum(-1)).clone()

    check, message = first_failure(cumulated, lambda x: x.cumsum(-1))
    assert check == "fresh data"
    assert message.startswith("the same memory with two elements in the middle exchanged: ")


def test_a_backward_that_changes_from_call_to_call_is_the_cause_of_wrong_gradients(ns) -> None:
    """PyTorch's own words for the gradient were "backward not multiplied by grad_output"."""
    calls = itertools.count()

    @operator(f"{ns}::twice")
    def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 2 * x

    @twice.backward
    def twice_backward(grad_output):
        return 2 * grad_output + next(calls)  # as from memory that nothing has set to zero

    record = opwright.verify(twice, checks=["determinism", "gradients"], quick=True)
    assert [failure.check for failure in record.failures] == ["backward: determinism", "gradients"]


def test_a_wrong_gradient_is_told_of_the_part_that_is_shown(ns) -> None:
    """The numbers were those of a smaller part, and the case and the elements those of the whole."""

    @operator(f"{ns}::doubled")
    def doubled(x: Float[Tensor, "m n"]) -> Float[Tensor, "m n"]:
        return 2 * x

    @doubled.backward
    def doubled_backward(grad_output):
        return 3 * grad_output

    (failure,) = opwright.verify(doubled, checks=["gradients"], quick=True).failures
    assert failure.named_case == "x=f64[1, 1] (tiny), a part of x=f64[3, 2] (tiny)"
    assert "when element 0 of `x` changes" in failure.message
    assert failure.numbers.startswith("x = [[")


def test_what_reads_outside_is_said_to() -> None:
    def reads(x: Tensor) -> Tensor:
        behind = x.storage_offset() + x.numel()
        if not x.is_contiguous() or x.untyped_storage().nbytes() < (behind + 1) * x.element_size():
            return x * 2
        result = x * 2
        result.view(-1)[-1:] += 0 * x.as_strided((1,), (1,), behind)
        return result

    check, message = first_failure(reads, lambda x: x * 2)
    assert (check, message.partition(":")[2].partition(" (")[0]) == ("guard bands", " it reads outside of them")


# --- checks that do not depend on the dtype ----------------------------------------------------------------


def test_samples_without_float32_are_enough_for_what_pytorch_expects() -> None:
    @operator("verify_words::weighted")
    def weighted(x: Float[Tensor, "*s"], w: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x * w

    @weighted.backward
    def weighted_backward(grad_output, x, w):
        return grad_output * w, grad_output * x

    @weighted.samples
    def samples():
        yield torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16()
        yield torch.randn(3, 4).half(), torch.randn(3, 4).half()

    names = ["refusals", "vmap", "autocast", "opcheck", "compile", "export", "threads"]
    record = opwright.verify(weighted, quick=True, devices=["cpu"], checks=names)
    assert record.failures == []
    assert {check.name: check.outcome for check in record.checks} == {
        prefix + name: "passed" for prefix in ("", "backward: ") for name in names
    }


def test_a_full_sweep_has_the_kinds_of_the_default_in_every_dtype_and_layout() -> None:
    @operator("verify_words::shifted_by")
    def shifted_by(x: Float[Tensor, "*s n"], w: Float[Tensor, "n"], *, by: float = 1.0) -> Float[Tensor, "*s n"]:
        return x * w + by

    kinds = {
        effort: {(case.dtype, case.label) for case in make_target(shifted_by, None, None, effort).cases()}
        for effort in ("default", "full")
    }
    assert kinds["default"] < kinds["full"]
    more = {label for _, label in kinds["full"]} - {label for _, label in kinds["default"]}
    # "every value" has the sizes of "aligned".
    assert all(label.startswith(("large, ", "only ", "aligned", "mixed")) for label in more), more
    assert (torch.float16, "every value") in kinds["default"]


def test_the_numbers_of_a_small_input_are_shown() -> None:
    def reciprocal(x: Tensor) -> Tensor:
        return torch.where(x == 0, 0, 1 / x)

    sample = torch.tensor([[0.5, 0.25, 0.0], [2.0, 4.0, 8.0]])
    failure = opwright.verify(reciprocal, torch.reciprocal, [(sample,)], checks=["numerics"], expand=False).failures[0]
    assert failure.numbers == "x = [[0]]"
    assert ("inputs", "x = [[0]]") in failure.rows

    def halves(x: Tensor) -> Tensor:
        return x / 2 if x.shape[1] < 9 else x

    wide = opwright.verify(halves, lambda x: x / 2, [(torch.ones(1, 9),)], checks=["numerics"], expand=False).failures[
        0
    ]
    assert not wide.numbers


def test_a_reference_that_calls_autograd_is_told_to_write_the_derivative_out() -> None:
    @operator("verify_words::force")
    def force(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            return torch.autograd.grad(z.pow(4).sum(), z)[0]

    said = said_of(force, checks=["outputs written"])
    assert (
        "operators run below autograd, which records nothing there; write the derivative out" in said["outputs written"]
    )
