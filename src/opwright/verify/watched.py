"""Functions and classes that a candidate must leave alone: those that judge it, and its reference."""

from __future__ import annotations

import builtins
import math
import sys
import time
from collections.abc import Iterator
from operator import attrgetter, is_
from types import CodeType, FunctionType
from typing import Any

import torch

# PyTorch replaces these itself: when the default dtype changes, when torch._dynamo is imported.
_PYTORCHS_OWN = {"torch.Storage", "torch.manual_seed"}
_OWN = "opwright.verify."
_DEVICE_KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA")


class Watched:
    """What a module or a class holds, as it was.

    Args:
        is_own: whether constants count as well, and not functions alone.
    """

    def __init__(self, name: str, holder: Any, is_own: bool = False) -> None:
        self.name, self.holder, self.is_own = name, holder, is_own
        self.saved = dict(vars(holder))

    def put_back(self) -> list[str]:
        """Restores what was replaced; returns what that was."""
        now = vars(self.holder)
        if len(now) == len(self.saved) and all(map(is_, now.values(), self.saved.values())):  # as fast as can be
            return []
        found = []
        is_class = isinstance(self.holder, type)
        for name, was in self.saved.items():
            # What is gone from a module has been PyTorch's to remove: functions that torch.compile puts there.
            is_other = now.get(name) is not was and (name in now or is_class)
            is_watched = callable(was) or (self.is_own and not name.startswith("__"))
            if is_other and is_watched and f"{self.name}.{name}" not in _PYTORCHS_OWN:
                setattr(self.holder, name, was)
                found.append(f"`{self.name}.{name}` was replaced by the call")
        if is_class:  # a new name may hide what is inherited, or what each object has of its own
            for name in [n for n in now if n not in self.saved and self._hides(n)]:
                delattr(self.holder, name)
                found.append(f"`{self.name}.{name}` was replaced by the call")
        self.saved = dict(vars(self.holder))
        return found

    def _hides(self, name: str) -> bool:
        of_objects = self.is_own and name in vars(self.holder).get("__annotations__", ())
        return of_objects or hasattr(super(self.holder, self.holder), name)


_code_of = attrgetter("__code__")


class WatchedCode:
    """The code of functions, as it was: of a reference, of all that it calls by name, of the classes of a module."""

    def __init__(self, *roots: Any) -> None:
        self.saved: dict[FunctionType, CodeType] = {}
        self.names: list[tuple[dict[str, Any], str, Any]] = []
        self.classes: dict[type, Watched] = {}
        for root in roots:
            self._visit(root)

    def put_back(self) -> list[str]:
        found = [text for watched in self.classes.values() for text in watched.put_back()]
        if not all(map(is_, map(_code_of, self.saved), self.saved.values())):  # as fast as can be
            for function, code in self.saved.items():
                if function.__code__ is not code:
                    function.__code__ = code
                    found.append(f"the code of `{function.__module__}.{function.__qualname__}` was replaced by the call")
        for holder, name, was in self.names:
            if holder.get(name) is not was:
                holder[name] = was
                found.append(f"`{name}`, which the reference calls, was replaced by the call")
        return found

    def _visit(self, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            for module in value.modules():
                self._visit(type(module))
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif hasattr(value, "__func__") or hasattr(value, "func"):  # a bound method, a partial
            self._visit(getattr(value, "__func__", None) or value.func)

    def _visit_class(self, value: type) -> None:
        if value in self.classes or _is_library(value):
            return
        self.classes[value] = Watched(f"{value.__module__}.{value.__qualname__}", value)
        for member in vars(value).values():
            self._visit(getattr(member, "__func__", member))
        for base in value.__bases__:
            self._visit_class(base)

    def _visit_function(self, function: FunctionType) -> None:
        if function in self.saved or _is_library(function):
            return
        self.saved[function] = function.__code__
        for name in _names_in(function.__code__):
            called = function.__globals__.get(name)
            if isinstance(called, (FunctionType, type)) and not _is_library(called):
                self.names.append((function.__globals__, name, called))
                self._visit(called)
        for cell in function.__closure__ or ():
            try:
                self._visit(cell.cell_contents)
            except ValueError:  # it has none yet
                continue


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_library(value: Any) -> bool:
    """Returns whether it is of PyTorch or of Python: the names there are watched, and PyTorch changes some itself."""
    root = (getattr(value, "__module__", None) or "builtins").partition(".")[0]
    return root == "torch" or root in sys.stdlib_module_names


class WatchedOverrides:
    """Operators of PyTorch whose kernels are replaced for everybody; nobody can put them back."""

    def __init__(self) -> None:
        self.saved = set(torch.library._impls)

    def put_back(self) -> list[str]:
        now = torch.library._impls
        if len(now) == len(self.saved):
            return []
        new, self.saved = now - self.saved, set(now)
        # PyTorch registers others itself when it is first asked for vmap, say.
        names = sorted(name for name in new if name.startswith("aten/") and name.rpartition("/")[2] in _DEVICE_KEYS)
        return [f"a kernel of PyTorch was replaced for everybody by the call: {', '.join(names)}"] if names else []


def watched_judges() -> list[Watched | WatchedCode]:
    """Returns the modules and classes whose functions the judge uses, and the code of its own."""
    holders = {
        "builtins": builtins,
        "math": math,
        "time": time,
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.autograd": torch.autograd,
        "torch.cuda": torch.cuda,
        "torch.cuda.Event": torch.cuda.Event,
        "torch.cuda.Stream": torch.cuda.Stream,
        "torch.library": torch.library,
        "torch.linalg": torch.linalg,
        "torch.nn.functional": torch.nn.functional,
        "torch.testing": torch.testing,
    }
    own = {name: m for name, m in sys.modules.items() if name.startswith(_OWN) and m is not None}
    found: list[Watched | WatchedCode] = [Watched(name, holder) for name, holder in holders.items()]
    found += [Watched(name, module, is_own=True) for name, module in own.items()]
    members = [v for module in own.values() for v in vars(module).values()]
    classes = {v for v in members if isinstance(v, type) and v.__module__.startswith(_OWN)}
    found += [Watched(f"{c.__module__}.{c.__qualname__}", c, is_own=True) for c in classes]
    methods = [getattr(v, "__func__", v) for c in classes for v in vars(c).values()]
    functions = [f for f in (*members, *methods) if isinstance(f, FunctionType) and (f.__module__ or "").startswith(_OWN)]
    code = WatchedCode()
    code.saved = {f: f.__code__ for f in functions}
    return [*found, code]
