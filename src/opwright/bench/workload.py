"""One direction of one input: what is called, what is overwritten between rounds, what must come out."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opwright.bench.inputs import all_tensors
from opwright.dispatch.operator import Operator
from opwright.dispatch.reference import caller
from opwright.errors import CheckError
from opwright.spec.domains import Range
from opwright.verify.oracle import to_oracle
from opwright.verify.tensors import copy_of, is_same

_TOUCHED_ROWS = 16
DIRECTIONS = ("forward", "backward", "step")


class Workload:
    """The tensors that all candidates share, at the same addresses, and the calls on them.

    Attributes:
        values: the arguments, copies of those that were given.
    """

    def __init__(self, direction: str, values: Sequence[Any], operator: Operator | None) -> None:
        self.direction, self._operator = direction, operator
        needs_gradient = direction != "forward"
        self.values = [_leaf(value, needs_gradient) for value in values]
        self._domains = _domains_of(operator, self.values)
        self._inputs = [t for t in all_tensors(self.values) if t.requires_grad]
        self._seeds: dict[int, torch.Tensor] | None = None  # by the number of the output
        self._originals: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._given = [t.detach().clone() for t in all_tensors(self.values)]
        self._generator: torch.Generator | None = None

    def bind(self, function: Callable[..., Any]) -> Callable[[], list[Any]]:
        """Returns the call to be timed, without arguments; it returns a list of results.

        Raises:
            CheckError: there is no gradient to be computed.
        """
        apply = applier(function, self._operator)
        values, inputs = self.values, self._inputs
        if self.direction == "forward":
            return lambda: as_list(apply(values))
        results = as_list(apply(values))
        if self._seeds is None:  # those of the first candidate, Opwright's: others are asked for the same gradients
            self._seeds = {i: torch.randn_like(r) for i, r in enumerate(results) if _needs_gradient(r)}
        chosen = [i for i in self._seeds if i < len(results) and _needs_gradient(results[i])]
        if not chosen or not inputs:
            raise CheckError(
                self._operator.declaration.name if self._operator else getattr(function, "__name__", "bench"),
                f'it has no gradient, so there is no "{self.direction}" to measure',
                rows=[
                    ("inputs that may have one", str(len(inputs))),
                    ("outputs that need one", str(len(chosen))),
                ],
                hint='`directions=["forward"]`',
            )
        outputs = [results[i] for i in chosen]
        seeds = [self._seed_for(i, results[i]) for i in chosen]
        gradient = torch.autograd.grad

        def backward() -> list[Any]:
            return list(gradient(outputs, inputs, seeds, retain_graph=True, allow_unused=True))

        def step() -> list[Any]:
            results = as_list(apply(values))
            return [*results, *gradient([results[i] for i in chosen], inputs, seeds, allow_unused=True)]

        return backward if self.direction == "backward" else step

    def _seed_for(self, number: int, result: torch.Tensor) -> torch.Tensor:
        """Returns the gradient that comes in at an output: the shared one, where the candidate's output is like ours."""
        seed = self._seeds[number]
        return seed if (seed.shape, seed.dtype) == (result.shape, result.dtype) else torch.randn_like(result)

    # --- other values at the same addresses --------------------------------------------------------------

    def refresh(self) -> None:
        """Writes other values into the same storage: a result that was kept from an earlier call is wrong now.

        They are those of the input, each made smaller by up to a quarter at random, so that signs stay and nothing
        grows; in a backward on a kept graph those of the gradients that come in, as the rest belongs to the graph.
        """
        if self._originals is None:
            seeds = list((self._seeds or {}).values())
            written = seeds if self.direction == "backward" else [*all_tensors(self.values), *seeds]
            self._originals = [(t, t.detach().clone()) for t in written if _is_writable(t)]
            self._generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for tensor, original in self._originals:
                tensor.copy_(original)
                for axis, size in enumerate(tensor.shape):
                    factor = 1 - torch.rand(size, generator=self._generator) / (4 * tensor.ndim)
                    shape = [-1 if d == axis else 1 for d in range(tensor.ndim)]
                    tensor.mul_(factor.to(tensor.device, tensor.dtype).reshape(shape))
                self._fold(tensor)
        self._given = [t.detach().clone() for t in self._all()]

    def _fold(self, tensor: torch.Tensor) -> None:
        """Moves values that were changed back into the domain of their argument."""
        domain = self._domains.get(id(tensor))
        if domain is not None:
            tensor.copy_(domain.fold(tensor))

    def _all(self) -> list[torch.Tensor]:
        return [*all_tensors(self.values), *(self._seeds or {}).values()]

    def is_as_given(self) -> bool:
        """Returns whether the inputs are, bit for bit, what they were in the beginning, or `refresh` has made of them."""
        return all(is_same(given, now.detach()) for given, now in zip(self._given, self._all(), strict=False))

    def toucher(self) -> Callable[[], object] | None:
        """Returns what changes a row of the largest of these tensors, each time another one; None without a tensor.

        It costs next to nothing and leaves caches and branches as they are, so it can stand in a row of timed calls.
        """
        tensors = [tensor for tensor, _ in self._originals or ()]
        if not tensors:
            return None
        largest = max(tensors, key=torch.Tensor.numel)
        domain = self._domains.get(id(largest))
        largest = largest.detach()
        count = len(largest) if largest.ndim else 1
        rows = [largest[i] if largest.ndim else largest for i in range(0, count, max(count // _TOUCHED_ROWS, 1))]
        writes = [(row, row / 2 if domain is None else domain.fold(row / 2)) for row in rows] + [(row, row.clone()) for row in rows]
        turn = itertools.cycle(writes)

        def touch() -> None:
            row, value = next(turn)
            row.copy_(value)

        return touch

    def scale(self, factor: float) -> None:
        """Multiplies all values; by 1, they are written and stay."""
        with torch.no_grad():
            for tensor, _ in self._originals or ():
                tensor.mul_(factor)
                self._fold(tensor)

    def restore(self) -> None:
        """Writes the values of the beginning."""
        with torch.no_grad():
            for tensor, original in self._originals or ():
                tensor.copy_(original)

    # --- what must come out ------------------------------------------------------------------------------------

    def difference(self, got: Sequence[Any], reference: Callable[..., Any]) -> str:
        """Returns how results differ from the reference on the values as they are now; "" when they do not.

        The error of a result, as a norm, may be four times that of PyTorch in the same dtype and four roundings of
        each element more. Verify has held each element to its own allowance; this is to find results that were not
        computed from these values.
        """
        exact, plain = self._expected(reference, in_double=True), self._expected(reference, in_double=False)
        if len(got) != len(exact):
            return f"{len(got)} results, expected {len(exact)}"
        for i, (result, true, usual) in enumerate(zip(got, exact, plain, strict=True)):
            found = _difference(result, true, usual)
            if found:
                return f"result {i}: {found}"
        return ""

    def _expected(self, reference: Callable[..., Any], *, in_double: bool) -> list[Any]:
        if isinstance(reference, torch.nn.Module):  # a copy: its parameters follow, and what it counts stays its own
            reference = copy.deepcopy(reference)
            reference = reference.double() if in_double else reference
        apply = applier(reference, self._operator)
        values = [_converted(v, in_double) for v in self.values]
        if self.direction == "forward":
            with torch.no_grad():
                return as_list(apply(values))
        inputs = [
            t.requires_grad_()
            for t, own in zip(all_tensors(values), all_tensors(self.values), strict=True)
            if own.requires_grad
        ]
        results = as_list(apply(values))
        pairs = [(results[i], seed) for i, seed in self._seeds.items() if _needs_gradient(results[i])]
        seeds = [seed.to(result.dtype) for result, seed in pairs]
        gradients = list(torch.autograd.grad([result for result, _ in pairs], inputs, seeds, allow_unused=True))
        return gradients if self.direction == "backward" else [*results, *gradients]


def _difference(got: Any, exact: Any, plain: Any) -> str:
    if not isinstance(got, torch.Tensor) or not isinstance(exact, torch.Tensor):
        is_absent = [v is None or not v.numel() for v in (got, exact)]  # an absent gradient
        return "" if all(is_absent) else f"got {type(got).__name__}, expected {type(exact).__name__}"
    if got.shape != exact.shape:
        return f"shape {list(got.shape)}, expected {list(exact.shape)}"
    got, exact, plain = got.detach(), exact.detach(), plain.detach()
    if not plain.is_floating_point():
        count = int((got != plain).sum())
        return f"{count} of {got.numel()} elements differ" if count else ""
    finite = torch.isfinite(exact) & torch.isfinite(plain)

    def norm(values: torch.Tensor) -> float:
        return torch.where(finite, values.double(), 0.0).norm().item()

    error, usual, size = norm(got.double() - exact), norm(plain.double() - exact), norm(exact)
    info = torch.finfo(got.dtype)
    allowed = 4 * usual + 4 * info.eps * size + info.tiny * got.numel() ** 0.5
    return "" if error <= allowed else f"error {error:.3g} in norm, {allowed:.3g} allowed, of a result of {size:.3g}"


def _converted(value: Any, in_double: bool) -> Any:
    if isinstance(value, dict):
        return {k: _converted(v, in_double) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_converted(v, in_double) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    return to_oracle(value) if in_double else value.detach().clone()


def _leaf(value: Any, needs_gradient: bool) -> Any:
    if isinstance(value, torch.Tensor):
        # With its strides and its offset, or a slice would be measured as a whole tensor.
        return copy_of(value).requires_grad_(needs_gradient and value.is_floating_point())
    if isinstance(value, dict):
        return {k: _leaf(v, needs_gradient) for k, v in value.items()}
    return type(value)(_leaf(v, needs_gradient) for v in value) if isinstance(value, (list, tuple)) else value


def _is_writable(tensor: torch.Tensor) -> bool:
    overlaps = any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.is_floating_point() and not overlaps


def _needs_gradient(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.is_floating_point() and result.requires_grad


def _domains_of(operator: Operator | None, values: Sequence[Any]) -> dict[int, Range]:
    """Returns the declared domain of each floating-point tensor, by its `id`."""
    pairs = zip(operator.contract.parameters, values, strict=True) if operator is not None else ()
    return {
        id(tensor): parameter.domain
        for parameter, value in pairs
        if isinstance(parameter.domain, Range)
        for tensor in all_tensors([value])
        if tensor.is_floating_point()
    }


def applier(function: Callable[..., Any], operator: Operator | None) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that takes the values of a case."""
    if operator is not None:
        return caller(operator.contract, function)
    return lambda values: function(*values[0], **values[1])


def as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]
