"""Hypothesis strategies from a contract: argument tuples that satisfy the annotations of an operator."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Literal

import torch

from opwright.contract.axes import Computed, Fixed, Named, Variadic, names_in
from opwright.contract.contract import MISSING, Bindings, Contract, Parameter, TensorType
from opwright.contract.domains import Index, Range
from opwright.contract.dtypes import Family, short_name
from opwright.contract.fill import LAYOUTS, put_in_layout
from opwright.contract.sweep import domain_in, integers_in, nearest_in, within
from opwright.errors import CheckError, ContractError
from opwright.testing.arguments import Inputs, inputs_from
from opwright.testing.sweep import names_of, one_operator
from opwright.verify.target import Target, make_target

try:
    from hypothesis import assume
    from hypothesis import strategies as st
except ImportError:
    raise CheckError(
        "opwright.testing.inputs",
        "its strategies are Hypothesis's, which is not installed",
        hint="`pip install hypothesis`",
    ) from None

_USUAL = (8, 33, 257)  # most sizes are small, some larger than a vector, a few larger than several
_ALL_LAYOUTS = ("contiguous", *LAYOUTS)
_MAX_ELEMENTS = 4096
_MAX_AXES = 3  # of a variadic axis
_MAX_PLACED = 6  # values that are chosen one by one in a tensor

Ends = tuple[float, float]


def inputs(
    operator: Any,
    *,
    dtypes: Iterable[Any] | Any = (),
    layouts: Iterable[str] | str = _ALL_LAYOUTS,
    special: bool = True,
    max_elements: int = _MAX_ELEMENTS,
    **ranges: Any,
) -> st.SearchStrategy[Inputs]:
    """Returns a strategy for the arguments of a call.

    Axes of one name have one size, variadic axes up to three dimensions, tensors of one family one dtype; literals
    are one of their choices. Inputs that the reference refuses are skipped. Examples shrink to one element in
    float32, contiguous, zero, with the defaults.

        @given(opwright.testing.inputs(bias_gelu, n=(1, 64), input=(-10.0, 10.0)))
        def test_bias_gelu(case): ...

    Args:
        operator: an operator, or a TARGET such as "my_ops::name".
        dtypes: of all, those of these: `torch.float32` or "f32".
        layouts: of "contiguous", "transposed", "sliced", "offset", "expanded" and "columns", these.
        special: whether floating-point tensors hold infinities, NaN and subnormal numbers too.
        max_elements: the most elements of a tensor.
        ranges: by the name of an axis or of an argument, the least and the largest value, both included: of a
            size, of a number, of the elements of a tensor; or a strategy for the whole argument. Tensors of a
            strategy give the sizes of their axes to the others.

    Raises:
        CheckError: it is not an operator, there is no axis, argument, dtype or layout of that name, or Hypothesis is
            missing.
    """
    found = one_operator(operator, "opwright.testing.inputs")
    contract = found.contract
    _check_names(contract, ranges)
    chosen = names_of(() if dtypes is None else dtypes)
    _check_dtypes(contract, chosen)
    layouts = (layouts,) if isinstance(layouts, str) else tuple(layouts)
    _check_layouts(contract, layouts)
    target = make_target(found.function, None, None)
    return _arguments(_Maker(target, ranges, chosen, layouts, special, max_elements))


def _check_names(contract: Contract, ranges: Mapping[str, Any]) -> None:
    known = dict.fromkeys([*_axis_names(contract), *(p.name for p in contract.parameters)])
    variadic = {
        axis.name: p.name for p in contract.parameters if p.type for axis in p.type.axes if isinstance(axis, Variadic)
    }
    for name, given in ranges.items():
        if name in variadic and name not in known:
            raise CheckError(
                contract.subject,
                f"`*{name}` is a variadic axis, whose sizes have no range",
                rows=[("got", f"{name}={given!r}")],
                hint=f"`{variadic[name]}=st.just(tensor)` sets a whole tensor",
            )
        if name not in known:
            raise CheckError(
                contract.subject,
                f"it has no axis or argument `{name}`",
                rows=[("there", ", ".join(known))],
                hint=f"`{next(iter(known))}=(1, 64)`",
            )
        is_argument = any(p.name == name for p in contract.parameters)
        if not _is_range(given) and not (is_argument and isinstance(given, st.SearchStrategy)):
            raise CheckError(
                contract.subject,
                f"`{name}` takes the least and the largest {'value, or a strategy' if is_argument else 'size'}",
                rows=[("got", repr(given))],
                hint=f"`{name}=(1, 64)`",
            )


def _check_dtypes(contract: Contract, names: set[str]) -> None:
    family = contract.scalar_family
    there = [short_name(dtype) for dtype in family.dtypes] if family is not None else []
    if names and there and names.isdisjoint(there):
        raise CheckError(
            contract.subject,
            f"`{family}` has none of these dtypes",
            rows=[("got", " ".join(sorted(names))), ("there", " ".join(there))],
        )


def _check_layouts(contract: Contract, layouts: Sequence[str]) -> None:
    unknown = [layout for layout in layouts if layout not in _ALL_LAYOUTS]
    if unknown or not layouts:
        raise CheckError(
            contract.subject,
            f"`{unknown[0]}`: unknown layout" if unknown else "`layouts` names no layout",
            rows=[("expected", " ".join(_ALL_LAYOUTS))],
        )


def _is_range(given: Any) -> bool:
    """Whether it is a pair of numbers in ascending order, which may be equal."""
    is_pair = isinstance(given, tuple) and len(given) == 2 and all(isinstance(end, Real) for end in given)
    return is_pair and given[0] <= given[1]


@st.composite
def _arguments(draw: st.DrawFn, maker: _Maker) -> Inputs:
    values, label = maker.draw(draw)
    assume(maker.accepts(values))
    try:
        with torch.no_grad():
            maker.target.reference(list(Inputs(values, {}).fresh().args))
    except Exception:  # whatever a reference may raise to refuse
        assume(False)
    return inputs_from(maker.contract, values, label)


class _Maker:
    """Draws the values of all arguments, in schema order."""

    def __init__(
        self,
        target: Target,
        ranges: Mapping[str, Any],
        dtypes: set[str],
        layouts: Sequence[str],
        special: bool,
        max_elements: int,
    ) -> None:
        contract = target.drawn
        self.target, self.contract, self.ranges, self.special = target, contract, ranges, special
        self.dtypes, self.layouts, self.max_elements = dtypes, layouts, max_elements
        self.axes = _axis_names(contract)
        self.ints = {p.name for p in contract.parameters if p.kind == "int"}
        # Hypothesis checks the bounds of each new strategy at its first draw, which costs more than the draw.
        self.elements = functools.cache(_elements)

    def __repr__(self) -> str:
        """Names the operator alone: Hypothesis shows the arguments of a strategy in its messages."""
        return f"<inputs of {self.target.name}>"

    def draw(self, draw: st.DrawFn) -> tuple[list[Any], str]:
        """Returns the values in schema order, and the layout."""
        strategies = {name: given for name, given in self.ranges.items() if isinstance(given, st.SearchStrategy)}
        given = {p.name: draw(strategies[p.name]) for p in self.contract.tensors if p.name in strategies}
        numbers, bound = self._numbers(draw, given)
        sizes = self._sizes(draw, numbers, bound)
        layout = draw(st.sampled_from(self.layouts))
        values = []
        for parameter in self.contract.parameters:
            if not parameter.is_tensor:
                values.append(numbers[parameter.name])
            elif parameter.name in given:
                values.append(given[parameter.name])
            elif parameter.optional and not draw(st.booleans()):
                values.append(None)
            else:
                count = draw(st.integers(1, 3)) if parameter.kind == "tensors" else 1
                made = [self._tensor(draw, parameter, sizes, bound, layout) for _ in range(count)]
                values.append(made if parameter.kind == "tensors" else made[0])
        return values, "" if layout == "contiguous" else layout

    def accepts(self, values: Sequence[Any]) -> bool:
        """Whether a call with these values satisfies the contract; a range replaces the domain of an argument."""
        if not self.contract.fits(values):
            return False
        outside = self.contract.find_outside(values)
        return outside is None or outside.name in self.ranges

    def _numbers(self, draw: st.DrawFn, given: Mapping[str, Any]) -> tuple[dict[str, Any], Bindings]:
        """Returns the arguments that are not tensors, and what they and the given tensors bind.

        An integer that is the size of an axis of a given tensor follows from the tensor.
        """
        axes = [axis for p in self.contract.parameters if p.type and p.name in given for axis in p.type.axes]
        follow = {axis.name for axis in axes if isinstance(axis, Named)} & self.ints - self.ranges.keys()
        plain = [p for p in self.contract.parameters if not p.is_tensor]
        numbers = {p.name: draw(self._number(p)) for p in plain if p.name not in follow}
        bound = self._bind({**given, **numbers})
        for parameter in plain:
            if parameter.name in follow:
                size = bound.sizes.get(parameter.name)
                numbers[parameter.name] = draw(self._number(parameter)) if size is None else size
        return numbers, bound

    def _bind(self, known: Mapping[str, Any]) -> Bindings:
        """Returns what some arguments bind, which is nothing where they alone break the contract.

        The size `n*k` of the only tensor, for example, does not tell `n`.
        """
        parameters = tuple(p for p in self.contract.parameters if p.name in known)
        try:
            bound = self.contract._replace(parameters=parameters, outputs=()).bind(known)
        except ContractError:
            return Bindings()
        for name in bound.sizes.keys() & self.ranges.keys() - self.ints:
            low, high = self.ranges[name]
            assume(low <= bound.sizes[name] <= high)
        return bound

    def _number(self, parameter: Parameter) -> st.SearchStrategy:
        given = self.ranges.get(parameter.name)
        if isinstance(given, st.SearchStrategy):
            return given
        default = parameter.default
        has_default = default is not MISSING
        match parameter.kind:
            case "choice":
                return st.sampled_from(sorted(parameter.choices, key=lambda choice: choice != default))
            case "bool":
                return st.sampled_from([default is True, default is not True])
            case "int":
                if given:
                    return st.integers(*map(int, given))
                if isinstance(parameter.domain, Index):
                    return st.integers(0, 3)
                if isinstance(parameter.domain, Range):
                    usual = default if has_default else 2
                    return st.sampled_from(
                        list(dict.fromkeys(nearest_in(parameter.domain, n, "int") for n in (usual, 1, 3, 4)))
                    )
                if parameter.name in self.axes:
                    return st.sampled_from(list(dict.fromkeys([default if has_default else 2, 1, 3])))
                return st.just(default) | st.integers(1, 4) if has_default else st.integers(1, 4)
            case _:
                if given:
                    return st.floats(*map(float, given))
                between = st.floats(2.0**-10, 2.0, width=32)
                if isinstance(parameter.domain, Range):
                    inside = functools.partial(nearest_in, parameter.domain, kind="float")
                    if parameter.domain.is_bounded:
                        between = st.floats(*parameter.domain.ends(torch.float64))
                    return st.just(inside(float(default) if has_default else 0.5)) | between.map(inside)
                return st.just(float(default)) | between if has_default else st.just(0.5) | between

    def _sizes(self, draw: st.DrawFn, numbers: Mapping[str, Any], bound: Bindings) -> dict[str, int]:
        sizes = {**bound.sizes, **{name: value for name, value in numbers.items() if name in self.ints}}
        free = [name for name in self.axes if name not in sizes]
        for name in free:
            sizes[name] = draw(_size(*map(int, self.ranges.get(name, (0, max(_USUAL))))))
        return self._within_budget(sizes, free)

    def _within_budget(self, sizes: dict[str, int], free: Sequence[str]) -> dict[str, int]:
        """Halves the widest free axis until every tensor has room for a batch."""

        def elements() -> int:
            counts = [math.prod(self._known(p.type, sizes)) for p in self.contract.parameters if p.type]
            return max(counts, default=0)

        while elements() > self.max_elements and any(sizes[name] > self._least(name) for name in free):
            widest = max((n for n in free if sizes[n] > self._least(n)), key=sizes.__getitem__)
            sizes[widest] = max(sizes[widest] // 2, self._least(widest))
        return sizes

    def _least(self, name: str) -> int:
        return max(1, int(self.ranges.get(name, (1, 1))[0]))

    def _known(self, type_: TensorType, sizes: Mapping[str, int]) -> list[int]:
        """Returns the sizes of the axes that are not variadic."""
        return [self._size(axis, sizes) for axis in type_.axes if not isinstance(axis, Variadic)]

    def _size(self, axis: Any, sizes: Mapping[str, int]) -> int:
        match axis:
            case Named(name):
                return sizes[name]
            case Computed():
                return max(int(axis.evaluate(sizes)), 0)
            case Fixed(size):
                return size
        return 3  # `_`: any size

    def _batch(self, draw: st.DrawFn, room: int) -> tuple[int, ...]:
        """Returns the axes of a variadic axis, none first."""
        shape = draw(st.lists(st.sampled_from((1, 2, 3, 5, 0)), max_size=_MAX_AXES))
        while math.prod(shape) > max(room, 1):
            shape = shape[:-1]
        return tuple(shape)

    def _tensor(
        self,
        draw: st.DrawFn,
        parameter: Parameter,
        sizes: Mapping[str, int],
        bound: Bindings,
        layout: str,
    ) -> torch.Tensor:
        type_, shapes, dtypes = parameter.type, bound.shapes, bound.dtypes
        assert type_ is not None
        room = self.max_elements // max(math.prod(self._known(type_, sizes)), 1)
        shape: list[int] = []
        for axis in type_.axes:
            if isinstance(axis, Variadic):
                if axis.name not in shapes or axis.name is None:
                    shapes[axis.name or ""] = self._batch(draw, room)
                shape.extend(shapes[axis.name or ""])
            else:
                shape.append(self._size(axis, sizes))
        if type_.family.name not in dtypes:
            dtypes[type_.family.name] = draw(st.sampled_from(self._dtypes(type_.family)))
        dtype = dtypes[type_.family.name]
        values = self._values(draw, parameter, tuple(shape), dtype, sizes)
        if parameter.mutated and layout == "expanded":
            layout = "contiguous"  # writing through stride 0 has no defined result
        return put_in_layout(values, layout)

    def _dtypes(self, family: Family) -> tuple[torch.dtype, ...]:
        return tuple(dtype for dtype in family.dtypes if short_name(dtype) in self.dtypes) or family.dtypes

    def _values(
        self,
        draw: st.DrawFn,
        parameter: Parameter,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        sizes: Mapping[str, int],
    ) -> torch.Tensor:
        count = math.prod(shape)
        values = torch.zeros(count, dtype=dtype)
        given = self.ranges.get(parameter.name)
        is_free = given is None
        if is_free and not dtype.is_floating_point and dtype != torch.bool and (domain := domain_in(parameter, sizes)):
            given = integers_in(domain, shape, dtype)
        smallest = max(min(shape, default=2), 2)
        plain, elements = self.elements(dtype, given, smallest, self.special)
        # The first element is the value that is drawn, the others shares of it: whatever is wrong with a large one
        # is wrong with the first one too, so that the tensor can shrink to it.
        first, seed = draw(plain), draw(st.integers(0, 255))
        values.copy_(_spread(first, _shares(seed, count), given, dtype))
        # Drawn for an empty tensor too: else one element would be the longer example, and shrink to none.
        placed = draw(st.lists(st.tuples(st.integers(0, max(count - 1, 0)), elements), max_size=_MAX_PLACED))
        for at, value in placed[: _MAX_PLACED if count else 0]:
            values[at] = value
        return within(values.view(shape), parameter, sizes) if is_free else values.view(shape)


@functools.cache
def _size(low: int, high: int) -> st.SearchStrategy[int]:
    """Returns a strategy for a size, which shrinks to one before it is nothing.

    All are integers that stand for themselves: an index into a table of sizes would shrink worse.
    """
    least = max(low, 1)
    bounds = [*(bound for bound in _USUAL if least < bound < high), high]
    sizes = st.one_of(*(st.integers(least, bound) for bound in bounds if least <= bound))
    if low > 0:
        return sizes
    if high < 1:
        return st.just(0)
    is_empty = st.sampled_from([False] * 15 + [True])
    return st.tuples(is_empty, sizes).map(lambda drawn: 0 if drawn[0] else drawn[1])


def _axis_names(contract: Contract) -> list[str]:
    return names_in(axis for p in contract.parameters if p.type for axis in p.type.axes)


def _elements(
    dtype: torch.dtype, given: Ends | None, smallest: int, special: bool
) -> tuple[st.SearchStrategy, st.SearchStrategy]:
    """Returns strategies for an element: without and with special values."""
    if dtype == torch.bool:
        return st.booleans(), st.booleans()
    if not dtype.is_floating_point:
        # Without a range they may be indices: of the smallest axis.
        whole = st.integers(*map(int, given)) if given else st.integers(0, smallest - 1)
        return whole, whole
    if given:
        inside = st.floats(*map(float, given), allow_nan=False)
        return inside, inside
    width: Literal[16, 32, 64] = 64 if dtype == torch.float64 else 32 if dtype == torch.float32 else 16
    usual = st.integers(-8, 8).map(float) | st.floats(-1e3, 1e3, width=width)
    if not special:
        return usual, usual
    info = torch.finfo(dtype)
    odd = (-0.0, math.inf, -math.inf, math.nan, info.tiny / 2, -info.tiny / 2, info.max, -info.max)
    # float16's range is not bfloat16's.
    return usual, usual | st.sampled_from(odd) | st.floats(width=32 if dtype == torch.bfloat16 else width)


def _shares(seed: int, count: int) -> torch.Tensor:
    """Returns pseudo-random numbers from -1 to 1, the first one 1."""
    shares = 2 * torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1
    shares[:1] = 1
    return shares


def _spread(first: Any, shares: torch.Tensor, given: Ends | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns the first value at a share of 1, and others between it and the least at less."""
    if dtype == torch.bool:
        return (shares > 0) & bool(first)
    if dtype.is_floating_point and not given:
        return first * shares + 0.0  # no -0.0 of a zero
    low = given[0] if given else 0
    between = low + (first - low) * shares.abs()
    return between if dtype.is_floating_point else between.floor()
