"""Compiles generated Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def compiled(name: str, source: str, module: str) -> Callable[..., Any]:
    """Returns the function `make` of a text, as a function of that module; tracebacks call the text by the name."""
    namespace: dict[str, Any] = {"__name__": module}
    exec(compile(source, f"<opwright {name}>", "exec"), namespace)
    return namespace["make"]
