"""What fills the tensors of test inputs: shapes, memory layouts, values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from opwright.contract.axes import Computed, Named, Variadic
from opwright.contract.contract import Contract, TensorType
from opwright.contract.domains import Range

LAYOUTS = ("transposed", "sliced", "offset", "expanded", "columns")
APART = "axes apart"  # of a part of a larger tensor: no two of three or more are one in memory


def tensor_dtype(contract: Contract, type_: TensorType, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a tensor of this type when the operator's own family has `dtype`."""
    family = type_.family
    return dtype if dtype is not None and family == contract.scalar_family else family.dtypes[0]


def shape_of(type_: TensorType, sizes: Mapping[str, int], batch: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a tensor of this type; `batch` are the axes of every variadic axis."""
    shape: list[int] = []
    for axis in type_.axes:
        match axis:
            case Variadic():
                shape.extend(batch)
            case Named(name):
                shape.append(sizes[name])
            case Computed():
                shape.append(max(axis.evaluate(sizes), 0))
            case _:
                shape.append(getattr(axis, "size", 3))
    return tuple(shape)


def lay_out(fill: Callable[[tuple[int, ...]], torch.Tensor], shape: tuple[int, ...], layout: str) -> torch.Tensor:
    """Returns a tensor of this shape in a memory layout: contiguous, one of LAYOUTS, or APART.

    "columns" are the first columns of a wider tensor; "sliced", every second one.
    """
    if layout == "offset":
        count = math.prod(shape)
        return fill((count + 3,))[3:].view(shape)
    if not shape:
        return fill(shape)
    if layout == "transposed":
        if len(shape) == 1:
            return fill((shape[0], 2))[:, 0]
        return fill((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
    if layout == "sliced":
        padded = fill((*shape[:-1], 2 * shape[-1] + 1))
        return padded[..., 1::2]
    if layout == APART:
        part = fill((shape[0], *(size + 1 for size in shape[1:])))
        for axis, size in enumerate(shape):
            part = part.narrow(axis, 0, size)
        return part
    if layout == "columns":
        return fill((*shape[:-1], shape[-1] + 3))[..., : shape[-1]]
    if layout == "expanded":
        return fill((1, *shape[1:])).expand(shape)
    return fill(shape)


def put_in_layout(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Returns these values in a memory layout; an expanded one repeats the first entry."""
    values = values.detach()
    if layout == "expanded":
        return values[:1].clone().expand(values.shape) if values.ndim else values
    return lay_out(values.new_zeros, tuple(values.shape), layout).copy_(values)


def with_special_values(
    noise: torch.Tensor, dtype: torch.dtype, shift: int = 0, apart: bool = False, domain: Range | None = None
) -> torch.Tensor:
    """Returns the tensor with some elements replaced by zeros, infinities, NaN, extremes of the dtype.

    Args:
        apart: spread over the tensor, so that a row has few of them: one NaN hides what else is in a sum.
            Otherwise they are the first elements.
        shift: how far the list is turned, so that several tensors have different values at the same place.
        domain: the values that there may be; its ends are among them, and what lies outside is not.
    """
    info = torch.finfo(dtype)
    ladder = [
        s * m for m in (0.5, 1, 2, 3, 4, 5, 6, 8, 10, 13, 15, 20, 25, 40, 80, 87, 89, 104, 700, 750) for s in (1, -1)
    ]
    ladder += [s * 10.0**e for e in (3, 4, 5, 6, 8, 12, 20, 30, -2, -4, -6, -12, -20, -30) for s in (1, -1)]
    special = [
        0.0, -0.0, math.inf, -math.inf, math.nan, info.tiny, -info.tiny, info.tiny / 2, -info.tiny / 2,
        info.smallest_normal * info.eps, info.max, -info.max, info.eps, -info.eps, 1.0, -1.0, *ladder,
    ]  # fmt: skip
    if domain is not None:
        special = [*domain.ends(dtype), *(value for value in special if domain.contains(value))]
    shift %= len(special)
    special = special[shift:] + special[:shift]
    flat = noise.reshape(-1).clone()
    count = min(len(special), flat.numel())
    step = max(flat.numel() // len(special), 1) if apart else 1
    flat[: count * step : step] = torch.tensor(special[:count], dtype=torch.float64)
    return flat.view(noise.shape)


def every_value(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Returns every finite value of a 16-bit type in random order, repeated where there is room; in float64.

    It is float16 for float16, else bfloat16, whose range is that of float32.
    """
    half = torch.float16 if dtype == torch.float16 else torch.bfloat16
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(half).double()
    values = values[torch.isfinite(values)]
    order = torch.randperm(values.numel(), generator=generator)
    count = math.prod(shape)
    return values[order].repeat(-(-count // values.numel()) if count else 1)[:count].view(shape)
