"""Where a right kernel may overflow, or give NaN, although the reference does not.

A variance by two passes adds up numbers that Welford's algorithm does not, and a compensated sum of infinite terms
computes inf - inf. Which elements of the result may be touched by that follows from the reference: it is called with
each overflow replaced by NaN, or by the largest number, and the results are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from opwright.verify.formulas import Rounding

_aten = torch.ops.aten


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(_aten, name) for name in names.split())


_SUMS = _packets("sum nansum mean cumsum mm bmm addmm baddbmm mv dot scatter_add index_add addmv")
_SQUARES = _packets("var var_mean std linalg_vector_norm")
_CENTERED = _packets("var var_mean std")
_REDUCTIONS = _SUMS | _SQUARES
_GROWING = _packets("add sub mul rsub square pow exp exp2 expm1 addcmul prod cumprod add_ sub_ mul_ addcmul_")


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
        self._inputs = {t.untyped_storage()._cdata for t in inputs}
        self.largest, self.fill = largest, fill
        self.is_of_sums, self.is_of_infinities = is_of_sums, is_of_infinities

    def in_single(self, formula: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return formula(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in (
            _REDUCTIONS if self.is_of_sums or self.is_of_infinities else _REDUCTIONS | _GROWING
        ):
            return func(*args, **kwargs)
        if self.is_of_infinities and not self._sums_inputs(args):
            return func(*args, **kwargs)
        sizes = None if self.is_of_infinities else _sizes(func, args, kwargs)
        result = func(*args, **kwargs)
        made = result if isinstance(result, tuple) else (result,)
        for value, size in zip(made, sizes or [None] * len(made), strict=True):
            if value.dtype == torch.float64:
                is_over = value.isinf() if size is None else size > self.largest
                if bool(is_over.any()):
                    value.copy_(torch.where(is_over, torch.full_like(value, self.fill).copysign(value), value))
        return result

    def _sums_inputs(self, args: Any) -> bool:
        """Returns whether an operator adds up inputs unchanged; other sums must be infinite where the reference is."""
        tensors = [a for a in tree_leaves(list(args)) if isinstance(a, torch.Tensor)]
        return any(t.untyped_storage()._cdata in self._inputs for t in tensors)


def _sizes(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns how large the numbers are that an operator has on the way to each result, of its finite inputs alone."""
    kind = func.overloadpacket

    def finite(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        tame = value.nan_to_num(0.0, 0.0, 0.0)
        return tame.abs() if kind in _SUMS else tame

    found = func(*tree_map(finite, list(args)), **tree_map(finite, kwargs))
    made = [v.abs().nan_to_num(math.inf, math.inf, math.inf) for v in (found if isinstance(found, tuple) else (found,))]
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
