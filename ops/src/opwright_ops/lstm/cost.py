"""What `lstm` is measured by: the least work of a call, and what people write without it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from opwright_ops.tensors import bytes_of


def _rows(input: Tensor, lengths: Tensor | None) -> int:
    """Returns how many inputs all steps take together."""
    return math.prod(input.shape[:-1]) if lengths is None else int(lengths.clamp(0, len(input)).sum())


def _products(input: Tensor, weight_hh: Tensor, weight_hr: Tensor | None, lengths: Tensor | None) -> int:
    """Returns the operations of the matrix products of a forward.

    The rest, some 100 for each element of the cells, is not counted.
    """
    rows, size = weight_hh.shape
    projection = 0 if weight_hr is None else 2 * size * (rows // 4)
    return _rows(input, lengths) * (2 * rows * (input.shape[-1] + size) + projection)


def lstm_cost(
    input, h_0, c_0, weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, peephole, norm_ih, norm_hh, norm_c, h_mask,
    lengths, reset, seed, *, keep_cells, keep_gates, **options,
):  # fmt: skip
    read = bytes_of(
        input, h_0, c_0, weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, peephole, norm_ih, norm_hh, norm_c, h_mask,
        lengths, reset, seed,
    )  # fmt: skip
    hidden, size = weight_hh.shape[0] // 4, weight_hh.shape[1]
    entries = math.prod(input.shape[:-1])
    written = entries * (size + (keep_cells + 4 * keep_gates) * hidden) * input.element_size()
    written += entries // max(len(input), 1) * (size + hidden) * input.element_size()
    return read + written, _products(input, weight_hh, weight_hr, lengths)


def lstm_backward_cost(
    grad_output, grad_h_n, grad_c_n, grad_cells,
    input, h_0, c_0, weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, peephole, norm_ih, norm_hh, norm_c, h_mask,
    lengths, reset, seed, output, gates, *, keep_gates, **options,
):  # fmt: skip
    differentiated = (
        input, h_0, c_0, weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, peephole, norm_ih, norm_hh, norm_c, h_mask
    )  # fmt: skip
    read = bytes_of(grad_output, grad_h_n, grad_c_n, grad_cells, lengths, reset, seed, output, gates)
    # Each product has two in the backward; without the gates it is computed again.
    products = (2 if keep_gates else 3) * _products(input, weight_hh, weight_hr, lengths)
    return read + 2 * bytes_of(*differentiated), products


def lstm_in_pytorch(reference: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
    """What nn.LSTM calls, where it computes the same; else the reference."""
    input, h_0, c_0, weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, *others = arguments
    variants = {"reverse": False, "activation": "soft", "coupled": False, "clip": 0, "keep_cells": 0}
    variants |= {"zoneout_h": 0, "zoneout_c": 0}
    is_plain = all(options[name] == usual for name, usual in variants.items())
    if input.ndim != 3 or not is_plain or any(other is not None for other in others):
        return reference(*arguments, **options)
    has_biases = bias_ih is not None and bias_hh is not None
    if h_0 is None or c_0 is None or (bias_ih is None) != (bias_hh is None):
        return reference(*arguments, **options)
    weights = [weight_ih, weight_hh, *([bias_ih, bias_hh] if has_biases else []), weight_hr]
    output, h_n, c_n = torch._VF.lstm(
        input, (h_0[None], c_0[None]), [w for w in weights if w is not None], has_biases, 1, 0.0,
        torch.is_grad_enabled(), False, False,
    )  # fmt: skip
    return output, h_n[0], c_n[0]
