"""Test inputs that follow from a contract: shapes, layouts, values, options."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from opwright.contract.axes import Anonymous, Axis, Computed, Fixed, Variadic, names_in
from opwright.contract.contract import MISSING, Contract, Parameter
from opwright.contract.domains import Range
from opwright.contract.dtypes import describe
from opwright.contract.fill import APART, LAYOUTS, every_value, lay_out, shape_of, tensor_dtype, with_special_values

_PRIMES = (7, 13, 5, 11, 3, 17, 19, 23)
# Sizes of the larger cases: past every vector width with a remainder, and enough elements that
# parallel kernels use all their threads.
_LARGE = (1031, 67, 37, 41, 29, 23, 19, 17)
_LARGE_BATCH = (3, 13)
# Sets of options; more of them where that many do not hold each option alone and each pair of options.
_MAX_OPTION_SETS = {"default": 4, "full": 16}
_MAX_FLAG_SETS = 8  # of options that are all flags or choices: each combination may be a path of its own
_MAX_COMBINATIONS = 2**12  # from which the sets are chosen
_MOST_ELEMENTS = 48 * 1024  # three times what one thread takes alone
# Sizes of the aligned cases: multiples of every vector width and tile, so that only the fast path runs.
_ALIGNED = (256, 64, 32, 16, 128, 48, 80, 96)
_ALIGNED_ELEMENTS = 64 * 1024
_MAX_SHORT = 1024  # the size of an axis that is not to be long: a reference may compare all its entries with each other
_SCALES = (10.0, 1e-3, 1.0, 1e3)  # of random numbers
_MOST_ORDERS = 120  # of sizes: all of five axes
_APART = 89  # rows for special values: one of them each
_MANY_ROWS = 65_601  # more than a GPU's grid has along its second axis
# More than a block of threads or its shared memory takes and, where that may cost more, than 16 bits count.
LONG = {"default": 16_411, "full": 65_601}

_STRIDED = ("transposed", "sliced")  # of LAYOUTS; the last axis of both has a stride other than 1
_LENGTHS = (1, 5)  # of lists, beside the usual one
# Sizes of the tensors of a list, where each may have its own: the first is neither always the largest nor the smallest.
_UNEQUAL = ((3, 1, 7), (1, 8, 2), (5, 0, 2), (67, 1, 1031))

# Makes a tensor of a shape and dtype.
Fill = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One input of an operator.

    Attributes:
        label: what is special about it: "base", "empty n", "sliced", "special values", ...
        values: the arguments in schema order.
        options: those that are not tensors, by name.
        names: the names of all arguments, in schema order; none where there is no contract.
        dtype: what the tensors have whose dtype may be one of several; None where there are none.
    """

    label: str
    values: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        tensors = []
        for value, name in itertools.zip_longest(self.values, self.names, fillvalue=""):
            for number, tensor in enumerate(tensors_in(value)):
                index = "" if isinstance(value, torch.Tensor) else f"[{number}]"
                tensors.append((f"{name}{index}=" if name else "") + describe(tensor).removesuffix(" cpu"))
        options = [f"{name}={value!r}" for name, value in self.options.items()]
        return f"{' '.join([*tensors, *options])} ({self.label})"


def without_names(text: str) -> str:
    """Returns the text of a case, or one with cases in it, without the names of tensors.

    Records are joined by it: `f32[2, 3] f32[3]` stays the same input when a parameter gets another name.
    """
    return _NAME_OF_TENSOR.sub("", text)


_NAME_OF_TENSOR = re.compile(r"\b\w+(\[\d+\])?=(?=[a-z]+[0-9a-z_]*\[)")


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [v for v in value if isinstance(v, torch.Tensor)] if isinstance(value, (list, tuple)) else []


class Sweep:
    """Makes the cases of a contract. The same seed makes the same cases.

    Attributes:
        short: the axes that aligned cases do not make long.
        share: how many elements large cases have, of those that are usual: fewer where the reference is slow.
    """

    def __init__(
        self,
        contract: Contract,
        seed: int = 0,
        forward: tuple[Contract, Callable[[Sequence[Any]], Sequence[Any]]] | None = None,
        effort: str = "default",
    ) -> None:
        """Makes a sweep.

        Args:
            effort: how many cases there are of each kind: "default" or "full".
            forward: for a backward, the contract and the reference of its operator: arguments that are
                outputs of it are computed, because not every tensor can be one.
        """
        self.contract = contract
        self.seed = seed
        self.forward = forward
        self.effort = effort
        self.short: frozenset[str] = frozenset()
        self.share = 1.0
        self.names = _axis_names(contract)
        self.variadics = [
            axis.name for p in contract.tensors for axis in p.type.axes if isinstance(axis, Variadic) and axis.name
        ]

    # --- shapes ----------------------------------------------------------------------------------------

    def base_sizes(self, table: Sequence[int] = _PRIMES, options: Mapping[str, Any] | None = None) -> dict[str, int]:
        """Returns a size for every named axis, all different, in an order that leaves no output empty if there is one."""
        fixed = self._int_sizes(options)
        free = [name for name in self.names if name not in fixed]
        orders = itertools.permutations(itertools.islice(itertools.cycle(table), len(free)))
        tried = (fixed | dict(zip(free, order, strict=True)) for order in itertools.islice(orders, _MOST_ORDERS))
        return next(filter(self._has_outputs, tried), fixed | dict(zip(free, itertools.cycle(table), strict=False)))

    def _has_outputs(self, sizes: Mapping[str, int]) -> bool:
        """Whether all computed sizes of outputs, such as `t-k+1`, are positive."""
        axes = [axis for output in self.contract.outputs for axis in output.type.axes if isinstance(axis, Computed)]
        known = [axis for axis in axes if set(axis.names) <= set(sizes)]
        try:
            return all(axis.evaluate(sizes) > 0 for axis in known)
        except ZeroDivisionError:
            return False

    def large_sizes(
        self, options: Mapping[str, Any] | None = None, share: float | None = None
    ) -> tuple[dict[str, int], tuple[int, ...]]:
        """Returns sizes for large cases: enough elements for all threads, and not many more.

        Args:
            share: how many elements, as a share of the usual number; by default that of the sweep.
        """
        if share is None:
            share = self.share
        most = int(share * _MOST_ELEMENTS)
        sizes = self.base_sizes(_LARGE, options)
        free = self.long_axes()
        batch = _LARGE_BATCH if free else (_LARGE_BATCH[0], most // _LARGE_BATCH[0] // 2 * 2 - 1)

        def elements() -> int:
            return max(math.prod(shape_of(p.type, sizes, batch)) for p in self.contract.tensors)

        while elements() > most and any(sizes[name] > 3 for name in free):
            widest = max(free, key=sizes.__getitem__)
            sizes[widest] = sizes[widest] // 2 | 1
        return sizes, batch

    def _int_sizes(self, options: Mapping[str, Any] | None = None) -> dict[str, int]:
        """The sizes that arguments give: integers, for a backward those of its forward as well."""
        contracts = (self.contract,) if self.forward is None else (self.forward[0], self.contract)
        ints = [p for contract in contracts for p in contract.parameters if p.kind == "int"]
        return {p.name: (options or {}).get(p.name, _usual_int(p)) for p in ints}

    def aligned_sizes(self, options: Mapping[str, Any] | None = None) -> tuple[dict[str, int], tuple[int, ...]]:
        """Returns sizes that are multiples of every vector width, for more than 64k elements."""
        sizes, rows = self.base_sizes(_ALIGNED, options), 8
        free = self.long_axes()
        least = _ALIGNED_ELEMENTS * self.share * (16 if self.effort == "full" else 1)

        def elements() -> int:
            return max(math.prod(shape_of(p.type, sizes, (rows,))) for p in self.contract.tensors)

        # Of many axes, or multiples of them, even the smallest table is large.
        while elements() > 4 * least and any(sizes[name] > 16 for name in free):
            sizes[max(free, key=sizes.__getitem__)] //= 2
        if self._has_variadic:
            rows += 8 * math.ceil(max(least - elements(), 0) / max(elements(), 1))
            while elements() <= least and elements() > 0:
                rows += 8 * (rows // 64 + 1)
        else:
            while 0 < elements() <= least:
                growing = [name for name in free if name not in self.short or sizes[name] < _MAX_SHORT]
                if not growing:
                    break
                sizes[max(growing, key=sizes.__getitem__)] *= 2
        return sizes, (rows,)

    def cases(self, dtype: torch.dtype | None) -> Iterator[Case]:
        """Yields the cases for one dtype of the operator's floating-point family, the small ones first.

        A full sweep has every kind of case for every dtype and every set of options. The default one has them for the
        first of both. The other dtypes and options take turns, so that each of them meets some of each kind.
        """
        first, *others = self.option_sets()
        family = self.contract.scalar_family
        dtypes = family.dtypes if family is not None else (dtype,)
        place = dtypes.index(dtype)
        is_full, is_main = self.effort == "full", place == 0
        yield from self._small_cases(dtype, first, others, place)
        # Enough elements for all special values, also where there is no other axis than those of the batch.
        rows = (5,) if self.long_axes() else (_LARGE[0],)
        for number, options in enumerate((first, *others)):
            (large, large_batch), (aligned, aligned_batch) = self.large_sizes(options), self.aligned_sizes(options)
            turn = number + place
            is_whole = is_full or not turn
            scales = _SCALES if is_whole else dict.fromkeys((_SCALES[0], _SCALES[turn % len(_SCALES)]))
            for scale in scales if is_whole or not number else (_SCALES[turn % len(_SCALES)],):
                yield self.make(f"values around {scale:g}", dtype, large, rows, options, scale=scale)
            yield from self._special_cases(dtype, large, rows, options, is_whole)
            if is_full or turn % len(dtypes) == 0 or (not number and dtype == dtypes[-1]):
                whole = self.large_sizes(options, share=1.0) if is_main and not number else (large, large_batch)
                yield self.make("large", dtype, *whole, options)
            if is_full or not (number or self._every_value_of):
                yield self.make("aligned", dtype, aligned, aligned_batch, options)
            if self._every_value_of and (is_full or not number):
                yield self.make("every value", dtype, aligned, aligned_batch, options, every=self._every_value_of)
        large, large_batch = self.large_sizes()
        if is_main or is_full:
            for layout in LAYOUTS if is_full else LAYOUTS[1:2]:
                yield self.make(f"large, {layout}", dtype, large, large_batch, first, layout=layout)
            yield self.make("large, mixed layouts", dtype, large, large_batch, first, layout=self._mixed_layouts(1))
        # Two columns: of one, softmax and its like are constant.
        two = large | dict.fromkeys(self.long_axes(), 2)
        if self._has_variadic and (is_main or is_full):
            yield self.make("many rows", dtype, two, (_MANY_ROWS,), first)
        if self._is_summed_over_batch and (is_full or dtype == dtypes[-1]):
            positive = {p.name: _positive for p in self.contract.tensors if p.type.family.has_floats}
            yield self.make("many rows of positive numbers", dtype, two, (_MANY_ROWS,), first, filled=positive)

    @property
    def _is_summed_over_batch(self) -> bool:
        """Whether an output has no batch axes where an input has them.

        A sum of many rows may be kept in 16 bits. One of positive numbers then stays behind; one of any is small
        beside its terms, and may err as much.
        """
        return self._has_variadic and any(output.type.variadic_at is None for output in self.contract.outputs)

    @property
    def _rounds(self) -> bool:
        """Whether an output may be rounded to integers, as by quantisation.

        Integers of 32 or 64 bits may be indices instead: where values are equal, more than one index is right.
        """
        families = [output.type.family for output in self.contract.outputs]
        is_index = any(max(dtype.itemsize for dtype in f.dtypes) > 2 for f in families if not f.has_floats)
        return self.forward is None and not is_index

    def long_axes(self) -> list[str]:
        """Returns the named axes that may have any size."""
        return [name for name in self.names if name not in self._int_sizes()]

    def long(self, dtype: torch.dtype | None, name: str, size: int) -> Case:
        """Returns a case in which one axis has this size, and the others two entries."""
        options = self.option_sets()[0]
        sizes = self._int_sizes() | dict.fromkeys(self.long_axes(), 2) | {name: size}
        return self.make(f"long {name}", dtype, sizes, (2,), options)

    def _small_cases(
        self, dtype: torch.dtype | None, first: Mapping[str, Any], others: Sequence[Mapping[str, Any]], place: int
    ) -> Iterator[Case]:
        is_full = self.effort == "full"
        base = self.base_sizes()
        batch = (2, 3)
        ones = base | dict.fromkeys(self.long_axes(), 1)
        for options in [first, *others] if not place else [first]:
            yield self.make("one element", dtype, ones, (1,), options)
        if self.variadics:
            yield self.make("no batch axes", dtype, base, (), first)
            yield self.make("four batch axes", dtype, base, (2, 1, 3, 2), first)
        yield self.make("base", dtype, base, batch, first)
        for options in others:
            yield self.make("base", dtype, self.base_sizes(options=options), batch, options)
        if self._rounds and not place:
            names = [p.name for p in self.contract.tensors if p.type.family.has_floats]
            halves = {name: partial(_halves, i) for i, name in enumerate(names)}
            yield self.make("multiples of a half", dtype, base, batch, first, filled=halves)
        for label, sizes, shape in self._empty(base, batch):
            yield self.make(label, dtype, sizes, shape, first)
        # Variadic axes that cannot be joined are copied, so that is about others.
        is_deep = any(p.type.rank > 2 and p.type.variadic_at is None for p in self.contract.tensors)
        for layout in (*LAYOUTS, APART) if is_deep else LAYOUTS:
            yield self.make(layout, dtype, base, batch, first, layout=layout)
        # A path for strides may ignore an option, or what is absent. One batch axis is passed on with its stride;
        # several that cannot be joined are copied.
        strided = LAYOUTS if is_full else _STRIDED[place % len(_STRIDED) :][:1]
        for layout, options in itertools.product(strided, others):
            yield self.make(layout, dtype, self.base_sizes(options=options), (7,), options, layout=layout)
        for name in [p.name for p in self.contract.tensors if p.optional]:
            yield self.make(f"without {name}", dtype, base, batch, first, absent={name})
            for layout in strided:
                yield self.make(f"without {name}, {layout}", dtype, base, (7,), first, absent={name}, layout=layout)
        if not place and any(p.kind == "tensors" for p in self.contract.tensors):
            for length in _LENGTHS:
                yield self.make(f"lists of {length}", dtype, base, batch, first, length=length)
        lists = [p for p in self.contract.tensors if p.kind == "tensors"]
        if any(_is_free(axis) for p in lists for axis in p.type.axes):
            for own in _UNEQUAL if is_full or not place else _UNEQUAL[:1]:
                label = f"lists with sizes of {', '.join(map(str, own))}"
                yield self.make(label, dtype, base, batch, first, own=own, length=len(own))
        names = [p.name for p in self.contract.tensors]
        if len(names) > 1:
            for i, name in enumerate(names):
                # Strided alone, misaligned alone: a fast path may ask for neither of one tensor.
                some = ("sliced", "offset") if not place else (LAYOUTS[(i + place) % len(LAYOUTS)],)
                for layout in LAYOUTS if is_full else some:
                    yield self.make(f"only {name} {layout}", dtype, base, batch, first, layout={name: layout})
            for shift in range(len(LAYOUTS)) if is_full else (place,):
                mixed = self._mixed_layouts(shift)
                yield self.make("mixed layouts", dtype, base, batch, first, layout=mixed)
        if self.variadics:
            for layout in LAYOUTS if is_full or not place else LAYOUTS[place % 2 :: 2]:
                yield self.make(f"{layout}, one batch axis", dtype, base, (7,), first, layout=layout)

    def _special_cases(
        self,
        dtype: torch.dtype | None,
        sizes: Mapping[str, int],
        rows: tuple[int, ...],
        options: Mapping[str, Any],
        one_by_one: bool,
    ) -> Iterator[Case]:
        """Yields special values in each floating-point tensor alone, then in all: at other places, at the same."""
        names = [p.name for p in self.contract.tensors if p.type.family.has_floats]
        if one_by_one and len(names) > 1:
            for name in names:
                yield self.make(f"special values in {name}", dtype, sizes, rows, options, special={name: 0})
            yield self.make("equal special values", dtype, sizes, rows, options, special=dict.fromkeys(names, 0))
        base = self.base_sizes()
        single = [p.name for p in self.contract.tensors if p.name in names and not p.type.axes] if one_by_one else []
        for (shift, what), name in itertools.product(((2, "infinity"), (3, "-infinity"), (4, "NaN")), single):
            yield self.make(f"{what} in {name}", dtype, base, (2,), options, special={name: shift})
        for name in names if one_by_one else ():
            label = f"special values in {name}, apart"
            yield self.make(label, dtype, base, (_APART,), options, special={name: 0}, apart=True)
        together = {name: 7 * i for i, name in enumerate(names)}
        yield self.make("special values", dtype, sizes, rows, options, special=together)

    def _mixed_layouts(self, shift: int) -> dict[str, str]:
        names = [p.name for p in self.contract.tensors]
        return {name: LAYOUTS[(i + shift) % len(LAYOUTS)] for i, name in enumerate(names)}

    @property
    def _has_variadic(self) -> bool:
        return any(p.type.variadic_at is not None for p in self.contract.tensors)

    @property
    def _every_value_of(self) -> str | None:
        """The tensor that is to take every value of a 16-bit type: of an operator that maps one element by element.

        It is the first tensor with the axes of an output, whatever the others are.
        """
        inner = self.forward[0] if self.forward is not None else self.contract
        candidates = [
            p.name
            for p in inner.tensors
            if p.kind == "tensor" and all(p.type.axes == o.type.axes for o in inner.outputs)
        ]
        names = {p.name for p in self.contract.tensors}
        return candidates[0] if inner.outputs and candidates and candidates[0] in names else None

    def _empty(
        self, base: Mapping[str, int], batch: tuple[int, ...]
    ) -> Iterator[tuple[str, dict[str, int], tuple[int, ...]]]:
        if self.variadics:
            yield "empty batch", dict(base), (0,)
        for name in self.long_axes():
            yield f"empty {name}", {**base, name: 0}, batch

    def option_sets(self) -> list[dict[str, Any]]:
        """Returns combinations of options: the defaults, each option changed alone, others until all pairs are covered.

        Integers and numbers have a second value: a kernel that ignores one is right at one value only.
        """
        axes: list[list[tuple[str, Any]]] = []
        for p in self.contract.parameters:
            if p.kind == "choice":
                values = sorted(p.choices, key=lambda choice, p=p: choice != p.default)
            elif p.kind == "bool":
                values = [False, True] if p.default in (MISSING, False) else [True, False]
            elif p.kind == "int":
                usual = _usual_int(p)
                values = [usual, *(usual + step for step in ((1, -1) if usual >= 0 else (-1, 1)))]
            elif p.kind == "float":
                usual = 0.5 if p.default is MISSING else p.default
                # A number that float32 cannot represent: a kernel for float64 may round it to that.
                values = [usual, round(0.7 * usual + 0.13, 9)]
            else:
                continue
            if isinstance(p.domain, Range):
                values = list(dict.fromkeys(nearest_in(p.domain, value, p.kind) for value in values))
            values = values[:2] if p.kind == "int" else values  # the third is for where the second is out of its domain
            axes.append([(p.name, value) for value in values])
        defaults = [values[0] for values in axes]
        alone = [[*defaults[:i], value, *defaults[i + 1 :]] for i, values in enumerate(axes) for value in values[1:]]
        every = [list(combination) for combination in itertools.islice(itertools.product(*axes), _MAX_COMBINATIONS)]
        limit = _MAX_OPTION_SETS[self.effort]
        if all(p.kind in ("bool", "choice") for p in self.contract.parameters if not p.is_tensor):
            limit = max(limit, _MAX_FLAG_SETS)
        if len(every) > limit:
            every = _cover_pairs([defaults, *alone], every, limit)
        return [dict(combination) for combination in every]

    # --- one case ----------------------------------------------------------------------------------------

    def make(
        self,
        label: str,
        dtype: torch.dtype | None,
        sizes: Mapping[str, int],
        batch: tuple[int, ...],
        options: Mapping[str, Any],
        *,
        layout: str | Mapping[str, str] = "contiguous",
        scale: float = 1.0,
        special: Mapping[str, int] | None = None,
        apart: bool = False,
        every: str | None = None,
        absent: frozenset[str] | set[str] = frozenset(),
        filled: Mapping[str, Fill] | None = None,
        length: int = 3,
        own: Sequence[int] = (),
    ) -> Case:
        """Returns a case with these sizes and options.

        Args:
            sizes: of the named axes; an integer among the options that is the size of one comes before.
            layout: of all tensors, or by name; the others are contiguous.
            special: the tensors that get special values, and how far the list of them is turned.
            apart: whether those are spread over the tensor.
            every: the tensor that gets every finite value of a 16-bit type.
            filled: what makes the values of a tensor, in place of random numbers, by name.
            length: of each list of tensors.
            own: sizes of the tensors of a list, in the axes that may differ from tensor to tensor; by default these are
                the same.
        """
        generator = torch.Generator().manual_seed(self.seed)
        special = special or {}
        sizes = dict(sizes) | {p.name: options[p.name] for p in self.contract.parameters if p.kind == "int"}
        values: list[Any] = []
        for parameter in self.contract.parameters:
            if not parameter.is_tensor:
                values.append(options[parameter.name])
            elif parameter.name in absent:
                values.append(None)
            else:
                count = length if parameter.kind == "tensors" else 1
                given = layout if isinstance(layout, str) else layout.get(parameter.name, "contiguous")
                shift = special.get(parameter.name)
                fill = (filled or {}).get(parameter.name)
                made = [
                    self._tensor(
                        _with_size(parameter, own[number], batch) if own and parameter.kind == "tensors" else parameter,
                        dtype,
                        sizes,
                        batch,
                        given if number != 1 else "contiguous",  # a list has several layouts at once
                        scale,
                        shift,
                        apart,
                        parameter.name == every,
                        generator,
                        fill,
                    )
                    for number in range(count)
                ]
                values.append(made if parameter.kind == "tensors" else made[0])
        if self.forward is not None:
            is_special = bool(special) and not apart
            values = self._with_outputs(values, dtype, sizes, batch, options, scale, is_special, length)
        names = tuple(p.name for p in self.contract.parameters)
        return Case(label, tuple(values), dict(options), names, dtype)

    def _with_outputs(
        self,
        values: list[Any],
        dtype: torch.dtype | None,
        sizes: Mapping[str, int],
        batch: tuple[int, ...],
        options: Mapping[str, Any],
        scale: float,
        special: bool,
        length: int,
    ) -> list[Any]:
        """Returns the arguments of a backward with those that are outputs of its operator computed."""
        contract, reference = self.forward
        given = self.contract.name_arguments(values)
        outputs = {o.name: i for i, o in enumerate(contract.outputs)}
        inputs = {p.name for p in contract.parameters}
        if not any(name in outputs and name not in inputs for name in given):
            return values
        maker = Sweep(contract, self.seed + 1)
        chosen = maker.option_sets()[0] | dict(options)
        places = {p.name: 7 * i for i, p in enumerate(contract.tensors)} if special else None
        named = maker.base_sizes() | dict(sizes)
        made = maker.make("forward", dtype, named, batch, chosen, scale=scale, special=places, length=length)
        arguments = [given.get(p.name, v) for p, v in zip(contract.parameters, made.values, strict=True)]
        try:
            with torch.no_grad():
                results = reference(arguments)
        except Exception:  # the forward refuses these inputs: any output will do, if the backward takes it
            return values
        return [
            results[outputs[name]] if name in outputs and name not in inputs else value for name, value in given.items()
        ]

    def _tensor(
        self,
        parameter: Parameter,
        dtype: torch.dtype | None,
        sizes: Mapping[str, int],
        batch: tuple[int, ...],
        layout: str,
        scale: float,
        special: int | None,
        apart: bool,
        every: bool,
        generator: torch.Generator,
        given: Fill | None,
    ) -> torch.Tensor:
        shape = shape_of(parameter.type, sizes, batch)
        own = tensor_dtype(self.contract, parameter.type, dtype)
        domain = domain_in(parameter, sizes)

        def fill(wanted: tuple[int, ...]) -> torch.Tensor:
            if given is not None:
                return within(given(wanted, own), parameter, sizes)
            if own == torch.bool:
                return torch.rand(wanted, generator=generator) > 0.5
            if not own.is_floating_point:
                low, high = integers_in(domain, shape, own)
                return torch.randint(low, high + 1, wanted, generator=generator).to(own)
            noise = torch.randn(wanted, generator=generator, dtype=torch.float64) * scale
            if domain is not None:
                noise = domain.fold(noise)
            if special is not None:
                noise = with_special_values(noise, own, special, apart, parameter.domain)
            if every:
                noise = every_value(noise.shape, own, generator)
            return within(noise.to(own), parameter, sizes)

        if parameter.mutated and layout == "expanded":
            layout = "contiguous"  # writing through stride 0 has no defined result
        return lay_out(fill, shape, layout)


def _positive(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).add(0.5).to(dtype)


def _halves(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Returns numbers from -2 to 2 in steps of a half: some, and some quotients, lie midway between integers."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).div(2).to(dtype)


def _cover_pairs(chosen: list[list[Any]], every: Sequence[list[Any]], least: int) -> list[list[Any]]:
    """Adds combinations to those chosen until each pair of values is in one of them, and there are at least `least`."""

    def pairs_in(combination: list[Any]) -> set[Any]:
        return set(itertools.combinations(combination, 2))

    pending = set().union(*map(pairs_in, every)).difference(*map(pairs_in, chosen))
    while pending:
        best = max(every, key=lambda combination: len(pending & pairs_in(combination)))
        chosen = [*chosen, best]
        pending -= pairs_in(best)
    rest = [combination for combination in every if combination not in chosen]
    return [*chosen, *rest[: max(least - len(chosen), 0)]]


def domain_in(parameter: Parameter, sizes: Mapping[str, int]) -> Range | None:
    """Returns the values that random numbers for a parameter are drawn from; None: any, or none at all."""
    domain = parameter.domain or parameter.likely
    return None if domain is None else domain.within(sizes)


def within(values: torch.Tensor, parameter: Parameter, sizes: Mapping[str, int]) -> torch.Tensor:
    """Returns floating-point numbers with those outside of a declared domain moved into it."""
    domain = None if parameter.domain is None else parameter.domain.within(sizes)
    return domain.fold(values) if domain is not None and values.is_floating_point() else values


def integers_in(domain: Range | None, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
    """Returns the smallest and the largest integer that a tensor of this shape is filled with.

    Without a bounded domain they are small: such that they may be indices of any of its own axes.
    """
    if domain is not None and domain.is_bounded:
        return tuple(map(int, domain.ends(dtype)))
    high = max(min([size for size in shape if size > 0], default=2), 2) - 1
    if domain is None:
        return 0, high
    low, most = map(int, domain.ends(dtype))
    start = low if math.isfinite(domain.low) else most - high if math.isfinite(domain.high) else 0
    return start, min(start + high, most)


def _usual_int(parameter: Parameter) -> int:
    usual = 2 if parameter.default is MISSING else parameter.default
    if isinstance(parameter.domain, Range):
        return nearest_in(parameter.domain, usual, "int")
    return 0 if parameter.domain and parameter.default is MISSING else usual


def nearest_in(domain: Range, value: float, kind: str) -> Any:
    """Returns a number of this kind, "int" or "float"; one in the domain in place of one outside."""
    if domain.contains(value):
        return value
    low, high = domain.ends(torch.int64 if kind == "int" else torch.float64)
    inner = (low + high) / 2 if domain.is_bounded else value
    return max(low, min(value, high)) if kind == "int" else max(low, min(inner, high))


def _is_free(axis: Axis) -> bool:
    """Returns whether an axis, `_` or `...`, may have another size in each tensor of a list."""
    return isinstance(axis, Anonymous) or (isinstance(axis, Variadic) and axis.name is None)


def _with_size(parameter: Parameter, size: int, batch: tuple[int, ...]) -> Parameter:
    """Returns a parameter for one tensor of a list, with this size as `_` and as the last axis of `...`."""
    axes: list[Axis] = []
    for axis in parameter.type.axes:
        if _is_free(axis):
            axes += map(Fixed, batch[:-1] if isinstance(axis, Variadic) else ())
            axis = Fixed(size)
        axes.append(axis)
    return parameter._replace(type=parameter.type._replace(axes=tuple(axes)))


def _axis_names(contract: Contract) -> list[str]:
    return names_in(axis for parameter in contract.tensors for axis in parameter.type.axes)
