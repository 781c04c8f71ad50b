"""A computation of PyTorch in twice the digits of float64.

A tensor in float64 stands for a pair of them (`double_double.py`), and the operators that a reference calls compute
with pairs. An operator that is several steps in one is computed by its decomposition, one that moves elements moves
both parts. An operator that has neither ends the computation: then `estimate_error` tells how far float64 may be off.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from opwright import _torch
from opwright._torch import DispatchMode, decomposition_table, return_and_correct_aliasing, tree_map
from opwright.verify import double_double as dd
from opwright.verify.double_double import Pair, pair
from opwright.verify.formulas import STABLE_FORMULAS, is_view, packets
from opwright.verify.tensors import tensors_of

_DRAWS, _MULTIPLE = 4, 16.0  # so few draws rarely meet the largest error
_NEIGHBOR = 2.0**-6  # so far that where terms cancel in float32 another rounding is met
_MAX_ELEMENTS = 2**20  # of a tensor: each function takes some hundred steps, in temporary tensors of that size
_MAX_PRODUCTS = 2**21  # of matrices: all of them are in memory at once

_aten = torch.ops.aten

Reference = Callable[[Sequence[Any]], Sequence[Any]]


class NotWide(Exception):
    """The computation cannot be done in pairs; the text says why."""


def compute_wide(reference: Reference, values: Sequence[Any]) -> list[Any]:
    """Returns what a computation in float64 returns, computed in twice the digits and rounded at the end.

    Args:
        values: the arguments, in float64; they may be written into.

    Raises:
        NotWide: it calls what is not known in more digits.
    """
    try:
        given = tree_map(_widen, list(values))
        with _Pairs():
            outputs = reference(given)
    except NotWide:
        raise
    except Exception as error:  # whatever PyTorch or a reference raises for tensors of a class of their own
        text = str(error).strip().partition("\n")[0]
        raise NotWide(f"{type(error).__name__}: {text}"[:200]) from error
    return [_high(output) for output in outputs]


def estimate_error(reference: Reference, values: Sequence[Any]) -> list[Tensor | None]:
    """Returns how far a computation in float64 may be off, from how far it is off in float32.

    It is called with the same numbers in both, and is taken to err as many units in the last place in either, or a
    few. A number may be right by chance, so it is called for neighboring ones as well. Where no digit is right in
    float32, none need be right in float64.
    """
    found: list[Tensor | None] = []
    for draw in range(_DRAWS):
        generator = torch.Generator("cpu").manual_seed(draw) if draw else None
        rounded = tree_map(functools.partial(_in_single, generator=generator), list(values))
        exact = reference(tree_map(_in_double, rounded))
        errors = [_error_of(e, s) for e, s in zip(exact, reference(rounded), strict=True)]
        found = [e if e is None else torch.maximum(e, f) for e, f in zip(errors, found or errors, strict=True)]
    return found


def _error_of(exact: Any, single: Any) -> Tensor | None:
    if not isinstance(exact, Tensor) or not exact.is_floating_point():
        return None
    exact, single = exact.double(), single.double()
    same = (single == exact) | (single.isnan() & exact.isnan())
    error = torch.where(same, 0.0, (single - exact).abs().nan_to_num(math.inf))
    size = exact.abs().nan_to_num(0.0, 0.0, 0.0)
    units = torch.maximum(error / torch.finfo(torch.float32).eps, size)
    if size.numel():  # a zero may be all that is left of terms as large as the other results
        units = torch.where(exact == 0, units.clamp(min=size.max()), units)
    has_digits = same | (error <= size / 4)
    return _MULTIPLE * torch.where(has_digits, units * torch.finfo(torch.float64).eps, error)


def _in_single(value: Any, generator: torch.Generator | None) -> Any:
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        return value
    if generator:
        moves = torch.empty(value.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator)
        value = value * (1 + _NEIGHBOR * moves.to(value.device))
    return value.to(torch.float32)


def _in_double(value: Any) -> Any:
    return value.to(torch.float64) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


class _Wide(Tensor):
    """A tensor in float64 to PyTorch and its autograd; its numbers are pairs."""

    high: Tensor
    low: Tensor
    __torch_function__ = _torch.no_torch_function

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor) -> _Wide:
        if low.stride() != high.stride():  # as of an expanded tensor, whose zeros are not expanded
            high, low = high.contiguous(), low.contiguous()
        made = _torch.make_wrapper(
            cls,
            high.shape,
            strides=high.stride(),
            storage_offset=high.storage_offset(),
            dtype=high.dtype,
            device=high.device,
        )
        made.high, made.low = high, low
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.high.untyped_storage()  # so that two that share memory can be told

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> _Wide:
        return _Wide(inner["high"], inner["low"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotWide(f"`{func}` is called outside of the computation")


def _widen(value: Any) -> Any:
    is_double = isinstance(value, Tensor) and value.dtype == torch.float64 and not isinstance(value, _Wide)
    return _Wide(value, torch.zeros_like(value)) if is_double else value


def _make(value: Any) -> Any:
    if not isinstance(value, Pair):
        return value
    if value.high.numel() > _MAX_ELEMENTS:
        raise NotWide(f"a tensor of {value.high.numel()} elements takes too long")
    return _Wide(*value)


def _high(value: Any) -> Any:
    return value.high if isinstance(value, _Wide) else value


def _pair_of(value: Any, like: Tensor | None = None) -> Pair:
    """Returns a tensor or a number as a pair; what is not float64 is exact in it."""
    return Pair(value.high, value.low) if isinstance(value, _Wide) else pair(value, like)


class _Pairs(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._open: list[Any] = []  # operators whose decompositions are being computed

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if not any(isinstance(t, _Wide) for t in tensors_of([args, kwargs])):
            return tree_map(_widen, func(*args, **kwargs))
        if any(t.is_complex() or t.layout != torch.strided for t in tensors_of([args, kwargs])):
            raise NotWide(f"`{func}` takes complex or sparse tensors")
        if _writes(func) and _torch.schema_of(func).name.endswith("_"):
            return self._in_place(func, args, kwargs)
        return self._compute_pairs(func, args, kwargs)

    def _compute_pairs(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = func.overloadpacket
        if kind in _ON_HIGH:
            return tree_map(_widen, func(*tree_map(_high, args), **tree_map(_high, kwargs)))
        is_composite = _torch.can_decompose(func)  # of views and others, before autograd sees them
        if kind in _MOVES or (is_view(func) and not is_composite):
            return _move_elements(func, args, kwargs)
        result = _ARITHMETIC[kind](*args, **kwargs) if kind in _ARITHMETIC else NotImplemented
        if result is not NotImplemented:
            return tree_map(_make, result, is_leaf=lambda value: isinstance(value, Pair))
        if func.namespace == "prims":
            steps = func.impl_aten
        else:
            steps = STABLE_FORMULAS.get(func) or (func.decompose if is_composite else decomposition_table.get(func))
        if steps is None or func in self._open:
            raise NotWide(f"`{func.overloadpacket}` has no formula in more digits")
        self._open.append(func)
        try:
            with self:
                return steps(*args, **kwargs)
        finally:
            self._open.pop()

    def _in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        target = args[0]
        if not isinstance(target, _Wide):
            if target.dtype == torch.float64:
                raise NotWide(f"`{func}` writes into a tensor that is not of the computation")
            return func(*tree_map(_high, args), **tree_map(_high, kwargs))
        name = _torch.schema_of(func).name.split("::")[1]
        if name in ("zero_", "fill_", "copy_"):
            value = _pair_of(0.0 if name == "zero_" else args[1], target.high)
        else:
            made = getattr(getattr(_aten, name.removesuffix("_")), _torch.overload_name_of(func))
            value = _pair_of(self._compute_pairs(made, args, kwargs))
        target.high.copy_(value.high)
        target.low.copy_(value.low)
        return return_and_correct_aliasing(func, args, kwargs, target)


@functools.cache
def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in _torch.schema_of(func).arguments)


def _move_elements(func: Any, args: Any, kwargs: Any) -> Any:
    """Moves elements: the high parts, and the low ones in the same way. Numbers that are filled in have no low part."""
    names = [a.name for a in _torch.schema_of(func).arguments]

    def part(which: str) -> Any:
        def taken(value: Any) -> Any:
            if isinstance(value, _Wide):
                return getattr(value, which)
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return torch.zeros_like(value) if is_float and which == "low" else value

        def argument(name: str, value: Any) -> Any:
            is_filled_in = name in _FILLED_IN and isinstance(value, (int, float))
            return 0.0 if is_filled_in and which == "low" else tree_map(taken, value)

        return func(*map(argument, names, args), **{name: argument(name, value) for name, value in kwargs.items()})

    high, low = part("high"), part("low")
    if isinstance(high, Tensor):
        made = _Wide(high, low) if high.dtype == torch.float64 else high
    else:
        made = type(high)(map(_Wide, high, low))
    return return_and_correct_aliasing(func, args, kwargs, made) if is_view(func) else made


_FILLED_IN = ("value", "fill_value", "self", "other")  # of masked_fill, constant_pad_nd, where with a number


_MOVES = packets(
    "clone cat stack index gather index_select flip roll repeat constant_pad_nd where masked_fill tril triu take "
    "masked_select select_scatter slice_scatter diagonal_scatter embedding contiguous scatter index_fill "
    "select_backward slice_backward diagonal_backward lift_fresh pixel_shuffle pixel_unshuffle channel_shuffle "
    "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d index_copy masked_scatter "
    "_unsafe_index unsafe_split split_with_sizes_copy repeat_interleave rot90 im2col"
)
# What follows from the high part alone: numbers that float64 holds, and what is not floating-point.
_ON_HIGH = packets(
    "isnan isinf isfinite signbit sign argmax argmin nonzero logical_not logical_and logical_or any all "
    "_local_scalar_dense is_nonzero bucketize searchsorted zeros_like ones_like full_like empty_like new_zeros new_ones "
    "new_full new_empty new_empty_strided"
)


# --- operators that compute --------------------------------------------------------------------------------


def _unary(function: Callable[[Pair], Pair]) -> Callable[..., Any]:
    return lambda a: function(_pair_of(a))


def _binary(function: Callable[[Pair, Pair], Any]) -> Callable[..., Any]:
    def computed(a: Any, b: Any) -> Any:
        like = next(_high(v) for v in (a, b) if isinstance(v, Tensor))
        return function(_pair_of(a, like), _pair_of(b, like))

    return computed


def _scaled_sum(function: Callable[[Pair, Pair], Pair]) -> Callable[..., Any]:
    def computed(a: Any, b: Any, alpha: float = 1) -> Pair:
        return _binary(function)(a, b if alpha == 1 else _Wide(*_binary(dd.multiply)(b, alpha)))

    return computed


def _quotient(a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    return _binary(dd.divide)(a, b) if rounding_mode is None else NotImplemented


def _truncate(a: Pair) -> Pair:
    return dd.choose(a.high < 0, dd.negative(dd.floor(dd.negative(a))), dd.floor(a))


def _power(a: Any, b: Any) -> Any:
    if isinstance(b, (int, float)) and float(b).is_integer() and abs(b) <= 64:
        return dd.integer_power(_pair_of(a), int(b))
    if isinstance(b, float) and b == 0.5:
        return dd.square_root(_pair_of(a))
    return _binary(dd.power)(a, b)


def _larger(a: Pair, b: Pair) -> Pair:
    return dd.choose(dd.is_less(a, b) | b.high.isnan(), b, a)


def _smaller(a: Pair, b: Pair) -> Pair:
    return dd.choose(dd.is_less(b, a) | b.high.isnan(), b, a)


def _clamp(a: Any, low: Any = None, high: Any = None) -> Pair:
    found = _pair_of(a)
    if low is not None:
        found = _larger(found, _pair_of(low, found.high))
    return found if high is None else _smaller(found, _pair_of(high, found.high))


def _dims(a: Tensor, dim: Any) -> list[int]:
    dims = list(range(a.ndim)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    return sorted({d % max(a.ndim, 1) for d in dims})


def _total(a: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    if dtype not in (None, torch.float64):
        return NotImplemented
    found = _pair_of(a)
    if not found.high.ndim:
        return found
    dims = _dims(found.high, dim)
    for d in reversed(dims):
        found = dd.total(found, d)
        if keepdim:
            found = Pair(found.high.unsqueeze(d), found.low.unsqueeze(d))
    return found


def _count(a: Tensor, dim: Any) -> int:
    return math.prod(a.shape[d] for d in _dims(a, dim)) if a.ndim else 1


def _mean(a: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    found = _total(a, dim, keepdim, dtype=dtype)
    return found if found is NotImplemented else dd.divide(found, pair(_count(a, dim), a.high))


def _variance(a: Any, dim: Any = None, *, correction: float | None = None, keepdim: bool = False) -> Pair:
    off = dd.subtract(_pair_of(a), _mean(a, dim, True))
    squares = _Wide(*dd.multiply(off, off))
    count = max(_count(a, dim) - (1 if correction is None else correction), 0)
    return dd.divide(_total(squares, dim, keepdim), pair(count, a.high))


def _cumulate(a: Any, dim: int, *, dtype: Any = None) -> Any:
    if dtype not in (None, torch.float64) or not a.ndim:
        return NotImplemented
    parts = [Pair(*part) for part in zip(a.high.unbind(dim), a.low.unbind(dim), strict=True)]
    sums = list(itertools.accumulate(parts, dd.add))
    return Pair(*(torch.stack(part, dim) for part in zip(*sums, strict=True))) if sums else _pair_of(a)


def _matrix_product(a: Any, b: Any) -> Any:
    first, second = _pair_of(a), _pair_of(b)
    if first.high.numel() * second.high.shape[-1] > _MAX_PRODUCTS:
        return NotImplemented
    first = Pair(*(part.unsqueeze(-1) for part in first))
    second = Pair(*(part.unsqueeze(-3) for part in second))
    return dd.total(dd.multiply(first, second), -2)


def _extreme(name: str) -> Callable[..., Any]:
    def computed(a: Any, dim: Any = (), keepdim: bool = False) -> Any:
        if not isinstance(a, _Wide):
            return NotImplemented
        dims = _dims(a.high, list(dim) if not isinstance(dim, int) else dim)
        if not dims:
            return _pair_of(a)
        high = getattr(a.high, name)(dims, keepdim=True)
        fill = -math.inf if name == "amax" else math.inf
        low = getattr(torch.where(a.high == high, a.low, fill), name)(dims, keepdim=True)
        low = torch.where(high.isfinite(), low, 0.0)
        if not keepdim:
            shape = getattr(a.high, name)(dims).shape
            high, low = high.reshape(shape), low.reshape(shape)
        return Pair(high, low)

    return computed


def _whole_extreme(name: str) -> Callable[..., Any]:
    whole = _extreme("amax" if name == "max" else "amin")

    def computed(a: Any, *args: Any, **named: Any) -> Any:
        return _pick(name)(a, *args, **named) if args or named else whole(a)

    return computed


def _pick(name: str) -> Callable[..., Any]:
    """Returns values with their indices, as found among the high parts."""

    def computed(a: Any, *args: Any, **named: Any) -> Any:
        values, index = getattr(torch, name)(a.high, *args, **named)
        at = [x for x in args[1 if name == "topk" else 0 :] if type(x) is int]
        dim = named.get("dim", at[0] if at else -1)
        if not a.ndim:
            return _pair_of(a), index
        low = a.low.gather(dim, index if index.ndim == a.ndim else index.unsqueeze(dim))
        return Pair(values, low.reshape(values.shape)), index

    return computed


def _accumulate(func: Callable[..., Tensor], base: Any, terms: Any) -> Pair:
    """Returns base + sum of terms, as `func(zeros, terms)` puts them there, without an error.

    The terms are cut into slices of a few bits, of which every sum is exact in float64.
    """
    found, source = _pair_of(base), _pair_of(terms)
    largest = source.high.abs().max() if source.high.numel() else torch.zeros(())
    if not bool(torch.isfinite(largest)) or not bool(torch.isfinite(found.high).all()):
        return NotImplemented
    for part in source:
        rest = part
        while bool((rest != 0).any()):
            sigma = 2.0 ** (math.frexp(float(rest.abs().max()))[1] + source.high.numel().bit_length() + 1)
            piece = (rest + sigma) - sigma
            if not bool((piece != 0).any()) or sigma == math.inf:
                piece = rest
            rest = rest - piece
            found = dd.add(found, pair(func(torch.zeros_like(found.high), piece)))
    return found


def _scattered_sum(base: Any, dim: int, index: Tensor, source: Any) -> Any:
    if not isinstance(source, _Wide):
        return NotImplemented
    source = _Wide(*(part[tuple(map(slice, index.shape))] for part in _pair_of(source)))
    return _accumulate(lambda zeros, part: zeros.scatter_add(dim, index, part), base, source)


def _put(base: Any, indices: Any, values: Any, accumulate: bool = False, *_: Any) -> Any:
    if accumulate:
        return _accumulate(lambda zeros, part: _aten.index_put(zeros, indices, part, accumulate=True), base, values)
    found, source = _pair_of(base), _pair_of(values)
    return Pair(*(_aten.index_put(to, indices, part) for to, part in zip(found, source, strict=True)))


def _convert(a: Any, *args: Any, dtype: Any = None, **named: Any) -> Any:
    if dtype not in (None, torch.float64):
        return a.high.to(dtype, copy=True)
    return _pair_of(a)._replace(high=a.high.clone(), low=a.low.clone())


_ARITHMETIC: dict[Any, Callable[..., Any]] = {
    _aten.neg: _unary(dd.negative),
    _aten.abs: _unary(dd.absolute),
    _aten.floor: _unary(dd.floor),
    _aten.ceil: _unary(lambda a: dd.negative(dd.floor(dd.negative(a)))),
    _aten.trunc: _unary(_truncate),
    _aten.maximum: _binary(_larger),
    _aten.minimum: _binary(_smaller),
    _aten.clamp: _clamp,
    _aten.lt: _binary(dd.is_less),
    _aten.gt: _binary(lambda a, b: dd.is_less(b, a)),
    _aten.le: _binary(lambda a, b: dd.is_less(a, b) | dd.is_equal(a, b)),
    _aten.ge: _binary(lambda a, b: dd.is_less(b, a) | dd.is_equal(a, b)),
    _aten.eq: _binary(dd.is_equal),
    _aten.ne: _binary(lambda a, b: ~dd.is_equal(a, b)),
    _aten.amax: _extreme("amax"),
    _aten.amin: _extreme("amin"),
    _aten.max: _whole_extreme("max"),
    _aten.min: _whole_extreme("min"),
    _aten.sort: _pick("sort"),
    _aten.topk: _pick("topk"),
    _aten._to_copy: _convert,
    _aten.add: _scaled_sum(dd.add),
    _aten.sub: _scaled_sum(dd.subtract),
    _aten.mul: _binary(dd.multiply),
    _aten.div: _quotient,
    _aten.pow: _power,
    _aten.reciprocal: _unary(dd.reciprocal),
    _aten.sqrt: _unary(dd.square_root),
    _aten.rsqrt: _unary(lambda a: dd.reciprocal(dd.square_root(a))),
    _aten.exp: _unary(dd.exponential),
    _aten.exp2: _unary(dd.exponential_of_two),
    _aten.expm1: _unary(dd.exponential_minus_one),
    _aten.log: _unary(dd.logarithm),
    _aten.log2: _unary(lambda a: dd.divide(dd.logarithm(a), dd.logarithm(pair(2.0, a.high)))),
    _aten.log1p: _unary(dd.logarithm_of_one_plus),
    _aten.sigmoid: _unary(dd.sigmoid),
    _aten.tanh: _unary(dd.hyperbolic_tangent),
    _aten.sin: _unary(dd.sine),
    _aten.cos: _unary(dd.cosine),
    _aten.erf: _unary(dd.error_function),
    _aten.erfc: _unary(dd.error_function_complement),
    _aten.sum: _total,
    _aten.mean: _mean,
    _aten.var: _variance,
    _aten.cumsum: _cumulate,
    _aten.mm: _matrix_product,
    _aten.bmm: _matrix_product,
    _aten.scatter_add: _scattered_sum,
    _aten.index_put: _put,
    _aten._unsafe_index_put: _put,
}
