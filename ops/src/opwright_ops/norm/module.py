"""nn.RMSNorm and nn.LayerNorm by the operators of this library."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from opwright_ops.norm.op import layer_norm, rms_norm


def _takes(module: nn.RMSNorm | nn.LayerNorm, input: Tensor) -> bool:
    """Returns whether the operators take an input; PyTorch computes, or refuses, what they do not."""
    dims = len(module.normalized_shape)
    if tuple(input.shape[-dims:]) != tuple(module.normalized_shape):
        return False
    weight = module.weight
    return weight is None or weight.dtype == input.dtype or torch.is_autocast_enabled(input.device.type)


class RMSNorm(nn.RMSNorm):
    """Takes the place of nn.RMSNorm: the same parameters, state_dict, arguments and results, by `rms_norm`.

    An input of another dtype than the weight is left to PyTorch.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last axes, those of `normalized_shape`."""
        if not _takes(self, x):
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        if len(self.normalized_shape) == 1:
            return rms_norm(x, self.weight, eps=eps)
        weight = None if self.weight is None else self.weight.flatten()
        return rms_norm(x.flatten(-len(self.normalized_shape)), weight, eps=eps).view(x.shape)


class LayerNorm(nn.LayerNorm):
    """Takes the place of nn.LayerNorm: the same parameters, state_dict, arguments and results, by `layer_norm`.

    An input of another dtype than the weight is left to PyTorch.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalises the last axes, those of `normalized_shape`."""
        if not _takes(self, input):
            return super().forward(input)
        if len(self.normalized_shape) == 1:
            return layer_norm(input, self.weight, self.bias, eps=self.eps)
        weight, bias = (None if p is None else p.flatten() for p in (self.weight, self.bias))
        return layer_norm(input.flatten(-len(self.normalized_shape)), weight, bias, eps=self.eps).view(input.shape)
