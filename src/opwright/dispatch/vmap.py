"""vmap: from the promise of a variadic axis, else through the reference.

A variadic axis promises that its entries are computed independently. So a vmapped dimension of
`T *batch n` simply joins `*batch`. Where an argument without the axis is batched, or an output does not
keep it, the reference is vectorised by PyTorch instead. One that PyTorch cannot vectorise, such as one that
selects by a mask, is called once for each entry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opwright import _torch
from opwright._torch import functorch, retrieve_current_functorch_interpreter, tree_flatten, tree_unflatten
from opwright.contract.contract import Contract, TensorType
from opwright.contract.declaration import Declaration
from opwright.dispatch.arguments import Arguments
from opwright.dispatch.autocast import cast_for_region, device_of, has_region
from opwright.dispatch.fake import pack, unpack
from opwright.dispatch.reference import Reference
from opwright.dispatch.registration import Registration

_BATCHED = _torch.key_set("FuncTorchBatched")


def vmap_kernel(
    declaration: Declaration, registration: Registration, arguments: Arguments, reference: Reference
) -> Callable[..., Any]:
    """Returns the kernel for the dispatcher's FuncTorchBatched key."""
    contract = declaration.contract

    def compute_each(values: Sequence[Any], interpreter: Any) -> Any:
        level = interpreter.level()
        with _torch.without_keys(_BATCHED):
            found = [
                unpack(arguments.pass_to(registration.entry(), [_take(value, i, level) for value in values]), contract)
                for i in range(interpreter.batch_size())
            ]
            outputs = [torch.stack(tuple(each)) for each in zip(*found, strict=True)]
        return pack([_torch.add_batch_dim(t, 0, level) for t in outputs])

    def compute_without_autocast(values: Sequence[Any], interpreter: Any) -> Any:
        """Vectorises the reference anew: within the active level of vmap, autocast cannot be turned off."""
        level = interpreter.level()
        leaves, spec = tree_flatten(list(values))
        pairs = [_torch.unwrap_batched(v, level) if isinstance(v, torch.Tensor) else (v, None) for v in leaves]
        batched = {i: (tensor, dim) for i, (tensor, dim) in enumerate(pairs) if dim is not None}

        def compute(*entries: torch.Tensor) -> Any:
            given = dict(zip(batched, entries, strict=True))
            filled = [given.get(i, value) for i, (value, _) in enumerate(pairs)]
            return unpack(reference.compute(tree_unflatten(filled, spec)), contract)

        tensors, dims = zip(*batched.values(), strict=True)
        with interpreter.lower(), torch.autocast(device_of(values), enabled=False):
            outputs = torch.vmap(compute, in_dims=dims, randomness=interpreter.randomness())(*tensors)
        return pack([_torch.add_batch_dim(t, 0, level) for t in outputs])

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = arguments.normalize(*args, **kwargs)
        interpreter = retrieve_current_functorch_interpreter()
        level = interpreter.level()
        axis = joined_axes(contract, [_is_batched(value, level) for value in values])
        # Random numbers are drawn as vmap's `randomness` says, which only PyTorch's own rules know.
        if axis is None or declaration.random:
            try:
                # Still batched: every operator of the reference applies its own rule.
                if has_region(declaration, values):
                    return compute_without_autocast(cast_for_region(declaration, values), interpreter)
                arguments.bind(values)
                return reference.compute(values)
            except Exception:  # whatever PyTorch raises where it has no rule
                if declaration.random or contract.mutated or not interpreter.batch_size():
                    raise
            return compute_each(values, interpreter)
        joined = [
            _join(value, p.type, axis, level, interpreter.batch_size())
            for p, value in zip(contract.parameters, values, strict=True)
        ]
        with _torch.without_keys(_BATCHED):
            result = arguments.pass_to(registration.entry(), joined)
        outputs = zip(unpack(result, contract), (o.type.variadic_at for o in contract.outputs), strict=True)
        # The gradient of an absent argument is empty, without the axis.
        return pack([_torch.add_batch_dim(t, at, level) if t.ndim > at else t for t, at in outputs])

    return kernel


def joined_axes(contract: Contract, batched: list[bool]) -> str | None:
    """Returns the variadic axis that the batch dimension joins; None when the reference is needed."""
    if contract.mutated or not contract.outputs:
        return None
    given = [p for p, is_batched in zip(contract.parameters, batched, strict=True) if is_batched]
    # Entries of one axis are independent of each other, not of those of another axis.
    name, *others = {_variadic(p.type) for p in given if p.kind == "tensor"} or {None}
    if name is None or others or any(p.kind == "tensors" for p in given):
        return None
    if any(p.kind == "tensors" and _variadic(p.type) == name for p in contract.tensors):
        return None  # the axis would have to grow in the list too
    return name if all(_variadic(output.type) == name for output in contract.outputs) else None


def _variadic(type_: TensorType | None) -> str | None:
    at = type_.variadic_at if type_ else None
    return None if at is None else type_.axes[at].name


def _is_batched(value: Any, level: int) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_is_batched(item, level) for item in value)
    return (
        isinstance(value, torch.Tensor)
        and functorch.is_batchedtensor(value)
        and functorch.maybe_get_level(value) == level
    )


def _take(value: Any, entry: int, level: int) -> Any:
    """Returns one entry of the batch of an argument."""
    if isinstance(value, (list, tuple)):
        return [_take(item, entry, level) for item in value]
    if not _is_batched(value, level):
        return value
    tensor, dim = _torch.unwrap_batched(value, level)
    return tensor.select(dim, entry)


def _join(value: Any, type_: TensorType | None, name: str, level: int, batch_size: int) -> Any:
    """Returns the argument with the batch dimension where its variadic axis starts."""
    if not isinstance(value, torch.Tensor) or _variadic(type_) != name:
        return value
    at = type_.variadic_at
    if _is_batched(value, level):
        tensor, dim = _torch.unwrap_batched(value, level)
        return tensor.movedim(dim, at)
    return value.unsqueeze(at).expand(*value.shape[:at], batch_size, *value.shape[at:])
