"""How far a computation moves when each of its intermediate results is off by one rounding."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from opwright import _torch
from opwright._torch import DispatchMode, tree_leaves, tree_map
from opwright.verify.formulas import MATRIX_PRODUCTS, Leaving, Rounding, is_view, packets
from opwright.verify.spatial_formulas import terms_of_convolution
from opwright.verify.tensors import copy_of, tensors_of

_TINY = torch.finfo(torch.float64).smallest_normal


def round_at_random(
    computation: Callable[[list[Any]], Sequence[Any]],
    inputs: Callable[[], list[Any]],
    unit: float,
    runs: int,
    product_unit: float = 0.0,
) -> Iterator[Sequence[Any]]:
    """Yields what a computation in float64 returns, every time with each result moved by one rounding at random.

    Args:
        inputs: makes the arguments.
        unit: half a unit in the last place of the dtype that is rounded to, relatively.
        runs: how many times.
        product_unit: the same as `unit` of a type that the inputs of matrix products are rounded to first; 0: of none.
    """
    for run in range(runs):
        # To add one by one once is enough: it is the same every time.
        rounding, values = _StochasticRounding(unit, run, product_unit, adds_one_by_one=run == 0), inputs()
        leaving = _RoundedLeaving(rounding)
        with warnings.catch_warnings(), leaving, rounding:
            warnings.simplefilter("ignore")
            moved = leaving.round(computation(values))
        yield moved


class _StochasticRounding(Rounding):
    """Moves every floating-point result by one rounding, up or down at random: Monte Carlo arithmetic.

    Args:
        adds_one_by_one: whether a long sum is moved by what it is off when its terms are added one after the other.
    """

    def __init__(self, unit: float, seed: int, product_unit: float, adds_one_by_one: bool) -> None:
        super().__init__()
        self.unit, self.product_unit, self.random = unit, product_unit, random.Random(seed)
        self._adds_one_by_one = adds_one_by_one

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = func.overloadpacket
        at, terms = _TERMS[kind](func, args, kwargs) if kind in _TERMS else (None, 0)
        unit_before = self._sum_unit(terms)
        unit = max(self.unit, unit_before)
        is_long_sum = terms >= _LONG_SUM and func in _PLAIN_SUMS and args[0].dtype == torch.float64
        if kind in _PRODUCTS:
            unit, unit_before = max(unit, self.product_unit), self._product_unit(terms) + 2 * self.product_unit
        elif kind in _TRANSFORMS:  # it spreads a NaN over all of its results, which sums of products need not do
            unit, args = self.unit, [torch.where(args[0].isfinite(), args[0], 0), *args[1:]]
        if at is not None:
            args = [*args[:at], self._move(args[at], unit_before, False), *args[at + 1 :]]
        off = self._rounding_of(args, kwargs) if kind in _DIFFERENCES else None
        result = func(*args, **kwargs)
        if _is_exact(func):
            return result
        if _makes_whole(func, args, kwargs, result, unit):
            result.opwright_is_whole = True
            return result
        if off is not None and isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            result = result.add_(off)
        if _returns_argument(func):  # it rounds what it leaves
            if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
                result.copy_(self._move(result, unit, kind in _FLUSHING))
            return result
        factors = args[:2] if kind in _SCALING else ()
        moved = tree_map(lambda each: self._move(each, unit, kind in _FLUSHING, factors), result)
        if is_long_sum and self._adds_one_by_one:
            off = self._error_one_by_one(func, args, result)
            moved = torch.where(off.abs() > (moved - result).abs(), result + off, moved)
        return moved

    def in_single_steps(self) -> contextlib.AbstractContextManager[None]:
        return self._in_steps_of(torch.finfo(torch.float32).eps / 2)

    @contextlib.contextmanager
    def _in_steps_of(self, unit: float) -> Iterator[None]:
        before, self.unit = self.unit, unit
        try:
            yield
        finally:
            self.unit = before

    def in_single(self, formula: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        unit = self.unit
        with self._in_steps_of(min(unit, torch.finfo(torch.float32).eps / 2)):
            result = formula(*args, **kwargs)
        with _torch.pause_dispatch_mode():  # this one: its own arithmetic is not to be rounded
            return tree_map(lambda each: self._move(each, unit, False), result)

    def _error_one_by_one(self, func: Any, args: Any, result: torch.Tensor) -> torch.Tensor:
        """Returns how far a sum is off when terms are added one after the other, in float32 at least.

        Equal terms are rounded alike: 16,411 of them in float32 are off by up to 31 times the root of their number, in
        half units, different ones by 0.6 times.
        """
        dtype = torch.float32 if self.unit >= torch.finfo(torch.float32).eps / 2 else torch.float64
        dims = [d % args[0].ndim for d in (args[1] if len(args) > 1 and args[1] else range(args[0].ndim))]
        kept = math.prod(size for dim, size in enumerate(args[0].shape) if dim not in dims)
        terms = args[0].movedim(dims, list(range(len(dims)))).reshape(-1, kept).to(dtype)
        row = torch.zeros(1, 1, dtype=torch.int64, device=terms.device).expand(terms.shape)
        added = terms.new_zeros(1, kept).scatter_add_(0, row, terms)
        share = len(terms) if func.overloadpacket is torch.ops.aten.mean else 1
        return (added.double().view(result.shape) / share - result).nan_to_num(0.0, 0.0, 0.0)

    def move_by_terms(self, value: torch.Tensor, terms: float) -> torch.Tensor:
        """Returns a tensor, each element moved by what a sum of that many terms is off."""
        return self._move(value, max(self.unit, self._sum_unit(terms)), False)

    def _rounding_of(self, args: Any, kwargs: Any) -> torch.Tensor:
        """Returns how far two terms are off when each is off by one rounding, in float32 at least.

        A difference of two numbers that are nearly equal is exact, but not in another formula: Welford's variance takes
        it of running means, and a softmax by exp2 of products with log2(e).
        """
        unit = min(self.unit, torch.finfo(torch.float32).eps / 2)
        size = sum(abs(a) for a in args[:2])
        return self._steps(size).mul(unit * abs(kwargs.get("alpha", 1))).mul_(size.nan_to_num(0.0, 0.0, 0.0))

    def _sum_unit(self, terms: float) -> float:
        """Returns the relative error of adding that many terms one by one, rounding each time.

        PyTorch accumulates 16-bit types in float32, so each addition rounds to float32 at most. The sum is moved as
        well as its terms: random moves of terms of one sign cancel, but an early rounding stays in all partial sums
        after it. Equal terms are even rounded alike: 1,031 terms exp(k / 8) of few different k, one after the other in
        float32, are off by 75 half units, twice the root of their number.
        """
        return min(self.unit, torch.finfo(torch.float32).eps / 2) * math.sqrt(max(terms, 1))

    def _product_unit(self, terms: float) -> float:
        """Returns the same for a sum of products.

        Those of 16-bit types are summed by tensor cores, which cut off what float32 cannot hold instead of rounding it
        (Fasi et al. 2021, doi:10.7717/peerj-cs.330): a whole unit in the last place, not half of one.
        """
        single = torch.finfo(torch.float32).eps
        return self._sum_unit(terms) if self.unit < single else single * math.sqrt(max(terms, 1))

    def _move(self, value: Any, unit: float, moves_zeros: bool, scaled: Sequence[Any] = ()) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in _ORACLES:
            return value
        if value.is_meta or _torch.is_zero_tensor(value):  # zeros without memory, as the derivative of torch.round
            return value
        if value.is_complex():  # a product of complex numbers cancels in each of its parts
            steps = [self._steps(value) for _ in range(2)]
            return value + torch.complex(*steps).mul_(unit).mul_(value.abs())
        factors, size = self._steps(value).mul(unit).add_(1), value.abs()
        moved = factors * value
        if size.numel() and size.min() >= _TINY:  # as most are, without NaN, zeros and three passes over the elements
            return moved
        tiny = size < _TINY
        if scaled:
            tiny &= (value != 0) | _underflows(*scaled)
        elif not moves_zeros:
            tiny &= value != 0
        moved = torch.where(tiny, value + (factors - 1).sign() * _TINY, moved)
        # What underflows keeps its sign: the square root of a square is not to become NaN.
        return moved.where(~tiny | (value != 0), torch.copysign(value.new_tensor(_TINY), value)) if scaled else moved

    def _steps(self, value: torch.Tensor) -> torch.Tensor:
        """Returns how far to move each element, in units: from a random place of the store if that is large enough."""
        count = value.numel()
        if count > _MAX_STORED:
            return _draw_steps(count, self.random.getrandbits(62)).to(value.device).view(value.shape)
        first = self.random.randrange(_STORED_STEPS - count)
        return _stored_steps(value.device)[first : first + count].view(value.shape)


class _RoundedLeaving(Leaving):
    """Moves numbers that leave PyTorch, and the results: what is computed in between cannot be moved step by step."""

    def __init__(self, rounding: _StochasticRounding) -> None:
        super().__init__()
        self._rounding, self._elements = rounding, 0

    def change(self, value: torch.Tensor) -> torch.Tensor:
        self._elements += value.numel()
        return self._rounding.move_by_terms(value, 1)

    def round(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Returns results moved by what sums of all that has left are off, and as they are if nothing has."""
        if not self._elements:
            return outputs
        return [
            self._rounding.move_by_terms(t, self._elements / max(t.numel(), 1)) if isinstance(t, torch.Tensor) else t
            for t in outputs
        ]


_ORACLES = (torch.float64, torch.complex128)
_STORED_STEPS = 2**20
_MAX_STORED = _STORED_STEPS // 2


@functools.cache
def _stored_steps(device: torch.device) -> torch.Tensor:
    return _draw_steps(_STORED_STEPS, 0).to(device)


def _underflows(a: Any, b: Any) -> Any:
    """Returns whether a zero is the product, quotient or power of two numbers only since there is none so small.

    Another formula keeps what is lost there: hypot, beside a root of squares.
    """
    is_finite = [x.isfinite() if isinstance(x, torch.Tensor) else math.isfinite(x) for x in (a, b)]
    return (a != 0) & (b != 0) & is_finite[0] & is_finite[1]


def _draw_steps(count: int, seed: int) -> torch.Tensor:
    """Returns numbers up or down by 0.5 to 1.5: equal ones would cancel between two operators too often."""
    made = torch.empty(count, dtype=torch.float64, device="cpu")
    made.uniform_(-1, 1, generator=torch.Generator("cpu").manual_seed(seed))
    return made.add_(made.sign(), alpha=0.5)


@functools.cache
def _returns_argument(func: Any) -> bool:
    """Returns whether a result is an argument that was written into, or a view of one."""
    return any(result.alias_info is not None for result in _torch.schema_of(func).returns)


def _makes_whole(func: Any, args: Any, kwargs: Any, result: Any, unit: float) -> bool:
    """Returns whether a result holds integers that no dtype rounds: of `floor`, or a sum or product of such.

    Moved by one rounding, 3.0 is 2.9999998, and as an index 2: the result would jump to another element.
    """
    if func in _WHOLE:
        return True
    if func.overloadpacket not in _KEEPING_WHOLE:
        return False
    terms = tree_leaves([args, kwargs])
    if not any(getattr(term, "opwright_is_whole", False) for term in terms):
        return False
    if not all(isinstance(term, int) or getattr(term, "opwright_is_whole", False) for term in terms):
        return False
    return bool(((result.abs() * unit <= 0.5) & (result == result.round())).all())  # it may have been written into


def _is_exact(func: Any) -> bool:
    """Returns whether an operator does not round: a view, a constant, moved data."""
    return func.overloadpacket in _EXACT or is_view(func)


class PositiveSums(DispatchMode):
    """Makes sums that are zero positive, as those are that start from 0, or from a + x (b - a).

    But not those of two inputs as they are given: such a sum starts from one of them.

    Args:
        inputs: the tensors that the computation is given.
    """

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._inputs = {_torch.address_of(t.untyped_storage()) for t in inputs}

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if func.overloadpacket in _ADDING and isinstance(result, torch.Tensor) and result.is_floating_point():
            terms = {_torch.address_of(t.untyped_storage()) for t in tensors_of(args)}
            is_plain = func.overloadpacket in _DIFFERENCES and not kwargs and terms <= self._inputs
            if not is_plain:
                result.add_(0.0)
        if _returns_argument(func) and args and isinstance(args[0], torch.Tensor):
            self._inputs.discard(_torch.address_of(args[0].untyped_storage()))  # written into
        return result


class OperatorWatch(DispatchMode):
    """Notes what operators of PyTorch do.

    Attributes:
        operators: those that are called.
        largest: the size of the largest tensor that one makes.
        rounds_to_single: whether one rounds its result to float32 or a shorter type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []
        self.largest = 0
        self.rounds_to_single = False

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self.operators.append(func.overloadpacket)
        for made in tensors_of([result]):
            self.largest = max(self.largest, made.numel())
            is_single = made.is_floating_point() and made.element_size() < 8
            self.rounds_to_single |= is_single and not _is_exact(func)
        return result


def computes_in_single(reference: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> bool:
    """Returns whether a reference computes anything of these arguments in less than float64."""
    if not any(t.is_floating_point() and t.element_size() < 8 for t in tensors_of(values)):
        return False
    watch = OperatorWatch()
    # What PyTorch refuses within a mode is not an answer, such as a mask of truth values for attention.
    with contextlib.suppress(Exception), torch.no_grad(), watch:
        reference(copy_of(values))
    return watch.rounds_to_single


def _terms_of_product(func: Any, args: Any, kwargs: Any) -> tuple[int, float]:
    at = 1 if func.overloadpacket in _BIASED_PRODUCTS else 0
    return at, args[-1].shape[-2] if args[-1].ndim > 1 else args[-1].numel()


def _terms_of_sum(func: Any, args: Any, kwargs: Any) -> tuple[int | None, float]:
    at = None if func.overloadpacket in _LONG_PRODUCTS else 0
    if func.overloadpacket in _CUMULATIVE:
        return at, args[0].shape[args[1]] if args[0].ndim else 1
    if func.overloadpacket in _POOLS:
        return at, math.prod(args[1])
    result = func(*args, **kwargs)
    return at, args[0].numel() / max((result[0] if isinstance(result, (tuple, list)) else result).numel(), 1)


def _terms_of_scattered_sum(func: Any, args: Any, kwargs: Any) -> tuple[int | None, float]:
    """Counts the terms of the fullest element: as many ones as are added there, and the base."""
    at = 3  # base, dimension, index, terms
    if func.overloadpacket in _PUTS:
        at = 2
        if not (args[3] if len(args) > 3 else kwargs.get("accumulate", False)):
            return None, 0  # it replaces what is there
    values = list(args)
    values[0], values[at] = torch.zeros_like(args[0]), torch.ones_like(args[at])
    counts = func(*values, **kwargs)
    return at, 1 + (counts.max().item() if counts.numel() else 0)


def _terms_of_spread(func: Any, args: Any, kwargs: Any) -> tuple[int, float]:
    """Counts the terms of the fullest element of a gradient that goes back to where its elements were taken."""
    counts = func(torch.ones_like(args[0]), *args[1:], **kwargs)
    return 0, counts.max().item() if counts.numel() else 0


_BIASED_PRODUCTS = packets("addmm baddbmm")  # what is added comes first
_CUMULATIVE, _POOLS = packets("cumsum cumprod"), packets("avg_pool2d avg_pool3d")
_SUMS = _POOLS | packets(
    "sum nansum mean var var_mean std cumsum linalg_vector_norm _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "embedding_dense_backward"
)
_ATEN = torch.ops.aten
_PLAIN_SUMS = {_ATEN.sum.default, _ATEN.sum.dim_IntList, _ATEN.mean.default, _ATEN.mean.dim}
_LONG_SUM = 256  # terms
_PUTS = packets("index_put index_put_ _unsafe_index_put _index_put_impl_")
SCATTERED_SUMS = _PUTS | packets("index_add index_add_ scatter_add scatter_add_")
_DIFFERENCES = packets("add sub add_ sub_")
_ADDING = (
    _DIFFERENCES
    | _SUMS
    | MATRIX_PRODUCTS
    | SCATTERED_SUMS
    | packets("rsub addcmul addcdiv lerp addcmul_ addcdiv_ lerp_ convolution")
)
# What gives zeros for results below the normal numbers, also in the oracle. Another zero is a zero in every formula: a
# sum of zeros or of nothing, a product with a zero.
_FLUSHING = packets(
    "exp exp_ exp2 exp2_ expm1 expm1_ sigmoid sigmoid_ silu silu_ gelu mish softplus log_sigmoid_forward logaddexp "
    "erfc prod cumprod cumprod_ _softmax special_erfcx"
)
_WHOLE = {packet.default for packet in packets("floor floor_ ceil ceil_ trunc trunc_ round round_")}
_KEEPING_WHOLE = packets("add sub rsub mul")
_SCALING = packets("mul div pow")  # of two factors; a square is a power
_LONG_PRODUCTS = packets("prod cumprod")
_TRANSFORMS = packets("_fft_c2c _fft_r2c _fft_c2r")
_SPREADING = packets(
    "upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward reflection_pad1d_backward "
    "reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward "
    "replication_pad3d_backward col2im unfold_backward max_pool2d_with_indices_backward"
)
_NORMALIZATIONS = packets("_softmax _log_softmax logsumexp logcumsumexp native_layer_norm")
_PRODUCTS = MATRIX_PRODUCTS | {_ATEN.convolution}
# Takes an operator and its arguments; returns which argument is moved, None for none, and how many terms or factors an
# element of the result has, at most or on average.
_CountTerms = Callable[[Any, Any, Any], tuple[int | None, float]]
_TERMS: dict[Any, _CountTerms] = {
    **dict.fromkeys(MATRIX_PRODUCTS, _terms_of_product),
    **dict.fromkeys(_SUMS | _LONG_PRODUCTS, _terms_of_sum),
    **dict.fromkeys(SCATTERED_SUMS, _terms_of_scattered_sum),
    **dict.fromkeys(_TRANSFORMS, lambda func, args, kwargs: (0, math.log2(max(args[0].numel(), 2)) ** 2)),
    **dict.fromkeys(_NORMALIZATIONS, lambda func, args, kwargs: (None, args[0].shape[-1] if args[0].ndim else 1)),
    _ATEN.convolution: lambda func, args, kwargs: (1, terms_of_convolution(args)),
    **dict.fromkeys(_SPREADING, _terms_of_spread),
}
_EXACT = packets(
    "neg abs sign clone where cat stack gather index index_select zeros_like ones_like full_like scalar_tensor "
    "arange zeros ones full empty_like maximum minimum clamp relu _to_copy ge gt le lt eq ne"
)
