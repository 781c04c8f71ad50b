"""One drawn call of an operator: its arguments, how it is called, and what must be true afterwards."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensors import MAX_STRIDE, Placed, place, place_on
from torch import Tensor

from opwright.contract.axes import Computed, Fixed, Named, Variadic
from opwright.contract.contract import Contract, Parameter
from opwright.contract.schema import out_names
from opwright.errors import OpwrightError

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65]
MAX_ELEMENTS = 4000
NUMBERS = [0, 1, 2, 3, 5, -1, -2]
EXTREME_NUMBERS = [2**31, 2**32 + 1, 2**61, 2**62, 2**62 + 1, 2**63 - 1, -(2**31), -(2**63), -(2**63) + 1]
REALS = [0.0, 0.5, 1.0, -1.0, 0.125]
EXTREME_REALS = [1e-30, 1e30, float("inf"), float("-inf"), float("nan"), -0.0]
OTHER_DTYPES = [torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64, torch.uint16, torch.float8_e5m2]
ENTRIES = ["function", "torch.ops", "torch.ops default", "function out", "torch.ops out"]
REFUSALS = (OpwrightError, ValueError, RuntimeError, IndexError, TypeError)


@dataclass
class Subject:
    """An operator, and how it is fuzzed.

    Attributes:
        make_samples: yields arguments to start from; drawn from the contract where there is none.
        factor: the error that is allowed, in units of the rounding of the dtype.
        is_wide: whether the reference computes in float64.
        weight: how often it is called.
        forward: for a backward, its operator. What it is given depends on each other: it is laid out exactly.
        dense: the arguments that it takes only contiguous.
    """

    op: Any
    make_samples: Callable[[Any], Iterable[list[Any]]] | None = None
    factor: float = 64
    is_wide: bool = True
    weight: float = 1.0
    forward: Any = None
    dense: Sequence[str] = ()

    @functools.cached_property
    def samples(self) -> list[list[Any]]:
        """Arguments in schema order; none where they are drawn from the contract."""
        return list(self.make_samples(self.forward or self.op)) if self.make_samples else []

    @property
    def contract(self) -> Contract:
        return self.op.operator.contract

    @property
    def name(self) -> str:
        return self.op.operator.declaration.qualified_name

    @property
    def short(self) -> str:
        return self.op.operator.declaration.name


def samples_of(op: Any) -> list[list[Any]]:
    """Returns the samples of an operator, with all arguments in schema order."""
    return [list(op.operator.normalize(*args, **options)) for args, options in op.operator._samples()]


def backward_samples(op: Any) -> Iterator[list[Any]]:
    """Yields arguments of the backward of an operator for samples of it."""
    contract = op.operator.contract
    for values in samples_of(op):
        results = tensors_of(run_reference(op, values))
        known = dict(zip([p.name for p in contract.parameters], values, strict=True))
        known |= {o.name: r for o, r in zip(contract.outputs, results, strict=True)}
        known |= {f"grad_{o.name}": torch.randn_like(r) for o, r in zip(contract.outputs, results, strict=True)}
        yield [known[p.name] for p in op.operator.backward_operator.contract.parameters]


def run_reference(op: Any, values: Sequence[Any]) -> Any:
    args, options = split(op.operator.contract, values)
    return op.operator.declaration.reference(*args, **options)


def split(contract: Contract, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    pairs = list(zip(contract.parameters, values, strict=True))
    return [v for p, v in pairs if not p.keyword_only], {p.name: v for p, v in pairs if p.keyword_only}


def tensors_of(value: Any) -> list[Any]:
    return [] if value is None else [value] if isinstance(value, Tensor) else list(value)


# --- arguments --------------------------------------------------------------------------------------------------


def draw_values(chance: random.Random, contract: Contract) -> tuple[list[Any], bool]:
    """Draws arguments that follow the contract, dense; the second result says that a number is extreme."""
    sizes: dict[str, int] = {}
    batches: dict[str | None, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    numbers = {p.name: draw_number(chance) for p in contract.parameters if p.kind == "int"}
    sizes |= numbers
    left = chance.choice([MAX_ELEMENTS, MAX_ELEMENTS, MAX_ELEMENTS, 40 * MAX_ELEMENTS])

    def draw_size() -> int:
        nonlocal left
        if chance.random() < 0.04:
            return 0
        large = [chance.randint(100, 20_000)] if chance.random() < 0.05 else SIZES
        size = min(chance.choice(large), max(left, 1))
        left //= size
        return size

    def shape_of(parameter: Parameter) -> list[int]:
        shape: list[int] = []
        for axis in parameter.type.axes:
            match axis:
                case Fixed(size):
                    shape.append(size)
                case Named(name):
                    shape.append(sizes[name] if name in sizes else sizes.setdefault(name, draw_size()))
                case Variadic(name):
                    if name is None or name not in batches:
                        batches[name] = draw_batch(chance, draw_size)
                    shape += batches[name]
                case Computed():
                    for name in axis.names:
                        sizes.setdefault(name, draw_size())
                    shape.append(min(max(axis.evaluate(sizes), 0), MAX_ELEMENTS))
                case _:
                    shape.append(draw_size())
        return shape

    def draw(parameter: Parameter) -> Any:
        if parameter.optional and chance.random() < 0.4:
            return None
        match parameter.kind:
            case "int":
                return numbers[parameter.name]
            case "float":
                return chance.choice(EXTREME_REALS if chance.random() < 0.15 else REALS)
            case "bool":
                return chance.random() < 0.5
            case "choice":
                return chance.choice(parameter.choices)
        family = parameter.type.family
        dtype = dtypes.setdefault(family.name, chance.choice(family.dtypes))
        if parameter.kind == "tensors":
            return [fill(chance, shape_of(parameter), dtype) for _ in range(chance.choice([0, 1, 1, 2, 5, 20]))]
        return fill(chance, shape_of(parameter), dtype)

    values = [draw(p) for p in contract.parameters]
    kinds = zip(contract.parameters, values, strict=True)
    return values, any(v in {"int": EXTREME_NUMBERS, "float": EXTREME_REALS}.get(p.kind, ()) for p, v in kinds)


def draw_number(chance: random.Random) -> int:
    return chance.choice(EXTREME_NUMBERS if chance.random() < 0.1 else NUMBERS)


def draw_batch(chance: random.Random, draw_size: Callable[[], int]) -> tuple[int, ...]:
    if chance.random() < 0.02:  # more axes than kernels can have, or nearly
        shape = [1] * chance.choice([61, 62, 63, 64, 65, 66, 70, 100, 300])
        for _ in range(3):
            shape[chance.randrange(len(shape))] = chance.choice([1, 2, 3])
        return tuple(shape)
    return tuple(draw_size() for _ in range(chance.choice([0, 1, 1, 2, 2, 3, 4, 6])))


def fill(chance: random.Random, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns a dense tensor of random values, some of them special."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if not dtype.is_floating_point:
        bound = chance.choice([1, 1, 2, 4, 100])
        made = torch.randint(0 if not dtype.is_signed else -bound, bound, shape).to(dtype)
        limits, often = (torch.iinfo(dtype).min, torch.iinfo(dtype).max), 0.05
    else:
        made = torch.randn(shape).to(dtype)
        limits, often = (float("nan"), float("inf"), float("-inf"), torch.finfo(dtype).max), 0.05
    if made.numel() and chance.random() < often:
        made.view(-1)[chance.randrange(made.numel())] = chance.choice(limits)
    return made


def break_contract(chance: random.Random, values: list[Any], contract: Contract) -> None:
    """Changes one of the arguments to something that is likely to be refused."""
    at = chance.randrange(len(values))
    value = values[at]
    if isinstance(value, list) and value:
        inner = chance.randrange(len(value))
        values[at] = [*value[:inner], broken(chance, value[inner]), *value[inner + 1 :]]
    elif isinstance(value, Tensor):
        values[at] = broken(chance, value)
    else:
        values[at] = chance.choice([None, "none of them", 2**63, -(2**64), 1.5, torch.ones(2), [1, 2]])


def broken(chance: random.Random, value: Tensor) -> Any:
    other = chance.choice(["dtype", "size", "axes", "kind"])
    if other == "dtype":
        return value.to(chance.choice(OTHER_DTYPES))
    if other == "size" and value.ndim:
        shape = list(value.shape)
        shape[chance.randrange(value.ndim)] += chance.choice([1, -1, 3])
        return fill(chance, [max(size, 0) for size in shape], value.dtype)
    if other == "axes":
        return value[None] if chance.random() < 0.5 or not value.shape.numel() else value.flatten()[0]
    return chance.choice([None, 3, "x", [value], value.to("meta"), value.to_sparse() if value.ndim else None])


# --- a call -----------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """A call did not do what it must."""


@dataclass
class Call:
    """A drawn call."""

    subject: Subject
    chance: random.Random
    entry: str = ""
    values: list[Any] = field(default_factory=list)
    placed: dict[int, Placed] = field(default_factory=dict)  # by id of the view
    outs: list[Placed] = field(default_factory=list)
    may_refuse: bool = False
    must_refuse: bool = False
    is_comparable: bool = True

    def draw(self) -> None:
        chance, contract = self.chance, self.subject.contract
        self.entry = chance.choice([e for e in ENTRIES if contract.outputs or "out" not in e])
        if self.subject.samples:
            values = list(chance.choice(self.subject.samples))
            for i, parameter in enumerate(contract.parameters):
                if chance.random() < 0.02 and parameter.kind in ("int", "float"):
                    values[i] = draw_number(chance) if parameter.kind == "int" else chance.choice(EXTREME_REALS)
                    self.may_refuse, self.is_comparable = True, False
                elif chance.random() < 0.02 and parameter.kind in ("bool", "choice"):
                    values[i] = chance.choice(parameter.choices or (True, False))
                    self.may_refuse = self.subject.forward is not None
        else:
            values, self.may_refuse = draw_values(chance, contract)
        if chance.random() < 0.1:
            break_contract(chance, values, contract)
            self.may_refuse = True
        # A changed argument of a backward does not fit the outputs that it is given.
        self.is_comparable &= not (self.subject.forward and self.may_refuse)
        self.values = [self._place(p, v) for p, v in zip(contract.parameters, values, strict=True)]
        self._draw_aliases()
        views = [placed.view for placed in self.placed.values()]
        # PyTorch, which computes where a result is empty, takes up to 64 axes, and no views of views with such strides.
        self.may_refuse |= any(view.ndim > 64 or MAX_STRIDE in view.stride() for view in views)

    def _place(self, parameter: Parameter, value: Any) -> Any:
        if isinstance(value, list):
            return [self._place(parameter, item) for item in value]
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
            return value
        exactly = self.subject.forward is not None or (parameter.mutated and self.chance.random() < 0.9)
        placed = place(self.chance, value, exactly=exactly)
        if parameter.name in self.subject.dense and not placed.view.is_contiguous():
            self.may_refuse |= self.chance.random() < 0.1
            placed = placed if self.may_refuse else Placed(base := value.flatten().clone(), base.view(value.shape))
        self.placed[id(placed.view)] = placed
        return placed.view

    def _draw_aliases(self) -> None:
        contract = self.subject.contract
        at = self.chance.randrange(len(self.values))
        one = self.placed.get(id(self.values[at]))
        others = [p for p in self.placed.values() if one and p is not one and p.view.dtype == one.view.dtype]
        if others and self.chance.random() < 0.1:
            found = place_on(self.chance, self.chance.choice(others), one.view.shape)
            if found:
                self.is_comparable &= self.subject.forward is None
                self.may_refuse |= contract.parameters[at].name in self.subject.dense
                del self.placed[id(one.view)]
                self.placed[id(found.view)] = found
                self.values[at] = found.view
        mutated = [v for p, v in zip(contract.parameters, self.values, strict=True) if p.mutated]
        self.mutated = [self.placed[id(v)] for v in mutated if id(v) in self.placed]
        for one in self.mutated:
            shared = any(one.shares(other) for other in self.placed.values() if other is not one)
            self.must_refuse |= one.overlaps or shared

    def draw_outs(self, wanted: Sequence[Tensor] | None) -> None:
        """Draws the tensors that the results go to."""
        chance, contract = self.chance, self.subject.contract
        if wanted is None:
            wanted = [fill(chance, draw_batch(chance, lambda: 2), torch.float32) for _ in contract.outputs]
        for result in wanted:
            dtype = result.dtype
            if chance.random() < 0.03:
                self.must_refuse, result = True, torch.stack([result, result])
            if chance.random() < 0.03:
                other = chance.choice([d for d in OTHER_DTYPES if d != dtype])
                self.must_refuse, result = True, result.to(other)
            values = torch.zeros(result.shape, dtype=result.dtype)
            made = place(chance, values, exactly=chance.random() < 0.85)
            beside = [p for p in [*self.placed.values(), *self.outs] if p.view.dtype == result.dtype]
            if beside and chance.random() < 0.15:
                made = place_on(chance, chance.choice(beside), result.shape) or made
            self.must_refuse |= made.overlaps or any(made.shares(other) for other in [*self.mutated, *self.outs])
            self.outs.append(made)

    def __call__(self) -> Any:
        args, options = split(self.subject.contract, self.values)
        views = [out.view for out in self.outs]
        if self.entry == "function out":
            return self.subject.op(*args, **options, out=views[0] if len(views) == 1 else tuple(views))
        if self.entry == "function":
            return self.subject.op(*args, **options)
        namespace, name = self.subject.name.split("::")
        packet = getattr(getattr(torch.ops, namespace), name)
        if self.entry == "torch.ops out":
            return packet.out(*args, **options, **dict(zip(out_names(self.subject.contract), views, strict=True)))
        return (packet if self.entry == "torch.ops" else packet.default)(*args, **options)

    def __str__(self) -> str:
        def shown(value: Any) -> str:
            if isinstance(value, list):
                return f"[{', '.join(map(shown, value))}]"
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                return repr(value)
            return f"{value.dtype}{list(value.shape)} by {list(value.stride())} at {value.storage_offset()}"

        named = zip(self.subject.contract.parameters, self.values)
        rows = [f"  {p.name}: {shown(v)}" for p, v in named] + [f"  out: {shown(o.view)}" for o in self.outs]
        return "\n".join([f"{self.subject.name}, {self.entry}", *rows])


def expected(call: Call) -> tuple[list[Tensor], list[Tensor]] | Exception:
    """Returns the results of the reference and what it leaves in mutated arguments, or how it refused."""
    subject = call.subject
    widths: list[torch.dtype] = []

    def dense(value: Any) -> Any:
        if isinstance(value, list):
            return [dense(item) for item in value]
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return value
        if value.is_floating_point():
            widths.append(value.dtype)
        wide = subject.is_wide and value.is_floating_point()
        return value.to(torch.float64 if wide else value.dtype, copy=True, memory_format=torch.contiguous_format)

    values = [dense(value) for value in call.values]
    try:
        results = tensors_of(run_reference(subject.op, values))
    except Exception as error:
        return error
    if not all(result is None or isinstance(result, Tensor) for result in results):
        return TypeError("the reference takes a wrong argument as it is")
    narrow = widths[0] if widths else torch.float32
    if subject.is_wide:
        results = [r.to(narrow) if r is not None and r.is_floating_point() else r for r in results]
    mutated = [v for p, v in zip(subject.contract.parameters, values, strict=True) if p.mutated]
    return [r if r is not None else torch.empty(0, dtype=narrow) for r in results], mutated


def run(call: Call) -> str:
    """Draws a call, makes it, and compares; returns how it ended.

    Raises:
        Wrong: a result, an error, or what is in memory afterwards.
    """
    with torch.no_grad():
        call.draw()
        wanted = expected(call)
        is_refused = isinstance(wanted, Exception)
        call.may_refuse |= is_refused or any(result.ndim > 64 for result in wanted[0])
        if "out" in call.entry:
            call.draw_outs(None if is_refused else wanted[0])
        everything = [*call.placed.values(), *call.outs]
        for placed in everything:
            placed.remember()
        try:
            results = tensors_of(call())
        except REFUSALS as error:
            if not (call.may_refuse or call.must_refuse):
                raise Wrong(f"refused a right call: {type(error).__name__}: {error}") from None
            written = [] if call.must_refuse else [*call.mutated, *call.outs]
            ending = "refused"
            del error
        else:
            if call.must_refuse and not call.may_refuse:
                raise Wrong("accepted memory that is shared, or an `out` of another shape or dtype")
            # Without elements nothing is computed, and Python's numbers do not fit where C's do.
            counts = call.is_comparable and any(r.numel() and not r.is_meta for r in results)
            if is_refused and counts and not isinstance(wanted, OverflowError):
                raise Wrong(f"accepted what the reference refuses: {type(wanted).__name__}: {wanted}")
            if not is_refused:
                mutated = [placed.view for placed in call.mutated]
                if call.is_comparable:
                    compare([*results, *mutated], [*wanted[0], *wanted[1]], call.subject.factor)
            written, ending = [*call.mutated, *call.outs], "computed"
            del results
    for placed in everything:
        if not placed.is_kept(*written):
            raise Wrong(f"wrote where it must not (it {ending})")
        if placed.view._use_count() != placed.references:
            raise Wrong(f"{placed.view._use_count() - placed.references} references are left (it {ending})")
    return ending


def compare(results: Sequence[Tensor], wanted: Sequence[Tensor], factor: float) -> None:
    if len(results) != len(wanted):
        raise Wrong(f"returned {len(results)} results, expected {len(wanted)}")
    for number, (got, want) in enumerate(zip(results, wanted, strict=True)):
        if got.is_meta:
            continue
        want = want.to(got.dtype) if want.dtype == torch.float64 else want
        if got.shape != want.shape or got.dtype != want.dtype:
            raise Wrong(f"result {number} is {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}")
        if not got.numel():
            continue
        got, want = got.flatten(), want.flatten()  # some functions take up to 64 axes
        if not got.is_floating_point():
            is_right = got == want
        else:
            eps = torch.finfo(got.dtype).eps
            is_right = (got.double() - want.double()).abs() <= factor * eps * (1 + want.double().abs().max())
            # Infinities and NaN reach sums in another order, and what is near the largest number overflows or not.
            if not (want.abs() < torch.finfo(got.dtype).max / 4).all():
                continue
        if not is_right.all():
            at = int((~is_right).nonzero()[0])
            raise Wrong(f"result {number} at {at} of {got.numel()} is {got[at]}, expected {want[at]}")
