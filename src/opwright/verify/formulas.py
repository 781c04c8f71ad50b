"""Other formulas for PyTorch operators whose own formula is not accurate enough for an oracle.

The oracle is the reference in float64. Where an operator cancels, float64 is not exact either: F.gelu has 1 + erf(x),
so at -8 it is off by 2 %, and at -9 it is zero. There the oracle takes another formula of the same function.

And the oracle asks how far a reference moves when each intermediate result is rounded. An operator that is many
steps in one has its intermediate results too: they are those of its decomposition.

What a reference holds, weights or constants, and what it makes, as torch.zeros(n), comes in float64 as well.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from opwright import _torch
from opwright._torch import DispatchMode, get_decompositions, tree_leaves, tree_map
from opwright.contract.memory import overlaps_itself
from opwright.verify import spatial_formulas
from opwright.verify.tensors import tensors_of

_aten = torch.ops.aten


def packets(names: str) -> frozenset[Any]:
    """Returns operators of PyTorch, by their names."""
    return frozenset(getattr(_aten, name) for name in names.split())


@functools.cache
def is_view(func: Any) -> bool:
    """Returns whether an operator returns a view of one of its arguments."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in _torch.schema_of(func).returns)


_STEPS = get_decompositions(
    packets(
        "addcdiv addcmul binary_cross_entropy binary_cross_entropy_backward elu elu_backward gelu gelu_backward glu "
        "glu_backward grid_sampler_2d hardsigmoid hardsigmoid_backward hardswish hardswish_backward huber_loss "
        "huber_loss_backward lerp log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 mish mish_backward "
        "mse_loss mse_loss_backward native_batch_norm _native_batch_norm_legit native_batch_norm_backward "
        "native_group_norm native_group_norm_backward native_layer_norm_backward sigmoid_backward silu_backward "
        "smooth_l1_loss smooth_l1_loss_backward softplus_backward tanh_backward"
    )
)


def _in_place(formula: Callable[..., torch.Tensor], written: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return written.copy_(formula(written, *args, **kwargs))


for _packet in (_aten.lerp, _aten.addcmul, _aten.addcdiv):
    for _name in _packet.overloads():
        _formula = _STEPS.get(getattr(_packet, _name))
        _twin = getattr(getattr(_aten, f"{_packet.__name__}_"), _name, None)
        if _formula is not None and _twin is not None:
            _STEPS[_twin] = functools.partial(_in_place, _formula)
# Those that PyTorch computes in float32 at least, and rounds at the end.
_STEPS_IN_SINGLE = get_decompositions(
    packets("_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data logsumexp native_layer_norm")
)


def _logcumsumexp(x: torch.Tensor, dim: int) -> torch.Tensor:
    largest = x.cummax(dim).values.nan_to_num(0.0, 0.0, 0.0)
    return torch.log(torch.exp(torch.logcumsumexp(x, dim) - largest)) + largest


_STEPS_IN_SINGLE |= {_aten.logcumsumexp.default: _logcumsumexp, **spatial_formulas.INTERPOLATIONS}
_STEPS |= spatial_formulas.STEPS
_HALF_ROOT, _TANH = math.sqrt(0.5), (math.sqrt(2 / math.pi), 0.044715)


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if approximate == "none":
        return 0.5 * x * torch.erfc(-x * _HALF_ROOT)
    slope, cubic = _TANH
    return x * torch.sigmoid(2 * slope * (x + cubic * x**3))


def _gelu_backward(grad: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if approximate == "none":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return grad * (0.5 * torch.erfc(-x * _HALF_ROOT) + x * density)
    slope, cubic = _TANH
    inner = 2 * slope * (x + cubic * x**3)
    share = torch.sigmoid(inner)
    return grad * (share + x * share * torch.sigmoid(-inner) * 2 * slope * (1 + 3 * cubic * x * x))


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = query.shape[-3] // key.shape[-3]  # heads of the query that share one of the key, in grouped attention
    key, value = (t.repeat_interleave(groups, -3) if groups > 1 else t for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


# PyTorch's own decomposition of it is one operator again.
_STEPS[_aten._scaled_dot_product_flash_attention_for_cpu.default] = _attention
STABLE_FORMULAS = {_aten.gelu.default: _gelu, _aten.gelu_backward.default: _gelu_backward}


def oracle_formulas(widens_casts: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which operators in float64 are computed as an oracle should.

    Args:
        widens_casts: whether what a reference casts to float32 stays in float64, as in `WidenCasts`.
    """
    is_in_one = isinstance(_torch.current_dispatch_mode(), _OracleFormulas)
    return contextlib.nullcontext() if is_in_one else _OracleFormulas(widens_casts)


def _widen_cast(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a call, with float64 where float32 is asked for of a tensor in float64.

    `x.float()` in a reference says how its kernels are to compute. The oracle is as exact as it can be.
    """
    is_cast = kwargs.get("dtype") == torch.float32 and args and isinstance(args[0], torch.Tensor)
    return {**kwargs, "dtype": torch.float64} if is_cast and args[0].dtype == torch.float64 else kwargs


def _compute_in_double(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Calls an operator, in float64 if it makes float32 of integers alone; returns its result, and whether it does.

    `torch.arange(n).float()` and `one_hot(x) * 0.9` are float32 whatever a reference is given, and so is what it
    computes of them, such as an angle. A kernel need not round there as PyTorch does.
    """
    result = func(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or not result.is_floating_point() or result.dtype == torch.float64:
        return result, False
    given = tensors_of([args, kwargs])
    if not given and func.overloadpacket not in _TABLES:
        return _widen(result), False
    if result.dtype != torch.float32 or any(t.is_floating_point() or t.is_complex() for t in given):
        return result, False
    with contextlib.suppress(RuntimeError, TypeError):  # not an operator of these numbers
        if given and kwargs.get("dtype") != torch.float32:
            wide = tree_map(lambda a: a.double() if isinstance(a, torch.Tensor) else a, list(args))
            return func(*wide, **kwargs), True
        return func(*args, **{**kwargs, "dtype": torch.float64}), True
    return _widen(result), True


class NeedsSingle(Exception):
    """Raised where a reference reads the bits of a tensor that it has cast to float32."""


class WidenCasts(DispatchMode):
    """Computes in float64 what a reference casts to float32, and what it makes of integers in float32.

    Attributes:
        has_cast: whether it casts what it is given.
        has_single: whether it computes anything in float32.

    Raises:
        NeedsSingle: it cannot be computed so.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_cast = self.has_single = False

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        wide = _widen_cast(args, kwargs)
        self.has_cast |= wide is not kwargs
        self.has_single |= self.has_cast
        if self.has_single:
            if func is _aten.view.dtype and args[0].is_floating_point():
                raise NeedsSingle
            args = _widen_all(func, args)
        result, is_single = _compute_in_double(func, args, wide)
        self.has_single |= is_single
        return result


class _OracleFormulas(DispatchMode):
    """Computes operators in float64 by formulas that are fit for an oracle, within another mode step by step."""

    def __init__(self, widens_casts: bool) -> None:
        super().__init__()
        self._widens_casts = widens_casts

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        mode = _torch.current_dispatch_mode()  # this one is not current in here
        if self._widens_casts and isinstance(mode, Rounding):
            wide = _widen_cast(args, kwargs)
            floats = [t for t in tensors_of([args, kwargs]) if t.is_floating_point()]
            # Whether each stands for a tensor that a reference computes in float32.
            is_single = wide is not kwargs or all(getattr(t, "opwright_is_single", False) for t in floats)
            with mode.in_single_steps() if is_single else contextlib.nullcontext():
                if floats:
                    result = self._compute_by_formula(mode, func, args, wide)
                else:
                    result, is_single = _compute_in_double(func, args, wide)
            for tensor in tensors_of([result]):
                tensor.opwright_is_single = is_single
            return result
        return self._compute_by_formula(mode, func, args, kwargs)

    def _compute_by_formula(self, mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        args = _widen_all(func, args)
        if not args or not tensors_of(args):
            return _widen(func(*args, **kwargs))
        if not (args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64):
            return func(*args, **kwargs)
        if isinstance(mode, Rounding) and func in _STEPS_IN_SINGLE:
            return mode.in_single(_STEPS_IN_SINGLE[func], *args, **kwargs)
        return (_STEPS if isinstance(mode, Rounding) else STABLE_FORMULAS).get(func, func)(*args, **kwargs)


def _widen_all(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Returns arguments in float64, where some are and others, what a reference holds, are not.

    PyTorch refuses many of such mixtures. What is written into stays as it is.
    """
    dtypes = {tensor.dtype for tensor in tensors_of(args) if tensor.is_floating_point()}
    if len(dtypes) < 2 or torch.float64 not in dtypes:
        return args
    written = [a.alias_info is not None and a.alias_info.is_write for a in _torch.schema_of(func).arguments]
    return [a if is_written else tree_map(_widen, a) for a, is_written in zip(args, written, strict=False)]


def _widen(value: Any) -> Any:
    is_narrow = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64
    return value.to(torch.float64) if is_narrow else value


class Rounding(DispatchMode):
    """Rounds the result of each operator that is one step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A step of a formula comes as it was called; PyTorch takes others apart before a mode sees them.
        if _is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def in_single_steps(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which steps are rounded to float32."""
        return contextlib.nullcontext()

    def in_single(self, formula: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Computes several steps, rounded as float32 is at most, and rounds the result."""
        return formula(*args, **kwargs)


class Leaving(TorchFunctionMode):
    """Changes floating-point numbers as they leave PyTorch: no mode sees what NumPy or Python computes of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAVING and args[0].dtype == torch.float64:
            with _torch.disable_dispatch_modes(), torch.no_grad():
                changed = self.change(args[0])
                if func in _READ_AS_NUMBERS or overlaps_itself(args[0]):
                    args = (changed, *args[1:])
                else:  # in its own memory, through which an array may be written
                    args[0].copy_(changed)
        return func(*args, **(kwargs or {}))

    def change(self, value: torch.Tensor) -> torch.Tensor:
        """Returns what leaves in place of a tensor in float64."""
        raise NotImplementedError


_READ_AS_NUMBERS = {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__float__}
_LEAVING = {torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__, *_READ_AS_NUMBERS}
_is_composite = functools.cache(_torch.can_decompose)
_TABLES = packets("arange linspace logspace")
_SUMS = packets("sum nansum mean cumsum mm bmm addmm baddbmm mv dot scatter_add index_add addmv convolution")
_SQUARES = packets("var var_mean std linalg_vector_norm")
_CENTERED = packets("var var_mean std")
_REDUCTIONS = _SUMS | _SQUARES
_ADDS = packets("add sub rsub add_ sub_ lerp")
_SCALES = packets("mul div mul_ div_")
MATRIX_PRODUCTS = packets("mm bmm addmm baddbmm mv dot")
_GROWING = packets("add sub mul rsub square pow exp exp2 expm1 addcmul prod cumprod add_ sub_ mul_ addcmul_")


# A formula that scales terms after adding them overflows earlier than one that scales them before. Sums that come
# within this factor of the largest number may therefore be infinite.
_ROOM_OF_SUMS = 64.0


class Overflow(Rounding):
    """Replaces what has no room in a range of numbers, in all intermediate results of a computation in float64.

    Attributes:
        largest: the largest number of the range.
        fill: what takes the place of an overflow; a NaN, or a number that takes its sign.
        is_of_sums: whether overflows of sums and of statistics alone are replaced.
        is_of_infinities: whether infinite sums of infinite inputs are replaced, and no overflows are.
    """

    def __init__(
        self,
        largest: float,
        fill: float,
        is_of_sums: bool = False,
        is_of_infinities: bool = False,
        inputs: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._multiples = [*inputs]  # kept: an address must not be used again
        self._inputs = {_torch.address_of(t.untyped_storage()) for t in inputs}
        self.largest, self.fill = largest, fill
        self.is_of_sums, self.is_of_infinities = is_of_sums, is_of_infinities

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.is_of_infinities:
            return self._compute_with_infinities(func, args, kwargs)
        if func.overloadpacket not in (_REDUCTIONS if self.is_of_sums else _REDUCTIONS | _GROWING):
            return func(*args, **kwargs)
        sizes = _sizes(func, args, kwargs)
        result = func(*args, **kwargs)
        made = result if isinstance(result, tuple) else (result,)
        for value, size in zip(made, sizes, strict=True):
            if value.dtype == torch.float64:
                room = _ROOM_OF_SUMS if func.overloadpacket in _REDUCTIONS and math.isnan(self.fill) else 1
                self._fill(value, size > self.largest / room)
        return result

    def _compute_with_infinities(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = func.overloadpacket
        is_sum = (kind in _REDUCTIONS and self._takes(any, args)) or (kind in _ADDS and self._takes(all, args))
        result = func(*args, **kwargs)
        if is_sum:
            for value in result if isinstance(result, tuple) else (result,):
                if value.dtype == torch.float64:
                    self._fill(value, value.isinf())
        elif kind in _SCALES and self._takes(any, args[:1]) and not isinstance(args[1], torch.Tensor):
            self._multiples.append(result)
            self._inputs.add(_torch.address_of(result.untyped_storage()))
        return result

    def _fill(self, value: torch.Tensor, is_over: torch.Tensor) -> None:
        if bool(is_over.any()):
            value.copy_(torch.where(is_over, torch.full_like(value, self.fill).copysign(value), value))

    def _takes(self, some: Callable[[list[bool]], bool], args: Any) -> bool:
        """Returns whether any or all tensors among the arguments are inputs, or multiples of them.

        Other sums than of these must be infinite where the reference is: the maximum that a row of -inf is compared
        with is not one. But a x + b (1 - x) is b + x (a - b) as well.
        """
        tensors = [a for a in tree_leaves(list(args)) if isinstance(a, torch.Tensor)]
        return some([_torch.address_of(t.untyped_storage()) in self._inputs for t in tensors])


class ZeroProducts(Rounding):
    """Lets zero times infinity or NaN be zero: a kernel may skip what has no weight, such as keys that are masked."""

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = func.overloadpacket
        at = 1 if kind in (_aten.addmm, _aten.baddbmm) else 0
        pair = args[at : at + 2]
        is_product = kind in MATRIX_PRODUCTS | {_aten.mul} and all(isinstance(a, torch.Tensor) for a in pair)
        if not is_product or all(bool(a.isfinite().all()) for a in pair):
            return func(*args, **kwargs)
        tame = [torch.where(a.isfinite(), a, 0) for a in pair]
        multiply = func if at == 0 else {_aten.addmm: torch.mm, _aten.baddbmm: torch.bmm}[kind]
        counted = [[a.ne(0).double(), (~a.isfinite()).double()] for a in pair]
        hits = multiply(counted[0][0], counted[1][1]) + multiply(counted[0][1], counted[1][0])
        return torch.where(hits == 0, func(*args[:at], *tame, *args[at + 2 :], **kwargs), func(*args, **kwargs))


class OverflowLeaving(Leaving):
    """Lets NaN leave in place of numbers whose squares, or sums of them, have no room; or of infinities."""

    def __init__(self, overflow: Overflow) -> None:
        super().__init__()
        self._overflow = overflow

    def change(self, value: torch.Tensor) -> torch.Tensor:
        most = math.sqrt(self._overflow.largest / _ROOM_OF_SUMS)
        is_over = value.isinf() if self._overflow.is_of_infinities else value.abs() > most
        return value.masked_fill(is_over, math.nan) if math.isnan(self._overflow.fill) else value


def _sizes(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns how large the numbers are that an operator has on the way to each result, of its finite inputs alone."""
    kind = func.overloadpacket

    def finite(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        tame = value.nan_to_num(0.0, 0.0, 0.0)
        return tame.abs() if kind in _SUMS else tame

    found = func(*tree_map(finite, list(args)), **tree_map(finite, kwargs))
    results = found if isinstance(found, tuple) else (found,)
    made = [v.double().abs().nan_to_num(math.inf, math.inf, math.inf) for v in results]  # masks are multiplied as well
    terms = args[0].numel() / max(made[0].numel(), 1) if isinstance(args[0], torch.Tensor) else 1
    if kind is _aten.mean or kind is _aten.var or kind is _aten.var_mean:
        made = [size * terms for size in made]
    elif kind in _SQUARES:
        made = [size.square() * terms for size in made]
    if kind in _CENTERED:  # the mean that is subtracted is a sum as well
        dims = args[1] if len(args) > 1 else None
        sums = finite(args[0]).abs().sum(dims, keepdim=True).view(made[0].shape)
        made = [torch.maximum(size, sums) for size in made]
    return made
