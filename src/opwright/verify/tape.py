"""The operators that a computation has called, to be called again without it.

An operator that a mode of Python sees costs several times what it costs alone; a small tensor costs little beside that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from opwright.verify.tensors import tensors_of

_MOST_ELEMENTS = 2**21  # 16 MiB in float64: all are kept, and where tensors are large, calls are not what it costs
# Tags of operators whose result depends on more than their arguments, or is not a tensor: Python may branch on it.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
# What gives numbers to Python without an operator.
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr}


@dataclass(frozen=True)
class _Slot:
    """Where a tensor comes from: the n-th of all inputs and results."""

    index: int


class Tape(TorchFunctionMode):
    """What a computation calls while this mode is active.

    It can be played if every tensor in it is an input or the result of an operator, and Python has seen no number of one.

    Attributes:
        is_complete: whether it can be played.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.is_complete = True
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self._outputs: Any = None
        self._slots: dict[Any, _Slot] = {}
        self._known: dict[int, _Slot] = {}
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets the memory of one
        self._elements = 0
        self._hold(inputs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._give_up()
        return func(*args, **(kwargs or {}))

    def note(self, step: Any, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Writes down a call.

        Args:
            step: what `play` gets for it.
            func: the operator, or None.
        """
        if not self.is_complete:
            return
        if func is not None and _is_open(func):
            self._give_up()
            return
        self._steps.append((step, self._referred(tuple(args)), self._referred(kwargs)))
        self._hold([result])

    def end(self, outputs: Sequence[Any]) -> None:
        """Writes down what the computation has returned."""
        self._outputs = self._referred(list(outputs))
        self._forget()

    def play(self, run: Callable[[Any, Any, Any], Any], inputs: Sequence[Any]) -> Any:
        """Calls `run` with each step, its arguments and its keyword arguments; returns the outputs."""
        tensors = tensors_of(inputs)

        def filled(value: Any) -> Any:
            if isinstance(value, _Slot):
                return tensors[value.index]
            if isinstance(value, (list, tuple)):
                return [filled(v) for v in value]
            return value

        with torch.no_grad():
            for step, args, kwargs in self._steps:
                result = run(step, filled(args), {name: filled(v) for name, v in kwargs.items()} if kwargs else kwargs)
                if isinstance(result, torch.Tensor):
                    tensors.append(result)
                else:
                    tensors += tensors_of([result])
        return filled(self._outputs)

    def _referred(self, value: Any) -> Any:
        """Returns arguments with slots in place of tensors."""
        if isinstance(value, torch.Tensor):
            slot = self._known.get(id(value)) or self._slots.get(_place_of(value))
            if slot is None:
                self._give_up()
            return slot
        if isinstance(value, (list, tuple)):
            return [self._referred(v) for v in value]
        if isinstance(value, dict):
            return {name: self._referred(v) for name, v in value.items()}
        return value

    def _hold(self, values: Sequence[Any]) -> None:
        for tensor in tensors_of(values):
            if (place := _place_of(tensor)) is None:
                return self._give_up()
            self._slots[place] = self._known[id(tensor)] = _Slot(len(self._kept))
            self._kept.append(tensor)
            self._elements += tensor.numel()
        if self._elements > _MOST_ELEMENTS:
            self._give_up()

    def _give_up(self) -> None:
        self.is_complete = False
        self._steps = []
        self._forget()

    def _forget(self) -> None:
        self._kept, self._slots, self._known = [], {}, {}


@functools.cache
def _is_open(func: Any) -> bool:
    return not _TAGS.isdisjoint(func.tags)


def _place_of(tensor: torch.Tensor) -> Any:
    """Returns what two tensors of the same numbers have in common; None if it has no memory of its own.

    Autograd gives out others for what it has saved, so identity is not enough.
    """
    if tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None
    where = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *where, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
