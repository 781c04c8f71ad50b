"""Rules for distributed tensors: which shards of the arguments of an operator give which shards of its results.

A rule says what each tensor is along one axis of a mesh of devices: sharded along a dimension, replicated, or
partial, which is to be summed. Rules follow from the contract, from the reference, or from `@name.sharding`:

* The entries of a variadic axis are independent by promise, so each of its dimensions shards.
* Whether those of a named axis are, the contract does not say. Two answers from the reference must agree. PyTorch's own
  rules for the operators that it calls say whether shards stay apart: that covers data that were not tried. Small
  shards give the same numbers as the whole: that covers sizes and positions that the reference computes with.
* A gradient of what all entries share is a sum over them.
* Replication is always right.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from opwright import _torch
from opwright._torch import DispatchMode, tree_leaves, tree_map
from opwright.contract.axes import Computed, Fixed, Named, Variadic
from opwright.contract.contract import Contract, Parameter, TensorType
from opwright.contract.domains import Index
from opwright.dispatch import registry
from opwright.dispatch.record import Operator, keep
from opwright.dispatch.reference import caller, outputs_of, tensors_in, with_copies
from opwright.errors import ShardingError

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

# Sizes of the axes that the reference is tried at, all different. Shards of the odd ones are uneven.
_EVEN = (4, 6, 8, 10, 12, 14, 16, 18)
_ODD = (5, 7, 9, 11, 13, 15, 17, 19)
_SCALES = (1.0, 30.0)  # within and beyond where sigmoids and their like saturate
_TOLERANCE = 1e-3  # of float32; a wrong rule is wrong by as much as the numbers themselves


@functools.cache
def names() -> SimpleNamespace:
    """Returns the names of torch.distributed.tensor that are used here, the private ones included.

    The import takes a second: nothing calls this before a program has a distributed tensor.

    Raises:
        ShardingError: this PyTorch lacks one of them.
    """
    try:
        return _torch.find_distributed()
    except (ImportError, AttributeError, RuntimeError) as error:
        raise ShardingError(
            "",
            f"torch {torch.__version__} cannot run operators of Opwright on distributed tensors",
            rows=[("reason", str(error).partition("\n")[0])],
            hint="torch 2.13 can; here, call the operator on `x.to_local()`",
        ) from None


class Rule(NamedTuple):
    """What each tensor of a call is along one axis of a mesh.

    Attributes:
        inputs: the placements of the tensors among the arguments, those of lists one by one.
        outputs: those of the results.
        needs_elements: whether every rank must have elements, as for a maximum.
        exchanges: whether ranks exchange numbers within the call.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    needs_elements: bool = False
    exchanges: bool = False

    def describe(self, signature: Signature) -> str:
        """Returns the rule in words: `input Shard(0), bias Replicate -> output Shard(0)`."""
        given = [f"{slot.label} {word_of(p)}" for slot, p in zip(signature.slots, self.inputs, strict=True)]
        made = [f"{o.name} {word_of(p)}" for o, p in zip(signature.contract.outputs, self.outputs, strict=True)]
        return " -> ".join(filter(None, [", ".join(given), ", ".join(made)]))


def word_of(placement: Placement) -> str:
    """Returns a placement as it is written in code: `Shard(0)`, `Replicate`, `Partial(sum)`."""
    return re.sub(r"\(\)|dim=", "", repr(placement))


class Slot(NamedTuple):
    """One tensor among the arguments of a call."""

    parameter: Parameter
    index: int | None  # in a list
    ndim: int

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.parameter.name if self.index is None else f"{self.parameter.name}[{self.index}]"


class Signature(NamedTuple):
    """What the rules of a call depend on.

    Attributes:
        ranks: of each tensor parameter: its rank, None if it is absent, a tuple for a list.
        options: the other arguments.
    """

    contract: Contract
    ranks: tuple[int | tuple[int, ...] | None, ...]
    options: tuple[Any, ...]

    @property
    def key(self) -> tuple:
        """What tells it from the other signatures of one operator: 1, 1.0 and True are equal."""
        return self.ranks, tuple((type(v), v) for v in self.options)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The tensors of a call."""
        found: list[Slot] = []
        for parameter, rank in zip(self.contract.tensors, self.ranks, strict=True):
            if isinstance(rank, tuple):
                found += (Slot(parameter, i, each) for i, each in enumerate(rank))
            elif rank is not None:
                found.append(Slot(parameter, None, rank))
        return tuple(found)

    @property
    def absent(self) -> set[str]:
        """The names of the optional tensors that are not there."""
        return {p.name for p, rank in zip(self.contract.tensors, self.ranks, strict=True) if rank is None}

    def arrange(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns values in schema order, with these in place of the tensors."""
        given, ranks, options = iter(tensors), iter(self.ranks), iter(self.options)
        arranged: list[Any] = []
        for parameter in self.contract.parameters:
            rank = next(ranks) if parameter.is_tensor else None
            if isinstance(rank, tuple):
                arranged.append([next(given) for _ in rank])
            elif parameter.is_tensor:
                arranged.append(None if rank is None else next(given))
            else:
                arranged.append(next(options))
        return arranged


def signature_of(contract: Contract, values: Sequence[Any]) -> Signature:
    """Returns the signature of a call with these arguments, in schema order."""
    pairs = list(zip(contract.parameters, values, strict=True))
    ranks = tuple(
        tuple(t.ndim for t in v) if p.kind == "tensors" else None if v is None else v.ndim
        for p, v in pairs
        if p.is_tensor
    )
    return Signature(contract, ranks, tuple(v for p, v in pairs if not p.is_tensor))


class Rules:
    """The rules of one operator, derived when a call first asks for them.

    Every process of a mesh must choose the same: what is tried depends on the signature alone.
    """

    def __init__(self, operator: Operator) -> None:
        self._operator = operator
        self._contract = operator.contract
        self._proved: dict[tuple, Rule | None] = {}

    def offer(
        self,
        signature: Signature,
        tensors: Sequence[torch.Tensor],
        placements: Sequence[Placement] | None = None,
    ) -> list[Rule]:
        """Returns the rules for a call; the last one replicates.

        Args:
            signature: of the call.
            tensors: those of the call, which an author's rules may look at.
            placements: along one axis of a mesh, the tensors as they are: only rules that fit one of them. By
                default, all rules.
        """
        t = names()
        replicated = self.replicate(signature)
        if self._operator.sharding_rules is not None:
            return [*declared_rules(self._operator, signature, tensors), replicated]
        forward = registry.operators.get(self._operator.declaration.forward or "")
        if self._contract.data_dependent or (forward is not None and forward.sharding_rules is not None):
            return [replicated]  # which backward belongs to an author's rules, nothing says
        found = []
        for inputs in self._shards(signature):
            if placements is None or any(
                p == q and q != t.Replicate() for p, q in zip(placements, inputs, strict=True)
            ):
                found.append(self._along(signature, inputs))
        for inputs in self._partials(signature, placements):
            found.append(self._linear(signature, inputs))
        return [*(rule for rule in found if rule is not None), replicated]

    def replicate(self, signature: Signature) -> Rule:
        """Returns the rule that replicates, which is always right."""
        whole = names().Replicate()
        return Rule((whole,) * len(signature.slots), (whole,) * len(self._contract.outputs))

    # --- candidates ----------------------------------------------------------------------------------

    def _shards(self, signature: Signature) -> Iterator[tuple[Placement, ...]]:
        """Yields, for each dimension that may shard, the placements of the tensors: sharded where its axis occurs."""
        t = names()
        fixed = _unshardable(self._contract)
        spans = [[*slot.parameter.type.spans(slot.ndim)] for slot in signature.slots]
        axes = dict.fromkeys(axis for each in spans for axis, _ in each)
        for axis in axes:
            if not isinstance(axis, (Named, Variadic)) or axis.name is None or axis.name in fixed:
                continue
            places = [[span for other, span in each if other == axis] for each in spans]
            if any(len(each) > 1 for each in places):
                continue  # a shard of a square is not square
            count = next(span.stop - span.start for each in places for span in each)
            for offset in range(count):
                yield tuple(t.Shard(each[0].start + offset) if each else t.Replicate() for each in places)

    def _partials(
        self, signature: Signature, placements: Sequence[Placement] | None
    ) -> Iterator[tuple[Placement, ...]]:
        """Yields placements in which some of the tensors are to be summed: those that are, or each alone, and all."""
        t = names()
        slots = signature.slots
        can = [i for i, slot in enumerate(slots) if slot.parameter.is_differentiable and not slot.parameter.mutated]
        if placements is not None:
            chosen = {tuple(i for i in can if placements[i] == t.Partial())}
        else:
            gradients = tuple(i for i in can if slots[i].parameter.name.startswith("grad_"))
            chosen = {(i,) for i in can} | {tuple(can), gradients}
        for some in sorted(chosen - {()}):
            yield tuple(t.Partial() if i in some else t.Replicate() for i in range(len(slots)))

    # --- what is right -------------------------------------------------------------------------------

    def _along(self, signature: Signature, inputs: tuple[Placement, ...]) -> Rule | None:
        """Returns the rule for these shards; None where the entries are not independent."""
        t = names()
        slots = signature.slots
        at = next(i for i, p in enumerate(inputs) if isinstance(p, t.Shard))
        axis, first = next(
            (axis, span.start)
            for axis, span in slots[at].parameter.type.spans(slots[at].ndim)
            if span.start <= inputs[at].dim < span.stop
        )
        if any(slot.parameter.mutated and p == t.Replicate() for slot, p in zip(slots, inputs, strict=True)):
            return None  # each rank would write its own part into what all share
        offset = inputs[at].dim - first
        outputs = [self.shard_of(o, axis, offset, signature) for o in self._contract.outputs]
        if isinstance(axis, Variadic) and self._is_promised(axis, outputs):
            made = tuple(t.Partial() if p is None else p for p in outputs)
            return Rule(inputs, made)
        return self._prove(signature, inputs, outputs)

    def shard_of(self, output: Any, axis: Any, offset: int, signature: Signature) -> Placement | None:
        """Returns the placement of an output, None where it has no such axis."""
        t = names()
        if output.gradient_of in signature.absent:
            return t.Replicate()
        if axis not in output.type.axes:
            return None
        ranks = _variadic_ranks(signature)
        ndim = sum(ranks[a.name] if isinstance(a, Variadic) else 1 for a in output.type.axes)
        return t.Shard(next(span.start for a, span in output.type.spans(ndim) if a == axis) + offset)

    def _is_promised(self, axis: Variadic, outputs: Sequence[Placement | None]) -> bool:
        """Returns whether the entries of a variadic axis are independent in all outputs.

        For a backward those of its operator count: a gradient without the axis is then a sum over the entries.
        """
        forward = registry.operators.get(self._operator.declaration.forward or "")
        if forward is not None:
            return all(axis in output.type.axes for output in forward.contract.outputs)
        return all(p is not None for p in outputs)

    def _linear(self, signature: Signature, inputs: tuple[Placement, ...]) -> Rule | None:
        """Returns the rule for tensors that are yet to be summed; None where the operator is not linear in them."""
        t = names()
        absent = signature.absent
        outputs = [t.Replicate() if o.gradient_of in absent else t.Partial() for o in self._contract.outputs]
        if not outputs or self._contract.mutated:
            return None
        if self._operator.declaration.forward is not None:
            summed = {s.parameter.name for s, p in zip(signature.slots, inputs, strict=True) if p == t.Partial()}
            if summed == {p.name for p in self._contract.tensors if p.name.startswith("grad_")}:
                return Rule(inputs, tuple(outputs))  # a backward is linear in its gradients
        return self._prove(signature, inputs, outputs)

    def _prove(
        self, signature: Signature, inputs: tuple[Placement, ...], expected: Sequence[Placement | None]
    ) -> Rule | None:
        key = (signature.key, inputs)
        if key not in self._proved:
            proof = _Proof(self._operator, signature)
            keep(self._proved, key, _run_apart(lambda: proof.find(inputs, expected)))
        return self._proved[key]


def declared_rules(operator: Operator, signature: Signature, tensors: Sequence[torch.Tensor]) -> list[Rule]:
    """Returns the rules that the author's function gives for a call.

    Raises:
        ShardingError: it does not return what such a function returns.
    """
    t, name = names(), operator.declaration.name
    shown = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in tensors]
    values = signature.arrange(shown)
    call = caller(operator.contract, operator.sharding_rules)

    def refuse(rule: Any, why: str) -> ShardingError:
        return ShardingError(
            name,
            f"a rule of `@{name}.sharding` {why}",
            rows=[("got", repr(rule))],
            hint='`[({"x": Shard(0)}, Shard(0))]`: placements of arguments by name, then that of each result',
        )

    found = []
    labels = {p.name for p in operator.contract.tensors}
    for rule in call(values):
        if not isinstance(rule, tuple) or len(rule) != 2 or not isinstance(rule[0], dict):
            raise refuse(rule, "is not a pair of placements")
        given, made = rule
        outputs = tuple(made) if isinstance(made, (tuple, list)) else (made,)
        if not given.keys() <= labels:
            raise refuse(rule, f"names `{min(given.keys() - labels)}`, which is not a tensor argument")
        if len(outputs) != len(operator.contract.outputs):
            raise refuse(rule, f"has {len(outputs)} placements for {len(operator.contract.outputs)} results")
        inputs = tuple(given.get(slot.parameter.name, t.Replicate()) for slot in signature.slots)
        for placement in (*inputs, *outputs):
            if not isinstance(placement, (t.Shard, t.Replicate, t.Partial)):
                raise refuse(rule, f"has `{placement!r}`, which is not a placement")
        found.append(Rule(inputs, outputs))
    return found


def _unshardable(contract: Contract) -> set[str]:
    """Returns the axes that are not whole in a shard: those that others are computed from, that an int gives, or that
    are indexed."""
    types = [p.type for p in contract.tensors] + [o.type for o in contract.outputs]
    found = {name for type_ in types for axis in type_.axes if isinstance(axis, Computed) for name in axis.names}
    found |= {p.name for p in contract.parameters if p.kind == "int"}
    for parameter in contract.parameters:
        if isinstance(parameter.domain, Index):
            found |= set(parameter.domain.names)
    return found


def _variadic_ranks(signature: Signature) -> dict[str | None, int]:
    """Returns how many dimensions each variadic axis has."""
    return {
        axis.name: span.stop - span.start
        for slot in signature.slots
        for axis, span in slot.parameter.type.spans(slot.ndim)
        if isinstance(axis, Variadic)
    }


@functools.cache
def _enter_fake_mode() -> None:
    """Enters a FakeTensorMode once in the caller's thread, before a thread that ends does.

    Where PyTorch is built with CUDA and there is no GPU, it keeps a pointer into the first thread that enters one. The
    next thread to enter one crashes if the first has ended.
    """
    from opwright._torch import FakeTensorMode

    with FakeTensorMode():
        pass


def _run_apart(function: Callable[[], Any]) -> Any:
    """Calls a function in a thread of its own, where no mode, transform, autocast or gradient of the caller is on."""
    _enter_fake_mode()
    found: list[Any] = []

    def run() -> None:
        with torch.no_grad():
            found.append(function())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


# --- the proof from the reference ---------------------------------------------------------------------


class _Proof:
    """Finds out whether a rule is right, from the reference."""

    def __init__(self, operator: Operator, signature: Signature) -> None:
        self._signature = signature
        self._contract = operator.contract
        self._call = caller(operator.contract, operator.declaration.reference)

    def find(self, inputs: tuple[Placement, ...], expected: Sequence[Placement | None]) -> Rule | None:
        """Returns the rule for these placements of the arguments, None if there is none.

        Args:
            inputs: the placements of the arguments.
            expected: those of the results where they are known.
        """
        try:
            if None not in expected and not self._agrees(inputs, expected):
                return None  # the quicker of the two
            outputs = self._follow(inputs)
            if outputs is None or any(e is not None and e != o for e, o in zip(expected, outputs, strict=True)):
                return None
            if None in expected and not self._agrees(inputs, outputs):
                return None
        except Exception:  # whatever a reference may raise at these sizes
            return None
        partial = names().Partial
        is_reduced = None in expected and any(isinstance(p, partial) for p in outputs)
        return Rule(inputs, tuple(outputs), needs_elements=is_reduced)

    # --- by PyTorch's rules for the operators of the reference ---------------------------------------

    def _follow(self, inputs: Sequence[Placement]) -> list[Placement] | None:
        """Returns the placements of the results if no operator of the reference would move its arguments."""
        values = self._values(_EVEN, 1.0)
        slots = list(tensors_in(values))
        with _Following(slots, inputs) as following:
            results = outputs_of(self._contract, self._call(values))
        found = [names().Replicate() if r is None else following.placement_of(r) for r in results]
        kept = [following.placement_of(tensor) for tensor in slots]
        return found if not following.has_failed and kept == list(inputs) else None

    # --- by numbers ----------------------------------------------------------------------------------

    def _agrees(self, inputs: Sequence[Placement], outputs: Sequence[Placement]) -> bool:
        """Returns whether the parts of the arguments give the parts of the results."""
        is_tried = False
        for scale, is_positive in itertools.product(_SCALES, (False, True)):
            count = 3 if is_positive else 2
            values = self._values(_ODD, scale, is_positive)
            whole = self._results(values)
            if not all(bool(w.isfinite().all()) for w in whole):
                continue
            pieces = [split(x, p, count) for x, p in zip(tensors_in(values), inputs, strict=True)]
            parts = [self._results(self._signature.arrange([each[i] for each in pieces])) for i in range(count)]
            slots = zip(self._signature.slots, inputs, strict=True)
            placements = [*outputs, *(p for slot, p in slots if slot.parameter.mutated)]
            for made, wanted, placement in zip(zip(*parts, strict=True), whole, placements, strict=True):
                if not _is_close(made, wanted, placement):
                    return False
            is_tried = True
        return is_tried

    def _results(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """Returns the results of the reference on copies, and the arguments that it has written into."""
        copies = with_copies(list(values))
        made = outputs_of(self._contract, self._call(copies))
        written = [v for p, v in zip(self._contract.parameters, copies, strict=True) if p.mutated]
        return [torch.zeros(0) if m is None else m for m in made] + list(tensors_in(written))

    # --- arguments -----------------------------------------------------------------------------------

    def _values(self, table: Sequence[int], scale: float, is_positive: bool = False) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        names_of = {p.name: v for p, v in self._options() if p.kind == "int"}
        axes = [axis for slot in self._signature.slots for axis in slot.parameter.type.axes]
        found = dict.fromkeys(
            name
            for axis in axes
            for name in (axis.names if isinstance(axis, Computed) else (axis.name,) if isinstance(axis, Named) else ())
        )
        free = [name for name in found if name not in names_of]
        sizes = names_of | dict(zip(free, itertools.cycle(table), strict=False))
        ranks = _variadic_ranks(self._signature)
        batches = {name: tuple(itertools.islice(itertools.cycle(table[:2]), rank)) for name, rank in ranks.items()}
        tensors = []
        for slot in self._signature.slots:
            shape = _shape_of(slot.parameter.type, sizes, batches)
            tensors.append(_fill(slot.parameter, shape, sizes, scale, is_positive, generator))
        return self._signature.arrange(tensors)

    def _options(self) -> Iterator[tuple[Parameter, Any]]:
        others = [p for p in self._contract.parameters if not p.is_tensor]
        return zip(others, self._signature.options, strict=True)


def _shape_of(type_: TensorType, sizes: dict[str, int], batches: dict[str | None, tuple[int, ...]]) -> tuple[int, ...]:
    shape: list[int] = []
    for axis in type_.axes:
        match axis:
            case Variadic(name):
                shape += batches[name]
            case Named(name):
                shape.append(sizes[name])
            case Computed():
                shape.append(axis.evaluate(sizes))
            case Fixed(size):
                shape.append(size)
            case _:
                shape.append(3)
    return tuple(shape)


def _fill(
    parameter: Parameter,
    shape: tuple[int, ...],
    sizes: dict[str, int],
    scale: float,
    is_positive: bool,
    generator: torch.Generator,
) -> torch.Tensor:
    dtypes = parameter.type.family.dtypes
    dtype = torch.float64 if torch.float64 in dtypes else dtypes[0]
    domain = None if parameter.domain is None else parameter.domain.within(sizes)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        low, high = (0, 1) if domain is None else domain.ends(dtype)
        low, high = int(max(low, -100)), int(min(high, max(low, -100) + 100))
        return torch.randint(low, high + 1, shape, generator=generator).to(dtype)
    noise = (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)
    noise = noise.abs() if is_positive else noise
    return noise if domain is None else domain.fold(noise)


def split(tensor: torch.Tensor, placement: Placement, count: int) -> list[torch.Tensor]:
    """Returns what each of some ranks holds of a tensor."""
    t = names()
    if isinstance(placement, t.Shard):
        parts = list(tensor.chunk(count, placement.dim))
        empty = tensor.narrow(placement.dim, 0, 0)
        return parts + [empty] * (count - len(parts))
    if isinstance(placement, t.Partial):
        generator = torch.Generator().manual_seed(1)
        drawn = [torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for _ in range(count - 1)]
        parts = [(each * (tensor.double().abs() + 1).cpu()).to(tensor) for each in drawn]
        return [*parts, tensor - sum(parts)]
    return [tensor] * count


def join(parts: Sequence[torch.Tensor], placement: Placement) -> list[torch.Tensor]:
    """Returns what the parts of the ranks make: one tensor, or what each has where all should have the same."""
    t = names()
    if isinstance(placement, t.Shard):
        return [torch.cat(list(parts), placement.dim)]
    if isinstance(placement, t.Partial):
        reduce = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin, "product": torch.prod}
        return [reduce[placement.reduce_op](torch.stack(list(parts)), 0)]
    return list(parts)


def _is_close(parts: Sequence[torch.Tensor], whole: torch.Tensor, placement: Placement) -> bool:
    tolerance = _TOLERANCE if whole.dtype != torch.float64 else _TOLERANCE**2
    largest = float(whole.abs().max()) if whole.is_floating_point() and whole.numel() else 0.0
    return all(
        j.shape == whole.shape and torch.allclose(j, whole, rtol=tolerance, atol=tolerance * largest)
        for j in join(parts, placement)
    )


class _Following(DispatchMode):
    """Follows placements through the operators of a reference, by PyTorch's own rules for two ranks.

    The operators run on whole tensors. One that would want its arguments placed otherwise, or whose result Python looks
    at, ends the search.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], placements: Sequence[Placement]) -> None:
        super().__init__()
        self._t = names()
        self._mesh = self._t.Pair()
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}  # held, so that no other tensor gets the number
        for tensor, placement in zip(tensors, placements, strict=True):
            self._keep(tensor, placement)
        self.has_failed = False

    def placement_of(self, tensor: torch.Tensor) -> Placement:
        """Returns how a tensor is placed; one that was made from numbers alone is the same everywhere."""
        return self._spec_of(tensor).placements[0]

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        specs = {id(t): self._spec_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **kwargs)
        made = [r for r in tree_leaves(result) if isinstance(r, torch.Tensor)]
        if all(spec.placements == (self._t.Replicate(),) for spec in specs.values()):
            return result
        if self.has_failed or not made:
            self.has_failed = True
            return result
        given = tree_map(lambda v: specs[id(v)] if isinstance(v, torch.Tensor) else v, (args, kwargs))
        nested = registry.operators.get(_torch.schema_of(func).name)
        try:
            placements = self._apply(nested, args, kwargs) if nested else self._propagate(func, *given)
        except Exception:  # PyTorch has no rule for it
            placements = None
        if placements is None or len(placements) != len(made):
            self.has_failed = True
            return result
        for tensor, placement in zip(made, placements, strict=True):
            self._keep(tensor, placement)
        return result

    def _keep(self, tensor: torch.Tensor, placement: Placement) -> None:
        meta = self._t.TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        self._known[id(tensor)] = tensor, self._t.Spec(self._mesh, (placement,), tensor_meta=meta)

    def _spec_of(self, tensor: torch.Tensor) -> Any:
        if id(tensor) not in self._known:
            self._keep(tensor, self._t.Replicate())
        return self._known[id(tensor)][1]

    def _apply(self, operator: Operator, args: Any, kwargs: Any) -> Sequence[Placement] | None:
        """Returns the placements of the results of an operator of Opwright, by its own rules."""
        values = operator.normalize(*args, **kwargs)
        tensors = list(tensors_in(values))
        held = tuple(map(self.placement_of, tensors))
        offered = operator.rules.offer(signature_of(operator.contract, values), tensors, held)
        return next((rule.outputs for rule in offered if rule.inputs == held), None)

    def _propagate(self, func: Any, args: Any, kwargs: Any) -> list[Placement] | None:
        """Returns the placements of the results; None if an argument would have to be placed otherwise."""
        propagator = self._t.propagator
        info = propagator.op_to_schema_info.get(func) or getattr(
            propagator, "op_to_schema_info_for_single_dim_strategy", {}
        ).get(func)
        schema = self._t.OpSchema(func, tuple(args), kwargs, schema_info=info)
        found = propagator.propagate_op_sharding_non_cached(schema)
        if found.needs_redistribute:
            moved = [s for s in tree_leaves(found.redistribute_schema.args_schema) if isinstance(s, self._t.Spec)]
            held = [s for s in tree_leaves(args) if isinstance(s, self._t.Spec)]
            if [s.placements for s in moved] != [s.placements for s in held]:
                return None
        made = (
            tree_leaves(found.output_spec) if not isinstance(found.output_spec, self._t.Spec) else [found.output_spec]
        )
        return [spec.placements[0] for spec in made]
