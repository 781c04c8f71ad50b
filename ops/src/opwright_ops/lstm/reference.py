"""The equations of an LSTM and of its gradient in plain PyTorch, one step at a time.

Shapes: h is [*B, R], c is [*B, H], gates are [*B, 4H] in the order i, f, g, o.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-5  # of the layer normalisations


@dataclass
class Step:
    """What one step computed: the state before and after it, and what its gradient needs."""

    t: int
    active: Tensor | None
    h_in: Tensor
    c_in: Tensor
    from_input: Tensor
    from_h: Tensor
    gates: Tensor
    i: Tensor
    f: Tensor
    g: Tensor
    o: Tensor
    cell: Tensor
    squashed: Tensor
    h: Tensor
    c: Tensor


@dataclass
class Cell:
    """The parameters and options of a cell, in the type of its state."""

    weight_hh: Tensor
    bias: Tensor | None
    weight_hr: Tensor | None
    peephole: Tensor | None
    norm_ih: Tensor | None
    norm_hh: Tensor | None
    norm_c: Tensor | None
    h_mask: Tensor | None
    seed: Tensor | None
    narrow: torch.dtype
    activation: str
    slope: float
    coupled: bool
    clip: float
    zoneout_h: float
    zoneout_c: float

    def __post_init__(self) -> None:
        for name in ("weight_hh", "bias", "weight_hr", "peephole", "norm_ih", "norm_hh", "norm_c", "h_mask"):
            setattr(self, name, widened(getattr(self, name)))
        self.has_hard_sigmoid = self.activation in ("hard", "hard_sigmoid")
        self.has_hard_tanh = self.activation in ("hard", "hard_tanh")

    def step(self, t: int, from_input: Tensor, h: Tensor, c: Tensor) -> Step:
        """Takes one step from the state (h, c); `from_input` is weight_ih @ x."""
        h_in = self.narrowed(h if self.h_mask is None else h * self.h_mask)
        from_h = h_in @ self.weight_hh.mT
        gates = normalised(from_input, self.norm_ih) + normalised(from_h, self.norm_hh)
        gates = gates if self.bias is None else gates + self.bias
        z_i, z_f, z_g, z_o = gates.chunk(4, -1)
        p_i, p_f, p_o = (0, 0, 0) if self.peephole is None else self.peephole
        z_i, z_f = z_i + p_i * c, z_f + p_f * c
        i, g = self.sigmoid(z_i), self.tanh(self.clipped(z_g))
        f = 1 - i if self.coupled else self.sigmoid(z_f)
        cell = f * c + i * g
        z_o = z_o + p_o * cell
        o = self.sigmoid(z_o)
        squashed = self.tanh(normalised(cell, self.norm_c))
        h_new = self.narrowed(o * squashed)
        if self.weight_hr is not None:
            h_new = h_new @ self.weight_hr.mT
        keeps_h, keeps_c = self.zoneout(t, h.shape[-1], c.shape[-1])
        h_new, c_new = keeps_h * h + (1 - keeps_h) * h_new, keeps_c * c + (1 - keeps_c) * cell
        gates = torch.cat([z_i, z_f, z_g, z_o], -1)
        return Step(t, None, h, c, from_input, from_h, gates, i, f, g, o, cell, squashed, self.narrowed(h_new), c_new)

    def gradient(self, step: Step, grad_h: Tensor, grad_c: Tensor, into: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Takes the gradient of one step back: returns those of its `from_input`, h and c.

        Those of the parameters are added to `into`.
        """
        h, c = step.h_in, step.c_in
        z_i, z_f, z_g, z_o = step.gates.chunk(4, -1)
        keeps_h, keeps_c = self.zoneout(step.t, h.shape[-1], c.shape[-1])
        past_h, past_c = grad_h * keeps_h, grad_c * keeps_c
        grad_out, grad_cell = grad_h - past_h, grad_c - past_c
        if self.weight_hr is not None:
            _add_product(into, "weight_hr", grad_out, self.narrowed(step.o * step.squashed))
            grad_out = grad_out @ self.weight_hr
        grad_o = self.through_sigmoid(grad_out * step.squashed, z_o, step.o)
        normal = normalised(step.cell, self.norm_c)
        grad_normal = self.through_tanh(grad_out * step.o, normal, step.squashed)
        grad_cell = grad_cell + normalised_gradient(step.cell, self.norm_c, grad_normal, into, "norm_c")
        p_i, p_f, p_o = (0, 0, 0) if self.peephole is None else self.peephole
        grad_cell = grad_cell + p_o * grad_o
        to_f = grad_cell * c
        to_i = grad_cell * step.g - (to_f if self.coupled else 0)
        grad_i = self.through_sigmoid(to_i, z_i, step.i)
        grad_f = torch.zeros_like(to_f) if self.coupled else self.through_sigmoid(to_f, z_f, step.f)
        grad_g = self.through_clip(self.through_tanh(grad_cell * step.i, self.clipped(z_g), step.g), z_g)
        past_c = past_c + grad_cell * step.f + p_i * grad_i + p_f * grad_f
        grad_gates = torch.cat([grad_i, grad_f, grad_g, grad_o], -1)
        if self.peephole is not None:
            found = torch.stack([grad_i * c, grad_f * c, grad_o * step.cell])
            _add(into, "peephole", found.flatten(1, -2).sum(1))
        _add(into, "bias", rows_of(grad_gates).sum(0))
        grad_input = normalised_gradient(step.from_input, self.norm_ih, grad_gates, into, "norm_ih")
        grad_from_h = normalised_gradient(step.from_h, self.norm_hh, grad_gates, into, "norm_hh")
        masked = self.narrowed(h if self.h_mask is None else h * self.h_mask)
        _add_product(into, "weight_hh", grad_from_h, masked)
        grad_masked = grad_from_h @ self.weight_hh
        if self.h_mask is not None:
            _add(into, "h_mask", grad_masked * h)
            grad_masked = grad_masked * self.h_mask
        return grad_input, past_h + grad_masked, past_c

    def narrowed(self, value: Tensor) -> Tensor:
        """Rounds to the type of the operator's input."""
        return value.to(self.narrow).to(value.dtype)

    def clipped(self, z: Tensor) -> Tensor:
        return z.clamp(-self.clip, self.clip) if self.clip else z

    def sigmoid(self, z: Tensor) -> Tensor:
        z = self.clipped(z)
        return (0.5 + self.slope * z).clamp(0, 1) if self.has_hard_sigmoid else torch.sigmoid(z)

    def tanh(self, z: Tensor) -> Tensor:
        return z.clamp(-1, 1) if self.has_hard_tanh else torch.tanh(z)

    # A gradient through each of them at z, where its value is known. It is 0, not a product with 0, where the
    # result does not move: as for torch.clamp, also where z is NaN.

    def through_clip(self, grad: Tensor, z: Tensor) -> Tensor:
        return torch.where(z.abs() <= self.clip, grad, 0) if self.clip else grad

    def through_sigmoid(self, grad: Tensor, z: Tensor, value: Tensor) -> Tensor:
        if not self.has_hard_sigmoid:
            return self.through_clip(grad * (value * (1 - value)), z)
        inside = (0.5 + self.slope * self.clipped(z) - 0.5).abs() <= 0.5
        return self.through_clip(torch.where(inside, self.slope * grad, 0), z)

    def through_tanh(self, grad: Tensor, z: Tensor, value: Tensor) -> Tensor:
        return torch.where(z.abs() <= 1, grad, 0) if self.has_hard_tanh else grad * (1 - value * value)

    def zoneout(self, t: int, width_h: int, width_c: int) -> tuple[Tensor | float, Tensor | float]:
        """Returns what part of h and of c stays as it was: 0 or 1 by chance, or the expectation."""
        if self.seed is None or not (self.zoneout_h or self.zoneout_c):
            return self.zoneout_h, self.zoneout_c
        words_c, words_h = random_words(self.seed, t, max(width_h, width_c))
        type_ = self.weight_hh.dtype
        keeps_h = (words_h[..., :width_h] < int(self.zoneout_h * 2**32)).to(type_)
        return keeps_h, (words_c[..., :width_c] < int(self.zoneout_c * 2**32)).to(type_)


def check(weight_hh: Tensor, weight_hr: Tensor | None, *norms: Tensor | None) -> None:
    """Refuses what the annotations cannot say, in the words of the kernel.

    Raises:
        ValueError: the widths of h and c differ without a projection, or some of the norms are missing.
    """
    if weight_hr is None and weight_hh.shape[0] != 4 * weight_hh.shape[1]:
        rule = "`weight_hh` must be [4 H, H], or `weight_hr` must project h to its width"
        raise ValueError(f"`lstm`: {rule}")
    if len({norm is None for norm in norms}) > 1:
        raise ValueError("`lstm`: `norm_ih`, `norm_hh` and `norm_c` come together")


def check_kept(keep_cells: int, keep_gates: int) -> None:
    """Refuses more rows of cells or gates than there are steps.

    Raises:
        ValueError: one of them is neither 0 nor 1.
    """
    if any(kept not in (0, 1) for kept in (keep_cells, keep_gates)):
        raise ValueError("`lstm`: `keep_cells` and `keep_gates` must be 0 or 1")


def initial(input: Tensor, h_0: Tensor | None, c_0: Tensor | None, weight_hh: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the state before the first step, zeros where none is given."""
    batch, (rows, width) = input.shape[1:-1], weight_hh.shape
    h = input.new_zeros(*batch, width) if h_0 is None else h_0
    return h, input.new_zeros(*batch, rows // 4) if c_0 is None else c_0


def sum_of(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Returns the sum of what is there, in the type of sums."""
    a, b = widened(a), widened(b)
    return b if a is None else a if b is None else a + b


def run(
    cell: Cell,
    input: Tensor,
    h: Tensor,
    c: Tensor,
    weight_ih: Tensor,
    lengths: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
) -> Iterator[Step]:
    """Yields the steps of a sequence, in the order in which they are taken."""
    h, c = widened(h), widened(c)
    times = range(len(input))
    from_input = widened(input) @ widened(weight_ih).mT
    for t in reversed(times) if reverse else times:
        active, goes_on = masks(t, lengths, reset)
        if goes_on is not None:
            h, c = h * goes_on, c * goes_on
        step = cell.step(t, from_input[t], h, c)
        if active is not None:
            step.active = active
            step.h, step.c = torch.where(step.active, step.h, h), torch.where(step.active, step.c, c)
        yield step
        h, c = step.h, step.c


def masks(t: int, lengths: Tensor | None, reset: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns which entries take part in a step, and which keep their state before it; None is all."""
    active = None if lengths is None else (t < lengths).unsqueeze(-1)
    if reset is None:
        return active, None
    goes_on = ~reset[t].unsqueeze(-1)
    return active, goes_on if active is None else goes_on | ~active


def without_rest(input: Tensor, lengths: Tensor | None) -> Tensor:
    """Returns the input with 0 behind the end of each entry, where anything may be, NaN included."""
    if lengths is None:
        return input
    times = torch.arange(len(input), device=input.device).reshape(-1, *[1] * lengths.ndim)
    return torch.where((times < lengths).unsqueeze(-1), input, 0)


def widened(value: Tensor | None) -> Tensor | None:
    """Returns a tensor in the type of states and sums: float32 for 16-bit types."""
    return None if value is None else value.to(torch.promote_types(value.dtype, torch.float32))


def normalised(value: Tensor, parameters: Tensor | None) -> Tensor:
    """Layer normalisation over the last axis; `parameters` are the gain, or gain and bias stacked."""
    if parameters is None:
        return value
    gain, bias = (parameters, None) if parameters.ndim == 1 else parameters
    return torch.nn.functional.layer_norm(value, gain.shape, gain, bias, EPSILON)


def normalised_gradient(
    value: Tensor, parameters: Tensor | None, grad: Tensor, into: dict[str, Tensor], name: str
) -> Tensor:
    """The gradient of `normalised`; that of its parameters is added to `into`."""
    if parameters is None:
        return grad
    gain = parameters if parameters.ndim == 1 else parameters[0]
    centred = value - value.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + EPSILON).rsqrt()
    unit = centred * scale
    found = rows_of(grad * unit).sum(0)
    _add(into, name, found if parameters.ndim == 1 else torch.stack([found, rows_of(grad).sum(0)]))
    grad = grad * gain
    return scale * (grad - grad.mean(-1, keepdim=True) - unit * (grad * unit).mean(-1, keepdim=True))


def random_words(seed: Tensor, t: int, count: int) -> tuple[Tensor, Tensor]:
    """Philox2x32-7 (Salmon et al., doi:10.1145/2063384.2063405): two words of 32 bits for each element.

    The key is the low half of the seed, the counter (element, t). Seven rounds are the least that pass
    all of BigCrush there.
    """
    key = (seed & 0xFFFFFFFF).unsqueeze(-1)
    low = torch.arange(count, device=seed.device).expand(*seed.shape, count)
    high = torch.full_like(low, t)
    for _ in range(7):
        product = low * 0xD256D193  # wraps around: its bits are those of the unsigned product
        low, high = ((product >> 32) & 0xFFFFFFFF) ^ key ^ high, product & 0xFFFFFFFF
        key = (key + 0x9E3779B9) & 0xFFFFFFFF
    return low, high


def rows_of(value: Tensor) -> Tensor:
    """Returns [*B, n] as a matrix."""
    return value.reshape(-1, value.shape[-1]) if value.numel() else value.new_zeros(0, value.shape[-1])


def _add(into: dict[str, Tensor], name: str, value: Tensor) -> None:
    into[name] = into[name] + value if name in into else value


def _add_product(into: dict[str, Tensor], name: str, grad: Tensor, operand: Tensor) -> None:
    _add(into, name, rows_of(grad).mT @ rows_of(operand))
