"""Opwright: write a PyTorch operator once.

A reference in PyTorch with shape annotations is the declaration; kernels in C++, CUDA or Triton lie next
to it. Names are imported when they are first used, so that `import opwright` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "operator": "opwright.dispatch.operator",
    "Operator": "opwright.dispatch.operator",
    "Mutates": "opwright.contract.annotations",
    "Factor": "opwright.contract.precision",
    "Index": "opwright.contract.domains",
    "NonNegative": "opwright.contract.domains",
    "Positive": "opwright.contract.domains",
    "Probability": "opwright.contract.domains",
    "Range": "opwright.contract.domains",
    "verify": "opwright",  # a package that can be called
    "VerifyRecord": "opwright.verify",
    "bench": "opwright",
    "BenchRecord": "opwright.bench",
    "errors": "opwright",
}

__all__ = [
    "BenchRecord",
    "Factor",
    "Index",
    "Mutates",
    "NonNegative",
    "Operator",
    "Positive",
    "Probability",
    "Range",
    "VerifyRecord",
    "__version__",
    "bench",
    "errors",
    "operator",
    "verify",
]

if TYPE_CHECKING:
    from opwright import errors
    from opwright.bench import BenchRecord, bench
    from opwright.contract.annotations import Mutates
    from opwright.contract.domains import Index, NonNegative, Positive, Probability, Range
    from opwright.contract.precision import Factor
    from opwright.dispatch.operator import Operator, operator
    from opwright.verify import VerifyRecord, verify


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'opwright' has no attribute {name!r}")
    try:
        if home == "opwright":
            return importlib.import_module(f"opwright.{name}")
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        text = f"`opwright.{name}` needs PyTorch, 2.11 or newer   hint: `pip install torch`"
        raise ModuleNotFoundError(text, name="torch") from None
