"""One layer and one direction of an LSTM over a whole sequence."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from opwright import operator
from opwright_ops.lstm.cost import lstm_backward_cost, lstm_cost, lstm_in_pytorch
from opwright_ops.lstm.reference import (
    Cell,
    Step,
    check,
    check_kept,
    initial,
    masks,
    rows_of,
    run,
    sum_of,
    widened,
    without_rest,
)
from opwright_ops.lstm.samples import samples

Activation = Literal["soft", "hard", "hard_sigmoid", "hard_tanh"]
Tier = Literal["auto", "cluster", "grid", "step"]


class LstmOutputs(NamedTuple):
    """What `lstm` returns."""

    output: Float[Tensor, "T *B R"]
    h_n: Float[Tensor, "*B R"]
    c_n: Float[Tensor, "*B H"]
    cells: Float[Tensor, "keep_cells*T *B H"]
    gates: Float[Tensor, "keep_gates*T *B 4*H"]


@operator("opwright_ops::lstm", autocast="lower", non_differentiable=["gates"])
def lstm(
    input: Float[Tensor, "T *B I"],
    h_0: Float[Tensor, "*B R"] | None,
    c_0: Float[Tensor, "*B H"] | None,
    weight_ih: Float[Tensor, "4*H I"],
    weight_hh: Float[Tensor, "4*H R"],
    bias_ih: Float[Tensor, "4*H"] | None = None,
    bias_hh: Float[Tensor, "4*H"] | None = None,
    weight_hr: Float[Tensor, "R H"] | None = None,
    peephole: Float[Tensor, "3 H"] | None = None,
    norm_ih: Float[Tensor, "4*H"] | None = None,
    norm_hh: Float[Tensor, "4*H"] | None = None,
    norm_c: Float[Tensor, "2 H"] | None = None,
    h_mask: Float[Tensor, "*B R"] | None = None,
    lengths: Int64[Tensor, "*B"] | None = None,
    reset: Bool[Tensor, "T *B"] | None = None,
    seed: Int64[Tensor, "*B"] | None = None,
    *,
    reverse: bool = False,
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
) -> LstmOutputs:
    """An LSTM layer in one direction, with the parameters and the gate order (i, f, g, o) of nn.LSTM.

    Args:
        input: the sequence; T steps of B entries, which are independent of each other.
        h_0, c_0: the state before the first step; zeros where there is none.
        bias_ih, bias_hh: their sum is what counts.
        weight_hr: the projection of h; without it R equals H.
        peephole: weights of the gates i, f (they see the cell before the step) and o (it sees the new one).
        norm_ih, norm_hh, norm_c: gains of the layer normalisations of weight_ih @ x and weight_hh @ h,
            each over all 4H; gain and bias of that of the cell, before the output's tanh. All three or none.
        h_mask: multiplies h on its way into the gates, the same at every step (variational dropout).
        lengths: steps of each entry; after them the outputs are 0 and the state stays.
        reset: where true, the state is 0 before that step.
        seed: of the random numbers of zoneout, one per entry; without it zoneout takes its expectation.
        reverse: from the last step to the first.
        activation: "hard" is clamp(0.5 + slope * z, 0, 1) for sigmoid and clamp(z, -1, 1) for tanh. "hard_sigmoid" and
            "hard_tanh" replace only one of the two.
        coupled: the forget gate is 1 - i; without layer normalisation the rows of `weight_*` for f have no effect.
        clip: clamps what the gates are computed from to [-clip, clip]; 0 does not.
        zoneout_h, zoneout_c: the probability that an element of h, of c keeps its value from the step before.
        keep_cells: 1 returns the cells of all steps.
        keep_gates: 1 returns what the backward would otherwise compute again with one matrix product: the
            gates before their activations, or weight_hh @ h when layers are normalised.
        tier: how a GPU takes the steps: "cluster" or "grid" in one launch with the weights on the chip, "step" with one
            product and one kernel for each. "auto" is what `lstm_tier` says. What does not fit is taken step by step.
        fp32_precision: "tf32" lets a GPU round the factors of float32 products to 11 bits, as torch.backends' option
            of this name.

    Numerics:
        Cells, sums and their gradients are float32 for 16-bit types, float64 for float64; h is rounded to
        the type of the input at each step.

    Source:
        Equations and names: Greff et al., LSTM: A Search Space Odyssey, doi:10.1109/TNNLS.2016.2582924;
        layer normalisation: Ba et al., arXiv:1607.06450, eq. 20 to 22; zoneout: Krueger et al.,
        arXiv:1606.01305; h_mask: Gal and Ghahramani, arXiv:1512.05287.
    """
    check(weight_hh, weight_hr, norm_ih, norm_hh, norm_c)
    check_kept(keep_cells, keep_gates)
    input, h_0, c_0 = without_rest(input, lengths), *initial(input, h_0, c_0, weight_hh)
    cell = Cell(
        weight_hh, sum_of(bias_ih, bias_hh), weight_hr, peephole, norm_ih, norm_hh, norm_c, h_mask, seed, input.dtype,
        activation, slope, coupled, clip, zoneout_h, zoneout_c,
    )  # fmt: skip
    steps = list(run(cell, input, h_0, c_0, weight_ih, lengths, reset, reverse))
    h_n, c_n = (steps[-1].h, steps[-1].c) if steps else (h_0, c_0)
    is_normalised = norm_hh is not None
    sequences = [
        _sequence([s.h for s in steps], steps, h_0, reverse),
        _sequence([s.c for s in steps] * keep_cells, steps, c_0, reverse),
        _sequence([s.from_h if is_normalised else s.gates for s in steps] * keep_gates, steps,
                  c_0.repeat_interleave(4, -1), reverse),
    ]  # fmt: skip
    output, cells, gates = (s.to(input.dtype) for s in sequences)
    return LstmOutputs(output, h_n.to(input.dtype), c_n.to(input.dtype), cells, gates)


def _sequence(values: list[Tensor], steps: list[Step], like: Tensor, reverse: bool) -> Tensor:
    """Stacks what the steps computed in the order of time, 0 where an entry has ended."""
    if not values:
        return like.new_zeros(0, *like.shape)
    shown = [v if s.active is None else v * s.active for v, s in zip(values, steps, strict=True)]
    return torch.stack(shown[::-1] if reverse else shown)


@lstm.backward
def lstm_backward(
    grad_output, grad_h_n, grad_c_n, grad_cells,
    input, h_0, c_0, weight_ih, weight_hh, bias_ih, bias_hh, weight_hr, peephole, norm_ih, norm_hh, norm_c, h_mask,
    lengths, reset, seed, output, gates, *,
    reverse=False, activation="soft", slope=0.125, coupled=False, clip=0.0, zoneout_h=0.0, zoneout_c=0.0,
    keep_cells=0, keep_gates=0, tier="auto", fp32_precision="ieee",
):  # fmt: skip
    check(weight_hh, weight_hr, norm_ih, norm_hh, norm_c)
    check_kept(keep_cells, keep_gates)
    input, h, c = without_rest(input, lengths), *initial(input, h_0, c_0, weight_hh)
    cell = Cell(
        weight_hh, sum_of(bias_ih, bias_hh), weight_hr, peephole, norm_ih, norm_hh, norm_c, h_mask, seed, input.dtype,
        activation, slope, coupled, clip, zoneout_h, zoneout_c,
    )  # fmt: skip
    steps = list(run(cell, input, h, c, weight_ih, lengths, reset, reverse))
    grad_h, grad_c = widened(grad_h_n), widened(grad_c_n)
    found: dict[str, Tensor] = {}
    to_inputs: list[Tensor] = []
    for step in reversed(steps):
        after_h = grad_h + grad_output[step.t]
        after_c = grad_c + grad_cells[step.t] if keep_cells else grad_c
        if step.active is not None:
            after_h, after_c = after_h * step.active, after_c * step.active
        to_input, before_h, before_c = cell.gradient(step, after_h, after_c, found)
        if step.active is not None:
            before_h = torch.where(step.active, before_h, grad_h)
            before_c = torch.where(step.active, before_c, grad_c)
        _, goes_on = masks(step.t, lengths, reset)
        if goes_on is not None:
            before_h, before_c = before_h * goes_on, before_c * goes_on
        to_inputs.append(to_input)
        grad_h, grad_c = before_h, before_c
    grad_from_input = torch.stack(to_inputs if reverse else to_inputs[::-1]) if steps else None
    if steps:
        found["input"] = grad_from_input @ widened(weight_ih)
        found["weight_ih"] = rows_of(grad_from_input).mT @ rows_of(widened(input))
    found |= {"h_0": grad_h, "c_0": grad_c}
    if "bias" in found:
        found |= {"bias_ih": found["bias"], "bias_hh": found["bias"]}
    inputs = {
        "input": input, "h_0": h_0, "c_0": c_0, "weight_ih": weight_ih, "weight_hh": weight_hh,
        "bias_ih": bias_ih, "bias_hh": bias_hh,
        "weight_hr": weight_hr, "peephole": peephole, "norm_ih": norm_ih, "norm_hh": norm_hh,
        "norm_c": norm_c, "h_mask": h_mask,
    }  # fmt: skip
    return tuple(
        None if value is None else found.get(name, torch.zeros_like(value)).to(value.dtype)
        for name, value in inputs.items()
    )


lstm.samples(samples)
lstm.cost(lstm_cost)
lstm_backward.cost(lstm_backward_cost)


@lstm.baseline
def lstm_baseline(*arguments, **options):
    return lstm_in_pytorch(lstm.operator.declaration.reference, arguments, options)


_PLAIN = {
    name: [None]
    for name in ("weight_hr", "peephole", "norm_ih", "norm_hh", "norm_c", "h_mask", "lengths", "reset", "seed")
}
lstm.sweep(
    *(
        {"T": [100], "batch": batches, "I": [width], "H": [width], "R": [width], "keep_gates": [0, 1]} | _PLAIN
        for width, batches in ((512, [(1,), (16,)]), (1024, [(16,)]))
    )
)
