"""autocast: the operator's policy for mixed precisions.

"promote"  floating-point tensors are brought to the widest dtype among them (the default)
"lower"    to the dtype of the autocast region
"float32"  to float32
None       left as they are
Tensors annotated with a single dtype (`Float32`) are always brought to that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opwright import _torch
from opwright._torch import tree_leaves
from opwright.contract.contract import Contract
from opwright.contract.declaration import Declaration
from opwright.dispatch.arguments import Arguments
from opwright.dispatch.reference import tensors_in
from opwright.dispatch.registration import AUTOCAST_KEYS, Registration

AUTOCAST = _torch.key_set(*AUTOCAST_KEYS.values())


def autocast_kernel(
    declaration: Declaration, registration: Registration, arguments: Arguments, device: str
) -> Callable[..., Any]:
    """Returns the kernel for the dispatcher's autocast key of one device."""
    contract, policy = declaration.contract, declaration.autocast

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = arguments.normalize(*args, **kwargs)
        with _torch.without_keys(AUTOCAST):
            cast = _cast(contract, values, _target(contract, values, policy, device))
            return arguments.pass_to(registration.entry(), cast)

    return kernel


def cast_for_region(declaration: Declaration, values: Sequence[Any]) -> Sequence[Any]:
    """Returns arguments as the operator's policy has them in the region of autocast that is active."""
    contract = declaration.contract
    return _cast(contract, values, _target(contract, values, declaration.autocast, device_of(values)))


def has_region(declaration: Declaration, values: Sequence[Any]) -> bool:
    """Returns whether an operator has a policy, and autocast is active on the device of these arguments."""
    device = device_of(values)
    return declaration.autocast is not None and device in AUTOCAST_KEYS and torch.is_autocast_enabled(device)


def device_of(values: Sequence[Any]) -> str:
    """Returns the type of the device that the tensors are on; "" if there is none."""
    return next((t.device.type for t in tree_leaves(list(values)) if isinstance(t, torch.Tensor)), "")


def _target(contract: Contract, values: Sequence[Any], policy: str, device: str) -> torch.dtype | None:
    written = [
        tensor.dtype
        for p, v in zip(contract.parameters, values, strict=True)
        if p.mutated and p.type.family == contract.scalar_family
        for tensor in tensors_in([v])
    ]
    if written:
        return written[0]  # what is written into cannot be converted, so the others follow it
    if policy == "lower":
        return torch.get_autocast_dtype(device)
    if policy == "float32":
        return torch.float32
    dtypes = [
        tensor.dtype
        for parameter, value in zip(contract.parameters, values, strict=True)
        if parameter.is_differentiable and not parameter.type.family.is_single
        for tensor in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    ]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _cast(contract: Contract, values: Sequence[Any], target: torch.dtype | None) -> list[Any]:
    cast: list[Any] = []
    for parameter, value in zip(contract.parameters, values, strict=True):
        if not parameter.is_differentiable or parameter.mutated:
            cast.append(value)
            continue
        family = parameter.type.family
        dtype = family.dtypes[0] if family.is_single else target
        convert = functools.partial(_convert, dtype=dtype)
        cast.append([convert(v) for v in value] if isinstance(value, (list, tuple)) else convert(value))
    return cast


def _convert(value: Any, dtype: torch.dtype | None) -> Any:
    # float64 is left alone, as PyTorch's own autocast does, unless it is what all are brought to.
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or dtype is None:
        return value
    return value if value.dtype in (dtype, torch.float64) else value.to(dtype)
