"""Operators that write into their arguments: autograd is told, and asked for no gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from opwright import _torch
from opwright.dispatch.arguments import Arguments
from opwright.dispatch.reference import tensors_in
from opwright.dispatch.registration import Registration
from opwright.errors import NotDifferentiableError


def bump_versions(values: Sequence[Any]) -> None:
    """Tells autograd that these tensors were written into."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors_in(values) if not tensor.is_inference()])


def mutation_kernel(registration: Registration, arguments: Arguments) -> Callable[..., Any]:
    """Returns the kernel for the dispatcher's ADInplaceOrView key: it bumps versions and goes on."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        values = arguments.normalize(*args, **kwargs)
        bump_versions(arguments.mutated(values))
        with _torch.below_inplace_or_view():
            keys = keyset & _torch.KEYS_AFTER_INPLACE_OR_VIEW
            return arguments.pass_to(registration.public.redispatch, values, keys)

    return kernel


def refuse_mutation(arguments: Arguments, values: Sequence[Any]) -> NoReturn:
    """Raises the error for a gradient through an operator that mutates its arguments."""
    contract = arguments.contract
    pairs = zip(contract.parameters, values, strict=True)
    asking = [p.name for p, value in pairs if any(t.requires_grad for t in tensors_in([value]))]
    raise NotDifferentiableError(
        contract.subject,
        f"it writes into `{contract.mutated[0].name}`, so it has no gradient",
        rows=[("gradient asked for", ", ".join(asking))],
        hint=f"`with torch.no_grad(): {contract.subject}(...)`, or pass `{asking[0]}.detach()`",
    )
