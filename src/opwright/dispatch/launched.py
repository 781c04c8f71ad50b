"""Calls a kernel that is launched from Python: what the C glue does for compiled ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opwright.contract.declaration import Declaration
from opwright.dispatch.fake import empty_outputs, pack


class Launched:
    """A library whose kernels are launched from Python: the dispatcher keeps calling the fallback, which launches them.

    Attributes:
        backend: the backend that it belongs to.
        launch: runs a kernel.
    """

    handle = None

    def __init__(self, backend: Any, library: Any) -> None:
        self.backend, self.launch = backend, library.launch

    def register(self, backend: str) -> None:
        """Does nothing."""

    def unregister(self, backend: str) -> None:
        """Does nothing."""


def launch(
    declaration: Declaration, launched: Launched, values: Sequence[Any], run_reference: Callable[[Sequence[Any]], Any]
) -> Any:
    """Checks the arguments, allocates the outputs and launches; the reference runs in a dtype that is refused."""
    contract = declaration.contract
    bindings = contract.bind(contract.name_arguments(values))
    family = contract.scalar_family
    if family is not None and launched.backend.find_refusal(contract, bindings.dtypes[family.name]):
        return run_reference(values)
    outputs = empty_outputs(contract, bindings)
    present = [
        t for t, output in zip(outputs, contract.outputs, strict=True) if output.gradient_of not in bindings.absent
    ]
    if any(t.numel() for t in present) or not present:
        if not all(
            t.numel() for t in present
        ):  # as for compiled kernels: one beside an empty output is the reference's
            return run_reference(values)
        launched.launch(declaration, values, outputs)
    return pack(outputs)
