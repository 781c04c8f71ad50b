"""Samples with other sizes and with other options, as far as the reference takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch

from opwright._torch import tree_unflatten
from opwright.contract.sweep import Case
from opwright.verify.inputs.budget import is_too_large, parts_of, takes_longer
from opwright.verify.oracle import are_finite, to_oracle, try_reference
from opwright.verify.target import Target
from opwright.verify.tensors import are_same, copy_of, count_elements, storage_bytes, tensors_of

_ROWS = 65_599  # more than a GPU's grid has along its second axis, and one less than whole blocks of 64
_WIDTHS = (5, 2, None)  # that the other axes are cut to; None: they stay, where the reference wants it
# Of all inputs. The oracle computes the long case a dozen times, in float64; the large one is for measuring.
_MAX_ELEMENTS, _MAX_ENLARGED = {"default": 2**22, "full": 2**23}, 2**25
# Of another axis: more than a block of a GPU's, and one less than whole blocks of 128: each step of a tail is taken.
_WIDE = (4223, 255)
_NARROW = (2, 3)
_MAX_UNEQUAL = 3  # cases with unequal axes in place of equal ones
# For a call of the reference with an eighth of the rows; the oracle calls it a dozen times with all of them. What is only
# measured may be slower, and a candidate, which is called once.
_ORACLE_SECONDS, _MEASURED_SECONDS, _SLOWER = 0.02, 0.1, 10


def resized_cases(target: Target) -> Iterator[Case]:
    """Yields of each sample an empty part, along its first axis and along its last; of one a long case, and wide ones."""
    given = _given(target)
    for case in given:
        leading = _leading(case)
        if leading is not None:
            forms = _forms(_outputs(target, case))
            for size in dict.fromkeys((leading.shape[0], leading.shape[-1])):
                made = _change(case, "empty", lambda _, t, size=size: _cut(t, lambda s: 0 if s == size else s))
                # The mean of nothing is NaN, and a sum that a loop adds up is the integer 0.
                if forms and _forms(_outputs(target, made, is_finite=True)) == forms:
                    yield made
    long = next(filter(None, (_long(target, case) for case in sorted(given, key=_elements))), None)
    if long is not None:
        yield long
    for case in sorted(given, key=_elements)[:1]:
        leading = _leading(case)
        sizes = leading.shape[::-1] if leading is not None else ()
        for size in dict.fromkeys(s for s in sizes if s > 1):
            # One row, but no other axis of one: what was made for weights of 3 would be repeated along it without an error.
            places = _places_of(case, size)
            first = (*((_WIDE,) if long is None else ()), _NARROW, (1,))
            for tried in first if size == leading.shape[0] else (_WIDE, _NARROW):
                yield from islice(filter(None, (_of_size(target, case, places, size, n) for n in tried)), 1)
        batch = _batch_of_one(case)
        if batch:
            yield from islice(filter(None, (_of_size(target, case, batch, 1, size) for size in _NARROW[::-1])), 1)
        yield from islice(_with_unequal_axes(target, case), _MAX_UNEQUAL)


def _forms(outputs: list[torch.Tensor]) -> list[tuple[torch.dtype, int]]:
    return [(output.dtype, output.ndim) for output in outputs]


def is_of_one(case: Case) -> bool:
    """Returns whether an axis of a sample has one entry here: where a view will do for a sum."""
    return ", 1 where " in case.label


def enlarge(target: Target, bytes_of_outputs: int) -> Case | None:
    """Returns a sample with as many times its rows as outputs of this size need; None where there is none."""
    for case in sorted(_given(target), key=_elements, reverse=True):
        leading = _leading(case)
        made = sum(storage_bytes(o).numel() for o in _outputs(target, case))
        if leading is None or not made:
            continue
        times = -(-bytes_of_outputs // made)
        rows = times * leading.shape[0]
        what = f"{times} times the rows"
        found = _lengthen(target, case, rows, None, _MAX_ENLARGED, what, _MEASURED_SECONDS)
        if found is not None and try_reference(target.run, target.inputs(found)) is not None:
            return found
    return None


def _given(target: Target) -> list[Case]:
    if target.callables is None or not target.expand:
        return []
    return [case for case in target.cases() if "," not in case.label]


def _long(target: Target, case: Case) -> Case | None:
    most, what = _MAX_ELEMENTS[target.effort], f"{_ROWS} rows"
    found = (_lengthen(target, case, _ROWS, width, most, what, _ORACLE_SECONDS) for width in _WIDTHS)
    return next(filter(None, found), None)


def _lengthen(
    target: Target, case: Case, rows: int, width: int | None, most: int, what: str, seconds: float
) -> Case | None:
    """Returns a case with more entries along the first axis, which results have too; None where that is not an input.

    They are those of the sample again and again, in all tensors that have as many of them, or in the first alone.

    Args:
        width: what the other axes are cut to; None: they stay.
        most: elements of all inputs.
        seconds: for a call with an eighth of the rows.
    """
    leading = _leading(case)
    if leading is None or leading.shape[0] >= rows:
        return None
    count = leading.shape[0]
    for is_shared in (True, False):

        def resized(rows: int, is_shared: bool = is_shared) -> Case:
            def change(_: int, tensor: torch.Tensor) -> torch.Tensor:
                is_long = tensor.shape[0] == count and (is_shared or tensor is leading)
                kept = _cut(tensor, lambda s: s if width is None else min(s, width), first=int(is_long))
                return kept[torch.arange(rows, device=kept.device) % count] if is_long else kept

            return _change(case, what, change)

        of_one = _elements(resized(2)) - _elements(resized(1))
        if of_one * rows > most:
            continue
        parts = [resized(size) for size in parts_of(rows)]
        if is_too_large(target.reference, parts, 2 * most, partial(_is_slow, target, seconds=seconds)):
            continue
        made = resized(rows)
        outputs = _outputs(target, made)
        at = next(i for i, v in enumerate(case.values) if v is leading)
        if any(o.ndim and o.shape[0] == rows for o in outputs) and (
            is_shared or _depends_on_added(target, made, outputs, frozenset({(at, 0)}), count)
        ):
            return made
    return None


_Places = frozenset[tuple[int, int]]  # a tensor among the values of a case, and an axis of it


def _places_of(case: Case, size: int) -> _Places:
    """Returns the axes of a size."""
    arguments = enumerate(case.values[: case.values[-1].arguments])
    shapes = [(i, tuple(v.shape)) for i, v in arguments if isinstance(v, torch.Tensor)]
    return frozenset((i, dim) for i, shape in shapes for dim, s in enumerate(shape) if s == size)


def _batch_of_one(case: Case) -> _Places:
    """Returns the first axis of all tensors where it has one entry and they have one shape; else no axis.

    In a smaller tensor it may be there to be repeated, as that of a bias.
    """
    arguments = case.values[: case.values[-1].arguments]
    tensors = {i: v for i, v in enumerate(arguments) if isinstance(v, torch.Tensor)}
    shapes = {tuple(v.shape) for v in tensors.values()}
    is_batch = len(shapes) == 1 and min(shapes)[:1] == (1,) and len(min(shapes)) > 1
    return frozenset((i, 0) for i in tensors) if is_batch else frozenset()


def _with_unequal_axes(target: Target, case: Case) -> Iterator[Case]:
    """Yields cases in which some of the axes of one size have another: an image of a sample may be a square.

    Those are an axis of all tensors, of all but the first, as of keys and values beside queries, or of the first alone.
    """
    first = next((i for i, v in enumerate(case.values) if isinstance(v, torch.Tensor)), 0)
    sizes = {s for t in _tensors(case) for s in t.shape if s > 1}
    for size in sorted(sizes):
        places = _places_of(case, size)
        of_all = [frozenset(p for p in places if p[1] == dim) for dim in sorted({dim for _, dim in places})]
        behind = [frozenset(p for p in group if p[0] != first) for group in of_all if (first, min(group)[1]) in group]
        alone = [frozenset({p}) for p in sorted(places) if p[0] == first]
        for group in dict.fromkeys((*of_all, *behind, *alone)):
            if group and group != places:
                tried = (_of_size(target, case, group, size, wanted) for wanted in (size + 3, 2 * size))
                yield from islice(filter(None, tried), 1)


def _of_size(target: Target, case: Case, places: _Places, size: int, wanted: int) -> Case | None:
    """Returns a case where some axes of one size have another; None where that is not an input.

    Their entries are those of the sample, drawn at random; of real numbers none comes twice: indices of equal numbers may
    come in any order.
    """
    generator = torch.Generator().manual_seed(0)

    def resized(wanted: int) -> Case:
        def change(i: int, tensor: torch.Tensor) -> torch.Tensor:
            at = [dim for dim in range(tensor.ndim) if (i, dim) in places]
            kept = tensor.detach()
            for dim in range(kept.ndim):
                if dim in at:
                    drawn = torch.randint(size, (wanted,), generator=generator).to(kept.device)
                    kept = kept.index_select(dim, drawn)
                else:
                    kept = kept.narrow(dim, 0, min(kept.shape[dim], _WIDTHS[0]))
            kept = kept.clone(memory_format=torch.contiguous_format)
            if not at or not kept.is_floating_point() or bool((tensor == tensor.round()).all()):
                return kept
            # Towards zero, where probabilities stay what they are.
            less = 1 - torch.rand(kept.shape, generator=generator, dtype=torch.float64) / 2
            return kept * less.to(kept)

        return _change(case, f"{wanted} where {size} are{_tell_places(target, case, places, size)}", change)

    most = _MAX_ELEMENTS[target.effort]
    shapes = ([wanted if s == size else min(s, _WIDTHS[0]) for s in tensor.shape] for tensor in _tensors(case))
    if wanted == size or (wanted in _WIDE and wanted < size) or sum(map(math.prod, shapes)) > most:
        return None
    parts = [resized(size) for size in parts_of(wanted)]
    is_slow = partial(_is_slow, target, seconds=_ORACLE_SECONDS)
    if wanted == _WIDE[0] and is_too_large(target.reference, parts, 2 * most, is_slow):
        return None
    made = resized(wanted)
    outputs = _outputs(target, made, is_finite=True)
    is_half = any(t.is_floating_point() and t.element_size() < 4 for t in tensors_of(made.values))
    if not outputs or (is_half and not all(o.is_floating_point() for o in outputs)):
        return None
    if places != _places_of(case, size) and not _depends_on_added(target, made, outputs, places, size):
        return None
    try:
        return None if is_slow(made) else made
    except Exception:  # the candidate refuses
        return None


def _depends_on_added(target: Target, case: Case, outputs: list[torch.Tensor], places: _Places, size: int) -> bool:
    """Returns whether the outputs of a case depend on what these axes have beyond a size.

    They do not if the reference loops over another, shorter tensor.
    """

    def change(i: int, tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        for dim in (dim for j, dim in places if j == i and tensor.shape[dim] > size):
            added = changed.narrow(dim, size, tensor.shape[dim] - size)
            added.copy_(changed.narrow(dim, 0, 1).expand_as(added))
        return changed

    changed = _outputs(target, _change(case, "", change))
    return len(changed) != len(outputs) or not are_same(outputs, changed)


def _tell_places(target: Target, case: Case, places: _Places, size: int) -> str:
    """Returns which axes of a size are meant, "" where all are."""
    if places == _places_of(case, size):
        return ""
    names = target.argument_names(case)
    return " in " + ", ".join(f"axis {dim} of {names[i]}" for i, dim in sorted(places))


def _is_slow(target: Target, case: Case, seconds: float) -> bool:
    """Returns whether a call of the reference takes longer, or one of the candidate many times as long."""
    return any(
        takes_longer(call, lambda: target.inputs(case), most)
        for call, most in ((target.reference, seconds), (target.run, _SLOWER * seconds))
    )


def _outputs(target: Target, case: Case, is_finite: bool = False) -> list[torch.Tensor]:
    """Returns the outputs of the reference; none if it refuses, or where they must be finite and are not."""
    exact = try_reference(target.reference, case.values, is_exact=True)
    plain = try_reference(target.reference, case.values)
    is_input = exact is not None and plain is not None and (not is_finite or are_finite(exact))
    return tensors_of(plain) if is_input else []


def _leading(case: Case) -> torch.Tensor | None:
    """Returns the first tensor among the arguments that has axes and elements."""
    return next((t for t in _tensors(case) if t.ndim and t.numel()), None)


def _tensors(case: Case) -> list[torch.Tensor]:
    return tensors_of(case.values[: case.values[-1].arguments])


def _change(case: Case, what: str, change: Callable[[int, torch.Tensor], torch.Tensor]) -> Case:
    """Returns a case with the tensors among its arguments changed; parameters of a module stay.

    `change` takes the place of a tensor among the values as well: one may be there twice.
    """
    count = case.values[-1].arguments
    values = [
        change(i, v) if i < count and isinstance(v, torch.Tensor) and v.ndim else v for i, v in enumerate(case.values)
    ]
    return Case(f"{case.label}, {what}", tuple(values), case.options)


def _cut(tensor: torch.Tensor, size_of: Callable[[int], int], first: int = 0) -> torch.Tensor:
    """Returns the part with the first so many entries of each axis, from axis `first` on; contiguous."""
    part = tensor.detach()
    for dim in range(first, tensor.ndim):
        part = part.narrow(dim, 0, size_of(tensor.shape[dim]))
    return part.clone(memory_format=torch.contiguous_format)


def _elements(case: Case) -> int:
    return count_elements(case.values)


_MAX_SAMPLE = 2**20  # of a sample: the oracle computes each case a dozen times
_MAX_GROWTH = 8  # times the outputs of the sample
_MAX_OTHERS = 2  # other values of an integer: 0 and 1 beside -1 are two axes, 8 and 2 beside 4 two numbers of groups


def cases_with_other_options(target: Target) -> Iterator[Case]:
    """Yields the first sample with each set of options with one of them changed, where that changes the results."""
    seen = set()
    for case in _given(target):
        count = case.values[-1].arguments
        options = {i: v for i, v in enumerate(case.values[:count]) if isinstance(v, (bool, int, float))}
        key = tuple(options.items())
        if key in seen or _elements(case) > _MAX_SAMPLE:
            continue
        seen.add(key)
        before = _outputs_of(target, case)
        for i, value in options.items():
            found = 0
            for other in _others(value):
                made = _with_option(case, i, other)
                after = _outputs_of(target, made)
                if not before or not after or count_elements(after) > _MAX_GROWTH * count_elements(before):
                    continue
                if len(before) != len(after) or not are_same(before, after):
                    yield made
                    found += 1
                if found == (1 if isinstance(value, (bool, float)) else _MAX_OTHERS):
                    break


def _others(value: bool | int | float) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        # No round number: what is made an integer, or rounded to 16 bits, is seen. What is below 1 stays below 1.
        return [value * 0.6180339, value * 2] if value else [0.6180339]
    tried = (value + 1, -1, value - 1, 2 * value, value // 2)  # axes are counted from the end as well
    return [v for v in dict.fromkeys(tried) if v != value]


def _with_option(case: Case, at: int, value: Any) -> Case:
    values = [value if i == at else v for i, v in enumerate(case.values)]
    assembly = case.values[-1]
    args, kwargs = tree_unflatten(list(range(assembly.arguments)), assembly.spec)
    name = next((f"`{name}`" for name, i in kwargs.items() if i == at), "")
    name = name or next((f"argument {number}" for number, i in enumerate(args) if i == at), "an option")
    options = {key: value if f"`{key}`" == name else v for key, v in case.options.items()}
    return Case(f"{case.label}, {name} {value} for {case.values[at]}", tuple(values), options)


def _outputs_of(target: Target, case: Case) -> list[torch.Tensor]:
    """Returns the outputs of the reference; none if it refuses, draws random numbers or writes into other arguments."""
    found = []
    try:
        for _ in range(2):
            values = copy_of(list(case.values))
            with torch.no_grad():
                found.append(tensors_of(target.reference(values)))
            pairs = enumerate(zip(case.values, values, strict=True))
            if any(not are_same(tensors_of([a]), tensors_of([b])) for i, (a, b) in pairs if i not in target.mutated()):
                return []
        with torch.no_grad():
            exact = tensors_of(target.reference([to_oracle(v) for v in case.values]))
    except Exception:  # whatever a reference may raise to refuse
        return []
    return found[0] if are_same(*found) and are_finite(exact) else []
