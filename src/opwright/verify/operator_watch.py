"""Which operators of PyTorch a computation calls."""

from __future__ import annotations

from typing import Any

from opwright._torch import TorchDispatchMode
from opwright.verify.tensors import tensors_of


class OperatorWatch(TorchDispatchMode):
    """Notes the operators of PyTorch that are called, and the size of the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []
        self.largest = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operators.append(func.overloadpacket)
        made = tensors_of(result if isinstance(result, (list, tuple)) else [result])
        self.largest = max([self.largest, *(t.numel() for t in made)])
        return result
