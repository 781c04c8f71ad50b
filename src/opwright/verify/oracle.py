"""The oracle: the reference in float64, and how far a computation in a dtype may be from it.

No tolerance is set by hand. A kernel is compared, element by element, with what PyTorch gets for the
same computation in the same dtype, and with how far the reference moves when each of its intermediate
results is off by one rounding. So an ill-conditioned element allows what it must, and no other does.
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opwright.verify.formulas import Rounding
from opwright.verify.tensors import copy_of, tensors_of

# A kernel may err this many times what PyTorch itself errs on that element ...
_MULTIPLE = 4.0
# ... plus this many units in the last place: one rounding of the result, and the few ulp of a
# library's exp and its like, which PyTorch's own vectorised functions are allowed as well.
_ULP = 4.0
_STOCHASTIC_RUNS = 8
# Results of a 16-bit type are rounded to nearest, so they lie above as often as below: the mean distance from the
# correctly rounded result, in ulp, is at most this and twice PyTorch's own. Cutting instead of rounding gives a half.
LEAN = 0.25
_LEAN_ELEMENTS, _LEAN_ULP = 1024, 32.0
_TINY = torch.finfo(torch.float64).smallest_normal


@dataclass
class Expected:
    """What the oracle says about one output.

    Attributes:
        exact: the value in float64.
        allowance: largest absolute error that passes, per element.
        ulp: the unit in the last place of the output's dtype at `exact`.
        overflowed: where PyTorch itself gets NaN or an infinity in this dtype that is not right.
        lean: the mean distance of PyTorch's results from the correctly rounded ones, upwards and outwards.
        is_negative_zero: where a zero must be negative; None: nowhere.
    """

    exact: torch.Tensor
    allowance: torch.Tensor
    ulp: torch.Tensor
    overflowed: torch.Tensor
    dtype: torch.dtype
    lean: tuple[float, float] = (0.0, 0.0)
    is_negative_zero: torch.Tensor | None = None


def to_oracle(value: Any) -> Any:
    """Returns an argument as the oracle takes it: a copy, floating-point tensors in float64, with their strides.

    PyTorch chooses how it computes by layout too: a linear layer of what is not contiguous rounds once more.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return value.detach().clone()
        value = value.detach()
        elements = value.untyped_storage().nbytes() // value.element_size()
        if value.layout != torch.strided or elements > 4 * value.numel() + 64:  # a small part of much
            return value.to(torch.float64, copy=True)
        flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(
            value.untyped_storage(), 0, (elements,), (1,)
        )
        wide = flat.to(torch.float64, copy=True)
        return wide.as_strided(value.shape, value.stride(), value.storage_offset())
    return [to_oracle(v) for v in value] if isinstance(value, (list, tuple)) else value


def expect(
    reference: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any], seed: int = 0
) -> list[Expected | torch.Tensor | None]:
    """Returns what each output must be; outputs that are not floating-point come as they must be exactly.

    Args:
        reference: the computation; takes the arguments, returns the outputs.
        values: the arguments, in the dtype under test.
    """
    with few_threads(values):
        exact = reference([to_oracle(v) for v in values])
        eager = reference([copy_of(v) for v in values])
        spreads = _spread(reference, values, exact, eager, seed)
        nudged = _nudged(reference, values)
    found: list[Expected | torch.Tensor | None] = []
    for i, (value, plain, spread) in enumerate(zip(exact, eager, spreads, strict=True)):
        if value is None or plain is None:
            found.append(None)
        elif not plain.is_floating_point():
            found.append(plain)
        else:
            expected = _expected(value.double(), plain, spread)
            expected.lean = lean_of(plain.double(), expected)
            if nudged is not None:
                expected.is_negative_zero = _signed_zeros(expected.exact, plain, nudged[i], values)
            found.append(expected)
    return found


@contextlib.contextmanager
def few_threads(values: Sequence[Any]) -> Iterator[None]:
    """Lets PyTorch compute in one thread where the tensors are small.

    A parallel loop over so few elements saves microseconds, and costs milliseconds wherever another process has the
    core that its second thread waits for.
    """
    threads = torch.get_num_threads()
    # Of other threads the number is not theirs alone.
    is_small = threading.current_thread() is threading.main_thread()
    is_small = is_small and sum(t.numel() for t in tensors_of(values)) < _FEW_ELEMENTS
    if is_small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if is_small:
            torch.set_num_threads(threads)


_FEW_ELEMENTS = 2**19
_NUDGE = 2.0**-100


def _nudged(reference: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any]) -> Sequence[Any] | None:
    """Returns the outputs for inputs whose negative zeros are tiny negative numbers; None where there are none."""
    has_zeros = False

    def nudge(value: Any) -> Any:
        nonlocal has_zeros
        if isinstance(value, (list, tuple)):
            return [nudge(v) for v in value]
        moved = to_oracle(value)
        if isinstance(moved, torch.Tensor) and moved.is_floating_point():
            zeros = (moved == 0) & moved.signbit()
            if bool(zeros.any()):
                has_zeros = True
                moved = torch.where(zeros, -_NUDGE, moved)
        return moved

    inputs = [nudge(v) for v in values]
    return reference(inputs) if has_zeros else None


def _signed_zeros(
    exact: torch.Tensor, plain: torch.Tensor, nudged: torch.Tensor, values: Sequence[Any]
) -> torch.Tensor:
    """Returns where a zero must be negative, because it follows a negative zero at its place in an input.

    Underflow gives negative zeros too, and so may a product with zero: there the sign depends on the formula. An
    output that becomes negative with the input, a sixteenth as fast at least, is none of them. Nor is a sum, which may
    start from a positive zero: those have other shapes than what they add up.
    """
    of_input = torch.zeros_like(exact, dtype=torch.bool)
    for value in tensors_of(values):
        if value.shape == exact.shape and value.is_floating_point():
            of_input |= (value == 0) & value.signbit()
    agree = (exact == 0) & exact.signbit() & (plain == 0) & plain.signbit()
    return of_input & agree & (nudged <= -_NUDGE / 16) & (nudged >= -1)


def lean_of(value: torch.Tensor, expected: Expected) -> tuple[float, float]:
    """Returns the mean distance from the correctly rounded result in ulp, upwards and away from zero."""
    if torch.finfo(expected.dtype).bits > 16 or value.numel() < _LEAN_ELEMENTS:
        return 0.0, 0.0
    info = torch.finfo(expected.dtype)
    size = expected.exact.abs()
    counted = (size >= info.smallest_normal) & (size < info.max / 2) & torch.isfinite(value)
    counted &= expected.allowance <= _LEAN_ULP * expected.ulp
    if int(counted.sum()) < _LEAN_ELEMENTS:
        return 0.0, 0.0
    exact = expected.exact[counted]
    distance = ((value[counted] - exact.to(expected.dtype).double()) / expected.ulp[counted]).clamp(-4, 4)
    return float(distance.mean()), float((distance * exact.sign()).mean())


def _expected(exact: torch.Tensor, plain: torch.Tensor, spread: torch.Tensor) -> Expected:
    ulp = ulp_of(exact, plain.dtype)
    error = (plain.double() - exact).abs().nan_to_num(0.0, 0.0, 0.0)
    allowance = _ULP * ulp + _MULTIPLE * torch.maximum(error, spread)
    overflowed = ~torch.isnan(exact) & ~torch.isfinite(plain) & (plain.double() != exact)
    return Expected(exact, allowance, ulp, overflowed, plain.dtype)


def ulp_of(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the distance between neighbouring numbers of `dtype` at these float64 values."""
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    magnitude = values.abs().nan_to_num(0.0, info.max, info.max).clamp(max=info.max)
    _, exponent = torch.frexp(magnitude)
    unit = torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)
    return torch.where(magnitude < info.smallest_normal, torch.full_like(unit, smallest), unit)


class _Jitter(Rounding):
    """Moves every floating-point result by one rounding, up or down at random: Monte Carlo arithmetic."""

    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()
        self.unit, self.random = unit, random.Random(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = _kind_of(func), kwargs or {}
        unit = self.unit
        if kind.is_product:
            terms = args[-1].shape[-2] if args[-1].ndim > 1 else args[-1].numel()
            args = self._move_terms(args, self._product_unit(terms), factor=1 if kind.is_biased else 0)
            unit = max(unit, self._one_sign_unit(terms))
        elif kind.is_sum:
            terms = _terms_of(func, args, kwargs)
            args = self._move_terms(args, self._sum_unit(terms))
            unit = max(unit, self._one_sign_unit(terms))
        elif kind.is_scattered_sum:  # base, dimension, index, terms
            terms = args[3].numel() / max(args[0].numel(), 1) + 1
            args = self._move_terms(args, self._sum_unit(terms), factor=3)
            unit = max(unit, self._one_sign_unit(terms))
        elif kind.is_long_product:
            unit = max(unit, self._sum_unit(_terms_of(func, args, kwargs)))
        elif kind.is_transform:
            args = self._move_terms(args, self._sum_unit(math.log2(max(args[0].numel(), 2)) ** 2))
        elif kind.is_convolution:
            args = self._move_terms(args, self._product_unit(args[1][0].numel()), factor=1)
            unit = max(unit, self._one_sign_unit(args[1][0].numel()))
        elif kind.is_normalization:
            unit = max(unit, self._sum_unit(args[0].shape[-1] if args[0].ndim else 1))
        result = func(*args, **kwargs)
        if kind.is_exact:
            return result
        if kind.is_in_place:
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                result.copy_(self._move(result, unit))  # an in-place operator rounds what it leaves
            return result
        if isinstance(result, (tuple, list)):
            return type(result)(self._move(r, unit) for r in result)
        return self._move(result, unit)

    def in_single(self, formula: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        unit = self.unit
        self.unit = min(unit, torch.finfo(torch.float32).eps / 2)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a variance of one element
                result = formula(*args, **kwargs)
        finally:
            self.unit = unit
        if isinstance(result, (tuple, list)):
            return tuple(self._move(r, unit) for r in result)
        return self._move(result, unit)

    def _sum_unit(self, terms: float) -> float:
        """Returns the relative error of adding that many terms one by one, rounding each time.

        PyTorch accumulates 16-bit types in float32, so that is the rounding, at most.
        """
        return min(self.unit, torch.finfo(torch.float32).eps / 2) * math.sqrt(max(terms, 1))

    def _one_sign_unit(self, terms: float) -> float:
        """Returns the same, of the sum of terms of one sign.

        Moving each of them apart says little then: what they move by cancels, but an early rounding stays in all partial
        sums after it. On average these are half of the sum.
        """
        return self._sum_unit(terms) / 2

    def _product_unit(self, terms: float) -> float:
        """Returns the same for a sum of products.

        Those of 16-bit types are summed by tensor cores, which cut off what float32 cannot hold instead of rounding it
        (Fasi et al. 2021, doi:10.7717/peerj-cs.330): a whole unit in the last place, not half of one.
        """
        single = torch.finfo(torch.float32).eps
        return self._sum_unit(terms) if self.unit < single else single * math.sqrt(max(terms, 1))

    def _move_terms(self, args: Any, unit: float, factor: int = 0) -> Any:
        """Moves the terms of a sum as far as adding them would; of a sum of products, one of the factors."""
        moved = args[factor]
        if not isinstance(moved, torch.Tensor) or moved.dtype not in _ORACLES:
            return args
        return [*args[:factor], self._move(moved, unit), *args[factor + 1 :]]

    def _move(self, value: Any, unit: float) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in _ORACLES:
            return value
        if value.is_complex():  # a product of complex numbers cancels in each of its parts
            steps = [self._steps(value) for _ in range(2)]
            return value + torch.complex(*steps).mul_(unit).mul_(value.abs())
        step = self._steps(value)
        # torch.exp and its like flush what is below the normal numbers to zero, also in the oracle.
        tiny = value.abs() < _TINY
        moved = torch.where(tiny, step.sign() * _TINY, 0.0) if bool(tiny.any()) else None
        result = step.mul(unit).add_(1).mul_(value)
        return result if moved is None else torch.where(tiny, value + moved, result)

    def _steps(self, value: torch.Tensor) -> torch.Tensor:
        """Returns how far to move each element, in units: a stretch of a store, from a place drawn at random."""
        count = value.numel()
        if count > _STORED_STEPS // 2:
            return _drawn_steps(count, self.random.getrandbits(62)).to(value.device).view(value.shape)
        first = self.random.randrange(_STORED_STEPS - count)
        return _stored_steps(value.device)[first : first + count].view(value.shape)


_ORACLES = (torch.float64, torch.complex128)
_STORED_STEPS = 2**19


@functools.cache
def _stored_steps(device: torch.device) -> torch.Tensor:
    return _drawn_steps(_STORED_STEPS, 0).to(device)


def _drawn_steps(count: int, seed: int) -> torch.Tensor:
    """Returns numbers up or down by 0.5 to 1.5: equal ones would cancel between two operators too often."""
    made = torch.empty(count, dtype=torch.float64, device="cpu")
    made.uniform_(-1, 1, generator=torch.Generator("cpu").manual_seed(seed))
    return made.add_(made.sign(), alpha=0.5)


@dataclass(frozen=True)
class _Kind:
    """How an operator of PyTorch rounds; exact are views, constants and moved data."""

    is_product: bool
    is_biased: bool
    is_sum: bool
    is_scattered_sum: bool
    is_long_product: bool
    is_convolution: bool
    is_transform: bool
    is_normalization: bool
    is_exact: bool
    is_in_place: bool


@functools.cache
def _kind_of(func: Any) -> _Kind:
    packet = func.overloadpacket
    aliases = [a.alias_info for a in func._schema.returns if a.alias_info is not None]
    return _Kind(
        packet in _PRODUCTS,
        packet in _BIASED_PRODUCTS,
        packet in _SUMS,
        packet in _SCATTERED_SUMS,
        packet in _LONG_PRODUCTS,
        packet is torch.ops.aten.convolution,
        packet in _TRANSFORMS,
        packet in _NORMALIZATIONS,
        packet in _EXACT or any(not alias.is_write for alias in aliases),
        bool(aliases),
    )


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(torch.ops.aten, name) for name in names.split())


def _terms_of(func: Any, args: Any, kwargs: Any) -> float:
    """Returns how many terms or factors an element of the result has, at most or on average."""
    if func.overloadpacket in _CUMULATIVE:
        return args[0].shape[args[1]] if args[0].ndim else 1
    if func.overloadpacket in _POOLS:
        return math.prod(args[1])
    return args[0].numel() / max(_first(func(*args, **kwargs)).numel(), 1)


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


_PRODUCTS = _packets("mm addmm bmm baddbmm dot mv")
_BIASED_PRODUCTS = _packets("addmm baddbmm")  # what is added comes first
_CUMULATIVE, _POOLS = _packets("cumsum cumprod"), _packets("avg_pool2d avg_pool3d")
_SUMS = _POOLS | _packets("sum nansum mean var var_mean std cumsum linalg_vector_norm _adaptive_avg_pool2d _adaptive_avg_pool3d")
_SCATTERED_SUMS = _packets("index_add scatter_add")
_LONG_PRODUCTS = _packets("prod cumprod")
_TRANSFORMS = _packets("_fft_c2c _fft_r2c _fft_c2r")
_NORMALIZATIONS = _packets("_softmax _log_softmax logsumexp native_layer_norm")
_EXACT = _packets(
    "neg abs sign clone where cat stack gather index index_select zeros_like ones_like full_like scalar_tensor "
    "arange zeros ones full empty_like maximum minimum clamp relu _to_copy ge gt le lt eq ne"
)


def _spread(
    reference: Callable[[Sequence[Any]], Sequence[Any]],
    values: Sequence[Any],
    exact: Sequence[Any],
    eager: Sequence[Any],
    seed: int,
) -> list[torch.Tensor]:
    # Half a unit in the last place; two in float64, where less would be rounded away.
    least = 2 * torch.finfo(torch.float64).eps
    units = [
        max(torch.finfo(e.dtype).eps / 2, least)
        for e in eager
        if isinstance(e, torch.Tensor) and e.is_floating_point()
    ]
    spreads = [
        torch.zeros_like(e, dtype=torch.float64) if isinstance(e, torch.Tensor) else torch.zeros(())
        for e in exact
    ]
    if not units:
        return spreads
    for run in range(_STOCHASTIC_RUNS):
        inputs = [to_oracle(v) for v in values]
        with _Jitter(max(units), seed + run):
            moved = reference(inputs)
        for i, (value, center) in enumerate(zip(moved, exact, strict=True)):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                distance = (value.double() - center.double()).abs().nan_to_num(0.0, 0.0, 0.0)
                spreads[i] = torch.maximum(spreads[i], distance)
    return spreads
