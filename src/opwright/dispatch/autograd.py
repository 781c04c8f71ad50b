"""Gradients: recorded only for calls that need one.

`torch.library.register_autograd` costs several microseconds on every call, gradient or not. Here the
Python function of an operator looks first, and only a call that needs a gradient reaches autograd.
The dispatcher's own entry (`torch.ops`) has the same kernel at its Autograd key, so that functorch,
torch.compile and torch.export see an ordinary differentiable operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opwright import _torch
from opwright._torch import enable_single_level_autograd_function
from opwright.contract.contract import Contract
from opwright.contract.declaration import Declaration
from opwright.dispatch.arguments import Arguments
from opwright.dispatch.derived_gradient import DerivedGradient
from opwright.dispatch.fake import pack, unpack
from opwright.dispatch.mutation import refuse_mutation
from opwright.dispatch.node import Saved, recorder
from opwright.dispatch.reference import PLAIN, Reference, tensors_in
from opwright.dispatch.registration import Registration
from opwright.errors import plural

_is_compiling = torch.compiler.is_compiling


class Gradient:
    """How the calls of one declaration are recorded for a gradient.

    Attributes:
        record: `record(compute, *values)` calls `compute`, or the reference in its place, and records the call for a
            gradient: for plain tensors outside any mode.
        record_node: the same with a node of the operator's own, under transforms and tracers too.
        derived: the gradient that follows from the reference.
        saved: what the node keeps for the backward.
    """

    def __init__(
        self,
        declaration: Declaration,
        arguments: Arguments,
        reference: Reference,
        *,
        has_kernel: Callable[[str], bool],
        has_every_kernel: bool,
    ) -> None:
        """Starts without a declared backward.

        Args:
            has_kernel: tells whether there is a kernel for a type of device.
            has_every_kernel: whether there is a kernel for each type of device that torch has.
        """
        self._declaration, self._arguments, self._reference = declaration, arguments, reference
        self._has_kernel, self._has_every_kernel = has_kernel, has_every_kernel
        parameters = enumerate(declaration.contract.parameters)
        self._tensors = [i for i, p in parameters if p.kind == "tensor" and not p.optional]
        self.derived = DerivedGradient(declaration.qualified_name, declaration.contract, reference)
        self.set_backward(None, None)

    def set_backward(self, function: Callable[..., Any] | None, contract: Contract | None) -> None:
        """Sets the operator that computes the gradient; None: it is derived from the reference."""
        declaration = self._declaration
        self._backward, self._backward_contract = function, contract
        self.saved = Saved.of(declaration, contract)
        if declaration.contract.mutated:
            self.record = self.record_node = lambda compute, *values: refuse_mutation(self._arguments, values)
        elif function is None and declaration.random:
            self.record = self.record_node = self._record_composite
        else:
            self.record_node = self._record_first
            has_kernel = function is not None or self._has_every_kernel
            self.record = self._record_first if has_kernel else self._record_reference

    def _record_first(self, compute: Callable[..., Any], *values: Any) -> Any:
        """Makes the node when the first call is recorded: that takes as long as all the rest of a declaration."""
        node = recorder(self._declaration, self.saved, self.derived, self._backward, self._backward_contract)
        if self.record == self._record_first:
            self.record = node
        self.record_node = node
        return node(compute, *values)

    def _record_composite(self, compute: Callable[..., Any], *values: Any) -> Any:
        """Leaves the gradient to the operators of the reference.

        For operators that draw random numbers: calling the reference again would draw others.
        """
        self._arguments.bind(values)
        return self._reference.compute(values)

    def _record_reference(self, compute: Callable[..., Any], *values: Any) -> Any:
        """Runs the reference under autograd where there is no kernel for a device.

        What is saved and how the gradient is computed is then what it is without the operator, and costs that.
        """
        contract = self._arguments.contract
        first = values[self._tensors[0]] if self._tensors else next(tensors_in(values))
        if self._has_kernel(first.device.type):
            return self.record_node(compute, *values)
        result = self._reference.run_checked(values)
        if type(result) is torch.Tensor and result.requires_grad and not _torch.is_view(result):
            return result  # most calls, without the cost of lists
        results = unpack(result, contract)
        for output, made in zip(contract.outputs, results, strict=True):
            if not (output.is_constant or made.requires_grad) and made.is_floating_point():
                return self.record_node(compute, *values)  # tracers see a node: each output has a gradient
        return pack([made if _torch.is_free_of_siblings(made) else made.clone() for made in results])

    def describe(self, values: Sequence[Any] | None = None) -> str:
        """Returns where the gradient comes from, what that costs, and whether a backward of its own would pay.

        Args:
            values: arguments of a call; small ones by default.
        """
        declaration, contract = self._declaration, self._arguments.contract
        name = declaration.name
        if contract.mutated:
            return f"none: it writes into `{contract.mutated[0].name}`"
        if self._backward_contract is not None:
            return f"{declaration.namespace}::{self._backward_contract.subject}"
        if not declaration.sources or declaration.random:
            return "autograd of the reference: as slow as without an operator"
        trace = self.derived.record(values)
        if trace is None:
            text = "derived: each backward may run all of the reference again"
            saving = "would save that"
        else:
            text = f"derived: {plural(trace.count, 'PyTorch operator')}"
            again = ", ".join(f"`{each}`" for each in trace.recomputed)
            text += f"; computes {again} of the forward again" if again else ", without the forward"
            saving = "with a kernel would save that" if again else "with a kernel would do it in one pass"
        is_worth_it = declaration.forward is None and (trace is None or trace.count > 1)
        return f"{text}; `@{name}.backward` {saving}" if is_worth_it else text


def autograd_kernel(
    gradient: Gradient,
    registration: Registration,
    arguments: Arguments,
    reference: Reference,
    explain: Callable[[Exception, Sequence[Any]], Exception],
    take_sharded: Callable[[], None],
) -> Callable[..., Any]:
    """Returns the kernel for the dispatcher's Autograd keys, above which distributed tensors are met first."""
    mutates = bool(arguments.contract.mutated)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        values = arguments.normalize(*args, **kwargs)
        take_sharded()
        below = keyset & _torch.KEYS_AFTER_AUTOGRAD
        if _has_tangent(values):
            # Forward-mode: the reference is differentiated as the composition of operators it is.
            arguments.bind(values)
            return reference.compute(values)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(values)):
            if mutates:
                refuse_mutation(arguments, values)
            is_transformed = _torch.are_transforms_active()

            def compute(*args: Any, **kwargs: Any) -> Any:
                # A node's forward runs with both kinds of derivatives off; an outer level of functorch
                # still wants them.
                with (
                    _torch.below_autograd(),
                    torch.set_grad_enabled(is_transformed),
                    _torch.set_forward_grad_enabled(is_transformed),
                ):
                    return registration.public.redispatch(below, *args, **kwargs)

            record = gradient.record if _is_plain(values) else gradient.record_node
            with enable_single_level_autograd_function():
                return record(compute, *values)
        with _torch.below_autograd():
            try:
                return arguments.pass_to(registration.public.redispatch, values, below)
            except RuntimeError as error:
                raise explain(error, values) from None

    return kernel


def _is_plain(values: Sequence[Any]) -> bool:
    """Returns whether these are PyTorch's own tensors, and nobody looks on that must see an operator of its own."""
    is_watched = (
        _is_compiling()
        or _torch.count_dispatch_modes()
        or _torch.count_function_modes()
        or _torch.are_transforms_active()
    )
    return not is_watched and all(type(t) in PLAIN for t in tensors_in(values))


def _has_tangent(values: Sequence[Any]) -> bool:
    return any(t.is_floating_point() and _torch.has_tangent(t) for t in tensors_in(values))
