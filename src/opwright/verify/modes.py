"""Modes that see each operator of PyTorch that a computation calls."""

from __future__ import annotations

from typing import Any

from opwright._torch import TorchDispatchMode
from opwright.verify.tensors import tensors_of


class Mode(TorchDispatchMode):
    """Computes the operators of PyTorch that are called while it is active."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first call imports torch._dynamo, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.compute(func, args, kwargs or {})

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operator; this mode is not active meanwhile."""
        raise NotImplementedError


class OperatorWatch(Mode):
    """Notes the operators of PyTorch that are called, and the size of the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []
        self.largest = 0

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self.operators.append(func.overloadpacket)
        self.largest = max([self.largest, *(t.numel() for t in tensors_of([result]))])
        return result
