"""One step of AdamW over lists of tensors, in one launch."""

from typing import Any

import torch
from jaxtyping import BFloat16, Float, Float32
from torch import Tensor

from opwright import Mutates, operator

_WORD = 0xFFFFFFFF


def _mix(word: Any) -> Any:
    """Returns 32 bits that each depend on all 32 bits of `word`, a number or a tensor of int64."""
    word = (word ^ (word >> 16)) * 0x7FEB352D & _WORD
    word = (word ^ (word >> 15)) * 0x846CA68B & _WORD
    return word ^ (word >> 16)


def random_bits(count: int, seed: int, step: Any, tensor: int, stream: int, device: torch.device) -> Tensor:
    """Returns 16 random bits for each element of a tensor: a function of these numbers alone.

    Args:
        step: a number, or a tensor of one.
        tensor: which of the tensors of a step it is.
        stream: 0 for the parameter, 1 for exp_avg, 2 for exp_avg_sq, 3 for its maximum.
    """
    key = _mix(_mix(_mix(_mix(seed & _WORD) ^ (seed >> 32 & _WORD)) ^ (tensor & _WORD)) ^ (step & _WORD))
    pair = torch.arange((count + 1) // 2, device=device)
    words = _mix(_mix((pair & _WORD) ^ key) ^ (pair >> 32) ^ _mix(key + 1 + stream & _WORD))
    return torch.stack([words & 0xFFFF, words >> 16], 1).flatten()[:count]


def _store(to: Tensor, value: Tensor, bits: Tensor | None) -> None:
    """Rounds into a tensor: to nearest, or to one of the two neighbours in bfloat16 by 16 random bits."""
    if bits is None or to.dtype != torch.bfloat16:
        to.copy_(value)
        return
    word = value.float().view(torch.int32).long() & _WORD
    word = torch.where(value.isnan(), word | 0x400000, word + bits.view(value.shape)) & 0xFFFF0000
    to.copy_(torch.where(word > 0x7FFFFFFF, word - (1 << 32), word).int().view(torch.float32))


def _declare(suffix: str, State: Any) -> Any:
    """Declares the operator for states of one family."""

    @operator("opwright_ops::adamw_" + suffix, autocast=None)
    def adamw_(
        params: Mutates[list[Float[Tensor, "..."]]],
        grads: list[Float[Tensor, "..."]],
        exp_avgs: Mutates[list[State[Tensor, "..."]]],
        exp_avg_sqs: Mutates[list[State[Tensor, "..."]]],
        max_exp_avg_sqs: Mutates[list[State[Tensor, "..."]]],
        steps: list[Float32[Tensor, ""]],
        rate: Float32[Tensor, ""] | None = None,
        *,
        step: int = 1,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
        first: int = 0,
    ) -> None:
        """Takes one step of AdamW with all tensors of the lists: the operator behind the optimizer `AdamW`.

        Args:
            params, grads, exp_avgs, exp_avg_sqs: lists of equal length; tensors at one place have one shape.
            max_exp_avg_sqs: the same with amsgrad, and no tensors without it.
            steps: the number of this step, counted from 1, for each tensor; without them it is `step` for all.
            rate: takes the place of `lr`.
            stochastic_rounding: bfloat16 is rounded up or down at random, in proportion to how near the two are.
            seed, first: the random bits follow from the seed, the number of the step, the place of a tensor in
                the lists plus `first`, and the place of the element.

        Numerics:
            16-bit types are computed in float32 and rounded once, at the end.

        Source:
            Loshchilov and Hutter, arXiv:1711.05101, algorithm 2; Reddi, Kale and Kumar, arXiv:1904.09237, for amsgrad.
        """
        if not len(params) == len(grads) == len(exp_avgs) == len(exp_avg_sqs):
            raise ValueError("the lists have different lengths")
        if len(max_exp_avg_sqs) not in (0, len(params)) or len(steps) not in (0, len(params)):
            raise ValueError("max_exp_avg_sqs and steps have no tensors, or as many as params")
        for i, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)):
            states = [exp_avg, exp_avg_sq, *max_exp_avg_sqs[i : i + 1]]
            if any(t.shape != param.shape for t in (grad, *states)):
                raise ValueError("tensors at one place of the lists have different shapes")
            wide = torch.float64 if param.dtype == torch.float64 else torch.float32
            # In float64: 1 - 0.999^t loses three digits for small t.
            t = steps[i].double() if steps else step
            rate_now = lr if rate is None else rate.double()
            p, g, m, v, *most = (x.to(wide) for x in (param, grad, *states))
            g = -g if maximize else g
            m = m + (g - m) * (1 - beta1)
            v = v * beta2 + g * (1 - beta2) * g  # the square may have no room
            most = torch.maximum(most[0], v) if most else v
            denominator = (most / (1 - beta2**t)).sqrt() + eps
            p = p - p * (rate_now * weight_decay) - rate_now / (1 - beta1**t) * (m / denominator)
            bits: list[Tensor | None] = [None] * 4
            if stochastic_rounding:
                count = t.long() if isinstance(t, Tensor) else t
                bits = [random_bits(p.numel(), seed, count, first + i, stream, p.device) for stream in range(4)]
            for to, value, own in zip((param, *states), (p, m, v, most), bits, strict=False):
                _store(to, value, own)

    adamw_.samples(lambda: _samples(State))
    adamw_.cost(_cost)
    return adamw_


def _samples(State: Any) -> Any:
    """Yields calls: lists of all sizes, one longer than 64k elements, special values, and every option."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    dtype = {"Float32": torch.float32, "BFloat16": torch.bfloat16}.get(State.__name__)

    def call(
        shapes: list[tuple[int, ...]], amsgrad: bool = False, counts: bool = False, rated: bool = False, **options
    ):
        state = [normal(*s).mul(0.1).to(dtype or torch.float32) for s in shapes]
        squares = [normal(*s).square().mul(0.01).to(dtype or torch.float32) for s in shapes]
        most = [(s.float() * 1.5).to(s.dtype) for s in squares] if amsgrad else []
        steps = [torch.tensor(float(3 + i)) for i in range(len(shapes))] if counts else []
        rate = torch.tensor(0.05) if rated else None
        lists = [normal(*s) for s in shapes], [normal(*s) for s in shapes], state, squares, most, steps, rate
        return lists, options

    yield call([(1,)])
    yield call([(0,), (3, 5), (), (257,)], step=7, lr=0.1)
    yield call([(64, 33), (4096,)], amsgrad=True, step=2, maximize=True, weight_decay=0.5)
    yield call([(17,), (1000,)], counts=True, rated=True, beta1=0.5, beta2=0.9, eps=1e-3, weight_decay=0.0)
    yield call([(70_000,), (5,)], amsgrad=True, counts=True, step=100)
    yield call([(300,), (9,)], stochastic_rounding=True, seed=2**40 + 1, first=3, step=12)
    yield call([(300,), (9,)], stochastic_rounding=True, seed=5, amsgrad=True, counts=True)
    (params, grads, *rest), options = call([(6,), (40,)], step=3)
    grads[0][:5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    params[1][:5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    yield (params, grads, *rest), options


def _cost(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, *steps, **options):
    lists = (params, params, grads, *2 * (exp_avgs, exp_avg_sqs, max_exp_avg_sqs))
    return sum(t.numel() * t.element_size() for each in lists for t in each), 15 * sum(p.numel() for p in params)


adamw_ = _declare("", Float)
adamw_float32_state_ = _declare("float32_state_", Float32)
adamw_bfloat16_state_ = _declare("bfloat16_state_", BFloat16)
