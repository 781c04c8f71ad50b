"""The fake kernel: shapes and dtypes of the outputs, from the contract alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from opwright.contract.contract import Bindings, Contract
from opwright.dispatch.arguments import Arguments


def fake_kernel(arguments: Arguments) -> Callable[..., Any]:
    """Returns a function that checks the arguments and makes outputs without data."""
    contract = arguments.contract

    def fake(*args: Any, **kwargs: Any) -> Any:
        bindings = arguments.bind(arguments.normalize(*args, **kwargs))
        for axis in contract.data_dependent:
            bindings.sizes[axis] = torch.library.get_ctx().new_dynamic_size()
        return pack(empty_outputs(contract, bindings))

    return fake


def empty_outputs(contract: Contract, bindings: Bindings) -> list[torch.Tensor]:
    """Returns outputs for a call with these bindings, not yet written."""
    return [
        torch.empty(
            contract.output_shape(output, bindings),
            dtype=contract.output_dtype(output, bindings),
            device=bindings.device,
        )
        for output in contract.outputs
    ]


def pack(outputs: Sequence[Any]) -> Any:
    """Returns what an operator with these outputs returns: nothing, the one, or a tuple."""
    if not outputs:
        return None
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def unpack(result: Any, contract: Contract) -> tuple[Any, ...]:
    """Returns the outputs of a call as a tuple."""
    if not contract.outputs:
        return ()
    return (result,) if len(contract.outputs) == 1 else tuple(result)
