"""The parameters that a compiled kernel takes, derived from its signature and checked against the cubin."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .classes import SIZES
from .cubin import CubinKernel
from .errors import WorkerError

_POINTER_SIZE = 8
_TMA_SIZE = 128  # bytes of a CUtensorMap
_TF32_FLAG_SINCE = (3, 7)


def launch_parameters(
    signature: Iterable[Any], has_tma: bool, version: tuple[int, ...], cubin: CubinKernel, symbol: str
) -> list[dict[str, Any]]:
    """Returns a kernel's parameters in the cubin's order, with the offsets and sizes that the cubin gives.

    Args:
        signature: Triton's type of every parameter of the function, nested for tuples.
        has_tma: Whether host descriptors were lowered to TMA ones.
        version: Triton's first two numbers.
        cubin: What the cubin says.
        symbol: The kernel's name in it.

    Raises:
        WorkerError: The cubin takes other parameters: this Triton passes them in a way unknown here.
    """
    derived: list[dict[str, Any]] = []
    for index, type_ in enumerate(signature):
        _flatten(type_, [index], has_tma, version, derived)
    derived += [{"arg": name, "type": "*i8", "size": _POINTER_SIZE} for name in ("global_scratch", "profile_scratch")]
    sizes = [size for _, size in cubin.parameters]
    if sizes != [parameter["size"] for parameter in derived]:
        import triton

        expected = ", ".join(f"{p['arg']} {p['type']} {p['size']}" for p in derived)
        raise WorkerError(
            "contract",
            f"`{symbol}`: Triton {triton.__version__} made a kernel of {len(sizes)} parameters of {sizes} bytes, expected "
            f"{len(derived)}: {expected}. This version of Triton cannot be used.",
        )
    return [{**p, "offset": offset} for p, (offset, _) in zip(derived, cubin.parameters)]


def _flatten(type_: Any, path: list[int], has_tma: bool, version: tuple[int, ...], found: list[dict[str, Any]]) -> None:
    if isinstance(type_, (tuple, list)):
        for index, item in enumerate(type_):
            _flatten(item, [*path, index], has_tma, version, found)
    elif type_.startswith("tensordesc"):
        found += ({"arg": path, **part} for part in _descriptor_parts(type_, has_tma, version))
    elif type_ != "constexpr":
        plain = f"*{type_[2:]}" if type_.startswith("*k") else type_
        found.append({"arg": path, "type": plain, "size": _POINTER_SIZE if plain[0] == "*" else SIZES[plain]})


def _descriptor_parts(type_: str, has_tma: bool, version: tuple[int, ...]) -> list[dict[str, Any]]:
    dtype, _, block = type_.partition("<")[2].partition("[")
    axes = range(block.partition("]")[0].count(",") + 1)

    def along(field: str, kind: str) -> list[dict[str, Any]]:
        return [{"field": field, "dim": axis, "type": kind, "size": SIZES[kind]} for axis in axes]

    if has_tma:
        parts = [{"field": "tma", "type": "tma", "size": _TMA_SIZE}]
    else:
        parts = [{"field": "base", "type": f"*{dtype}", "size": _POINTER_SIZE}]
        parts += [*along("shape", "i64"), *along("stride", "i64"), {"field": "nan", "type": "u1", "size": 1}]
        if version >= _TF32_FLAG_SINCE:
            parts.append({"field": "tf32", "type": "u1", "size": 1})
    return [*parts, *along("shape", "i32"), *along("stride", "i64")]
