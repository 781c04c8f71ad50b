"""What times and judges, and whether someone has put something else in its place.

The functions and the numbers of this package, of verify and of the records, and the functions of Python that they
call, as they are when they are remembered; of PyTorch those that a recheck is made of, as they are when this is
imported.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import math
import resource
import statistics
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

_PACKAGES = ("opwright.bench.", "opwright.verify.", "opwright.records.")
_PYTHONS = (contextlib, copy, gc, itertools, json, json.encoder, math, resource, statistics)
_TORCHS: dict[Any, tuple[str, ...]] = {
    torch: ("equal", "isfinite", "rand", "randn_like", "where"),
    torch.autograd: ("grad",),
    torch.Tensor: ("clone", "contiguous", "copy_", "detach", "double", "mul_", "norm", "sum", "to", "view"),
}
_originals = {(holder, name): getattr(holder, name) for holder, names in _TORCHS.items() for name in names}
_known: dict[tuple[Any, str], tuple[Any, ...]] = {}
_rivals: dict[str, tuple[Any, ...]] = {}


def remember(*more: ModuleType) -> None:
    """Takes what there is now for the right ones, that of further modules as well."""
    _known.clear()
    for holder in [*_holders(more), *_PYTHONS]:
        _known.update({(holder, name): _state(value) for name, value in vars(holder).items() if _judges(holder, name, value)})


def remember_rivals(rivals: Mapping[str, Any]) -> None:
    """Takes the functions that a candidate is compared with and held to as they are now."""
    _rivals.clear()
    _rivals.update({name: _state(rival) for name, rival in rivals.items()})


def replaced() -> list[str]:
    """Returns the names of those that are others now."""
    found = [
        f"{_name(holder)}.{name}"
        for (holder, name), was in _known.items()
        if not _is_same(_state(vars(holder).get(name)), was)
    ]
    found += [
        f"{_name(holder)}.{name}" for (holder, name), was in _originals.items() if getattr(holder, name) is not was
    ]
    found += [name for name, was in _rivals.items() if not _is_same(_state(was[0]), was)]
    return found if _known and _originals else [*found, f"{__name__}.remember"]


def _state(value: Any) -> tuple[Any, ...]:
    """Returns what a value consists of: a function keeps its identity when its code is replaced."""
    inside = value
    for attribute in ("__func__", "fget", "__wrapped__"):
        inside = getattr(inside, attribute, inside)
    return value, *(getattr(inside, part, None) for part in ("__code__", "__defaults__", "__kwdefaults__"))


def _is_same(now: tuple[Any, ...], was: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(now, was, strict=True))


def _judges(holder: Any, name: str, value: Any) -> bool:
    if isinstance(value, (int, float, str, tuple, property, staticmethod, classmethod)):  # limits, factors, lists of checks
        return not name.startswith("__")
    # torch.compile leaves functions in the modules of what it has compiled, and takes them away: `__compiled_fn_1`.
    return callable(value) and (isinstance(holder, type) or not name.startswith("__"))


def _holders(more: tuple[ModuleType, ...]) -> list[Any]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(_PACKAGES) and module]
    modules += more
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return modules + classes


def _name(holder: Any) -> str:
    return f"{holder.__module__}.{holder.__qualname__}" if isinstance(holder, type) else holder.__name__
