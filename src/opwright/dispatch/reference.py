"""Runs a reference so that its result keeps the promises of an operator."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from opwright import _torch
from opwright._torch import tree_map
from opwright.contract.contract import Contract, Output
from opwright.contract.declaration import Declaration
from opwright.dispatch.arguments import Arguments
from opwright.dispatch.fake import empty_outputs, pack
from opwright.errors import OpwrightError, OutOfBoundsError

MAX_CHECKED = 1024  # signatures of one operator
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # the classes of tensors that kernels take
_META = torch.device("meta")
_NUMBERS = frozenset({int, float, bool, str, type(None)})


class Reference:
    """The reference of one operator, with the promises of an operator.

    Attributes:
        call: calls it, with the arguments in schema order.
        run: runs it as a kernel.
    """

    def __init__(self, declaration: Declaration, arguments: Arguments) -> None:
        self._contract, self._arguments = declaration.contract, arguments
        self._is_random = declaration.random
        self.call = caller(self._contract, declaration.reference)
        self.run = conforming(self._contract, declaration.reference)
        self._checked: set[tuple] = set()

    def compute(self, values: Sequence[Any]) -> Any:
        """Returns what the operator returns, as the composition of operators that the reference is."""
        return pack(outputs_of(self._contract, self.call(values)))

    def run_checked(self, values: Sequence[Any]) -> Any:
        """Checks the arguments as the glue does, and runs it; a signature that has passed passes again.

        On device "meta" the contract answers: a reference may read its data.
        """
        # Where memory overlaps differs between calls.
        key = None if self._contract.mutated else signature_of_call(values)
        if key is None or key not in self._checked:
            bindings = self._arguments.bind(values)
            if bindings.device == _META and not self._contract.data_dependent:
                return pack(empty_outputs(self._contract, bindings))
            if key is not None:
                if len(self._checked) >= MAX_CHECKED:
                    self._checked = set()
                self._checked.add(key)
        return self.run(values)

    def has_index_out_of_bounds(self, values: Sequence[Any]) -> bool:
        """Returns whether it raises an IndexError for what a kernel has refused.

        A call that runs the reference, in a dtype without a kernel, then raises the same type of error.
        """
        if self._is_random:  # the caller's next numbers are not to change
            return False
        pairs = zip(self._contract.parameters, values, strict=True)
        copied = [with_copies(v) if p.mutated else v for p, v in pairs]
        try:
            with torch.no_grad():
                self.run(copied)
        except IndexError:
            return True
        except Exception:  # whatever a reference may raise
            return False
        return False


def with_copies(value: Any) -> Any:
    """Returns an argument, or a list of them, with copies of its tensors."""
    return tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, value)


def caller(contract: Contract, reference: Callable[..., Any]) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that calls the reference with the arguments in schema order.

    An index out of bounds is an IndexError. PyTorch raises a RuntimeError in `gather`, `scatter_add` and `index_add`.
    """
    pass_to = Arguments(contract).pass_to

    def call(values: Sequence[Any]) -> Any:
        try:
            return pass_to(reference, values)
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
        for declared, output in zip(contract.outputs, outputs_of(contract, result), strict=True):
            if output is None:
                output = absent_gradient(contract, declared, values)
            elif not output.is_contiguous() or _storage(output) in taken:
                output = output.clone(memory_format=torch.contiguous_format)
            taken.add(_storage(output))
            made.append(output)
        return pack(made)

    return run


def absent_gradient(contract: Contract, output: Output, values: Sequence[Any]) -> torch.Tensor:
    """Returns what stands for the gradient of an optional input that a call does not have."""
    bindings = contract.bind(contract.name_arguments(values))
    first = next(tensors_in(values))
    is_bound = output.type.family.is_single or output.type.family.name in bindings.dtypes
    return first.new_empty(0, dtype=contract.output_dtype(output, bindings) if is_bound else first.dtype)


def tensors_in(values: Sequence[Any]):
    """Yields the tensors among the arguments of a call, those in lists included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def _storage(tensor: torch.Tensor) -> int:
    return _torch.address_of(tensor.untyped_storage())


def signature_of_call(values: Sequence[Any]) -> tuple | None:
    """Returns what decides which operators run for these arguments; None for values of unusual classes."""
    found: list[Any] = []
    for value in values:
        if type(value) in PLAIN:
            try:
                found.append((value.shape, value.stride(), value.dtype, value.device))
            except RuntimeError:  # a sparse or a nested tensor has no strides
                return None
        elif isinstance(value, (list, tuple)):
            inner = signature_of_call(value)
            if inner is None:
                return None
            found.append(inner)
        elif type(value) in _NUMBERS:
            # 1, 1.0 and True are equal, and so are 0.0 and -0.0.
            found.append((type(value), value or repr(value)))
        else:
            return None
    return tuple(found)
