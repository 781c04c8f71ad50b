"""Dtype families of contracts: `Float`, `Int`, ... and what they mean in torch and in C++."""

from __future__ import annotations

from typing import NamedTuple

import torch

# PyTorch's number for each dtype (c10::ScalarType, part of the stable ABI), its short name in
# messages, its C++ type in kernels.
SCALAR_TYPES: dict[torch.dtype, tuple[int, str, str]] = {
    torch.uint8: (0, "u8", "uint8_t"),
    torch.int8: (1, "i8", "int8_t"),
    torch.int16: (2, "i16", "int16_t"),
    torch.int32: (3, "i32", "int32_t"),
    torch.int64: (4, "i64", "int64_t"),
    torch.float16: (5, "f16", "opwright::half"),
    torch.float32: (6, "f32", "float"),
    torch.float64: (7, "f64", "double"),
    torch.bool: (11, "bool", "bool"),
    torch.bfloat16: (15, "bf16", "opwright::bfloat16"),
}

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8)
_UINTS = (torch.uint8,)

_FAMILIES: dict[str, tuple[torch.dtype, ...]] = {
    "Float": FLOATS,
    "Inexact": FLOATS,
    "Real": (*FLOATS, *INTS, *_UINTS),
    "Num": (*FLOATS, *INTS, *_UINTS),
    "Shaped": (*FLOATS, *INTS, *_UINTS, torch.bool),
    "Int": INTS,
    "UInt": _UINTS,
    "Integer": (*INTS, *_UINTS),
    "Bool": (torch.bool,),
    "Float16": (torch.float16,),
    "BFloat16": (torch.bfloat16,),
    "Float32": (torch.float32,),
    "Float64": (torch.float64,),
    "Int8": (torch.int8,),
    "Int16": (torch.int16,),
    "Int32": (torch.int32,),
    "Int64": (torch.int64,),
    "UInt8": (torch.uint8,),
}


class Family(NamedTuple):
    """A set of dtypes under jaxtyping's name for it."""

    name: str
    dtypes: tuple[torch.dtype, ...]

    @property
    def is_single(self) -> bool:
        """Whether only one dtype belongs to it (`Float32`, `Bool`)."""
        return len(self.dtypes) == 1

    @property
    def is_floating(self) -> bool:
        """Whether all of its tensors are floating-point."""
        return all(dtype.is_floating_point for dtype in self.dtypes)

    @property
    def has_floats(self) -> bool:
        """Whether gradients may flow through its tensors."""
        return any(dtype.is_floating_point for dtype in self.dtypes)

    def __str__(self) -> str:
        return self.name


def family(name: str) -> Family | None:
    """Returns the family of that jaxtyping name, or None when operators cannot have it."""
    dtypes = _FAMILIES.get(name)
    return Family(name, dtypes) if dtypes else None


def family_names() -> tuple[str, ...]:
    """Returns the names of all supported families."""
    return tuple(_FAMILIES)


def short_name(dtype: torch.dtype) -> str:
    """Returns `f32`, `bf16`, ..., as used in messages."""
    return SCALAR_TYPES[dtype][1] if dtype in SCALAR_TYPES else str(dtype).removeprefix("torch.")


def describe_undense(label: str, tensor: torch.Tensor) -> tuple[str, str] | None:
    """Returns a tensor whose elements strides do not lead to, for a message, and what makes it dense; else None."""
    if tensor.is_nested:
        kind, dense = "nested", f"torch.nested.to_padded_tensor({label}, 0.0)"
    elif tensor.layout != torch.strided:
        kind, dense = str(tensor.layout).removeprefix("torch.").removeprefix("_"), f"{label}.to_dense()"
    elif tensor.is_quantized:
        kind, dense = "quantized", f"{label}.dequantize()"
    else:
        return None
    return f"{kind} {short_name(tensor.dtype)} {tensor.device}", dense


def describe(value: object) -> str:
    """Returns `bf16[8, 4096, 1024] cuda:0` for a tensor, else the value's type."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        return f"{short_name(value.dtype)}[{sizes}] {value.device}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    if value is None:
        return "None"
    return f"{type(value).__name__} {value!r}" if isinstance(value, (int, float, str, bool)) else type(value).__name__
