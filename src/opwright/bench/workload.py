"""One direction of one input: what is called, what is overwritten between rounds, what must come out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opwright.bench.inputs import all_tensors
from opwright.dispatch.operator import Operator
from opwright.dispatch.reference import caller
from opwright.errors import CheckError
from opwright.spec.domains import Range
from opwright.verify.compare import compare
from opwright.verify.oracle import Expected, expect, with_room
from opwright.verify.tensors import copy_of

# Above this size the oracle, in float64, takes seconds: PyTorch's own result is looked at first.
_MAX_ORACLE_ELEMENTS, _NEAR = 2**19, 16.0
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
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

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
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for tensor in self._written():
                for axis, size in enumerate(tensor.shape):
                    factor = 1 - torch.rand(size, generator=generator) / (4 * tensor.ndim)
                    shape = [-1 if d == axis else 1 for d in range(tensor.ndim)]
                    tensor.mul_(factor.to(tensor.device, tensor.dtype).reshape(shape))
                self._fold(tensor)

    def _written(self) -> list[torch.Tensor]:
        seeds = list((self._seeds or {}).values())
        written = seeds if self.direction == "backward" else [*all_tensors(self.values), *seeds]
        return [tensor for tensor in written if _is_writable(tensor)]

    def _fold(self, tensor: torch.Tensor) -> None:
        """Moves values that were changed back into the domain of their argument."""
        domain = self._domains.get(id(tensor))
        if domain is not None:
            tensor.copy_(domain.fold(tensor))

    def keep(self) -> None:
        """Remembers the values of arguments that a call changes, for `restore`."""
        self._kept = [(t, t.detach().clone()) for t in all_tensors(self.values) if _is_writable(t)]

    def restore(self) -> None:
        """Writes the values of `keep` again: what a step changes would else grow for thousands of calls."""
        with torch.no_grad():
            for tensor, value in self._kept:
                tensor.copy_(value)

    # --- what must come out ------------------------------------------------------------------------------------

    def difference(self, got: Sequence[Any], reference: Callable[..., Any]) -> str:
        """Returns by how much and where results differ from those of the reference; "" when they do not.

        That is by more than the checks of numerics and of gradients allow.
        """
        given = list(_tensors_in(self.values))
        seeds = list((self._seeds or {}).values())
        compute = self._computation(reference, len(given))
        is_large = sum(t.numel() for t in given) > _MAX_ORACLE_ELEMENTS
        if is_large and _is_near(got, compute([t.detach().clone() for t in given] + seeds)):
            return ""
        expected = expect(compute, [*given, *seeds], is_narrow=True)
        if len(got) != len(expected):
            return f"{len(got)} results, expected {len(expected)}"
        for number, (result, wanted) in enumerate(zip(got, expected, strict=True)):
            found = _difference(result, wanted, is_gradient=self.direction != "forward")
            if found:
                return f"result {number}: {found}"
        return ""

    def _computation(self, reference: Callable[..., Any], count: int) -> Callable[[Sequence[Any]], list[Any]]:
        """Returns the reference as a function of the tensors of the arguments and of the gradients that come in."""
        needs_gradient = [t.requires_grad for t in _tensors_in(self.values)]

        def compute(given: Sequence[Any]) -> list[Any]:
            tensors, seeds = [t.detach() for t in given[:count]], given[count:]
            is_wide = any(t.dtype == torch.float64 for t in tensors)
            apply = applier(_in_precision(reference, is_wide), self._operator)
            values = _with_tensors(list(self.values), iter(tensors))
            if self.direction == "forward":
                with torch.no_grad():
                    return as_list(apply(values))
            with torch.enable_grad():
                inputs = [t.requires_grad_() for t, needs in zip(tensors, needs_gradient, strict=True) if needs]
                results = as_list(apply(values))
                outputs = [results[i] for i in self._seeds or {}]
                pairs = [(o, s.to(o.dtype)) for o, s in zip(outputs, seeds, strict=True) if _needs_gradient(o)]
                outputs, seeds = [o for o, _ in pairs], [s for _, s in pairs]
                gradients = list(torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))
            return gradients if self.direction == "backward" else [*(r.detach() for r in results), *gradients]

        return compute


def _is_near(got: Sequence[Any], plain: Sequence[Any]) -> bool:
    """Returns whether results are so near those of PyTorch in the same dtype that the oracle need not be asked."""
    for ours, theirs in zip(got, plain, strict=False):
        if not isinstance(theirs, torch.Tensor) or not isinstance(ours, torch.Tensor) or not theirs.numel():
            continue
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        room = _NEAR * torch.finfo(theirs.dtype).eps if theirs.is_floating_point() else 0.0
        size = float(theirs.float().abs().mean()) if room else 0.0
        if not torch.allclose(ours.detach(), theirs, rtol=room, atol=room * size, equal_nan=True):
            return False
    return len(got) == len(plain)


def _difference(result: Any, wanted: Expected | torch.Tensor | None, *, is_gradient: bool) -> str:
    if not isinstance(result, torch.Tensor) or wanted is None:
        return "" if wanted is None else f"got {type(result).__name__}, expected a tensor"
    shape = (wanted if isinstance(wanted, torch.Tensor) else wanted.exact).shape
    if result.shape != shape:
        return f"shape {list(result.shape)}, expected {list(shape)}"
    if is_gradient:
        wanted = with_room(wanted)
    message = compare(result.detach(), wanted).message
    if message and is_gradient and isinstance(wanted, Expected):
        message = compare(result.detach(), with_room(wanted.whole())).message
    return message


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in lists, tuples and dictionaries, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        yield from _tensors_in(item)


def _with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Returns a value with other tensors in the places of its own."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {name: _with_tensors(item, tensors) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value


def _in_precision(reference: Callable[..., Any], is_wide: bool) -> Callable[..., Any]:
    """Returns the reference for float64 arguments: a copy of a module, whose parameters follow."""
    if not isinstance(reference, torch.nn.Module):
        return reference
    reference = copy.deepcopy(reference)  # what it counts stays its own
    return reference.double() if is_wide else reference


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
