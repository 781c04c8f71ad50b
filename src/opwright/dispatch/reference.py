"""Runs a reference so that its result keeps the promises of an operator."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opwright import _torch
from opwright.dispatch.fake import pack
from opwright.errors import OpwrightError, OutOfBoundsError
from opwright.spec.contract import Contract


def caller(contract: Contract, reference: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that calls the reference with the arguments in schema order.

    An index out of bounds is an IndexError. PyTorch raises a RuntimeError in `gather`, `scatter_add` and `index_add`.
    """
    positional = [p.name for p in contract.parameters if not p.keyword_only]
    named = [p.name for p in contract.parameters if p.keyword_only]
    count = len(positional)

    def call(values: Sequence[Any]) -> Any:
        try:
            return reference(*values[:count], **dict(zip(named, values[count:], strict=True)))
        except RuntimeError as error:
            text = str(error).partition("\n")[0]
            if _OUT_OF_BOUNDS.search(text) is None or isinstance(error, OpwrightError):
                raise
            raise OutOfBoundsError(contract.subject, text) from None

    return call


_OUT_OF_BOUNDS = re.compile(r"\bindex\b.* out of (bounds|range)")


def outputs_of(contract: Contract, result: Any) -> list[Any]:
    """Returns the outputs of a reference as a list; an absent gradient is None.

    Outputs that are declared non-differentiable come detached.
    """
    if not contract.outputs:
        return []
    found = [result] if len(contract.outputs) == 1 and not isinstance(result, tuple) else list(result)
    for i, output in enumerate(contract.outputs):
        if output.is_constant:
            found[i] = found[i].detach()
    return found


def conforming(contract: Contract, reference: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that runs the reference as a kernel.

    The outputs are contiguous and share no memory with the inputs or with each other, as the outputs
    of a kernel do; the gradient of an optional input that is absent is an empty tensor.
    """
    call = caller(contract, reference)
    is_simple = len(contract.outputs) == 1 and not contract.outputs[0].is_constant

    def run(values: Sequence[Any]) -> Any:
        result = call(values)
        taken = {_storage(tensor) for tensor in tensors_in(values)}
        if (  # most calls, without the cost of lists
            is_simple and isinstance(result, torch.Tensor) and result.is_contiguous() and _storage(result) not in taken
        ):
            return result
        made = []
        for output in outputs_of(contract, result):
            if output is None:
                output = next(tensors_in(values)).new_empty(0)
            elif not output.is_contiguous() or _storage(output) in taken:
                output = output.clone(memory_format=torch.contiguous_format)
            taken.add(_storage(output))
            made.append(output)
        return pack(made)

    return run


def tensors_in(values: Sequence[Any]):
    """Yields the tensors among the arguments of a call, those in lists included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return _torch.address_of(tensor.untyped_storage())
