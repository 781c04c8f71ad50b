"""Weights in the order in which `lstm_step` reads them: a block at a time, from one end to the other."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# Blocks of 16 units, each [K, 4 gates, 16].
_UNITS, _COLUMNS = 16, 64
Weights = Literal["float32", "bfloat16", "int8"]


def pack_gates(weight: Tensor) -> Tensor:
    """Returns a weight [4H, K] as blocks [ceil(H / 16), K, 64], in the order k, gate, unit."""
    width = weight.shape[1]
    units = F.pad(weight.view(4, -1, width), (0, 0, 0, -(weight.shape[0] // 4) % _UNITS))
    return units.view(4, -1, _UNITS, width).permute(1, 3, 0, 2).reshape(-1, width, _COLUMNS).contiguous()


def pack_columns(weight: Tensor) -> Tensor:
    """Returns a weight [R, K] as blocks [ceil(R / 64), K, 64]."""
    padded = F.pad(weight, (0, 0, 0, -weight.shape[0] % _COLUMNS))
    return padded.view(-1, _COLUMNS, weight.shape[1]).transpose(1, 2).contiguous()


def _refuse_strides(*packed: Tensor | None) -> None:
    """What is packed lies as the kernel reads it."""
    if not all(part is None or part.is_contiguous() for part in packed):
        raise ValueError("packed weights and their scales must be contiguous")


def unpacked_gates(blocks: Tensor, scale: Tensor | None, units: int, dtype: torch.dtype) -> Tensor:
    """Returns the weight [4H, K] that `pack_gates` packed."""
    _refuse_strides(blocks, scale)
    count, width, _ = blocks.shape
    values = blocks.to(dtype) if scale is None else blocks.to(dtype) * scale.unsqueeze(1)
    values = values.view(count, width, 4, _UNITS).permute(2, 0, 3, 1).reshape(4, count * _UNITS, width)
    return values[:, :units].reshape(4 * units, width)


def unpacked_columns(blocks: Tensor, scale: Tensor | None, rows: int, dtype: torch.dtype) -> Tensor:
    """Returns the weight [R, K] that `pack_columns` packed."""
    _refuse_strides(blocks, scale)
    values = blocks.to(dtype) if scale is None else blocks.to(dtype) * scale.unsqueeze(1)
    return values.transpose(1, 2).reshape(-1, blocks.shape[1])[:rows]


def quantized(weight: Tensor, dtype: Weights) -> tuple[Tensor, Tensor | None]:
    """Returns a weight [rows, K] in `dtype`, and for int8 the scale of each row: its largest magnitude is 127."""
    if dtype != "int8":
        return weight.to(getattr(torch, dtype)), None
    scale = (weight.float().abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight.float() / scale.unsqueeze(1)).round().to(torch.int8), scale


def packed_layer(
    w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, w_hr: Tensor | None,
    *more: Tensor | None, weights: Weights,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns the arguments of `lstm_step_` behind the state."""
    (ih, scale_ih), (hh, scale_hh) = quantized(w_ih, weights), quantized(w_hh, weights)
    scale = bias = hr = scale_hr = None
    if scale_ih is not None:
        scale = torch.stack([pack_gates(s[:, None]).squeeze(1) for s in (scale_ih, scale_hh)])
    if b_ih is not None:
        bias = b_ih.float() + b_hh.float()
    if w_hr is not None:
        hr, scale_hr = quantized(w_hr, weights)
        hr = pack_columns(hr)
        scale_hr = None if scale_hr is None else pack_columns(scale_hr[:, None]).squeeze(1)
    rest = (None if value is None else value.float() for value in more)
    return (pack_gates(ih), pack_gates(hh), scale, bias, hr, scale_hr, *rest)
