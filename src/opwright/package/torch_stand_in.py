"""Replaces torch, Triton, `opwright.verify` and `opwright.bench` while the operators of a package are collected.

A wheel can thus be built without torch and Triton. Declarations need dtypes and the class Tensor. For everything else
that a module takes from these when it is imported, such as a base class, a constant or a decorator, it gets
`Anything`: an object that has any attribute and can be called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from typing import Any, ClassVar

_FLOATS = ("float16", "float32", "float64", "bfloat16")
# torch and Triton, and the parts of Opwright that need torch when imported; a module may import them to verify or
# measure its operators as a script.
_REPLACED = "torch.", "triton.", "opwright.verify.", "opwright.bench."
_OTHERS = ("uint8", "int8", "int16", "int32", "int64", "bool", "complex64", "complex128")


class dtype:
    """A dtype by its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_floating_point = name in _FLOATS

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class _TensorType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or not name.startswith("_"):  # annotations are told by the public ones
            raise AttributeError(name)
        return Anything()


class Tensor(metaclass=_TensorType):
    """The class that annotations name."""


class Anything:
    """A value of which nothing is known."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A decorator without arguments leaves its function as it is.
        return args[0] if len(args) == 1 and isinstance(args[0], types.FunctionType) and not kwargs else self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        first = next(base for base in bases if isinstance(base, Anything))
        return (_Base,) if first is self else ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    __subclasscheck__ = __instancecheck__

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __format__(self, form: str) -> str:
        return "?"

    def __len__(self) -> int:
        return 0

    __int__ = __index__ = __len__

    def __float__(self) -> float:
        return 0.0

    def __lt__(self, other: Any) -> bool:
        return False

    __le__ = __gt__ = __ge__ = __lt__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __or__
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __mod__ = __rmod__ = __or__
    __and__ = __rand__ = __xor__ = __rxor__ = __matmul__ = __rmatmul__ = __lshift__ = __rshift__ = __or__

    def __neg__(self) -> Any:
        return self

    __pos__ = __abs__ = __invert__ = __neg__

    def __bool__(self) -> bool:
        return False


class _Base:
    """What a subclass of something of torch's inherits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Anything()


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_replaced = f"{name}.".startswith(_REPLACED)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_replaced else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__file__ = "<no torch>"
        if module.__name__ == "torch":
            module.__version__ = "0"
            module.Tensor, module.dtype = Tensor, dtype
            for name in (*_FLOATS, *_OTHERS):
                setattr(module, name, dtype(name))


def install() -> None:
    """Lets later imports of what is replaced find the replacements, even beside torch."""
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already")
    sys.meta_path.insert(0, _Finder())
