"""One layer of an LSTM in both directions: two `lstm` at the same time."""

import inspect
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from opwright import operator
from opwright_ops.lstm.cost import lstm_backward_cost, lstm_cost
from opwright_ops.lstm.op import Activation, Tier, lstm
from opwright_ops.lstm.samples import inputs_of

# How the arguments of `lstm` are found among those of both directions.
_WEIGHTS = (
    "weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr", "peephole", "norm_ih", "norm_hh", "norm_c"
)  # fmt: skip
_STACKED = ("h_0", "c_0", "h_mask", "reset", "seed", "gates", "grad_h_n", "grad_c_n")
_SIDE_BY_SIDE = ("output", "grad_output", "grad_cells")


class BidirectionalOutputs(NamedTuple):
    """What `lstm_bidirectional` returns."""

    output: Float[Tensor, "T *B 2*R"]
    h_n: Float[Tensor, "2 *B R"]
    c_n: Float[Tensor, "2 *B H"]
    cells: Float[Tensor, "keep_cells*T *B 2*H"]
    gates: Float[Tensor, "2 keep_gates*T *B 4*H"]


@operator("opwright_ops::lstm_bidirectional", cpu="cpu.cpp", autocast="lower", non_differentiable=["gates"])
def lstm_bidirectional(
    input: Float[Tensor, "T *B I"],
    h_0: Float[Tensor, "2 *B R"] | None,
    c_0: Float[Tensor, "2 *B H"] | None,
    weight_ih: Float[Tensor, "4*H I"],
    weight_hh: Float[Tensor, "4*H R"],
    bias_ih: Float[Tensor, "4*H"] | None,
    bias_hh: Float[Tensor, "4*H"] | None,
    weight_hr: Float[Tensor, "R H"] | None,
    peephole: Float[Tensor, "3 H"] | None,
    norm_ih: Float[Tensor, "4*H"] | None,
    norm_hh: Float[Tensor, "4*H"] | None,
    norm_c: Float[Tensor, "2 H"] | None,
    weight_ih_reverse: Float[Tensor, "4*H I"],
    weight_hh_reverse: Float[Tensor, "4*H R"],
    bias_ih_reverse: Float[Tensor, "4*H"] | None,
    bias_hh_reverse: Float[Tensor, "4*H"] | None,
    weight_hr_reverse: Float[Tensor, "R H"] | None,
    peephole_reverse: Float[Tensor, "3 H"] | None,
    norm_ih_reverse: Float[Tensor, "4*H"] | None,
    norm_hh_reverse: Float[Tensor, "4*H"] | None,
    norm_c_reverse: Float[Tensor, "2 H"] | None,
    h_mask: Float[Tensor, "2 *B R"] | None = None,
    lengths: Int64[Tensor, "*B"] | None = None,
    reset: Bool[Tensor, "2 T *B"] | None = None,
    seed: Int64[Tensor, "2 *B"] | None = None,
    *,
    activation: Activation = "soft",
    slope: float = 0.125,
    coupled: bool = False,
    clip: float = 0.0,
    zoneout_h: float = 0.0,
    zoneout_c: float = 0.0,
    keep_cells: int = 0,
    keep_gates: int = 0,
    tier: Tier = "auto",
    fp32_precision: Literal["ieee", "tf32"] = "ieee",
) -> BidirectionalOutputs:
    """An LSTM layer in both directions; what both have, the forward direction has at index 0.

    Args:
        input, lengths, and the options: as for `lstm`, for both directions.
        h_0, c_0, h_mask, reset, seed: as for `lstm`, one for each direction.
        weight_ih to norm_c: as for `lstm`; of the forward direction.
        weight_ih_reverse to norm_c_reverse: of the reverse direction.

    Numerics, source:
        As for `lstm`.
    """
    given = {  # written out: torch 2.11 cannot trace locals()
        "input": input, "h_0": h_0, "c_0": c_0, "weight_ih": weight_ih, "weight_hh": weight_hh,
        "bias_ih": bias_ih, "bias_hh": bias_hh, "weight_hr": weight_hr, "peephole": peephole,
        "norm_ih": norm_ih, "norm_hh": norm_hh, "norm_c": norm_c, "weight_ih_reverse": weight_ih_reverse,
        "weight_hh_reverse": weight_hh_reverse, "bias_ih_reverse": bias_ih_reverse,
        "bias_hh_reverse": bias_hh_reverse, "weight_hr_reverse": weight_hr_reverse,
        "peephole_reverse": peephole_reverse, "norm_ih_reverse": norm_ih_reverse,
        "norm_hh_reverse": norm_hh_reverse, "norm_c_reverse": norm_c_reverse, "h_mask": h_mask,
        "lengths": lengths, "reset": reset, "seed": seed, "activation": activation, "slope": slope,
        "coupled": coupled, "clip": clip, "zoneout_h": zoneout_h, "zoneout_c": zoneout_c,
        "keep_cells": keep_cells, "keep_gates": keep_gates, "tier": tier, "fp32_precision": fp32_precision,
    }  # fmt: skip
    return _joined(_for_both(lstm.operator, given))


def _joined(found: list[Any]) -> BidirectionalOutputs:
    """Returns what both directions gave, side by side."""
    output, h_n, c_n, cells, gates = zip(*found, strict=True)
    return BidirectionalOutputs(
        torch.cat(output, -1), torch.stack(h_n), torch.stack(c_n), torch.cat(cells, -1), torch.stack(gates)
    )


def in_two_calls(*arguments: Any, **options: Any) -> BidirectionalOutputs:
    """The same from two calls of `lstm`, which has kernels for GPUs."""
    given = dict(zip(_NAMES, arguments, strict=False)) | options
    return _joined([lstm(**_of_direction(given, reverse)) for reverse in (False, True)])


_NAMES = tuple(p.name for p in lstm_bidirectional.operator.contract.parameters)


def _for_both(operator: Any, given: dict[str, Any]) -> list[Any]:
    """Calls the reference of `lstm`, or of its backward, for the forward direction and for the other."""
    return [operator.declaration.reference(**_of_direction(given, reverse)) for reverse in (False, True)]


def _of_direction(given: dict[str, Any], reverse: bool) -> dict[str, Any]:
    """Returns the arguments of `lstm`, or of its backward, for one direction."""
    found: dict[str, Any] = {"reverse": reverse}
    for name, value in given.items():
        if name.endswith("_reverse"):
            continue
        if name in _WEIGHTS:
            found[name] = given[name + "_reverse"] if reverse else value
        elif name in _SIDE_BY_SIDE:
            found[name] = value.chunk(2, -1)[reverse]
        else:
            found[name] = value[int(reverse)] if name in _STACKED and value is not None else value
    return found


@lstm_bidirectional.backward
def lstm_bidirectional_backward(
    grad_output, grad_h_n, grad_c_n, grad_cells, input, h_0, c_0,
    weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, peephole, norm_ih, norm_hh, norm_c,
    weight_ih_reverse, weight_hh_reverse, bias_ih_reverse, bias_hh_reverse, weight_hr_reverse, peephole_reverse,
    norm_ih_reverse, norm_hh_reverse, norm_c_reverse, h_mask, lengths, reset, seed, output, gates, *,
    activation="soft", slope=0.125, coupled=False, clip=0.0, zoneout_h=0.0, zoneout_c=0.0,
    keep_cells=0, keep_gates=0, tier="auto", fp32_precision="ieee",
):  # fmt: skip
    given = {  # written out: torch 2.11 cannot trace locals()
        "grad_output": grad_output, "grad_h_n": grad_h_n, "grad_c_n": grad_c_n, "grad_cells": grad_cells,
        "input": input, "h_0": h_0, "c_0": c_0, "weight_ih": weight_ih, "weight_hh": weight_hh,
        "bias_ih": bias_ih, "bias_hh": bias_hh, "weight_hr": weight_hr, "peephole": peephole,
        "norm_ih": norm_ih, "norm_hh": norm_hh, "norm_c": norm_c, "weight_ih_reverse": weight_ih_reverse,
        "weight_hh_reverse": weight_hh_reverse, "bias_ih_reverse": bias_ih_reverse,
        "bias_hh_reverse": bias_hh_reverse, "weight_hr_reverse": weight_hr_reverse,
        "peephole_reverse": peephole_reverse, "norm_ih_reverse": norm_ih_reverse,
        "norm_hh_reverse": norm_hh_reverse, "norm_c_reverse": norm_c_reverse, "h_mask": h_mask,
        "lengths": lengths, "reset": reset, "seed": seed, "output": output, "gates": gates,
        "activation": activation, "slope": slope, "coupled": coupled, "clip": clip, "zoneout_h": zoneout_h,
        "zoneout_c": zoneout_c, "keep_cells": keep_cells, "keep_gates": keep_gates, "tier": tier,
        "fp32_precision": fp32_precision,
    }  # fmt: skip
    one, other = _for_both(lstm.operator.backward_operator, given)
    h_0, c_0, h_mask = (None if one[i] is None else torch.stack([one[i], other[i]]) for i in (1, 2, -1))
    return (one[0] + other[0], h_0, c_0, *one[3:-1], *other[3:-1], h_mask)


def _cost_of(backward: bool, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, int]:
    """Returns the cost of both directions, which read and write the input once."""
    operator = lstm_bidirectional.operator.backward_operator if backward else lstm_bidirectional.operator
    given = dict(zip(inspect.signature(operator.declaration.reference).parameters, arguments, strict=False)) | options
    cost = lstm_backward_cost if backward else lstm_cost
    (moved, flop), (moved_reverse, flop_reverse) = (cost(**_of_direction(given, reverse)) for reverse in (False, True))
    shared = given["input"].nbytes * (2 if backward else 1)
    return moved + moved_reverse - shared, flop + flop_reverse


@lstm_bidirectional.cost
def _cost(*arguments, **options):
    return _cost_of(False, arguments, options)


@lstm_bidirectional_backward.cost
def _backward_cost(*arguments, **options):
    return _cost_of(True, arguments, options)


@lstm_bidirectional.baseline
def lstm_bidirectional_baseline(*arguments, **options):
    """nn.LSTM's function, where it computes the same; else the reference."""
    input, h_0, c_0, *weights, h_mask, lengths, reset, seed = arguments
    plain = (*weights[:5], *weights[9:14])
    more = (*weights[5:9], *weights[14:], h_mask, lengths, reset, seed)
    usual = {"activation": "soft", "coupled": False, "clip": 0, "zoneout_h": 0, "zoneout_c": 0, "keep_cells": 0}
    if (
        input.ndim != 3
        or any(options[name] != value for name, value in usual.items())
        or any(value is not None for value in more)
        or any(value is None for value in (h_0, c_0, weights[2], weights[3], weights[11], weights[12]))
    ):
        return lstm_bidirectional.operator.declaration.reference(*arguments, **options)
    return torch._VF.lstm(
        input, (h_0, c_0), [w for w in plain if w is not None], True, 1, 0.0, torch.is_grad_enabled(), True, False
    )


_ABSENT = ("weight_hr", "peephole", "norm_ih", "norm_hh", "norm_c")
_PLAIN = {
    name: [None] for name in (*_ABSENT, *(f"{name}_reverse" for name in _ABSENT), "h_mask", "lengths", "reset", "seed")
}
lstm_bidirectional.sweep(
    *(
        {"T": [100], "batch": [(1,), (16,)], "I": [width], "H": [width], "R": [width], "keep_gates": [0, 1]} | _PLAIN
        for width in (128, 512)
    )
)


@lstm_bidirectional.samples
def _samples() -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields every argument, alone or with others; the cells themselves are verified with `lstm`."""
    norms, hard = "norm_ih norm_hh norm_c", {"activation": "hard"}
    many = f"bias weight_hr peephole {norms} h_mask lengths reset seed"
    cases: list[tuple[tuple[int, ...], str, dict[str, Any]]] = [
        ((2, 1, 1, 2, 2), "bias no_state", {"keep_gates": 1}),
        ((2, 2, 1, 2, 1), "bias weight_hr peephole lengths", {"keep_cells": 1, "coupled": True}),
        ((5, 1, 3, 33, 33), "bias", {"keep_gates": 1}),
        ((5, 7, 3, 17, 17), "bias lengths no_state", {"keep_gates": 1, "keep_cells": 1}),
        ((5, 3, 4, 33, 33), "h_mask reset", hard | {"slope": 0.2, "clip": 1.0}),
        ((5, 7, 5, 33, 17), many, {"zoneout_h": 0.3, "zoneout_c": 0.4, "keep_gates": 1, "keep_cells": 1}),
        ((5, 7, 9, 65, 65), "bias", {"keep_gates": 1}),  # two threads
        ((0, 3, 4, 5, 5), "bias lengths reset", {"keep_gates": 1, "keep_cells": 1}),
        ((3, 0, 4, 5, 5), "bias lengths reset", {"keep_gates": 1, "keep_cells": 1}),
        ((5, 3, 4, 17, 17), "bias lengths", {"activation": "hard_sigmoid", "keep_gates": 1}),
        ((5, 3, 4, 17, 17), "bias", {"activation": "hard_tanh"}),
    ]  # fmt: skip
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for number, (sizes, present, options) in enumerate(cases):
            yield _both(sizes, present, dtype, number), options
        for batch in ((), (2, 3)):
            yield _both((3, 6, 5, 17, 17), "bias h_mask lengths reset", dtype, batch=batch), {"keep_gates": 1}


def _both(*arguments: Any, **options: Any) -> tuple[Tensor | None, ...]:
    """Returns the tensors of a call, from those of two calls of `lstm` for the same input."""
    one, other = inputs_of(*arguments, **options), inputs_of(*arguments, **options)
    pairs = [None if a is None or b is None else (a, b.roll(1)) for a, b in zip(one, other, strict=True)]
    weights = [[None if pair is None else pair[i] for pair in pairs[3:12]] for i in (0, 1)]
    stacked = [None if pair is None else torch.stack(pair) for pair in (*pairs[1:3], *pairs[12:])]
    h_0, c_0, h_mask, _, reset, seed = stacked
    return one[0], h_0, c_0, *weights[0], *weights[1], h_mask, one[13], reset, seed
