"""What runs where no kernel is registered (yet): it is loaded, or launched from Python, or the reference runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from opwright.contract.declaration import Declaration
from opwright.dispatch import kernels
from opwright.dispatch.arguments import Arguments
from opwright.dispatch.call_errors import CallErrors
from opwright.dispatch.launched import launch
from opwright.dispatch.reference import Reference, tensors_in
from opwright.dispatch.registration import Registration

_NUMBERS = {"int": int, "float": float, "bool": bool}


class Fallback:
    """The fallback of one declaration."""

    def __init__(
        self,
        declaration: Declaration,
        registration: Registration,
        arguments: Arguments,
        reference: Reference,
        errors: CallErrors,
    ) -> None:
        self._declaration, self._registration = declaration, registration
        self._arguments, self._reference, self._errors = arguments, reference, errors
        kinds = [_NUMBERS.get(p.kind) for p in declaration.contract.parameters]
        self._options = [(i, kind) for i, kind in enumerate(kinds) if kind is not None]
        self._has_choices = any(p.kind == "choice" for p in declaration.contract.parameters)

    def run(self, values: tuple[Any, ...]) -> Any:
        """Calls the kernel, which is loaded first; else runs the reference, after the checks that the glue makes."""
        if not self.load_kernels(values):
            return self._reference.run_checked(values)
        launched = kernels.launched_by(self._registration.current, _device_of(values))
        if launched is not None:
            return launch(self._declaration, launched, values, self._reference.run)
        try:
            return self._registration.kernel(*self._arguments.encode(values))
        except RuntimeError as error:
            raise self._errors.explain(error, values) from None

    def run_call(self, *args: Any, **kwargs: Any) -> Any:
        """The same, with the arguments of a call."""
        return self.run(self._arguments.normalize(*args, **kwargs))

    def run_coded(self, *coded: Any) -> Any:
        """The same, with the arguments of a kernel."""
        return self.run(self._arguments.decode(coded))

    def run_coded_without_kernels(self, *coded: Any) -> Any:
        """Runs the reference, after the checks that the glue makes, with the arguments of a kernel.

        The dispatcher has to convert options of another type than the contract's, such as an int for a float.
        """
        for position, kind in self._options:
            if type(coded[position]) is not kind:
                return self._registration.kernel(*coded)
        return self._reference.run_checked(self._arguments.decode(coded) if self._has_choices else coded)

    def run_coded_reference(self, *coded: Any) -> Any:
        """Runs the reference for the glue; where the kernels were taken back, the current ones."""
        try:
            values = self._arguments.decode(coded)
            if not kernels.is_loaded(self._registration.current, _device_of(values)):
                return self.run(values)
            return self._reference.run(values)
        except Exception as error:
            self._errors.keep(error)
            raise

    def load_kernels(self, values: Sequence[Any]) -> bool:
        """Loads the kernels for these tensors; returns whether there are any that can take them."""
        device = _device_of(values)
        for t in tensors_in(values):  # one of another kind would lead the dispatcher here again
            if t.layout != torch.strided or t.is_nested or t.device.type != device:
                return False
        return kernels.ensure_loaded(self._registration.current, device)

    def is_launched(self, values: Sequence[Any]) -> bool:
        """Returns whether Python launches the kernels that are loaded for these tensors."""
        return kernels.launched_by(self._registration.current, _device_of(values)) is not None


def _device_of(values: Sequence[Any]) -> str:
    return next((tensor.device.type for tensor in tensors_in(values)), "")
