"""Tests of operators with pytest: the generic suite, cases of a sweep, hypothesis strategies, `assert_matches`.

    test_operators = opwright.testing.suite("my_ops")

Nothing here imports torch before it is used: pytest loads the plugin in every run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "suite": "opwright.testing.generic",
    "cases": "opwright.testing.sweep",
    "assert_matches": "opwright.testing.matching",
    "inputs": "opwright.testing.strategies",
    "Inputs": "opwright.testing.arguments",
}

__all__ = ["Inputs", "assert_matches", "cases", "inputs", "suite"]

if TYPE_CHECKING:
    from opwright.testing.arguments import Inputs
    from opwright.testing.generic import suite
    from opwright.testing.matching import assert_matches
    from opwright.testing.strategies import inputs
    from opwright.testing.sweep import cases


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'opwright.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
