"""Gradients: recorded only for calls that need one.

`torch.library.register_autograd` costs several microseconds on every call, gradient or not. Here the
Python function of an operator looks first, and only a call that needs a gradient reaches autograd.
The dispatcher's own entry (`torch.ops`) has the same kernel at its Autograd key, so that functorch,
torch.compile and torch.export see an ordinary differentiable operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from opwright import _torch
from opwright._torch import enable_single_level_autograd_function
from opwright.dispatch.backward_trace import (
    PLAIN,
    BackwardTrace,
    record_backward,
    signature_of_call,
)
from opwright.dispatch.fake import pack, unpack
from opwright.dispatch.reference import caller, outputs_of, tensors_in
from opwright.errors import NotDifferentiableError
from opwright.spec.contract import Contract, ContractError

if TYPE_CHECKING:
    from opwright.dispatch.operator import Operator

_AFTER_AUTOGRAD = _torch.KEYS_AFTER_AUTOGRAD
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = _torch.count_dispatch_modes
_function_modes = _torch.count_function_modes
_transforms = _torch.are_transforms_active
_any_autocast = _torch.is_any_autocast_enabled


def autograd_kernel(operator: Operator) -> Callable[..., Any]:
    """Returns the kernel for the dispatcher's Autograd keys."""
    contract = operator.contract
    call_reference = caller(contract, operator.declaration.reference)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        values = operator.normalize(*args, **kwargs)
        if _has_tangent(values):
            # Forward-mode: the reference is differentiated as the composition of operators it is.
            return pack(outputs_of(contract, call_reference(values)))
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(values)):
            refuse_mutation(operator, values)
            transformed = _transforms()

            def compute(*args: Any, **kwargs: Any) -> Any:
                # A node's forward runs with both kinds of derivatives off; an outer level of functorch
                # still wants them.
                with (
                    _torch.below_autograd(),
                    torch.set_grad_enabled(transformed),
                    _torch.set_forward_grad_enabled(transformed),
                ):
                    return operator.public.redispatch(keyset & _AFTER_AUTOGRAD, *args, **kwargs)

            record = operator.record if _is_plain(values) else operator.record_node
            with enable_single_level_autograd_function():
                return record(compute, *values)
        with _torch.below_autograd():
            try:
                return operator.redispatch(keyset & _AFTER_AUTOGRAD, values)
            except RuntimeError as error:
                raise operator.explain(error, values) from None

    return kernel


def _is_plain(values: Sequence[Any]) -> bool:
    """Returns whether these are PyTorch's own tensors, and nobody looks on that must see an operator of its own."""
    return not (_is_compiling() or _dispatch_modes() or _function_modes() or _transforms()) and all(
        type(t) in PLAIN for t in tensors_in(values)
    )


def _has_tangent(values: Sequence[Any]) -> bool:
    return _torch.is_forward_mode() and any(
        t.is_floating_point() and torch.autograd.forward_ad.unpack_dual(t).tangent is not None
        for t in tensors_in(values)
    )


def refuse_mutation(operator: Operator, values: Sequence[Any]) -> None:
    """Raises the error for a gradient through an operator that mutates its arguments."""
    mutated = operator.declaration.contract.mutated
    if mutated:
        name = operator.declaration.name
        asking = [
            p.name
            for p, value in zip(operator.contract.parameters, values, strict=True)
            if any(t.requires_grad for t in tensors_in([value]))
        ]
        raise NotDifferentiableError(
            name,
            f"it writes into `{mutated[0].name}`, so it has no gradient",
            rows=[("gradient asked for", ", ".join(asking))],
            hint=f"`with torch.no_grad(): {name}(...)`, or pass `{asking[0]}.detach()`",
        )


def composite_recorder(operator: Operator) -> Callable[..., Any]:
    """Returns a recorder that leaves the gradient to the operators of the reference.

    For operators that draw random numbers: calling the reference again would draw others.
    """
    contract = operator.contract
    call_reference = caller(contract, operator.declaration.reference)
    return lambda compute, *values: pack(outputs_of(contract, call_reference(values)))


def reference_recorder(operator: Operator) -> Callable[..., Any]:
    """Returns a recorder that runs the reference under autograd where there is no kernel for a device.

    What is saved and how the gradient is computed is then what it is without the operator, and costs that.
    """
    contract, sources = operator.contract, operator.declaration.sources
    tensors = [i for i, p in enumerate(contract.parameters) if p.kind == "tensor" and not p.optional]

    def record(compute: Callable[..., Any], *values: Any) -> Any:
        if sources:
            first = values[tensors[0]] if tensors else next(tensors_in(values))
            if first.device.type in sources:
                return operator.record_node(compute, *values)
        result = operator.run_checked_reference(values)
        if type(result) is torch.Tensor and result.requires_grad and not _torch.is_view(result):
            return result  # most calls, without the cost of lists
        results = unpack(result, contract)
        for output, made in zip(contract.outputs, results, strict=True):
            if not (output.is_constant or made.requires_grad) and made.is_floating_point():
                return operator.record_node(compute, *values)  # tracers see a node: each output has a gradient
        return pack([_without_siblings(made) for made in results])

    return record


def _without_siblings(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that may be written into: autograd refuses that for one of several views made at once."""
    return tensor if _torch.is_free_of_siblings(tensor) else tensor.clone()


def differentiable_outputs(operator: Operator, values: Sequence[Any]) -> list[torch.Tensor]:
    """Runs the reference for its outputs, with gradients through all of them.

    A backward that is differentiated needs the derivative of what it saved, declared differentiable or not.
    """
    result = caller(operator.contract, operator.declaration.reference)(values)
    return [result] if len(operator.contract.outputs) == 1 else list(result)


def reference_gradient(
    operator: Operator,
    values: Sequence[Any],
    gradients: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> Sequence[torch.Tensor | None]:
    """Differentiates the reference at the saved inputs.

    Args:
        operator: the operator.
        values: its arguments, lists as lists.
        gradients: those of its outputs.
        needed: which arguments of its node need a gradient.

    Returns:
        The gradients of the arguments of the node.
    """
    if not (
        torch.is_grad_enabled()  # this gradient will be differentiated
        or _dispatch_modes()
        or _function_modes()
        or _transforms()
        or _any_autocast()
    ):
        key = needed, signature_of_call((*values, *gradients))
        found = operator.traces.found  # a new declaration puts another in its place
        trace = found.get(key)
        if trace is None and operator.traces.is_due(key):
            trace = found[key] = record_backward(
                partial(_differentiate, operator, needed), values, gradients, operator.declaration.qualified_name
            )
        if trace is not None:
            return trace.run(*values, *gradients)
    return _differentiate(operator, needed, values, gradients)


def remark_on_backward(operator: Operator, values: Sequence[Any] | None = None) -> str:
    """Returns where the gradient comes from, what that costs, and whether a backward of its own would pay.

    Args:
        operator: the operator.
        values: arguments of a call; small ones by default.
    """
    contract, name = operator.contract, operator.declaration.name
    if contract.mutated:
        return f"none: it writes into `{contract.mutated[0].name}`"
    if operator.backward_operator is not None:
        return operator.backward_operator.declaration.qualified_name
    if not operator.declaration.sources or operator.declaration.random:
        return "PyTorch's own of the reference, at its cost"
    trace = _record_for(operator, values)
    if trace is None:
        text = "derived: each backward may run all of the reference again"
        saving = "would save that"
    else:
        text = f"derived: {trace.count} PyTorch operator{'s' if trace.count != 1 else ''}"
        again = ", ".join(f"`{each}`" for each in trace.recomputed)
        text += f", of which {again} run the forward again" if again else ", without the forward"
        saving = "with a kernel would save that" if again else "with a kernel would do it in one pass"
    is_worth_it = operator.declaration.forward is None and (trace is None or trace.count > 1)
    return f"{text}; `@{name}.backward` {saving}" if is_worth_it else text


def _record_for(operator: Operator, values: Sequence[Any] | None) -> BackwardTrace | None:
    """Records the backward of a call in which every floating-point tensor needs a gradient."""
    from opwright.spec.dryrun import small_arguments  # which wheels do without

    contract = operator.contract
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
    placed = _placed(contract, values)
    needed = [isinstance(value, torch.Tensor) and value.is_floating_point() for value in placed]
    return record_backward(partial(_differentiate, operator, needed), values, gradients, operator.declaration.name)


def _placed(contract: Contract, values: Sequence[Any]) -> list[Any]:
    """Returns arguments in the node's order: tensors of lists one by one, behind the others and the lists' lengths."""
    pairs = list(zip(values, contract.parameters, strict=True))
    flat: list[Any] = [None, *(value for value, p in pairs if p.kind != "tensors")]
    flat += [len(value) for value, p in pairs if p.kind == "tensors"]
    return flat + [t for value, p in pairs if p.kind == "tensors" for t in value]


def _differentiate(
    operator: Operator,
    needed: Sequence[bool],
    values: Sequence[Any],
    gradients: Sequence[torch.Tensor | None],
    end_forward: Callable[[], None] = lambda: None,
) -> Sequence[torch.Tensor | None]:
    """Runs the reference under autograd and differentiates it."""
    contract = operator.contract
    call = caller(contract, operator.declaration.reference)
    flat = _placed(contract, values)
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
        found = zip(contract.outputs, outputs_of(contract, call(arguments)), gradients, strict=True)
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


def _vjp(
    outputs_at: Callable[..., list[tuple[torch.Tensor, torch.Tensor]]], inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    if _transforms():
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
        return torch.autograd.grad(outputs, fresh, cotangents, create_graph=keep, allow_unused=True)
