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
        if any(_is_converted(t, contract) and t.family.has_floats for t in _types(contract)):
            return "it has a second family of floating-point dtypes"
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
            value if p.type is None or value is None else _view(value, p.type, contract)
            for p, value in zip(contract.parameters, values, strict=True)
        ]
        made = [
            None if output.gradient_of in absent else _view(tensor, output.type, contract)
            for output, tensor in zip(contract.outputs, outputs, strict=True)
        ]
        tensor = next(value for value in [*outputs, *values] if isinstance(value, Tensor))
        try:
            with torch.cuda.device_of(tensor):  # Triton launches on the current one
                getattr(self._module, declaration.name)(*given, *made)
        except AssertionError as error:
            raise KernelError(declaration.name, f"its launch function refuses: {error}") from None
        written = [p.mutated and value is not None for p, value in zip(contract.parameters, values, strict=True)]
        written += [view is not None for view in made]
        for is_written, value, view in zip(written, [*values, *outputs], [*given, *made], strict=True):
            if is_written and view.data_ptr() != value.data_ptr():
                value.copy_(view.reshape(value.shape))


def load(module: str) -> Launched:
    """Returns the launcher of a module's kernels.

    Raises:
        ImportError: as above.
    """
    file = TritonFile(module)
    return Launched(file, file)


def _types(contract: Contract) -> list[TensorType]:
    return [p.type for p in contract.parameters if p.type is not None] + [output.type for output in contract.outputs]


def _is_converted(type_: TensorType, contract: Contract) -> bool:
    """Returns whether kernels see tensors as int64: those of families other than the one that they are compiled for."""
    return not type_.family.is_single and type_.family != contract.scalar_family


def _view(tensor: Tensor, type_: TensorType, contract: Contract) -> Tensor:
    """Returns a tensor as kernels see it, with its variadic axis as one dimension: a view or, if need be, a copy."""
    if _is_converted(type_, contract):
        tensor = tensor.to(torch.int64)
    at = type_.variadic_at
    if at is None:
        return tensor
    end = tensor.ndim - (type_.rank - 1 - at)
    shape = tensor.shape
    return tensor.reshape(*shape[:at], math.prod(shape[at:end]), *shape[end:])
