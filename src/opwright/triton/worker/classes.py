"""Argument classes: a key's text, the parsed class, and a value that Triton's own binder puts into that class.

Nothing of Triton's rules is repeated here. The binder is given representative values and says what it made of
them; `observed` writes that as a class again, and the two texts must agree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .errors import WorkerError
from .values import Scanner, from_python, scan_value, to_python, write_value

_TORCH_NAMES = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
    "fp8e4b8": "float8_e4m3fnuz",
    "fp8e5b16": "float8_e5m2fnuz",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "u1": "bool",
}
SIZES = {
    **dict.fromkeys(("u1", "i1", "i8", "u8", "fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16"), 1),
    **dict.fromkeys(("i16", "u16", "fp16", "bf16"), 2),
    **dict.fromkeys(("i32", "u32", "fp32"), 4),
    **dict.fromkeys(("i64", "u64", "fp64"), 8),
}
_FLOATS = ("fp16", "bf16", "fp32", "fp64")
_POINTER = re.compile(r"\*(\w+)(:16)?")
_SCALAR = re.compile(r"(\w+)(:16|:1)?")
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[(\d+(?:, \d+)*)\]>")
_TENSOR_ALIGNMENT = 16  # bytes; what TMA asks of an address and of the strides


@dataclass(frozen=True)
class Pointer:
    dtype: str
    is_aligned: bool


@dataclass(frozen=True)
class Scalar:
    dtype: str
    suffix: str  # "", ":16" or ":1"


@dataclass(frozen=True)
class Absent:
    """None, or an undefined tensor."""


@dataclass(frozen=True)
class Group:
    """A tuple of classes."""

    items: tuple[Any, ...]


@dataclass(frozen=True)
class Descriptor:
    dtype: str
    block: tuple[int, ...]


@dataclass(frozen=True)
class Constant:
    value: Any


ArgumentClass = Pointer | Scalar | Absent | Group | Descriptor | Constant


def parse_class(text: str) -> ArgumentClass:
    """Returns the class that a text stands for.

    Raises:
        WorkerError: The text is not a class, or not written as `write_class` writes it.
    """
    scanner = Scanner(text)
    found = _scan_class(scanner)
    scanner.end()
    if write_class(found) != text:
        raise WorkerError("request", f"`{text}` must be written as `{write_class(found)}`.")
    return found


def _scan_class(scanner: Scanner) -> ArgumentClass:
    start = scanner.at
    if scanner.take("="):
        return Constant(scan_value(scanner))
    if scanner.take("("):
        return Group(scanner.items(_scan_class))
    if (found := scanner.match(_POINTER)) and found[1] in _TORCH_NAMES:
        return Pointer(found[1], found[2] is not None)
    if (found := scanner.match(_DESCRIPTOR)) and found[1] in _TORCH_NAMES:
        return Descriptor(found[1], tuple(int(size) for size in found[2].split(", ")))
    scanner.at = start
    if found := scanner.match(_SCALAR):
        dtype, suffix = found[1], found[2] or ""
        if dtype == "none" and not suffix:
            return Absent()
        is_integer = dtype in _TORCH_NAMES and dtype not in _FLOATS and dtype != "u1" and not dtype.startswith("fp8")
        if is_integer and (suffix != ":1" or dtype == "i32"):
            return Scalar(dtype, suffix)
        if (dtype in _FLOATS or dtype == "u1") and not suffix:
            return Scalar(dtype, "")
        scanner.at = start
    raise scanner.error("`*fp32:16`, `i32`, `fp32`, `none`, `(i32, fp32)`, `tensordesc<fp16[64, 64]>` or `=1024`")


def write_class(found: ArgumentClass) -> str:
    """Returns the text of a class."""
    if isinstance(found, Constant):
        return f"={write_value(found.value)}"
    if isinstance(found, Group):
        inner = ", ".join(write_class(item) for item in found.items)
        return f"({inner},)" if len(found.items) == 1 else f"({inner})"
    if isinstance(found, Pointer):
        return f"*{found.dtype}{':16' if found.is_aligned else ''}"
    if isinstance(found, Descriptor):
        return f"tensordesc<{found.dtype}[{', '.join(map(str, found.block))}]>"
    return "none" if isinstance(found, Absent) else f"{found.dtype}{found.suffix}"


class _TorchDtype:
    """As much of a torch dtype as Triton's binder reads: its name, and its size for a descriptor."""

    def __init__(self, dtype: str) -> None:
        self.name = f"torch.{_TORCH_NAMES[dtype]}"
        self.itemsize = SIZES[dtype]

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TorchDtype) and other.name == self.name


class _Tensor:
    """As much of a tensor as Triton's binder reads."""

    def __init__(self, dtype: str, address: int) -> None:
        self.dtype = _TorchDtype(dtype)
        self.shape = (1,)
        self._address = address

    def data_ptr(self) -> int:
        return self._address

    def stride(self, axis: int | None = None) -> Any:
        return (1,) if axis is None else 1

    def ptr_range(self) -> int:
        return 0


def representative(found: ArgumentClass, module: Any, *, in_tuple: bool = False) -> Any:
    """Returns a value that Triton's binder puts into a class, if the parameter's declaration allows it."""
    if isinstance(found, Constant):
        value = to_python(found.value, module)
        if in_tuple:
            import triton.language as tl

            return tl.constexpr(value)
        return value
    if isinstance(found, Group):
        return tuple(representative(item, module, in_tuple=True) for item in found.items)
    if isinstance(found, Pointer):
        return _Tensor(found.dtype, 0 if found.is_aligned else 1)
    if isinstance(found, Descriptor):
        return _tensor_descriptor(found)
    if isinstance(found, Absent):
        return None
    if found.dtype == "u1":
        return True
    if found.dtype in _FLOATS:
        return 1.5
    aligned = found.suffix == ":16"
    if found.dtype == "i64":
        return 2**32 if aligned else 2**31 + 1
    if found.dtype == "u64":
        return 2**63 if aligned else 2**63 + 1
    return {":16": 16, ":1": 1, "": 2}[found.suffix]


def _tensor_descriptor(found: Descriptor) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [1]
    for size in reversed(found.block[1:]):
        strides.insert(0, max(_TENSOR_ALIGNMENT, strides[0] * size))
    return TensorDescriptor(_Tensor(found.dtype, 0), list(found.block), strides, list(found.block))


def observed(type_: Any, attribute: Any, value: Any, module: Any, *, is_constexpr: bool = False) -> str:
    """Returns, as a class's text, what Triton's binder made of an argument.

    Args:
        type_: The type it gave, nested for a tuple.
        attribute: What it specialized on: "D" for a multiple of 16, nested likewise.
        value: The argument.
        module: The kernel's module, whose names stand for functions.
        is_constexpr: Whether the parameter is declared `tl.constexpr`.
    """
    if isinstance(type_, (tuple, list)):
        parts = [observed(t, a, v, module) for t, a, v in zip(type_, attribute, value)]
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    if type_ == "constexpr":
        if not is_constexpr and value is None:
            return "none"
        if not is_constexpr and type(value) is int and value == 1:
            return "i32:1"
        return f"={write_value(from_python(value, module))}"
    return f"{_plain(type_)}{':16' if attribute == 'D' else ''}"


def _plain(type_: str) -> str:
    """Returns a type without the mark of a `const` pointer, which the declaration says already."""
    return f"*{type_[2:]}" if type_.startswith("*k") else type_
