"""vmap: from the promise of a variadic axis, else through the reference.

A variadic axis promises that its entries are computed independently. So a vmapped dimension of
`*batch n` simply joins `*batch`. Where an argument without a leading variadic axis is batched, or an
output does not keep the axis, the reference is vectorised by PyTorch instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

from opwright.dispatch.fake import pack, unpack
from opwright.dispatch.reference import caller, outputs_of
from opwright.spec.axes import Variadic
from opwright.spec.contract import Contract, TensorType

if TYPE_CHECKING:
    from opwright.dispatch.operator import Operator

_BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)


def vmap_kernel(operator: Operator) -> Callable[..., Any]:
    """Returns the kernel for the dispatcher's FuncTorchBatched key."""
    contract = operator.declaration.contract
    call_reference = caller(contract, operator.declaration.reference)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = operator.normalize(*args, **kwargs)
        interpreter = retrieve_current_functorch_interpreter()
        level = interpreter.level()
        axes = joined_axes(contract, [_is_batched(value, level) for value in values])
        # Random numbers are drawn as vmap's `randomness` says, which only PyTorch's own rules know.
        if axes is None or operator.declaration.random:
            # Still batched: every operator of the reference applies its own rule.
            return pack(outputs_of(contract, call_reference(values)))
        joined = [
            _join(value, _leading(p.type), axes, level, interpreter.batch_size())
            for p, value in zip(contract.parameters, values, strict=True)
        ]
        with torch._C._ExcludeDispatchKeyGuard(_BATCHED):
            result = operator.call_public(joined)
        return pack([_functorch._add_batch_dim(o, 0, level) for o in unpack(result, contract)])

    return kernel


def joined_axes(contract: Contract, batched: list[bool]) -> set[str] | None:
    """Returns the variadic axes that the batch dimension joins; None when the reference is needed."""
    if contract.mutated or not contract.outputs:
        return None
    axes: set[str] = set()
    for parameter, is_batched in zip(contract.parameters, batched, strict=True):
        if is_batched:
            name = _leading(parameter.type)
            if name is None or parameter.kind != "tensor":
                return None
            axes.add(name)
    for parameter in contract.tensors:
        # The same axes in a list, or behind others, would have to grow there too.
        inside = {a.name for a in parameter.type.axes if isinstance(a, Variadic)}
        if inside & axes and (parameter.kind == "tensors" or _leading(parameter.type) not in axes):
            return None
    return axes if all(_leading(output.type) in axes for output in contract.outputs) else None


def _leading(type_: TensorType | None) -> str | None:
    if type_ is None or not type_.axes or not isinstance(type_.axes[0], Variadic):
        return None
    return type_.axes[0].name


def _is_batched(value: Any, level: int) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_batched(item, level) for item in value)
    return (
        isinstance(value, torch.Tensor)
        and _functorch.is_batchedtensor(value)
        and _functorch.maybe_get_level(value) == level
    )


def _join(value: Any, name: str | None, axes: set[str], level: int, batch_size: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if _is_batched(value, level):
        tensor, dim = _functorch._unwrap_batched(value, level)
        return tensor.movedim(dim, 0)
    return value.expand(batch_size, *value.shape) if name in axes else value
