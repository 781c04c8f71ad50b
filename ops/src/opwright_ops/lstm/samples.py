"""What `lstm` is verified on: every option, alone and with others, at sizes that leave remainders.

Sweeps that follow from the contract would take hundreds of steps in Python, give lengths beyond the sequence and
widths that do not fit each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_NORMS = "norm_ih norm_hh norm_c"
_ALL = f"bias weight_hr peephole {_NORMS} h_mask lengths reset seed"
_HARD = {"activation": "hard"}

# T, B, I, H, R; the optional arguments; the options. The first six are small enough for finite differences;
# those with norms have three units, because two that are normalised are 1 and -1 but for a kink.
_SMALL: list[tuple[tuple[int, ...], str, dict[str, Any]]] = [
    ((2, 1, 1, 2, 2), "bias no_state", {"keep_gates": 1}),
    ((2, 1, 1, 3, 1), f"bias weight_hr peephole {_NORMS}", {"zoneout_c": 0.25, "keep_cells": 1}),
    ((2, 1, 1, 2, 2), "bias peephole reset seed",
     {"zoneout_h": 0.5, "zoneout_c": 0.5, "coupled": True, "reverse": True}),
    ((2, 1, 2, 2, 2), "peephole h_mask", _HARD | {"slope": 0.2, "keep_cells": 1, "keep_gates": 1}),
    ((2, 1, 1, 3, 1), f"weight_hr {_NORMS} h_mask reset",
     {"zoneout_h": 0.25, "coupled": True, "clip": 2.0, "keep_gates": 1}),
    ((2, 2, 1, 2, 2), "bias lengths", _HARD | {"slope": 1 / 6, "clip": 2.0, "reverse": True}),
]  # fmt: skip

# Entries: one; three, which share one reading of the weights; more than one pass of products takes (6 rows with
# AVX-512, 2 without, 16 with AMX), with a remainder. Steps: up to 4, for which nothing is packed, and more.
_LARGE: list[tuple[tuple[int, ...], str, dict[str, Any]]] = [
    ((1, 1, 3, 17, 17), "bias", {}),
    ((1, 7, 3, 33, 33), "no_state", {"keep_gates": 1}),
    ((1, 3, 5, 17, 7), _ALL, _HARD | {"zoneout_h": 0.3, "zoneout_c": 0.4, "keep_cells": 1, "clip": 1.5}),
    ((5, 1, 5, 33, 33), "bias", {"keep_cells": 1}),
    ((5, 3, 1, 17, 17), "bias_ih lengths no_state", {"reverse": True, "keep_gates": 1}),
    ((5, 7, 9, 33, 33), "bias", {"keep_gates": 1}),
    ((5, 17, 7, 17, 17), "bias lengths reset", {"keep_gates": 1, "keep_cells": 1}),
    ((5, 17, 7, 17, 17), "bias lengths reset", {"reverse": True}),
    ((5, 7, 33, 17, 17), "bias peephole", _HARD | {"keep_gates": 1}),
    ((5, 3, 4, 33, 33), "bias", _HARD | {"slope": 0.2, "clip": 1.0}),
    ((5, 7, 3, 17, 17), "bias", {"coupled": True, "keep_gates": 1}),
    ((5, 7, 3, 33, 17), "bias weight_hr", {"keep_gates": 1, "keep_cells": 1}),
    ((5, 1, 3, 17, 33), "bias weight_hr h_mask", {"reverse": True}),
    ((5, 7, 3, 33, 33), f"bias {_NORMS}", {"keep_gates": 1}),
    ((5, 1, 3, 17, 17), f"{_NORMS}", {"keep_cells": 1}),
    ((5, 7, 3, 17, 17), "bias h_mask", {"clip": 0.5, "keep_gates": 1}),
    ((5, 3, 3, 33, 33), "bias seed", {"zoneout_h": 0.3, "zoneout_c": 0.1, "keep_gates": 1}),
    ((5, 7, 3, 17, 17), "bias", {"zoneout_h": 0.3, "zoneout_c": 0.1}),
    ((5, 7, 5, 33, 17), _ALL, {"zoneout_h": 0.3, "zoneout_c": 0.4, "keep_gates": 1, "keep_cells": 1}),
    ((5, 17, 5, 17, 9), _ALL, _HARD | {"zoneout_h": 0.5, "coupled": True, "clip": 1.5, "reverse": True}),
    ((5, 7, 3, 65, 65), "bias", {"keep_gates": 1}),  # two threads
    ((0, 3, 4, 5, 5), "bias lengths reset", {"keep_gates": 1, "keep_cells": 1}),
    ((3, 0, 4, 5, 5), "bias lengths reset", {"keep_gates": 1, "keep_cells": 1}),
]  # fmt: skip

# One of the two activations is hard. The first two are small.
_ONE_HARD: list[tuple[tuple[int, ...], str, dict[str, Any]]] = [
    ((2, 1, 1, 2, 2), "bias peephole", {"activation": "hard_sigmoid", "slope": 1 / 6, "keep_gates": 1}),
    ((2, 1, 1, 2, 2), "bias weight_hr", {"activation": "hard_tanh", "clip": 1.5, "coupled": True}),
    ((5, 7, 3, 33, 33), "bias peephole", {"activation": "hard_sigmoid", "slope": 0.2, "keep_gates": 1}),
    ((5, 3, 5, 17, 17), f"bias {_NORMS} reset", {"activation": "hard_sigmoid", "keep_cells": 1}),
    ((5, 3, 4, 33, 33), "bias lengths", {"activation": "hard_tanh", "clip": 1.5, "keep_gates": 1}),
    ((5, 7, 5, 17, 9), _ALL, {"activation": "hard_tanh", "zoneout_h": 0.5, "reverse": True}),
]  # fmt: skip

# float32 and bfloat16 have products of their own; float64 and float16 go through the code of float32.
_LARGE_FOR = {
    torch.float32: slice(None),
    torch.float64: slice(0, None, 2),
    torch.bfloat16: slice(None),
    torch.float16: slice(1, None, 2),
}


def samples() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields the inputs in every type, the small ones first."""
    for dtype in _LARGE_FOR:
        for number, (sizes, present, options) in enumerate([*_SMALL, *_LARGE[_LARGE_FOR[dtype]]]):
            yield inputs_of(sizes, present, dtype, number), options
        sizes = (3, 6, 5, 17, 17)
        for batch in ((), (2, 3)):
            yield inputs_of(sizes, "bias h_mask lengths reset", dtype, batch=batch), {"keep_gates": 1}
        given = inputs_of(sizes, "bias peephole lengths reset", dtype)
        yield tuple(map(_with_gaps, given)), {"keep_cells": 1}
        for options in ({}, _HARD | {"clip": 5.0}):
            given = inputs_of(sizes, "bias peephole lengths", dtype)
            _put_special_values(given[0], given[-3])
            yield given, options
        for sizes, present, options in _ONE_HARD:
            yield inputs_of(sizes, present, dtype), options


def inputs_of(
    sizes: tuple[int, ...],
    present: str,
    dtype: torch.dtype,
    seed: int = 0,
    batch: tuple[int, ...] | None = None,
) -> tuple[Tensor | None, ...]:
    """Returns the tensors of a call, random numbers in the scale of trained weights.

    Args:
        sizes: T, B, I, H, R.
        present: the names of the optional arguments, apart by spaces; "no_state" leaves h_0 and c_0 out.
        batch: the axes of the batch, where it is not one of B.
    """
    T, B, I, H, R = sizes  # noqa: E741
    shape = (B,) if batch is None else batch
    generator = torch.Generator().manual_seed(seed)

    def noise(*size: int, scale: float = 1.0, offset: float = 0.0) -> Tensor:
        made = torch.randn(size, generator=generator, dtype=torch.float64)
        return (offset + scale * made).to(dtype)

    lengths = torch.randint(0, T + 1, shape, generator=generator)
    lengths.view(-1)[:1] = T
    lengths.view(-1)[2:3] = 0
    # "bias" is both.
    words = present.replace("bias ", "bias_ih bias_hh ") if present != "bias" else "bias_ih bias_hh"
    optional = {
        "bias_ih": noise(4 * H, scale=0.5),
        "bias_hh": noise(4 * H, scale=0.5),
        "weight_hr": noise(R, H, scale=H**-0.5),
        "peephole": noise(3, H, scale=0.5),
        "norm_ih": noise(4 * H, scale=0.3, offset=1.0),
        "norm_hh": noise(4 * H, scale=0.3, offset=1.0),
        "norm_c": noise(2, H, scale=0.3, offset=1.0),
        "h_mask": noise(*shape, R, offset=1.0) * (torch.rand(*shape, R, generator=generator) < 0.7),
        "lengths": lengths,
        "reset": torch.rand(T, *shape, generator=generator) < 0.3,
        "seed": torch.randint(-(2**63), 2**63 - 1, shape, generator=generator),
    }
    has_state = "no_state" not in words
    return (
        noise(T, *shape, I),
        noise(*shape, R, scale=0.5) if has_state else None,
        noise(*shape, H) if has_state else None,
        noise(4 * H, I, scale=I**-0.5),
        noise(4 * H, R, scale=R**-0.5),
        *(value if name in words.split() else None for name, value in optional.items()),
    )


def _with_gaps(value: Tensor | None) -> Tensor | None:
    """Returns an equal tensor whose elements lie apart, the last axis outermost."""
    if value is None:
        return None
    wide = torch.stack([value, torch.zeros_like(value)], -1)
    return wide.movedim(value.ndim - 1, 0).contiguous().movedim(0, value.ndim - 1)[..., 0]


def _put_special_values(input: Tensor, lengths: Tensor) -> None:
    """Puts one special value into the input of each entry, and one behind its end."""
    largest = torch.finfo(input.dtype).max
    for b, value in enumerate((math.nan, math.inf, -math.inf, largest, -largest, 100.0)):
        if lengths[b] > 0:
            input[lengths[b] - 1, b, b % input.shape[-1]] = value
        input[lengths[b] :, b] = math.nan
