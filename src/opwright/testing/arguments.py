"""The arguments of one call, as tests pass them around."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from opwright.contract.contract import Contract
from opwright.contract.dtypes import describe
from opwright.verify.tensors import copy_of

_SHOWN = 8  # a tensor of at most so many elements is shown with its values


class Inputs(tuple):
    """The positional and named arguments of one call; also the pair `(args, kwargs)` that `samples=` takes.

    Attributes:
        args, kwargs: `op(*inputs.args, **inputs.kwargs)` calls an operator.
        label: what is special about it: "sliced", "empty n", ...
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str

    def __new__(cls, args: Sequence[Any], kwargs: Mapping[str, Any], label: str = "") -> Inputs:
        """Makes the arguments of one call."""
        made = super().__new__(cls, (tuple(args), dict(kwargs)))
        made.args, made.kwargs = made
        made.label = label
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.args, self.kwargs, self.label)

    def __str__(self) -> str:
        values = [*self.args, *self.kwargs.values()]
        named = [f"{name}={value!r}" for name, value in self.kwargs.items() if not _tensors(value)]
        plain = [repr(value) for value in self.args if not _tensors(value)]
        shapes = [describe(t).removesuffix(" cpu") for value in values for t in _tensors(value)]
        return " ".join([*shapes, *plain, *named, *([self.label] if self.label else [])])

    def __repr__(self) -> str:
        shown = [_show(value) for value in self.args]
        shown += [f"{name}={_show(value)}" for name, value in self.kwargs.items()]
        return f"Inputs({', '.join(shown)})"

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first floating-point tensor, else of the first tensor."""
        tensors = [t for value in (*self.args, *self.kwargs.values()) for t in _tensors(value)]
        floats = [t for t in tensors if t.is_floating_point()]
        return next((t.dtype for t in floats or tensors), None)

    def fresh(self) -> Inputs:
        """Returns a copy with tensors of its own, of the same strides and offsets."""
        return Inputs(copy_of(self.args), copy_of(self.kwargs), self.label)


def inputs_from(contract: Contract, values: Sequence[Any], label: str) -> Inputs:
    """Returns the arguments of a call from values in schema order."""
    args, kwargs = contract.split_arguments(values)
    return Inputs(list(args), kwargs, label)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple)) and value and _tensors(value):
        return f"[{', '.join(map(_show, value))}]"
    if not isinstance(value, torch.Tensor):
        return repr(value)
    text = describe(value).removesuffix(" cpu")
    text += "" if value.is_contiguous() else f" strides {list(value.stride())}"
    return f"{text} = {value.tolist()}" if 0 < value.numel() <= _SHOWN else text
