"""The inputs of a benchmark, made on the device that is measured, and the calls on them: what must come out of each."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, process_time
from typing import Any

import torch

from opwright._torch import tree_leaves, tree_map
from opwright.contract.axes import names_in
from opwright.contract.contract import Contract, TensorType
from opwright.contract.declared import declared_cases, in_every_dtype, split_sample
from opwright.contract.domains import Range
from opwright.contract.dtypes import Family, short_name
from opwright.contract.fill import lay_out, shape_of, tensor_dtype
from opwright.contract.likely import find_likely
from opwright.contract.memory import overlaps_itself
from opwright.contract.sweep import Case, Sweep, domain_in, integers_in
from opwright.dispatch.operator import Operator
from opwright.dispatch.reference import caller
from opwright.errors import CheckError, plural
from opwright.verify.compare import compare
from opwright.verify.devices import wait_for
from opwright.verify.oracle import Discrete, Expected, expect, with_room
from opwright.verify.target import make_target
from opwright.verify.tensors import copy_of

_USUAL_DTYPES = (torch.float32, torch.bfloat16)
_STAR = "*"  # the axes of `*name`, among those of a sweep
_MAX_SAMPLES = 4  # of each dtype
MAX_ELEMENTS = 1 << 23  # of the largest tensor of a call, where no sizes are given
_SIZES = tuple(1 << k for k in (11, 14, 17, 20, 23))  # elements to try
_MAX_EAGER_SECONDS = 0.5  # for one call of the baseline, on inputs whose sizes are not given


@dataclass(frozen=True)
class Plan:
    """One input to be measured.

    Attributes:
        make: returns the input; another number gives another set of tensors, with other data where the
            data are ours to choose.
        axes: sizes and options that vary over the sweep.
        bytes: of its tensors, and of the results where their sizes are known.
    """

    make: Callable[[int], Case]
    axes: dict[str, Any]
    bytes: int


def plans(
    operator: Operator | None,
    samples: Any,
    sweep: Mapping[str, Sequence[Any]] | None,
    options: Mapping[str, Any] | None,
    dtypes: Sequence[torch.dtype] | None,
    device: torch.device,
    most: int = MAX_ELEMENTS,
) -> list[Plan]:
    """Returns what is to be measured, smallest first within a dtype.

    Args:
        most: elements of the largest tensor of a call, where no sizes are given.
    """
    if operator is None:
        given = map(split_sample, samples() if callable(samples) else samples)
        return [_plan_of(Case(f"sample {i}", (args, kwargs), kwargs), None) for i, (args, kwargs) in enumerate(given)]
    if samples is not None:
        return [_plan_of(case, device) for case in declared_cases(operator.contract, samples)]
    found = list(_sweep_plans(operator, sweep, options, dtypes, device, most))
    is_free = not (sweep or options or operator._sweep)
    if operator._samples is not None and is_free and not _is_taken(operator, found[0].make(0)):
        return _declared_plans(operator, dtypes, device) or found
    return found


def _is_taken(operator: Operator, case: Case) -> bool:
    """Returns whether the reference takes an input."""
    try:
        with torch.no_grad():
            caller(operator.contract, operator.declaration.reference)(copy_of(case.values))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a reference may raise to refuse
        return False
    return True


def _declared_plans(operator: Operator, dtypes: Sequence[torch.dtype] | None, device: torch.device) -> list[Plan]:
    """Returns the largest declared samples of each dtype: no other inputs fit together as the reference wants."""
    contract = operator.contract
    cases = sorted(in_every_dtype(contract, declared_cases(contract, operator._samples)), key=elements_of)
    chosen: list[Case] = []
    for dtype in _dtypes_in(operator, contract.scalar_family, dtypes):
        own = [c for c in cases if dtype is None or dtype in {t.dtype for t in all_tensors(c.values)}]
        chosen += [c for c in own if elements_of(c) and _is_taken(operator, c)][-_MAX_SAMPLES:]
    return [_plan_of(case, device) for case in chosen]


def _plan_of(case: Case, device: torch.device | None) -> Plan:
    """Returns the plan of a given sample, which is moved to the device, and copied for a further set."""

    def make(number: int) -> Case:
        is_there = device is None or all(t.device.type == device.type for t in all_tensors(case.values))
        if number == 0 and is_there:
            return case
        return replace(case, values=copy_of(case.values, None if is_there else device))

    size = sum(size_of(t) for t in all_tensors(case.values))
    return Plan(make, {"elements": elements_of(case)}, size)


def _sweep_plans(
    operator: Operator,
    sweep: Mapping[str, Sequence[Any]] | None,
    options: Mapping[str, Any] | None,
    dtypes: Sequence[torch.dtype] | None,
    device: torch.device,
    most: int,
) -> Iterator[Plan]:
    contract = _read_contract(operator)
    maker = DeviceSweep(contract, device)
    family = contract.scalar_family
    wanted = _dtypes_in(operator, family, dtypes)
    usual = maker.option_sets()[0]
    given: list[dict[str, Sequence[Any]]] = []
    usual_axes = [_read_axes(contract, maker, axes) for axes in operator._sweep] or [_default_sweep(maker, most)]
    asked = _read_axes(contract, maker, sweep or {})
    for declared in usual_axes:
        axes = declared | asked
        if axes not in given:
            given.append(axes)
    for dtype, axes in itertools.product(wanted, given):
        axes = {_STAR: [(256,)] if maker.variadics else [()], **axes}
        for values in itertools.product(*axes.values()):
            point = dict(zip(axes, values, strict=True))
            batch = point.pop(_STAR)
            shape = (batch,) if isinstance(batch, int) else tuple(batch)
            absent = {name for name, value in point.items() if value is None}
            point = {name: value for name, value in point.items() if name not in absent}
            chosen = usual | {n: v for n, v in point.items() if n in usual} | dict(options or {})
            bound = maker.base_sizes() | point | {n: v for n, v in chosen.items() if n in maker.names}
            present = [p for p in contract.tensors if p.name not in absent]
            largest = max(math.prod(shape_of(p.type, bound, shape)) for p in present)
            made = _with_known_size([p.type for p in (*present, *contract.outputs)], bound)
            size = sum(math.prod(shape_of(t, bound, shape)) * tensor_dtype(contract, t, dtype).itemsize for t in made)

            def make(number: int, dtype=dtype, bound=bound, shape=shape, chosen=chosen, absent=absent) -> Case:
                maker = DeviceSweep(contract, device, number)
                return maker.make("bench", dtype, bound, shape, chosen, absent=absent)

            yield Plan(make, {"elements": largest, **point, **chosen}, size)


def _dtypes_in(
    operator: Operator, family: Family | None, asked: Sequence[torch.dtype] | None
) -> list[torch.dtype] | list[None]:
    """Returns the dtypes to measure: those of the asked or the usual ones that an operator has; None alone: its first.

    Raises:
        CheckError: it has none of those that were asked for.
    """
    fixed = [p.type.family for p in operator.contract.tensors]
    families = [family] if family is not None else [f for f in fixed if f.is_floating] or fixed
    there = tuple(dict.fromkeys(dtype for each in families for dtype in each.dtypes))
    found = [dtype for dtype in asked or _USUAL_DTYPES if dtype in there]
    if there and asked and not found:
        raise CheckError(
            operator.declaration.qualified_name,
            f"it has no {' and no '.join(map(short_name, asked))}",
            rows=[("there", ", ".join(map(short_name, there)))],
            hint=f"`--dtype {short_name(there[0])}`",
        )
    return found if found and family is not None else [None]


def _read_contract(operator: Operator) -> Contract:
    """Returns the contract with the values that its inputs are drawn from, where none are declared."""
    if operator.declaration.random:
        return operator.contract
    return find_likely(operator.contract, make_target(operator.function, None, None).reference)


def _read_axes(contract: Contract, maker: Sweep, axes: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Returns the values to go through, those of an axis `*name` as `*`.

    Raises:
        CheckError: there is no such axis or argument, or it cannot have one of the values.
    """
    stars = dict.fromkeys(maker.variadics)
    named = maker.long_axes()
    arguments = [p.name for p in contract.parameters if not p.is_tensor or p.optional]
    found = {}
    for name, values in axes.items():
        is_star = name in stars or (name == "batch" and maker._has_variadic and name not in named)
        if not is_star and name not in (*named, *arguments):
            rows = [("axes", ", ".join([*named, *(f"*{star}" for star in stars)])), ("arguments", ", ".join(arguments))]
            raise CheckError(contract.subject, f"it has no axis `{name}`", rows=[row for row in rows if row[1]])
        for value in values:
            _check_value(contract, name, value, is_star=is_star, is_size=name in maker.names)
        found[_STAR if is_star else name] = values
    return found


def _check_value(contract: Contract, name: str, value: Any, *, is_star: bool, is_size: bool) -> None:
    """Raises CheckError for a value that an axis or an argument cannot have."""
    parameter = next((p for p in contract.parameters if p.name == name), None)
    if is_star:
        sizes = value if isinstance(value, (tuple, list)) else (value,)
        fits, expected = all(map(_is_size, sizes)), f"sizes, as {name}=512 or {name}=8x128"
    elif is_size:
        fits, expected = _is_size(value), f"a size, as {name}=1024"
    elif parameter is not None and parameter.is_tensor:
        fits, expected = value is None, f"`-`, as {name}=-, which leaves the tensor out"
    elif parameter is not None and parameter.kind == "choice":
        fits, expected = value in parameter.choices, ", ".join(map(str, parameter.choices))
    else:
        return
    if not fits:
        raise CheckError(
            contract.subject,
            f"`{name}` cannot have this value",
            rows=[("got", "nothing" if value is None else str(value)), ("expected", expected)],
        )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class DeviceSweep(Sweep):
    """Makes cases on a device: on a GPU a gigabyte takes a millisecond, where the CPU needs seconds."""

    def __init__(self, contract: Any, device: torch.device, seed: int = 0) -> None:
        super().__init__(contract, seed)
        self.device = device

    def _tensor(self, parameter: Any, dtype: Any, sizes: Any, batch: Any, *args: Any) -> torch.Tensor:
        shape = shape_of(parameter.type, sizes, batch)
        # A matrix of weights keeps what it is multiplied with in its scale: else a recurrence would be timed where all
        # is saturated and gradients are denormal.
        is_weight = len(shape) > 1 and parameter.type.variadic_at is None
        scale = shape[-1] ** -0.5 if is_weight and shape[-1] else 1.0
        if self.device.type == "cpu":
            layout, _, *others = args
            return super()._tensor(parameter, dtype, sizes, batch, layout, scale, *others)
        own = tensor_dtype(self.contract, parameter.type, dtype)
        domain = domain_in(parameter, sizes)
        position = [p.name for p in self.contract.parameters].index(parameter.name)
        generator = torch.Generator(self.device).manual_seed(1000 * self.seed + position)

        def fill(wanted: tuple[int, ...]) -> torch.Tensor:
            if own.is_floating_point:
                noise = torch.randn(wanted, generator=generator, dtype=own, device=self.device).mul_(scale)
                return noise if domain is None else domain.fold(noise)
            low, high = (0, 1) if own == torch.bool else integers_in(domain, shape, own)
            return torch.randint(low, high + 1, wanted, generator=generator, device=self.device).to(own)

        return lay_out(fill, shape, "contiguous")


def most_elements(operator: Operator, baseline: Callable[..., Any], device: torch.device) -> int:
    """Returns how large the inputs may be for a call of the baseline, which may loop in Python, to be quick."""
    maker, eager = DeviceSweep(_read_contract(operator), device), caller(operator.contract, baseline)
    (dtype, *_), options = operator.contract.scalar_dtypes, maker.option_sets()[0]

    def seconds_of(case: Case) -> float:
        values = copy_of(case.values)
        started = perf_counter(), process_time()
        eager(values)
        wait_for(device)
        return min(perf_counter() - started[0], process_time() - started[1])  # other work slows the first clock only

    with torch.no_grad():
        for most, larger in itertools.pairwise(_SIZES):
            axes = {_STAR: [()], **_default_sweep(maker, most)}
            batch, sizes = axes.pop(_STAR)[-1], {name: values[-1] for name, values in axes.items()}
            try:
                case = maker.make("bench", dtype, maker.base_sizes() | sizes, batch, options)
                taken = min(seconds_of(case) for _ in range(2))  # the first call may load something
            except Exception:  # whatever a reference may raise to refuse
                break
            if taken * larger / most > _MAX_EAGER_SECONDS:
                return most
            if taken * (MAX_ELEMENTS / most) ** 1.5 < _MAX_EAGER_SECONDS:  # as the product of square matrices grows
                break
    return MAX_ELEMENTS


def _default_sweep(maker: Sweep, most: int) -> dict[str, list[Any]]:
    """Returns sizes that make the largest tensor as large as that of the other operators, whatever its axes are."""
    free, has_rows = maker.long_axes(), bool(maker.variadics)
    sizes = maker.base_sizes() | dict.fromkeys(free, 1024)
    types = _with_known_size([each.type for each in (*maker.contract.tensors, *maker.contract.outputs)], sizes)

    def elements(rows: int) -> int:
        return max(math.prod(shape_of(t, sizes, (rows,) if has_rows else ())) for t in types)

    counts = [4096, 512, 64, 4] if free else [MAX_ELEMENTS >> k for k in (0, 3, 7, 11)]
    counts = [max(count * most // MAX_ELEMENTS, 1) for count in counts]
    while elements(counts[0]) > most and any(sizes[name] > 1 for name in free):
        sizes[max(free, key=sizes.__getitem__)] //= 2
    if has_rows:  # whose other axes may be fixed, and large
        fitting = max(most // max(elements(1), 1), 1)
        rows = dict.fromkeys((min(count, fitting),) for count in reversed(counts))
        return {_STAR: list(rows), **{name: [sizes[name]] for name in free}}
    first = {name: list(dict.fromkeys((max(sizes[name] // 4, 1), sizes[name]))) for name in free[:1]}
    return first | {name: [sizes[name]] for name in free[1:]}


def _with_known_size(types: Iterable[TensorType], sizes: Mapping[str, int]) -> list[TensorType]:
    """Returns the types but those whose size depends on data."""
    return [type_ for type_ in types if sizes.keys() >= set(names_in(type_.axes))]


def one_element(operator: Operator, device: torch.device) -> Case | None:
    """Returns the smallest input that the reference takes, of single elements where it takes them, or None."""
    # A norm refuses rows of one element, a convolution inputs that are smaller than its window.
    made = (_make_small(operator, device, size) for size in (1, 2, 4, 16))
    found = next((case for case in made if _is_taken(operator, case)), None)
    if found is not None or operator._samples is None:
        return found
    samples = sorted(declared_cases(operator.contract, operator._samples), key=elements_of)
    smallest = next((s for s in samples if elements_of(s) and _is_taken(operator, s)), None)
    return smallest and replace(smallest, values=copy_of(smallest.values, device))


def _make_small(operator: Operator, device: torch.device, size: int) -> Case:
    maker = DeviceSweep(_read_contract(operator), device)
    sizes = maker.base_sizes() | dict.fromkeys(maker.long_axes(), size)
    absent = {name for axes in operator._sweep for name, values in axes.items() if list(values) == [None]}
    family = operator.contract.scalar_family
    dtype = None if family is None else torch.float32 if torch.float32 in family.dtypes else family.dtypes[0]
    return maker.make("one element", dtype, sizes, (size,), maker.option_sets()[0], absent=absent)


def size_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements, of a sparse one those of all that it stands for."""
    return tensor.numel() * tensor.element_size()


def all_tensors(values: Any) -> list[torch.Tensor]:
    """Returns the tensors of a case, those of named arguments and of any classes that PyTorch's trees know included."""
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def elements_of(case: Case) -> int:
    """Returns the elements of the largest tensor."""
    return max((t.numel() for t in all_tensors(case.values)), default=0)


# Above this size the oracle, in float64, takes seconds: PyTorch's own result is looked at first.
_MAX_ORACLE_ELEMENTS, _NEAR = 2**19, 16.0


class Workload:
    """The tensors that all candidates share, at the same addresses, and the calls on them.

    Attributes:
        values: the arguments, copies of those that were given.
    """

    def __init__(self, direction: str, values: Sequence[Any], operator: Operator | None) -> None:
        self.direction, self._operator = direction, operator
        needs_gradient = direction != "forward"
        self.values = tree_map(lambda value: _leaf(value, needs_gradient), list(values))
        self._domains = _domains_of(operator, self.values)
        self._inputs = [t for t in all_tensors(self.values) if t.requires_grad]
        self._seeds: dict[int, torch.Tensor] | None = None  # by the number of the output
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def bind(self, function: Callable[..., Any]) -> Callable[[], list[Any]]:
        """Returns the call to be timed, without arguments; it returns a list of results.

        Raises:
            CheckError: there is no gradient to be computed.
        """
        apply = applier(function, self._operator)
        values, inputs = self.values, self._inputs
        if self.direction == "forward":
            return lambda: as_list(apply(values))
        results = as_list(apply(values))
        if self._seeds is None:  # those of the first candidate, Opwright's: others are asked for the same gradients
            self._seeds = {i: torch.randn_like(r) for i, r in enumerate(results) if _needs_gradient(r)}
        chosen = [i for i in self._seeds if i < len(results) and _needs_gradient(results[i])]
        if not chosen or not inputs:
            raise CheckError(
                self._operator.declaration.name if self._operator else getattr(function, "__name__", "bench"),
                f'it has no gradient, so there is no "{self.direction}" to measure',
                rows=[("inputs that may have one", str(len(inputs))), ("outputs that need one", str(len(chosen)))],
                hint='`directions=["forward"]`',
            )
        outputs = [results[i] for i in chosen]
        seeds = [self._seed_for(i, results[i]) for i in chosen]
        gradient = torch.autograd.grad

        def backward() -> list[Any]:
            return list(gradient(outputs, inputs, seeds, retain_graph=True, allow_unused=True))

        def step() -> list[Any]:
            results = as_list(apply(values))
            return [*results, *gradient([results[i] for i in chosen], inputs, seeds, allow_unused=True)]

        return backward if self.direction == "backward" else step

    def _seed_for(self, number: int, result: torch.Tensor) -> torch.Tensor:
        """Returns the gradient that comes in at an output: the shared one, where the candidate's output is like ours."""
        seed = self._seeds[number]
        return seed if (seed.shape, seed.dtype) == (result.shape, result.dtype) else torch.randn_like(result)

    # --- other values at the same addresses --------------------------------------------------------------

    def refresh(self) -> None:
        """Writes other values into the same storage: a result that was kept from an earlier call is wrong now.

        They are those of the input, each made smaller by up to a quarter at random, so that signs stay and nothing
        grows; in a backward on a kept graph those of the gradients that come in, as the rest belongs to the graph.
        """
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for tensor in self._written():
                for axis, size in enumerate(tensor.shape):
                    factor = 1 - torch.rand(size, generator=generator) / (4 * tensor.ndim)
                    shape = [-1 if d == axis else 1 for d in range(tensor.ndim)]
                    tensor.mul_(factor.to(tensor.device, tensor.dtype).reshape(shape))
                if (domain := self._domains.get(id(tensor))) is not None:
                    tensor.copy_(domain.fold(tensor))

    def _written(self) -> list[torch.Tensor]:
        seeds = list((self._seeds or {}).values())
        written = seeds if self.direction == "backward" else [*all_tensors(self.values), *seeds]
        return [tensor for tensor in written if _is_writable(tensor)]

    def keep(self) -> None:
        """Remembers the values of arguments that a call changes, for `restore`."""
        self._kept = [(t, t.detach().clone()) for t in all_tensors(self.values) if _is_writable(t)]

    def restore(self) -> None:
        """Writes the values of `keep` again: what a step changes would else grow for thousands of calls."""
        with torch.no_grad():
            for tensor, value in self._kept:
                tensor.copy_(value)

    def count_unchanged_bytes(self) -> dict[str, int]:
        """Returns how many bytes of each mutated argument of an operator are as they were at `keep`, by name."""
        kept = {id(tensor): value for tensor, value in self._kept}
        pairs = zip(self._operator.contract.parameters, self.values, strict=True)
        return {
            parameter.name: sum(
                int((t == kept[id(t)]).sum()) * t.element_size() for t in all_tensors([value]) if id(t) in kept
            )
            for parameter, value in pairs
            if parameter.mutated
        }

    # --- what must come out ------------------------------------------------------------------------------------

    def difference(self, got: Sequence[Any], reference: Callable[..., Any]) -> str:
        """Returns by how much and where results differ from those of the reference; "" when they do not.

        That is by more than the checks of numerics and of gradients allow.
        """
        given = all_tensors(self.values)
        seeds = list((self._seeds or {}).values())
        compute = self._computation(reference)
        is_large = sum(t.numel() for t in given) > _MAX_ORACLE_ELEMENTS
        if is_large and _is_near(got, compute([t.detach().clone() for t in given] + seeds)):
            return ""
        expected = expect(compute, [*given, *seeds])
        if len(got) != len(expected):
            return f"{plural(len(got), 'result')}, expected {len(expected)}"
        for number, (result, wanted) in enumerate(zip(got, expected, strict=True)):
            found = _difference(result, wanted, is_gradient=self.direction != "forward")
            if found:
                return f"result {number}: {found}"
        return ""

    def _computation(self, reference: Callable[..., Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """Returns the reference as a function of the tensors of the arguments and of the gradients that come in."""
        needs_gradient = [t.requires_grad for t in all_tensors(self.values)]

        def compute(given: Sequence[Any]) -> list[Any]:
            count = len(needs_gradient)
            tensors, seeds = [t.detach() for t in given[:count]], given[count:]
            is_wide = any(t.dtype == torch.float64 for t in tensors)
            apply = applier(_in_precision(reference, is_wide), self._operator)
            pending = iter(tensors)
            values = tree_map(lambda v: next(pending) if isinstance(v, torch.Tensor) else v, list(self.values))
            if self.direction == "forward":
                with torch.no_grad():
                    return as_list(apply(values))
            with torch.enable_grad():
                inputs = [t.requires_grad_() for t, needs in zip(tensors, needs_gradient, strict=True) if needs]
                results = as_list(apply(values))
                outputs = [results[i] for i in self._seeds or {}]
                pairs = [(o, s.to(o.dtype)) for o, s in zip(outputs, seeds, strict=True) if _needs_gradient(o)]
                outputs, seeds = [o for o, _ in pairs], [s for _, s in pairs]
                gradients = list(torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))
            return gradients if self.direction == "backward" else [*(r.detach() for r in results), *gradients]

        return compute


def _is_near(got: Sequence[Any], plain: Sequence[Any]) -> bool:
    """Returns whether results are so near those of PyTorch in the same dtype that the oracle need not be asked."""
    for ours, theirs in zip(got, plain, strict=False):
        if not isinstance(theirs, torch.Tensor) or not isinstance(ours, torch.Tensor) or not theirs.numel():
            continue
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return False
        room = _NEAR * torch.finfo(theirs.dtype).eps if theirs.is_floating_point() else 0.0
        size = float(theirs.float().abs().mean()) if room else 0.0
        if not torch.allclose(ours.detach(), theirs, rtol=room, atol=room * size, equal_nan=True):
            return False
    return len(got) == len(plain)


def _difference(result: Any, wanted: Expected | Discrete | None, *, is_gradient: bool) -> str:
    if not isinstance(result, torch.Tensor) or wanted is None:
        return "" if wanted is None else f"got {type(result).__name__}, expected a tensor"
    if result.shape != wanted.exact.shape:
        return f"shape {list(result.shape)}, expected {list(wanted.exact.shape)}"
    if is_gradient:
        wanted = with_room(wanted)
    message = compare(result.detach(), wanted).message
    if message and is_gradient and isinstance(wanted, Expected):
        message = compare(result.detach(), with_room(wanted.after())).message
    return message


def _in_precision(reference: Callable[..., Any], is_wide: bool) -> Callable[..., Any]:
    """Returns the reference for float64 arguments: a copy of a module, whose parameters follow."""
    if not isinstance(reference, torch.nn.Module):
        return reference
    reference = copy.deepcopy(reference)  # what it counts stays its own
    return reference.double() if is_wide else reference


def _leaf(value: Any, needs_gradient: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # With its strides and its offset, or a slice would be measured as a whole tensor.
    return copy_of(value).requires_grad_(needs_gradient and value.is_floating_point())


def _is_writable(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not overlaps_itself(tensor)


def _needs_gradient(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and result.is_floating_point() and result.requires_grad


def _domains_of(operator: Operator | None, values: Sequence[Any]) -> dict[int, Range]:
    """Returns the declared domain of each floating-point tensor, by its `id`."""
    pairs = zip(operator.contract.parameters, values, strict=True) if operator is not None else ()
    return {
        id(tensor): parameter.domain
        for parameter, value in pairs
        if isinstance(parameter.domain, Range)
        for tensor in all_tensors([value])
        if tensor.is_floating_point()
    }


def applier(function: Callable[..., Any], operator: Operator | None) -> Callable[[Sequence[Any]], Any]:
    """Returns a function that takes the values of a case."""
    if operator is not None:
        return caller(operator.contract, function)
    return lambda values: function(*values[0], **values[1])


def as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [] if result is None else [result]
