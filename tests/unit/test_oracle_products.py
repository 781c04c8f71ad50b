"""What the oracle allows a sum of products does not depend on how PyTorch spells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opwright.verify.formulas import Rounding
from opwright.verify.oracle import Expected, expect


def summed_one_by_one(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product as a kernel makes it that adds its terms in order, in float32."""
    total = torch.zeros(x.shape[0], w.shape[0])
    for k in range(x.shape[1]):
        total += x[:, k, None] * w[None, :, k]
    return total + b


def test_linear_allows_what_a_product_and_a_sum_allow() -> None:
    torch.manual_seed(0)
    values = [torch.randn(40, 700), torch.randn(30, 700), torch.randn(30)]
    spellings = {
        "mm, add": lambda v: [v[0] @ v[1].mT + v[2]],
        "addmm": lambda v: [torch.nn.functional.linear(*v)],
        "baddbmm": lambda v: [torch.baddbmm(v[2], v[0][None], v[1].mT[None])[0]],
    }
    allowed = {}
    for name, reference in spellings.items():
        (expected,) = expect(reference, values)
        assert isinstance(expected, Expected)
        expected = expected.after()
        error = (summed_one_by_one(*values).double() - expected.exact).abs()
        assert (error <= expected.allowance).all(), name
        wrong = (expected.exact * (1 + 1e-4) - expected.exact).abs()
        assert (wrong > expected.allowance).float().mean() > 0.8, name  # and no more than it needs
        allowed[name] = expected.allowance.mean().item()
    assert max(allowed.values()) < 2 * min(allowed.values()), allowed


def test_a_step_that_is_a_composition_is_taken_apart_before_it_is_rounded() -> None:
    """The sums in `mm` are rounded term by term. Those in `matmul` are not, so it is taken apart into `mm`."""
    seen = []

    class Recording(Rounding):
        def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
            seen.append(func.overloadpacket)
            return func(*args, **kwargs)

    a, b = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.equal(Recording().__torch_dispatch__(torch.ops.aten.matmul.default, (), (a, b)), a @ b)
    assert torch.ops.aten.mm in seen
    assert torch.ops.aten.matmul not in seen


def test_rounding_imports_no_compiler(run_python: Callable) -> None:
    """A mode that PyTorch keeps from being compiled imports torch._dynamo: seconds, and more for each operator."""
    program = """
import sys, torch
from opwright.verify.formulas import Overflow, oracle_formulas
from opwright.verify.rounding import round_at_random
def compute(values):
    with oracle_formulas():
        return [torch.softmax(values[0], -1)]
def make():
    return [torch.ones(3, dtype=torch.float64)]
for _ in round_at_random(compute, make, 2.0**-24, 2):
    pass
with Overflow(1e30, fill=float("nan")):
    compute(make())
print("torch._dynamo" in sys.modules)
"""
    assert run_python(program).stdout == "False\n"


def test_positions_of_elements_do_not_jump_when_they_are_rounded() -> None:
    """Moved by one rounding, `floor(x) + 1` was the index below: any result was allowed."""
    torch.manual_seed(0)

    def interpolate(v: list[torch.Tensor]) -> list[torch.Tensor]:
        at = v[1] * (v[0].shape[0] - 2)
        below = torch.floor(at)
        low, high = v[0][below.long()], v[0][(below + 1).long()]
        return [low + (high - low) * (at - below)]

    grid = torch.nn.functional.grid_sample
    for reference, values in (
        (interpolate, [torch.randn(100), torch.rand(500)]),
        (lambda v: [grid(*v, align_corners=False)], [torch.randn(2, 3, 9, 8), torch.rand(2, 7, 6, 2)]),
    ):
        (expected,) = expect(reference, values)
        assert isinstance(expected, Expected)
        expected = expected.after()
        right = reference(values)[0].double()
        assert ((right - expected.exact).abs() <= expected.allowance).all()
        wrong = expected.exact * (1 + 1e-3)
        assert ((wrong - expected.exact).abs() > expected.allowance).float().mean() > 0.9
