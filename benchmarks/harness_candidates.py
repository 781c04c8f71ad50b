"""What the harnesses of harnesses.py judge: operators, and mutants of them as a kernel would be.

The mutants are those of `tests/power/mutants.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from opwright.verify.target import Target, make_target

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/power"))
from mutants import UNCHANGED
from wrong_calls import CALLS
from wrong_gradients import GRADIENTS
from wrong_results import RESULTS

Call = Callable[[Sequence[Any]], torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """An operator, and how a harness with inputs of its own gets to call it.

    Attributes:
        parameters: shapes of the arguments after the first, made of its last size: a bias.
        options: the arguments after the tensors.
        known_as: the operator of PyTorch whose inputs are taken: its name in OpInfo, and in BackendBench.
        from_call: the arguments of a call of that operator as arguments of this one.
    """

    name: str
    operator: Any
    target: Target
    parameters: int
    options: tuple[Any, ...]
    known_as: tuple[str, str]
    from_call: Callable[..., list[Any]]

    def right(self, values: Sequence[Any]) -> torch.Tensor:
        return self.target.call(values)[0]

    def reference(self, values: Sequence[Any]) -> torch.Tensor:
        return self.target.reference(values)[0]

    def values(self, x: torch.Tensor, *parameters: torch.Tensor) -> list[Any]:
        return [x, *parameters, *self.options]

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """Returns tensors of standard normal numbers for a call."""
        shapes = [shape, *[shape[-1:]] * self.parameters]
        return [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]


def problems() -> list[Problem]:
    """Returns the operators of the comparison."""
    from opwright_ops import bias_gelu, d_sigmoid, softmax

    def gelu_call(x: torch.Tensor, approximate: str = "none") -> list[Any]:
        x = x if x.ndim else x[None]
        bias = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return [x, bias.to(x.dtype), approximate]

    def softmax_call(x: torch.Tensor, dim: int = -1, *rest: Any, **options: Any) -> list[Any]:
        return [x.movedim(dim, -1) if x.ndim else x[None]]

    rows = [
        (bias_gelu, 1, ("tanh",), ("nn.functional.gelu", "gelu.default"), gelu_call),
        (d_sigmoid, 0, (), ("sigmoid", "sigmoid.default"), lambda x: [x]),
        (softmax, 0, (), ("softmax", "_softmax.default"), softmax_call),
    ]
    found = []
    for operator, *rest in rows:
        target = make_target(operator, None, None, "default")
        found.append(Problem(operator.__name__, operator, replace(target, memo={}), *rest))
    return found


@dataclass(frozen=True)
class Candidate:
    """A mutant as a kernel would be: its forward, and the same with a backward.

    Where the forward is wrong, the backward is that of the operator itself. A wrong backward has no derivative of its
    own, whatever else is wrong with it, so none is asked for where that is not what the kind is about.
    """

    problem: Problem
    forward: Call
    with_gradient: Call
    has_second_gradient: bool = True
    resource: str = "memory leaks"  # of Opwright's checks of these those that are asked, as `mutants.py` does


def candidates_of(problem: Problem) -> Iterator[tuple[str, str, Callable[[], Candidate]]]:
    """Yields the name of each kind, why there is no such mutant, and what makes one anew."""
    yield UNCHANGED, "", lambda: Candidate(problem, problem.right, problem.right)
    for kind in (*RESULTS, *CALLS):

        def wrong_forward(kind: Any = kind) -> Candidate:
            made = kind.make(problem.target)

            def forward(values: Sequence[Any]) -> torch.Tensor:
                return made(list(values))[0]

            def recorded(values: Sequence[Any]) -> torch.Tensor:
                return _Recorded.apply(problem.right, forward, *values)

            return Candidate(problem, forward, recorded, resource=kind.resource)

        yield kind.name, kind.needs(problem.target), wrong_forward
    for kind in GRADIENTS:

        def wrong_gradient(kind: Any = kind) -> Candidate:
            made = kind.make(problem.target)

            def call(values: Sequence[Any]) -> torch.Tensor:
                return made(list(values))[0]

            return Candidate(problem, call, call, kind.name == "gradient: its own derivative lost", "")

        yield kind.name, kind.needs(problem.target), wrong_gradient


class _Recorded(torch.autograd.Function):
    """A forward and the gradient of another function, which has derivatives of its own."""

    @staticmethod
    def forward(ctx: Any, right: Call, forward: Call, *values: Any) -> torch.Tensor:
        ctx.right = right
        ctx.rest = [None if isinstance(v, torch.Tensor) else v for v in values]
        ctx.save_for_backward(*[v for v in values if isinstance(v, torch.Tensor)])
        return forward(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        saved, keep = ctx.saved_tensors, torch.is_grad_enabled()
        with torch.enable_grad():
            leaves = [t if t.requires_grad else t.detach().requires_grad_() for t in saved]
            output = ctx.right([*leaves, *ctx.rest[len(leaves) :]])
            found = torch.autograd.grad(output, leaves, gradient, create_graph=keep)
        return None, None, *found, *[None] * (len(ctx.rest) - len(leaves))
