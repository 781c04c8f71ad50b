"""Launches the Triton kernels of a wheel, by Triton itself. In a checkout they are launched by C++."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from opwright.contract.contract import Contract, TensorType
from opwright.contract.declaration import Declaration
from opwright.dispatch.launched import Launched
from opwright.errors import KernelError


class TritonFile:
    """A `triton.py` of the package: its launch functions take tensors whose variadic axis is one dimension."""

    def __init__(self, module: str) -> None:
        """Imports it.

        Raises:
            ImportError: there is no Triton, or another module is missing that the file imports.
        """
        self._module = importlib.import_module(module)

    def find_refusal(self, contract: Contract, dtype: torch.dtype) -> str:
        """Returns why its kernels are not for a dtype; "" where they are."""
        dtypes = getattr(self._module, "DTYPES", None)
        return "" if dtypes is None or str(dtype).removeprefix("torch.") in dtypes else f"DTYPES is {dtypes}"

    def launch(self, declaration: Declaration, values: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """Calls the launch function of an operator.

        Raises:
            KernelError: an `assert` in it fails.
        """
        contract = declaration.contract
        absent = {p.name for p, value in zip(contract.parameters, values, strict=True) if value is None}
        given = [
            value if p.type is None or value is None else _flat(value, p.type)
            for p, value in zip(contract.parameters, values, strict=True)
        ]
        made = [
            None if output.gradient_of in absent else _flat(tensor, output.type)
            for output, tensor in zip(contract.outputs, outputs, strict=True)
        ]
        tensor = next(value for value in [*outputs, *values] if isinstance(value, Tensor))
        try:
            with torch.cuda.device_of(tensor):  # Triton launches on the current one
                getattr(self._module, declaration.name)(*given, *made)
        except AssertionError as error:
            raise KernelError(declaration.name, f"its launch function refuses: {error}") from None
        for parameter, value, flat in zip(contract.parameters, values, given, strict=True):
            if parameter.mutated and flat.data_ptr() != value.data_ptr():
                value.copy_(flat.reshape(value.shape))


def load(module: str) -> Launched:
    """Returns the launcher of a module's kernels.

    Raises:
        ImportError: as above.
    """
    file = TritonFile(module)
    return Launched(file, file)


def _flat(tensor: Tensor, type_: TensorType) -> Tensor:
    """Returns a tensor with its variadic axis as one dimension: a view where strides allow it, else a copy."""
    at = type_.variadic_at
    if at is None:
        return tensor
    end = tensor.ndim - (type_.rank - 1 - at)
    shape = tensor.shape
    return tensor.reshape(*shape[:at], math.prod(shape[at:end]), *shape[end:])
