"""Inputs at the boundaries where kernels go wrong, and what lies beyond them.

The reference says where a boundary is: which integers it takes, and which it refuses.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import torch

from opwright.backends.registry import all_backends
from opwright.contract import domains
from opwright.contract.axes import Named, Variadic
from opwright.contract.contract import Contract, Parameter
from opwright.contract.domains import Index
from opwright.contract.fill import shape_of, tensor_dtype
from opwright.contract.sources import Source
from opwright.contract.sweep import Case, Fill, Sweep, domain_in
from opwright.verify.inputs.budget import is_quick, is_too_large, parts_of, takes_longer
from opwright.verify.inputs.ranges import Range, find_range, is_taken
from opwright.verify.oracle import are_finite, try_reference
from opwright.verify.target import Target
from opwright.verify.tensors import copy_of, tensors_of

BATCH = "*"  # the name of every variadic axis here
_BATCH_SIZE = 29  # of the cases that find ranges: a prime that no named axis has
_TABLE_ROWS = 65_601  # more than 16 bits count
_TABLE_OTHERS = 16


def boundary_cases(target: Target) -> Iterator[Case]:
    """Yields the cases; those that the reference refuses are among them."""
    yield from _index_cases(target)
    yield from _special_cases(target)
    yield from _size_cases(target)
    yield from _list_cases(target)
    yield from (case for case in _option_cases(target) if _forward_takes(target, case))


# --- indices -----------------------------------------------------------------------------------------------


def _index_cases(target: Target) -> Iterator[Case]:
    """Yields integer tensors with values of the whole range that the reference takes, and beyond it.

    Where it takes any, they are not indices: then the extremes of the dtype are among them.
    """
    maker = target.make_sweep()
    for parameter in _integer_tensors(target.contract, maker):
        yield from _indices_for(target, maker, parameter)


def _indices_for(target: Target, maker: Sweep, parameter: Parameter) -> Iterator[Case]:
    own, name = parameter.type.family.dtypes[0], parameter.name
    info = torch.iinfo(own)
    sizes = {BATCH: _BATCH_SIZE} | maker.base_sizes()
    count = _count(maker, parameter, sizes)

    def filled(values: torch.Tensor, sizes: dict[str, int], what: str) -> Case:
        return _made(maker, f"{name} {what}", sizes, filled={name: lambda shape, dtype: values.to(dtype).view(shape)})

    def takes(value: int) -> bool | None:
        return is_taken(target, filled(_one(count, value), sizes, f"of {value}"))

    if not count or (found := find_range(takes, 0, info.min, info.max)) is None:
        return
    is_index = found.above is not None or isinstance(parameter.domain, Index)
    if parameter.domain is not None:
        declared = parameter.domain.within(maker.option_sets()[0] | sizes)
        low, high = map(int, declared.ends(own))
        found = found._replace(low=max(found.low, low), high=min(found.high, high))
        if found.low > found.high:
            return
    for values in _spread_over(found, count) if is_index else _extremes(found, count):
        yield filled(values, sizes, f"from {int(values.min())} to {int(values.max())}")
    if not is_index:
        return
    if target.device.type == "cpu":  # a GPU cannot refuse after the call
        # Near ones first: a kernel that does not look reads guard bytes there, and elsewhere crashes.
        for value in (found.above, found.below, *(n for n in (2**32, -(2**32)) if info.min < n < info.max)):
            if value is not None and not takes(value):
                yield filled(_one(count, value), sizes, f"with {value}")
    if found.below is not None and parameter.domain is None and takes(_IGNORED):
        values = next(_spread_over(found, count))
        values[::3] = _IGNORED
        yield filled(values, sizes, f"with {_IGNORED} among them")
    own_axis = next((axis for axis in _axis_names(parameter) if axis), None)
    if own_axis is not None and found.low <= 1 <= found.high:
        many = dict.fromkeys(sizes, 2) | {own_axis: _TABLE_ROWS}
        if _largest(maker, many) <= _MAX_ELEMENTS:
            values = torch.ones(_count(maker, parameter, many), dtype=torch.int64)
            case = filled(values, many, f"of 1, {len(values)} times")  # more than a counter of 16 bits holds
            if target.accepts(case) and _is_cheap(target, case):
                yield case
    axis = next((axis for axis, size in sizes.items() if size == found.high + 1), None)
    if axis is not None and axis not in _axis_names(parameter):
        long = dict.fromkeys(sizes, _TABLE_OTHERS) | {axis: _TABLE_ROWS}
        if _largest(maker, long) > _MAX_ELEMENTS:
            long = dict.fromkeys(sizes, 2) | {axis: _TABLE_ROWS}
        ends = found._replace(high=_TABLE_ROWS - 1, low=-_TABLE_ROWS if found.low == -sizes[axis] else found.low)
        for values in _spread_over(ends, _count(maker, parameter, long)):
            case = filled(values, long, f"over {_TABLE_ROWS} rows")
            if target.accepts(case):
                yield case


def negative_cases(target: Target) -> Iterator[Case]:
    """Yields integer tensors with values on both sides of 0 that are not indices, where the reference takes them.

    Without a bounded domain the inputs that follow from a contract have none: they might be indices.
    """
    maker = target.make_sweep()
    sizes = {BATCH: _BATCH_SIZE} | maker.base_sizes()
    for parameter in _integer_tensors(target.drawn, maker):
        own, domain = parameter.type.family.dtypes[0], parameter.domain or parameter.likely
        if isinstance(domain, Index) or (domain is not None and domain.is_bounded):
            continue
        low, high = (torch.iinfo(own).min, torch.iinfo(own).max) if domain is None else map(int, domain.ends(own))
        low, high = max(low, -_SMALL), min(high, _SMALL)

        def fill(shape: tuple[int, ...], dtype: torch.dtype, low: int = low, high: int = high) -> torch.Tensor:
            return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(0)).to(dtype)

        if low < 0 <= high:
            case = _made(maker, f"{parameter.name} on both sides of 0", sizes, filled={parameter.name: fill})
            if is_taken(target, case):
                yield case


def _integer_tensors(contract: Contract, maker: Sweep) -> Iterator[Parameter]:
    """Yields the parameters that are tensors of integers and are given, not computed by the forward of a backward."""
    of_forward = {output.name for output in maker.forward[0].outputs} if maker.forward else set()
    for parameter in contract.tensors:
        own = parameter.type.family.dtypes[0]
        is_integer = not own.is_floating_point and own != torch.bool
        if parameter.kind == "tensor" and parameter.name not in of_forward and is_integer:
            yield parameter


_SMALL = 100  # beyond every axis, so that the reference refuses it as an index
_IGNORED = -100  # a target that PyTorch's losses leave out, unless they are told otherwise


def _one(count: int, value: int) -> torch.Tensor:
    """Returns zeros with one other value among them: not the first, which a kernel may look at alone."""
    values = torch.zeros(count, dtype=torch.int64)
    values[count // 2] = value
    return values


def _spread_over(found: Range, count: int) -> Iterator[torch.Tensor]:
    """Yields integers of a range without repetition, as far as there are enough; among them the first and the last.

    Where they count from the end as well, each row comes with one sign in one tensor, with the other in the other: two
    that mean the same row would be two writes to it, in either order.
    """
    generator = torch.Generator().manual_seed(0)
    counts_from_end = found.low == -(found.high + 1)
    low = 0 if counts_from_end else found.low
    size = found.high + 1 - low
    ends = [0, size - 1][: min(count, size)]
    # Powers of two are where a narrower type wraps.
    powers = [p - low for p in (2**8, 2**8 - 1, 2**15, 2**15 - 1, 2**16, 2**16 - 1) if 0 < p - low < size - 1]
    first = torch.tensor(list(dict.fromkeys((*ends, *powers)))[:count])
    others = torch.randperm(size, generator=generator)
    others = others[~torch.isin(others, first)]
    values = torch.cat([first, others])
    values = values.repeat(-(-count // len(values)))[:count]
    values = values[torch.randperm(count, generator=generator)] + low
    if not counts_from_end:
        yield values
        return
    is_negative = torch.arange(count) % 2 == 0
    for mask in (is_negative, ~is_negative):
        yield torch.where(mask, values - size, values)


def _extremes(found: Range, count: int) -> Iterator[torch.Tensor]:
    """Yields integers that are not indices: the extremes of the range, values around 0, any."""
    generator = torch.Generator().manual_seed(0)
    # Not the smallest itself, of which there is no negative.
    special = [found.high, max(found.low, -found.high), -1, 0, 1, 2**31, 2**31 - 1, -(2**31), -(2**31) - 1]
    special = [v for v in dict.fromkeys(special) if found.low <= v <= found.high]
    yield torch.tensor((special * -(-count // len(special)))[:count])
    low, high = max(found.low, -(2**17)), min(found.high, 2**17)
    yield torch.randint(low, high + 1, (count,), generator=generator)


# --- options -----------------------------------------------------------------------------------------------


def _option_cases(target: Target) -> Iterator[Case]:
    """Yields integers and numbers among the options that are negative, zero, extreme, and those just refused."""
    maker = target.make_sweep()
    for parameter in target.contract.parameters:
        if parameter.kind in ("int", "float"):
            yield from _values_for(target, maker, parameter)


def _values_for(target: Target, maker: Sweep, parameter: Parameter) -> Iterator[Case]:
    name, usual = parameter.name, maker.option_sets()[0]
    sizes = maker.base_sizes() | {BATCH: 3}

    def made(value: float, at: dict[str, int] = sizes) -> Case:
        return _made(maker, f"{name} of {value}", at, options=usual | {name: value})

    if parameter.kind == "float":
        tried = (0.0, -usual[name], *(s * m for m in (1e-6, 1e6) for s in (1, -1)), *_ends_of(parameter))
        tried = [v for v in tried if parameter.domain is None or parameter.domain.contains(v)]
        yield from (made(v) for v in tried if _is_refused(target, made(v)) or _is_finite(target, made(v)))
        return

    def has_inputs(value: int, at: dict[str, int] = sizes) -> bool:
        """Returns whether the tensors that have an integer as a size exist, and are small."""
        return name not in maker.names or 0 <= _largest(maker, at, {name: value}) <= _MAX_OF_OPTION

    def takes(value: int) -> bool | None:
        if not has_inputs(value):
            return None
        return target.contract.fits(made(value).values) and is_taken(target, made(value))

    found = find_range(takes, usual[name], -(2**63), 2**63 - 1)
    if found is None:
        return
    if found.above is not None:
        large = maker.large_sizes()[0] | {BATCH: 3}
        for value in (v for v in _beyond(target, parameter, found.high) if has_inputs(v, large)):
            case = made(value, large)
            if target.contract.fits(case.values) and is_taken(target, case) and _is_finite(target, case):
                yield case
    limits = [v for v in (found.below, found.above) if v is not None and abs(v) <= _MAX_LIMIT]
    small = [value for value in _SMALL_INTEGERS if found.low <= value <= found.high]
    tried = dict.fromkeys((0, -1, 1, *small, *_ends_of(parameter), found.low, found.high, *limits))
    for value in filter(has_inputs, tried):
        case = made(value)
        if value == usual[name] or not target.contract.fits(case.values):
            continue
        if target.contract.find_outside(case.values) is not None:  # also one that is refused: nobody may give it
            continue
        taken = is_taken(target, case)
        if (taken is False and _is_refused(target, case)) or (taken and (abs(value) < 2 or _is_finite(target, case))):
            yield case


def _beyond(target: Target, parameter: Parameter, high: int) -> list[int]:
    """Returns integers for an option that small inputs refuse: ends of its domain, and beside what the source names."""
    source = target.operator.declaration.sources.get(target.device.type)
    named = [size + 1 for size in _sizes_in(source, tried=())] if source else []
    values = dict.fromkeys((*_LARGER_INTEGERS, *_ends_of(parameter), *named))
    return [v for v in values if v > high and (parameter.domain is None or parameter.domain.contains(v))]


def _ends_of(parameter: Parameter) -> list[Any]:
    """Returns the ends of the declared domain of an option that are numbers."""
    if not isinstance(parameter.domain, domains.Range):
        return []
    kind = int if parameter.kind == "int" else float
    return [kind(end) for end in (parameter.domain.low, parameter.domain.high) if math.isfinite(end)]


_SMALL_INTEGERS = (2, 3, 4, 5, 8, 17)  # where a kernel has code for some values, or a table
_LARGER_INTEGERS = (17, 33, 65, 100)
_MAX_OF_OPTION = 2**18  # elements of an input that has an option for a size
_MAX_LIMIT = 2**31  # farther from 0 the limit is one of the arithmetic of the reference, which a kernel need not have


def _is_refused(target: Target, case: Case) -> bool:
    """Returns whether the reference refuses a case, and not for want of memory, of which a kernel may need less."""
    try:
        target.reference(copy_of(case.values))
    except MemoryError:
        return False
    except Exception as error:  # whatever a reference may raise to refuse
        return not any(word in str(error) for word in ("alloc", "memory", "overflow", "Storage size"))
    return False


def _is_finite(target: Target, case: Case) -> bool:
    """Returns whether the results are numbers, in float64 too: what else a formula gives depends on its order."""
    found = [try_reference(target.reference, case.values, is_exact=exact) for exact in (False, True)]
    return all(outputs is not None and are_finite(outputs) for outputs in found)


# --- special values ----------------------------------------------------------------------------------------


def _special_cases(target: Target) -> Iterator[Case]:
    """Yields special values at every place of a row: row r has one of them, in column r.

    A tensor without rows has them in all places at once, and then, since one NaN hides the others in a sum, one alone.
    In dtypes other than the first the tensors take turns, unless it is full: each may be converted in a way of its own.
    """
    maker = target.make_sweep()
    dtypes, options = target.contract.scalar_dtypes, maker.option_sets()
    pairs = [(dtype, options[i % len(options)]) for i, dtype in enumerate(dtypes)]
    pairs += [(dtypes[0], each) for each in options[1:]] if target.effort == "full" else []
    tensors = [p for p in target.drawn.tensors if p.kind == "tensor" and p.type.family.has_floats]
    for i, (dtype, chosen) in enumerate(pairs):
        in_turn = tensors[i % len(tensors) :][:1] if tensors else []
        for parameter in tensors if target.effort == "full" or not i else in_turn:
            if not tensor_dtype(target.contract, parameter.type, dtype).is_floating_point:
                continue  # `Shaped` may be either
            yield from _special_in(target, maker, parameter, dtype, chosen)


def _special_in(
    target: Target, maker: Sweep, parameter: Parameter, dtype: torch.dtype | None, options: dict[str, Any]
) -> Iterator[Case]:
    name, axes = parameter.name, _axis_names(parameter)

    def made(label: str, sizes: dict[str, int], place: Callable[[torch.Tensor, torch.Tensor], None]) -> Case:
        def fill(shape: tuple[int, ...], own: torch.dtype) -> torch.Tensor:
            generator = torch.Generator().manual_seed(0)
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            domain = domain_in(parameter, {})
            values = values if domain is None else domain.fold(values)
            info = torch.finfo(own)
            numbers = (*_NOT_FINITE, -0.0, info.max, -info.max, info.tiny / 2, -info.tiny * info.eps)
            place(values, torch.tensor(numbers, dtype=torch.float64))
            return values.to(own)

        others = dict.fromkeys((BATCH, *maker.long_axes()), 2)
        return _made(maker, f"{label} of {name}", others | sizes, dtype, {name: fill}, options)

    if not axes or axes[-1] not in (BATCH, *maker.long_axes()):
        return
    row_axis = next((axis for axis in axes[:-1] if axis == BATCH or axis in maker.long_axes()), None)
    if row_axis not in (None, axes[-1]):
        sizes = {axes[-1]: _WIDTH, row_axis: _SPECIAL * _WIDTH}
        diagonal = made("special values at every place", sizes, _place_diagonally)
        if not _is_cheap(target, diagonal):
            return
        yield diagonal
        if dtype == target.contract.scalar_dtypes[0] and options == maker.option_sets()[0]:
            sizes = {axes[-1]: _WIDE, row_axis: _WIDE_ROWS}
            yield made("special values in wide rows", sizes, _place_diagonally)
        yield made("rows of one special value", {axes[-1]: _WIDTH, row_axis: _SPECIAL}, _fill_rows)
        return
    yield made("special values at every place", {axes[-1]: _SPECIAL * _WIDTH}, _place_everywhere)
    for number in _NOT_FINITE:
        for at in (_WIDTH // 2, _WIDTH - 1):

            def place(values: torch.Tensor, _: torch.Tensor, at: int = at, number: float = number) -> None:
                values[..., at] = number

            yield made(f"{number} at {at}", {axes[-1]: _WIDTH}, place)


def _place_diagonally(values: torch.Tensor, special: torch.Tensor) -> None:
    """Puts a special value into each row: each of them into every column, or into columns at equal distances."""
    width = values.shape[-1]
    rows = values.view(-1, width)
    row = torch.arange(len(rows))
    step = max(width * len(special) // len(rows), 1)
    rows[row, (row // len(special) * step + row % len(special) // 2) % width] = special[row % len(special)]


def _fill_rows(values: torch.Tensor, special: torch.Tensor) -> None:
    """Fills each row with one special value, as a row that is masked as a whole is."""
    rows = values.view(-1, values.shape[-1])
    rows[:] = special[torch.arange(len(rows)) % len(special), None]


def _place_everywhere(values: torch.Tensor, special: torch.Tensor) -> None:
    """Fills a tensor with special values so that each stands at every distance from a multiple of a power of two."""
    at = torch.arange(values.numel())
    values.view(-1)[at] = special[(at + at // len(special)) % len(special)]


def _forward_takes(target: Target, case: Case) -> bool:
    """Returns whether the operator that this is the backward of takes its arguments, where it has all of them."""
    forward = target.forward()
    if forward is None:
        return True
    (contract, reference), given = forward, dict(zip(case.names, case.values, strict=True))
    needed = [p.name for p in contract.parameters]
    return not given.keys() >= set(needed) or try_reference(reference, [given[name] for name in needed]) is not None


def _is_cheap(target: Target, case: Case) -> bool:
    """Returns whether the reference takes a case, in little time."""
    return is_quick(target.reference, lambda: copy_of(case.values), _CHEAP_SECONDS)


def _is_slow(target: Target, case: Case) -> bool:
    """Returns whether a call of the reference takes long, or one of the candidate many times as long."""
    with contextlib.suppress(Exception):  # that of a candidate is a finding where the case is tried
        if takes_longer(target.run, lambda: target.inputs(case), _SLOWER * _CHEAP_SECONDS):
            return True
    return not _is_cheap(target, case)


_NOT_FINITE = (math.nan, math.inf, -math.inf)
_SPECIAL = 8  # special values
_WIDTH = 67  # of a row: four vectors of 16 elements, and a remainder
_WIDE, _WIDE_ROWS = 2051, 32
_CHEAP_SECONDS, _SLOWER = 0.02, 10


# --- sizes -------------------------------------------------------------------------------------------------


def _size_cases(target: Target) -> Iterator[Case]:
    """Yields sizes at and beside multiples of tiles, along one axis and along two, and one beyond 2^17 elements.

    Tiles are powers of two, three times those, and what the source of the kernel names.
    """
    maker = target.make_sweep()
    options, beside = itertools.cycle(maker.option_sets()), itertools.cycle((-1, 1))
    main, *other_dtypes = target.contract.scalar_dtypes
    axes = [*dict.fromkeys(axis for p in target.contract.tensors for axis in _axis_names(p))]
    axes = [axis for axis in axes if axis == BATCH or axis in maker.long_axes()]

    def made(dtype: torch.dtype | None, sizes: dict[str, int], chosen: dict[str, Any] | None = None) -> Case:
        label = ", ".join(f"{size} along {axis}" for axis, size in sizes.items())
        return _made(maker, label, dict.fromkeys(axes, 2) | sizes, dtype, options=chosen or next(options))

    def fits(sizes: dict[str, int], most: int = _MAX_ELEMENTS) -> bool:
        """Returns whether no tensor is large: the square of one axis soon takes gigabytes."""
        return _largest(maker, dict.fromkeys(axes, 2) | sizes) <= most

    for axis in axes:
        for size in _TILES:
            if not fits({axis: size}, _MAX_TILED) or not _is_cheap(target, made(main, {axis: size})):
                break
            is_whole = target.effort == "full" or size.bit_count() == 1
            for near in (size - 1, size, size + 1) if is_whole else (size, size + next(beside)):
                yield made(main, {axis: near})
            if other_dtypes and size in _TILES_OF_OTHERS:
                yield made(other_dtypes[-1], {axis: size})
    for first, second in itertools.combinations(axes, 2):
        for size in (size for size in _TILES if size <= _MAX_SQUARE):
            if not _is_cheap(target, made(main, {first: size, second: size})):
                break
            for near in (0, next(beside)):
                yield made(main, {first: size + near, second: size - near})
    source = target.operator.declaration.sources.get(target.device.type)
    for size in _sizes_in(source) if source else ():
        for axis in axes:
            for near in (size - 1, size, size + 1, 2 * size):
                if not fits({axis: near}) or not _is_cheap(target, made(main, {axis: near})):
                    break
                yield made(main, {axis: near})
    tiles = _sizes_in(source, tried=())[:_MAX_TILES] if source and len(axes) > 1 else ()
    for pair in itertools.product((size for size in tiles if size <= _MAX_SQUARE), repeat=2):
        if all(size.bit_count() == 1 for size in pair):  # squares are multiples of both
            continue
        case = made(main, dict(zip(axes[-2:], pair, strict=True)))
        if _is_cheap(target, case):
            yield case
    for axis in axes:
        if not fits({axis: _MANY}):
            continue
        usual = maker.option_sets()[0]
        parts = [made(main, {axis: size}, usual) for size in parts_of(_MANY)]
        if not is_too_large(target.reference, parts, _MAX_MADE, partial(_is_slow, target)):
            case = made(main, {axis: _MANY}, usual)
            if maker.forward is None:  # what a forward has computed stays as it is
                for value in tensors_of(case.values):
                    _put_extremes_last(value)
            yield case


def _put_extremes_last(tensor: torch.Tensor) -> None:
    """Exchanges the largest number of the first row with its last, and the smallest of the last row with its last.

    An index of 16 bits, or a search that leaves out the end, finds others.
    """
    if _MANY not in tensor.shape or not tensor.numel() or tensor.dtype == torch.bool or tensor.is_complex():
        return
    rows = tensor.movedim(tensor.shape.index(_MANY), -1)
    rows = rows[(0,) * (rows.ndim - 2)] if rows.ndim > 2 else rows.view(-1, _MANY) if rows.ndim == 1 else rows
    for row, at in ((rows[-1], rows[-1].double().argmin()), (rows[0], rows[0].double().argmax())):
        row[at], row[-1] = row[-1].clone(), row[at].clone()


# Powers of two, and three times those: what tiles and blocks are multiples of.
_TILES = tuple(sorted((*(2**k for k in range(3, 13)), *(3 * 2**k for k in range(3, 10)))))
_TRIED = frozenset(size + near for size in _TILES for near in (-1, 0, 1))


def _sizes_in(source: Source, tried: Collection[int] = _TRIED) -> list[int]:
    """Returns the integers in the source of a kernel, other than those tried anyway: its tiles and thresholds."""
    text = re.sub(all_backends()[source.backend].comments, "", source.read())
    text = re.sub(r"(?<=\d)['_](?=\d)", "", text)
    found = {int(digits) for digits in _INTEGER.findall(text)}
    found |= {1 << int(digits) for digits in _POWER.findall(text)}
    found |= {int(a) * int(b) for a, b in _PRODUCT.findall(text)}
    return sorted(size for size in found.difference(tried) if _TILES[0] <= size <= _MANY)[:_MAX_SIZES_IN_SOURCE]


_INTEGER = re.compile(r"(?<![\w.])(\d+)[uUlLzZ]*(?![\w.])")
_PRODUCT = re.compile(r"(?<![\w.])(\d+) *\* *(\d+)(?![\w.])")
_POWER = re.compile(r"(?<![\w.])1[uUlL]* *<< *(\d\d?)(?![\w.])")
_MAX_SIZES_IN_SOURCE = 16
_MAX_TILES = 6  # that are tried in pairs


_TILES_OF_OTHERS = (64, 192, 256, 1024)  # in the last dtype, whose vectors are the longest
_MAX_SQUARE = 384
_MANY = 2**17 + 3  # along one axis
_MAX_ELEMENTS, _MAX_TILED = 2**25, 2**22  # elements of an input: of one long axis, of all tiles
_MAX_MADE = 2**22  # elements of a tensor that the reference makes on the way


# --- lists -------------------------------------------------------------------------------------------------


def _list_cases(target: Target) -> Iterator[Case]:
    """Yields lists of one tensor, and of more than a kernel may have room for."""
    maker = target.make_sweep()
    if any(parameter.kind == "tensors" for parameter in target.contract.parameters):
        for length in (1, 2, 4, 5, 9, 65):
            case = _made(maker, f"lists of {length}", {BATCH: 3}, length=length)
            if target.accepts(case):
                yield case


# --- making cases ------------------------------------------------------------------------------------------


def _largest(maker: Sweep, sizes: dict[str, int], options: dict[str, Any] | None = None) -> int:
    """Returns the elements of the largest input of these sizes; -1 where there is none."""
    named = maker.option_sets()[0] | maker.base_sizes() | sizes | (options or {})
    try:
        shapes = [shape_of(p.type, named, (sizes.get(BATCH, 1),)) for p in maker.contract.tensors]
    except ZeroDivisionError:
        return -1
    return -1 if any(size < 0 for shape in shapes for size in shape) else max(map(math.prod, shapes))


def _made(
    maker: Sweep,
    label: str,
    sizes: dict[str, int],
    dtype: torch.dtype | None = None,
    filled: dict[str, Fill] | None = None,
    options: dict[str, Any] | None = None,
    length: int = 3,
) -> Case:
    """Returns a case, by default in the first dtype, with these sizes of its axes, the variadic ones among them."""
    dtype = dtype or maker.contract.scalar_dtypes[0]
    maker.seed = zlib.crc32(label.encode())  # else one row is the same in all sizes
    named = maker.base_sizes() | {name: size for name, size in sizes.items() if name in maker.long_axes()}
    chosen = options or maker.option_sets()[0]
    return maker.make(label, dtype, named, (sizes.get(BATCH, 1),), chosen, filled=filled, length=length)


def _axis_names(parameter: Parameter) -> list[str]:
    """Returns the name of each axis of a tensor, in order; "" for one of fixed or computed size."""
    return [BATCH if isinstance(a, Variadic) else a.name if isinstance(a, Named) else "" for a in parameter.type.axes]


def _count(maker: Sweep, parameter: Parameter, sizes: dict[str, int]) -> int:
    values = maker.contract.name_arguments(_made(maker, "", sizes).values)
    return values[parameter.name].numel()
