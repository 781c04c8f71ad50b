"""The functions that time and judge, and whether someone has put others in their place.

Those of this package and of verify as they are when they are remembered; of PyTorch those that a recheck is made of,
as they are when this is imported.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_PACKAGES = ("opwright.bench.", "opwright.verify.")
_TORCHS: dict[Any, tuple[str, ...]] = {
    torch: ("equal", "isfinite", "rand", "randn_like", "where"),
    torch.autograd: ("grad",),
    torch.Tensor: ("clone", "contiguous", "copy_", "detach", "double", "mul_", "norm", "sum", "to", "view"),
}
_originals = {(holder, name): getattr(holder, name) for holder, names in _TORCHS.items() for name in names}
_known: dict[tuple[Any, str], Any] = {}


def remember() -> None:
    """Takes the functions as they are now for the right ones."""
    _known.clear()
    for holder in _holders():
        _known.update({(holder, name): value for name, value in vars(holder).items() if _judges(holder, name, value)})


def replaced() -> list[str]:
    """Returns the names of those that are others now."""
    found = [
        f"{_name(holder)}.{name}"
        for (holder, name), was in _known.items()
        if vars(holder).get(name) is not was
    ]
    found += [
        f"{_name(holder)}.{name}" for (holder, name), was in _originals.items() if getattr(holder, name) is not was
    ]
    return found


def _judges(holder: Any, name: str, value: Any) -> bool:
    # torch.compile leaves functions in the modules of what it has compiled, and takes them away: `__compiled_fn_1`.
    return callable(value) and (isinstance(holder, type) or not name.startswith("__"))


def _holders() -> list[Any]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_PACKAGES) and module]
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return modules + classes


def _name(holder: Any) -> str:
    return f"{holder.__module__}.{holder.__qualname__}" if isinstance(holder, type) else holder.__name__
