"""Derived gradients: those of the reference, differentiated at the saved inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from opwright import _torch
from opwright.contract.contract import Contract, ContractError
from opwright.dispatch.autocast import AUTOCAST
from opwright.dispatch.backward_trace import BackwardTrace, BackwardTraces, record_backward
from opwright.dispatch.reference import Reference, outputs_of, signature_of_call

_is_traced = torch.compiler.is_dynamo_compiling  # by Dynamo, which refuses `torch.autograd.grad`


class DerivedGradient:
    """The gradient of one operator that follows from its reference.

    Attributes:
        traces: backwards that were recorded.
        compute_sharded: `compute` for distributed tensors; None for others.
        place_sharded: returns arguments whose distributed tensors lie as PyTorch's rules for the reference take them.
    """

    def __init__(self, qualified_name: str, contract: Contract, reference: Reference) -> None:
        self._qualified_name, self._contract, self._reference = qualified_name, contract, reference
        self.traces = BackwardTraces()
        self.compute_sharded: Callable[..., Sequence[torch.Tensor | None] | None] = lambda *call: None
        self.place_sharded: Callable[[Sequence[Any]], Sequence[Any]] = lambda values: values

    def compute_outputs(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Runs the reference for its outputs, with gradients through all of them.

        A backward that is differentiated needs the derivative of what it saved, declared differentiable or not.
        """
        if _torch.is_any_autocast_enabled() and not _is_traced():
            with _torch.without_keys(AUTOCAST):  # as the forward ran, which gave what is computed again
                return self._compute_outputs(values)
        return self._compute_outputs(values)

    def _compute_outputs(self, values: Sequence[Any]) -> list[torch.Tensor]:
        result = self._reference.call(self.place_sharded(values))
        return [result] if len(self._contract.outputs) == 1 else list(result)

    def compute(
        self, values: Sequence[Any], gradients: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        """Differentiates the reference at the saved inputs.

        Args:
            values: its arguments, lists as lists.
            gradients: those of its outputs.
            needed: which arguments of its node need a gradient.

        Returns:
            The gradients of the arguments of the node.
        """
        if _torch.is_any_autocast_enabled() and not _is_traced():
            with _torch.without_keys(AUTOCAST):  # as the forward ran, whose dtypes are those of its gradient
                return self._compute(values, gradients, needed)
        return self._compute(values, gradients, needed)

    def _compute(
        self, values: Sequence[Any], gradients: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> Sequence[torch.Tensor | None]:
        if (sharded := self.compute_sharded(values, gradients, needed)) is not None:
            return sharded
        if not (
            _is_traced()  # by compiled autograd
            or torch.is_grad_enabled()  # this gradient will be differentiated
            or _torch.count_dispatch_modes()
            or _torch.count_function_modes()
            or _torch.are_transforms_active()
        ):
            key = needed, signature_of_call((*values, *gradients))
            found = self.traces.found  # a new declaration puts another in its place
            trace = found.get(key)
            if trace is None and self.traces.is_due(key):
                differentiate = partial(self._differentiate, needed)
                trace = found[key] = record_backward(differentiate, values, gradients, self._qualified_name)
            if trace is not None:
                return trace.run(*values, *gradients)
        return self._differentiate(needed, values, gradients)

    def record(self, values: Sequence[Any] | None) -> BackwardTrace | None:
        """Records the backward of a call in which every floating-point tensor needs a gradient.

        Args:
            values: arguments of a call; small ones by default.
        """
        from opwright.contract.dryrun import small_arguments  # which wheels do without

        contract = self._contract
        names = [p.name for p in contract.parameters]
        if values is None:
            small = small_arguments(contract, torch.Generator().manual_seed(0)) or {}
            values = [small.get(name) for name in names]
        try:
            bindings = contract.bind(dict(zip(names, values, strict=True)))
            gradients = [
                torch.empty(contract.output_shape(o, bindings), dtype=contract.output_dtype(o, bindings))
                for o in contract.outputs
            ]
        except (ContractError, KeyError, ValueError):  # an axis that only the data know, or no small arguments
            return None
        placed = place_for_node(contract, values)
        needed = [isinstance(value, torch.Tensor) and value.is_floating_point() for value in placed]
        return record_backward(partial(self._differentiate, needed), values, gradients, contract.subject)

    def _differentiate(
        self,
        needed: Sequence[bool],
        values: Sequence[Any],
        gradients: Sequence[torch.Tensor | None],
        end_forward: Callable[[], None] = lambda: None,
    ) -> Sequence[torch.Tensor | None]:
        """Runs the reference under autograd and differentiates it."""
        contract = self._contract
        flat = place_for_node(contract, values)
        wanted = [i for i, needs in enumerate(needed) if needs and flat[i].is_floating_point()]

        def outputs_at(*tensors: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
            """Returns the differentiable outputs with their gradients."""
            moved = list(flat)
            for i, tensor in zip(wanted, tensors, strict=True):
                moved[i] = tensor
            plain, listed = iter(moved[1:]), iter(moved[1 + len(values) :])
            arguments = [
                [next(listed) for _ in value] if parameter.kind == "tensors" else next(plain)
                for value, parameter in zip(values, contract.parameters, strict=True)
            ]
            found = zip(contract.outputs, outputs_of(contract, self._reference.call(arguments)), gradients, strict=True)
            pairs = [
                (o, g)
                for output, o, g in found
                if o is not None and g is not None and o.is_floating_point() and not output.is_constant
            ]
            end_forward()
            return pairs

        result: list[torch.Tensor | None] = [None] * len(flat)
        for i, gradient in zip(wanted, _vjp(outputs_at, [flat[i] for i in wanted]), strict=True):
            result[i] = gradient
        return tuple(result)


def place_for_node(contract: Contract, values: Sequence[Any]) -> list[Any]:
    """Returns arguments in the node's order: tensors of lists one by one, behind the others and the lists' lengths."""
    pairs = list(zip(values, contract.parameters, strict=True))
    flat: list[Any] = [None, *(value for value, p in pairs if p.kind != "tensors")]
    flat += [len(value) for value, p in pairs if p.kind == "tensors"]
    return flat + [t for value, p in pairs if p.kind == "tensors" for t in value]


def _vjp(
    outputs_at: Callable[..., list[tuple[torch.Tensor, torch.Tensor]]], inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    if _is_traced() or _torch.are_transforms_active():
        given: list[torch.Tensor] = []

        def outputs_alone(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            pairs = outputs_at(*tensors)
            given[:] = [g for _, g in pairs]
            return tuple(o for o, _ in pairs)

        _, pull = torch.func.vjp(outputs_alone, *inputs)
        return pull(tuple(given))
    keep = torch.is_grad_enabled()
    with torch.enable_grad():
        fresh = [t.view_as(t) if keep and t.requires_grad else t.detach().requires_grad_() for t in inputs]
        pairs = [(o, g) for o, g in outputs_at(*fresh) if o.requires_grad]
        if not pairs:
            return [None] * len(inputs)
        outputs, cotangents = zip(*pairs, strict=True)
        keep = keep and any(t.requires_grad for t in (*inputs, *cotangents))
        return torch.autograd.grad(outputs, fresh, cotangents, create_graph=keep, allow_unused=True)
