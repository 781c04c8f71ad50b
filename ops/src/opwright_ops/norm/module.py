"""nn.RMSNorm and nn.LayerNorm by the operators of this library."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from opwright_ops.norm.norm import layer_norm, rms_norm
from opwright_ops.tensors import is_autocast_on


def _takes(module: nn.RMSNorm | nn.LayerNorm, input: Tensor) -> bool:
    """Returns whether the operators take an input; PyTorch computes, or refuses, what they do not."""
    if (
        not isinstance(input, Tensor)
        or input.is_nested
        or input.layout != torch.strided
        or not input.is_floating_point()
    ):
        return False
    dims = len(module.normalized_shape)
    if not dims or tuple(input.shape[-dims:]) != tuple(module.normalized_shape):
        return False
    weight = module.weight
    if weight is None or weight.dtype == input.dtype:
        return True
    if input.device.type != "cpu" and is_autocast_on(input):
        return True
    return weight.dtype == torch.float32 and input.dtype in (torch.float16, torch.bfloat16)


def _as_in_pytorch(input: Tensor) -> AbstractContextManager[Any]:
    """Returns a context with PyTorch's autocast of norms: on CPUs it has none."""
    if input.device.type == "cpu" and is_autocast_on(input):
        return torch.autocast("cpu", enabled=False)
    return nullcontext()


class RMSNorm(nn.RMSNorm):
    """Takes the place of nn.RMSNorm: the same parameters, state_dict, arguments and results, by `rms_norm`.

    An input of another dtype than the weight is left to PyTorch, unless it has 16 bits and the weight is float32.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axes, those of `normalized_shape`."""
        if not _takes(self, x):
            return super().forward(x)
        eps = self.eps
        if eps is None:  # that of the type that is computed in
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        with _as_in_pytorch(x):
            if len(self.normalized_shape) == 1:
                return rms_norm(x, self.weight, eps=eps)
            weight = None if self.weight is None else self.weight.flatten()
            return rms_norm(x.flatten(-len(self.normalized_shape)), weight, eps=eps).view(x.shape)


class LayerNorm(nn.LayerNorm):
    """Takes the place of nn.LayerNorm: the same parameters, state_dict, arguments and results, by `layer_norm`.

    An input of another dtype than the weight is left to PyTorch, unless it has 16 bits and the weight is float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the last axes, those of `normalized_shape`."""
        if not _takes(self, input):
            return super().forward(input)
        with _as_in_pytorch(input):
            if len(self.normalized_shape) == 1:
                return layer_norm(input, self.weight, self.bias, eps=self.eps)
            weight, bias = (None if p is None else p.flatten() for p in (self.weight, self.bias))
            rows = input.flatten(-len(self.normalized_shape))
            return layer_norm(rows, weight, bias, eps=self.eps).view(input.shape)
