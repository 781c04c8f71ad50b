"""Steps of interpolation and of the gradients of convolutions, which PyTorch takes as one operator each.

Positions between elements follow from sizes alone, and are computed in float32 at least: rounding moves the weights of
the neighbours, never which elements they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opwright import _torch

_aten = torch.ops.aten
_Weights = Callable[[torch.Tensor], Sequence[torch.Tensor]]


def _linear_weights(share: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the weights of the element below a position and of that above, `share` of the way to it."""
    return 1 - share, share


def _cubic_weights(share: torch.Tensor, a: float = -0.75) -> Sequence[torch.Tensor]:
    """Returns those of two elements below and two above, by cubic convolution (Keys 1981)."""

    def near(x: torch.Tensor) -> torch.Tensor:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: torch.Tensor) -> torch.Tensor:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return far(share + 1), near(share), near(1 - share), far(2 - share)


def _neighbours(
    weights_of: _Weights, size: int, made: int, align_corners: bool, scale: float | None, like: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields, for each neighbour of a position, the indices of the elements and their weights."""
    is_linear = weights_of is _linear_weights
    with _torch.pause_dispatch_mode():
        at = torch.arange(made, dtype=torch.float64, device=like.device)
        if is_linear and made == size:  # whatever the scale
            positions = at
        elif align_corners:
            positions = at * ((size - 1) / (made - 1) if made > 1 else 0.0)
        else:
            positions = (at + 0.5) * (1 / scale if scale else size / made) - 0.5
        if is_linear:
            positions = positions.clamp(min=0)
        below = positions.floor()
    weights = weights_of(positions - below)
    for i, weight in enumerate(weights):
        with _torch.pause_dispatch_mode():
            index = (below.long() + i + 1 - len(weights) // 2).clamp(0, size - 1)
        yield index, weight


def _along(weight: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    return weight.view(-1, *[1] * (like.ndim - 1 - dim))


def _scales_of(sizes: Sequence[int], scales: Sequence[float | None]) -> Sequence[float | None]:
    return scales or [None] * len(sizes)


def _interpolate(
    weights_of: _Weights, x: torch.Tensor, sizes: Sequence[int], align_corners: bool, *scales: float | None
) -> torch.Tensor:
    for dim, made, scale in zip(range(2, x.ndim), sizes, _scales_of(sizes, scales), strict=True):
        taps = _neighbours(weights_of, x.shape[dim], made, align_corners, scale, x)
        terms = [x.index_select(dim, index) * _along(weight, x, dim) for index, weight in taps]
        x = functools.reduce(torch.add, terms)
    return x


def _interpolate_backward(
    weights_of: _Weights,
    grad: torch.Tensor,
    sizes: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> torch.Tensor:
    if [*sizes] == [*input_size[2:]]:  # as PyTorch has it, whatever the scales
        return grad.clone()
    for dim, made, scale in zip(range(2, grad.ndim), sizes, _scales_of(sizes, scales), strict=True):
        shape = [*grad.shape[:dim], input_size[dim], *grad.shape[dim + 1 :]]
        result = grad.new_zeros(shape)
        for index, weight in _neighbours(weights_of, input_size[dim], made, align_corners, scale, grad):
            result = result.index_add(dim, index, grad * _along(weight, grad, dim))
        grad = result
    return grad


def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    of_input = of_weight = of_bias = None
    spatial = range(x.ndim - 2)
    none = [0] * len(spatial)
    if output_mask[0]:
        reach = [(grad.shape[2 + i] - 1) * stride[i] + dilation[i] * (weight.shape[2 + i] - 1) + 1 for i in spatial]
        beyond = none if transposed else [x.shape[2 + i] + 2 * padding[i] - reach[i] for i in spatial]
        made = _aten.convolution(grad, weight, None, stride, padding, dilation, not transposed, beyond, groups)
        of_input = _first(made, x)
    if output_mask[1]:
        # Each is a convolution with the other as its weight, whose batch and channels change places.
        wide, narrow = (grad, x) if transposed else (x, grad)
        parts = [
            _aten.convolution(a.transpose(0, 1), b.transpose(0, 1), None, dilation, padding, stride, False, none, 1)
            for a, b in zip(wide.chunk(groups, 1), narrow.chunk(groups, 1), strict=True)
        ]
        of_weight = _first(torch.cat([part.transpose(0, 1) for part in parts]), weight)
    if output_mask[2]:
        of_bias = grad.sum([0, *range(2, grad.ndim)])
    return of_input, of_weight, of_bias


def _first(of: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the first positions of a tensor, as many as another has."""
    return of[(slice(None), slice(None), *(slice(size) for size in like.shape[2:]))]


def terms_of_convolution(args: Sequence[Any]) -> int:
    """Returns how many products an element of a convolution is the sum of."""
    weight, is_transposed, groups = args[1], args[6], args[8]
    return weight.shape[0] // groups * math.prod(weight.shape[2:]) if is_transposed else math.prod(weight.shape[1:])


STEPS: dict[Any, Callable[..., Any]] = {_aten.convolution_backward.default: _convolution_backward}
INTERPOLATIONS: dict[Any, Callable[..., Any]] = {}
for _name, _weights in (
    ("upsample_linear1d", _linear_weights), ("upsample_bilinear2d", _linear_weights),
    ("upsample_trilinear3d", _linear_weights), ("upsample_bicubic2d", _cubic_weights),
):  # fmt: skip
    INTERPOLATIONS[getattr(_aten, _name).default] = functools.partial(_interpolate, _weights)
    INTERPOLATIONS[getattr(_aten, f"{_name}_backward").default] = functools.partial(_interpolate_backward, _weights)
