"""What is verified: an operator, or any callable with a reference."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from opwright._torch import tree_map
from opwright.contract.contract import Contract, Parameter
from opwright.contract.declared import ALL_SIZES, backward_cases, declared_cases, in_every_dtype
from opwright.contract.domains import Range
from opwright.contract.fill import put_in_layout
from opwright.contract.likely import find_likely
from opwright.contract.precision import Precision
from opwright.contract.sweep import Case, Sweep
from opwright.dispatch import registry
from opwright.dispatch.operator import Operator, operator_of
from opwright.dispatch.reference import caller, outputs_of
from opwright.errors import CheckError, OpwrightError
from opwright.verify.callables import Callables, name_of
from opwright.verify.compare import Difference
from opwright.verify.devices import CPU, raise_if_lost, wait_for
from opwright.verify.formulas import WidenCasts
from opwright.verify.global_state import CallThreads
from opwright.verify.inputs.budget import Pace
from opwright.verify.inputs.sweep import accepts, describe_refused, refusal_of, sweep_cases
from opwright.verify.inputs.values import derived_cases
from opwright.verify.oracle import to_oracle
from opwright.verify.oracle_process import Computation, Oracle, OracleProcess, Output, Question
from opwright.verify.tensors import (
    Bands,
    copy_of,
    count_elements,
    is_same,
    place_between_guards,
    poison_memory_for,
    tensors_of,
)

# What a reference raises whatever it is given.
_MISTAKES = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError")


@dataclass
class Target:
    """One thing under test, on one device.

    The cases of an operator are on the CPU, where the oracle computes; `inputs` puts them on the device.
    Those of a callable stay where its samples are, for it and for its reference.

    Attributes:
        name: how it is called in messages.
        call: takes the arguments in order, returns the outputs; does not wait for a GPU.
        call_with_out: takes the arguments and a tensor for each output, which it writes; None for a callable.
        threads: how many threads PyTorch has in a call. A guard obeys it, also for copies of this target.
        wait: waits until a device has done its work, in the candidate's time: a kernel may never end.
        reference: the same computation in PyTorch.
        operator: the operator behind it; None for a callable.
        device: where it runs.
        current: the case that was given out last.
        effort: how many cases there are: "default" or "full".
        oracle: says what results must be, here or in another process.
        key: what the target is called among those of its candidate: a prefix.
        memo: what the oracle has said, where several candidates meet the same cases.
        on_case: called with the description of each case that is given out.
        callables: what a callable and its reference are; None for an operator.
        expand: whether more inputs are made from the samples of a callable.
        boundaries: the inputs of that check; None: those that follow from the contract.
        pace: leaves cases out where they would take minutes; None: does not.
        refused: the inputs among those made for `cases` on which the reference raises.
    """

    name: str
    call: Callable[[Sequence[Any]], list[Any]]
    reference: Callable[[Sequence[Any]], list[Any]]
    operator: Operator | None
    _samples: Iterable[Any] | Callable[[], Iterable[Any]] | None
    _cases: list[Case] | None = None
    device: torch.device = CPU
    current: Case | None = None
    effort: str = "default"
    memo: dict[Any, Any] | None = None
    on_case: Callable[[str], None] | None = None
    callables: Callables | None = None
    expand: bool = True
    boundaries: list[Case] | None = None
    call_with_out: Callable[[Sequence[Any], Sequence[torch.Tensor]], Any] | None = None
    threads: CallThreads = field(default_factory=CallThreads)
    wait: Callable[[torch.device], None] = wait_for
    oracle: Oracle | OracleProcess = field(default_factory=Oracle)
    key: str = ""
    pace: Pace | None = None
    refused: list[Case] = field(default_factory=list)
    _mutated: list[int] | None = None
    _drawn: Contract | None = None
    _forward: Target | None = None
    _precision: Precision | None = None

    def remember(self, key: Any, compute: Callable[[], Any]) -> Any:
        """Returns what `compute` returns; where there is a memo, it is asked once for each key."""
        if self.memo is None:
            return compute()
        if key not in self.memo:
            self.memo[key] = compute()
        return self.memo[key]

    def expect(
        self, computation: Computation, values: Sequence[Any], *arguments: Any, **options: Any
    ) -> list[Output | None]:
        """Returns what the results of a computation must be; the options are those of a `Question`."""
        return self.oracle.expect(self, Question(computation, values, arguments, **options))

    def compare(self, got: torch.Tensor, wanted: Output) -> Difference:
        """Returns how far a result, on any device, is from what it must be."""
        return self.oracle.compare(got, wanted)

    def on(self, device: torch.device) -> Target:
        """Returns the same thing on another device, with the same cases."""
        return replace(self, device=device, current=None, _cases=self.cases())

    def inputs(self, case: Case, label: str = "") -> list[Any]:
        """Returns the arguments of a case on the device: fresh copies with the strides and offsets of the case.

        Args:
            label: what the case and its use are called, should the call end the process; by default the case alone.
        """
        self._announce(case, label)
        return list(copy_of(case.values, None if self.operator is None else self.device))

    def inputs_between_guards(self, case: Case) -> tuple[list[Any], Bands]:
        """Returns the arguments between guard bands, and the bands."""
        self._announce(case)
        values, bands = place_between_guards(case.values, None if self.operator is None else self.device)
        return list(values), bands

    def _announce(self, case: Case, label: str = "") -> None:
        self.current = case
        if self.on_case is not None:
            self.on_case(label or str(case))

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Calls it, on a GPU with poisoned memory, and waits until the work is done.

        Raises:
            DeviceLost: the call left the device in a state in which it accepts no more work.
        """
        try:
            poison_memory_for(values)
            outputs = self.call(values)
            self.wait(self.device)
        except Exception as error:
            raise_if_lost(self.device, error)
            raise
        return outputs

    def formulas_for(self, values: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the reference of a callable computes as an oracle, where the values are one's."""
        return self.callables.formulas_for(values) if self.callables is not None else contextlib.nullcontext()

    def mutated(self) -> list[int]:
        """Returns the positions of the arguments that it writes into, of a callable those that its reference does."""
        if self._mutated is None:
            if self.contract is not None:
                self._mutated = [i for i, p in enumerate(self.contract.parameters) if p.mutated]
            else:
                self._mutated = self._written_by_reference()
        return self._mutated

    def written(self, values: Sequence[Any]) -> list[Any]:
        """Returns the arguments that are written into, those of a list one by one."""
        return [part for i in self.mutated() for _, part in _parts_of("", values[i])]

    def written_names(self, case: Case) -> list[str]:
        """Returns what each of the arguments that are written into is called in messages."""
        names = self.argument_names(case)
        return [name for i in self.mutated() for name, _ in _parts_of(names[i], case.values[i])]

    def _written_by_reference(self) -> list[int]:
        case = next((case for case in self.cases() if case.label.startswith("sample")), None)
        if case is None:
            return []
        values = copy_of(case.values)
        with torch.no_grad():
            self.reference(values)
        pairs = enumerate(zip(case.values, values, strict=True))
        return [i for i, (a, b) in pairs if isinstance(a, torch.Tensor) and not is_same(a, b)]

    def argument_names(self, case: Case) -> list[str]:
        """Returns what each value of a case is called in messages: `bias`, in backticks, where it has a name."""
        if self.callables is not None:
            return self.callables.argument_names(case)
        return [f"`{p.name}`" for p in self.contract.parameters]

    def float_names(self, case: Case, without: Iterable[int] = ()) -> list[str]:
        """Returns what each floating-point tensor among the values is called, but for those at some positions."""
        named = enumerate(zip(self.argument_names(case), case.values, strict=False))
        parts = [part for i, each in named if i not in without for part in _parts_of(*each)]
        return [name for name, v in parts if isinstance(v, torch.Tensor) and v.is_floating_point()]

    def output_names(self, count: int) -> list[str]:
        """Returns what each of so many outputs is called in messages."""
        if self.contract is not None:
            return [f"`{o.name}`" for o in self.contract.outputs]
        return self.callables.output_names(count)

    @property
    def contract(self) -> Contract | None:
        return self.operator.contract if self.operator else None

    @property
    def drawn(self) -> Contract:
        """The contract of an operator, with the domains that its inputs are drawn from where none are declared."""
        if self._drawn is None:
            is_free = not self.has_samples and not self.operator.declaration.random
            self._drawn = find_likely(self.contract, self.reference) if is_free else self.contract
        return self._drawn

    @property
    def precision(self) -> Precision | None:
        """How much less precise than PyTorch an operator, or a callable, is declared to be."""
        return self.operator.declaration.precision if self.operator is not None else self._precision

    def fold(self, value: torch.Tensor, position: int) -> torch.Tensor:
        """Returns floating-point numbers of an argument with those outside of its domain moved into it."""
        parameter = self.drawn.parameters[position] if self.operator is not None else None
        domain = parameter and (parameter.domain or parameter.likely)
        return domain.fold(value) if isinstance(domain, Range) and value.is_floating_point() else value

    def cases(self) -> list[Case]:
        """Returns every input, small ones first within a dtype.

        Inputs that the reference refuses (an empty axis, say) are not inputs of the operator.
        """
        if self._cases is None:
            found = list(self._all_cases())
            if self.has_samples:
                found = [replace(case, dtype=_dtype_of(case)) for case in found]
            if self.operator is not None:  # declared samples may be anywhere
                found = [replace(case, values=_on_cpu(case.values)) for case in found]
            self._cases = [case for case in found if self.accepts(case)]
            kept = set(map(id, self._cases))
            self.refused = [case for case in found if id(case) not in kept and self._is_own(case)]
            if not self._cases and self.operator is not None:
                self._refuse_no_input(found)
        return self._cases

    def unbounded_integers(self) -> list[Parameter]:
        """Returns integer tensors without a domain; none where there are samples, or the inputs have been made."""
        if self.operator is None or self.has_samples or self._cases is not None:
            return []
        integers = (p for p in self.contract.tensors if not p.type.family.has_floats)
        return [p for p in integers if not p.domain and torch.bool not in p.type.family.dtypes]

    def within_time(self, cases: Iterable[Case] | None = None) -> Iterable[Case]:
        """Returns the cases, by default every input, that a check has the time for."""
        cases = self.cases() if cases is None else cases
        return cases if self.pace is None else self.pace.choose(cases)

    def _refuse_no_input(self, refused: list[Case]) -> None:
        name = self.operator.declaration.name
        kind = "samples" if self.has_samples else "inputs, as they follow from its contract"
        hint = f"`@{name}.samples` yields inputs that the reference takes, each a tuple of arguments"
        if not refused:
            raise CheckError(name, f"there are no {kind}", hint=hint)
        said = refusal_of(self.reference, refused[0], self.contract)
        if said.startswith(_MISTAKES):
            hint = "correct the reference: it raises this for any arguments"
        rows = [("the first", str(refused[0])), ("it says", said)]
        raise CheckError(name, f"its reference takes none of its {kind}", rows=rows, hint=hint)

    def _is_own(self, case: Case) -> bool:
        """Returns whether a case follows from the contract or is a declared sample, not made from one."""
        is_derived = self.has_samples and "," in case.label
        return self.operator is not None and not is_derived and self.contract.find_outside(case.values) is None

    def tell_refused(self) -> str:
        """Returns on how many of its inputs nothing is checked, since the reference raises; "" if it takes all."""
        if not self.refused:
            return ""
        owner = self._owner() or self.operator
        hint = "" if self.has_samples else f"; declare a domain, or `@{owner.declaration.name}.samples`"
        why = refusal_of(self.reference, self.refused[0], self.contract)
        return describe_refused(self.operator.declaration.name, self.refused, len(self.cases()), why) + hint

    def _refuse_no_oracle(self, given: list[Case]) -> None:
        """Raises CheckError where the reference takes the samples, but not in float64: there is no oracle then."""
        for case in given[:1]:
            try:
                with torch.no_grad():
                    self.reference([to_oracle(v) for v in case.values])
            except Exception as error:
                self.reference(copy_of(case.values))  # what it raises here is its own
                raise CheckError(
                    self.name,
                    "its reference cannot compute in float64, which every result is held against",
                    rows=[
                        ("on", str(case)),
                        ("it says", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"),
                    ],
                    hint="a reference takes the dtype of its arguments: `torch.zeros(n, dtype=x.dtype)`, `weight.to(x.dtype)`",
                ) from None

    def accepts(self, case: Case) -> bool:
        return self.operator is None or accepts(self.contract, self.reference, case)

    def _all_cases(self) -> Iterator[Case]:
        if self.operator is None:
            given = self.callables.cases(self._samples)
            self._refuse_no_oracle(given)
            self._cases = given  # enough for `mutated`
            more = derived_cases(given, self.callables, bool(self.mutated()), self._announce)
            yield from (*given, *(more if self.expand else ()))
        elif self.has_samples:
            sampled = list(self._sampled_cases())
            yield from sampled
            if self._owner() is None or self._samples is not None:
                yield from _lay_out_samples(sampled)
        else:
            yield from sweep_cases(self.drawn, self.reference, self.effort, self.forward(), self.inputs)

    @property
    def has_samples(self) -> bool:
        """Whether samples take the place of the sweep: given ones, declared ones, those of a backward's operator."""
        behind = self.operator, self._owner()
        return self._samples is not None or any(o is not None and o._samples is not None for o in behind)

    def _sampled_cases(self) -> Iterable[Case]:
        contract = self.operator.contract
        if self._samples is not None:
            return self._check_conforming(declared_cases(contract, self._samples))
        if self.operator._samples is not None:
            return in_every_dtype(contract, self._check_conforming(declared_cases(contract, self.operator._samples)))
        forward = make_target(self._owner().function, None, None, self.effort)
        return backward_cases(contract, forward.contract, forward.reference, forward.cases())

    def _check_conforming(self, cases: list[Case]) -> list[Case]:
        """Returns the samples; raises CheckError for one that is against the contract."""
        for case in cases:
            try:
                self.contract.bind(self.contract.name_arguments(case.values))
            except OpwrightError as error:
                raise CheckError(
                    self.operator.declaration.name,
                    f"its {case.label} is against its contract: {error.rule}",
                    rows=error.rows,
                    hint="a sample is a tuple of arguments, or such a tuple and a dictionary of those by name",
                ) from None
            outside = self.contract.find_outside(case.values)
            if outside is not None:
                value = case.values[self.contract.parameters.index(outside)]
                raise CheckError(
                    self.operator.declaration.name,
                    f"its {case.label} is against its contract: `{outside.name}` is not within {outside.domain}",
                    rows=[("got", _extent(value))],
                    hint="give other values, or a wider domain",
                )
        return cases

    @property
    def computed(self) -> dict[int, int]:
        """Which arguments of a backward its operator has returned: position and number of the output.

        They follow from the others. None are, where it does not take all that they are computed from.
        """
        owner = self._owner()
        names = [p.name for p in self.contract.parameters] if owner else []
        if owner is None or not {p.name for p in owner.contract.parameters}.issubset(names):
            return {}
        return {names.index(owner.contract.outputs[i].name): i for i in owner.gradient.saved.outputs}

    def with_computed(self, values: Sequence[Any]) -> list[Any]:
        """Returns the arguments with those computed, as a backward gets them that is differentiated in its turn."""
        known = self.contract.name_arguments(values)
        owner = self._owner()
        results = owner.gradient.derived.compute_outputs([known[p.name] for p in owner.contract.parameters])
        return [results[self.computed[i]] if i in self.computed else v for i, v in enumerate(values)]

    def free_tensors(self, case: Case) -> set[int]:
        """Returns the positions of the arguments whose values may be anything.

        Outputs of its operator that a backward takes follow from that operator's inputs: where it takes any, only
        the gradients are free.
        """
        owner = self._owner()
        if owner is None:
            return set(range(len(case.values)))
        names = [p.name for p in self.contract.parameters]
        inputs = {p.name for p in owner.contract.parameters}
        outputs = {o.name for o in owner.contract.outputs} - inputs
        if not outputs & set(names):
            return set(range(len(names)))
        return {i for i, name in enumerate(names) if name not in inputs | outputs}

    def _owner(self) -> Operator | None:
        """Returns the operator that this one is the backward of."""
        return registry.operators.get(self.operator.declaration.forward or "") if self.operator is not None else None

    @property
    def is_derivative_of_reference(self) -> bool:
        """Whether this is a backward whose own gradient follows from its reference: no kernel has part in that."""
        return self._owner() is not None and self.operator.backward_operator is None

    def forward(self) -> tuple[Contract, Callable[[Sequence[Any]], list[Any]]] | None:
        """Returns the contract and the reference of the operator that this one is the backward of."""
        forward = self._owner()
        if forward is None:
            return None
        if self._forward is None:
            self._forward = make_target(forward.function, None, None)
        return self._forward.drawn, self._forward.reference

    def make_sweep(self, effort: str = "") -> Sweep:
        """Returns what makes inputs that follow from the contract."""
        return Sweep(self.drawn, forward=self.forward(), effort=effort or self.effort)

    def tiny_cases(self, dtype: torch.dtype) -> list[Case]:
        """Returns inputs of a few elements, one for each combination of options: finite differences call
        the operator for every one of them."""
        if self.boundaries is not None:  # a part of a case that has failed
            return self.cases()
        if self.has_samples:
            return self.small_cases(dtype)
        maker = Sweep(self.drawn, forward=self.forward())
        for table in itertools.permutations((3, 2, 4)):  # a reference may ask for one axis to be the longer one
            sizes = maker.base_sizes(table)
            made = [maker.make("tiny", dtype, sizes, (2,), options) for options in maker.option_sets()[:6]]
            accepted = [case for case in made if self.accepts(case)]
            if accepted:
                return accepted
        return self.small_cases(dtype)

    @functools.cached_property
    def casts_to_single(self) -> bool:
        """Whether its reference computes in float32 what it is given in float64, as after `x.float()`."""
        mode = WidenCasts()
        with contextlib.suppress(Exception), torch.no_grad():
            values = to_oracle(next(iter(self.tiny_cases(torch.float64))).values)
            with mode:
                self.reference(values)
        return mode.has_cast

    def run_cases(self) -> list[Case]:
        """Returns a small input and a large one: for the checks of how calls run, not of what they compute."""
        wanted = [case for case in self.cases() if case.dtype in (torch.float32, None)] or self.cases()
        if self.operator is None:
            wanted = [case for case in wanted if "," not in case.label] or wanted  # as given, not derived
        if self.operator is None or any(case.label.startswith("sample") for case in wanted):
            return sorted(wanted, key=lambda case: count_elements(case.values))[:: max(len(wanted) - 1, 1)][:2]
        first = [next((c for c in wanted if c.label == label), None) for label in ("base", "large")]
        return [case for case in first if case is not None]

    def small_cases(self, dtype: torch.dtype) -> list[Case]:
        """Returns the small inputs of one dtype, of others where there are none, for the checks that are slow."""
        family = self.contract.scalar_family if self.contract is not None else None
        if family is not None and not family.has_floats:
            dtype = family.dtypes[0]
        found = [case for case in self.cases() if case.dtype in (dtype, None)]
        found = found or self.cases()  # samples may have dtypes of their own
        found = [case for case in found if ALL_SIZES not in case.label]  # of 1e31 there are no finite differences
        return [c for c in found if c.label in ("base", "no batch axes") or c.label.startswith("sample")][:6]


def make_target(
    target: Any,
    reference: Callable[..., Any] | None,
    samples: Any,
    effort: str = "default",
    expand: bool = True,
    precision: Precision | None = None,
) -> Target:
    """Returns the target for an operator or a callable.

    Args:
        precision: how much less precise than the reference a callable may be.

    Raises:
        CheckError: a callable comes without a reference or samples.
    """
    operator = operator_of(target)
    if operator is not None:
        contract = operator.contract
        own = caller(contract, reference or operator.declaration.reference)

        def call(values: Sequence[Any]) -> list[Any]:
            args, kwargs = contract.split_arguments(values)
            return outputs_of(contract, operator.function(*args, **kwargs))

        def call_with_out(values: Sequence[Any], outs: Sequence[torch.Tensor]) -> None:
            operator.call_with_out(tuple(values), outs[0] if len(outs) == 1 else tuple(outs))

        return Target(
            operator.declaration.qualified_name,
            call,
            lambda values: outputs_of(contract, own(values)),
            operator,
            samples,
            effort=effort,
            call_with_out=call_with_out,
        )
    if not callable(target) or reference is None or samples is None:
        raise CheckError(
            name_of(target),
            "a callable is verified against a reference, on samples",
            hint="`opwright.verify(f, reference=g, samples=[(x, y), ...])`",
        )
    for given in (target, reference):
        if isinstance(given, type) and issubclass(given, torch.nn.Module):
            hint = f"give a module: `{given.__name__}(...)`"
            raise CheckError(given.__name__, "this is a class of modules, and none of them", hint=hint)
    both = Callables(target, reference)
    return Target(
        both.name,
        both.call,
        both.call_reference,
        None,
        samples,
        effort=effort,
        callables=both,
        expand=expand,
        _precision=precision,
    )


def _dtype_of(case: Case) -> torch.dtype | None:
    return next((t.dtype for t in tensors_of(case.values) if t.is_floating_point()), None)


def _parts_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """Returns an argument with its name, the parts of a list one by one."""
    if not isinstance(value, (list, tuple)):
        return [(name, value)]
    return [(f"`{name.strip('`')}[{k}]`", part) for k, part in enumerate(value)]


def _on_cpu(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values if all(t.device == CPU for t in tensors_of(values)) else copy_of(values, CPU)


# Of the tensors of a sample, one after the other. In one of the two mixed layouts, each tensor has other strides than a
# contiguous one.
_SAMPLE_LAYOUTS = {
    "offset": ("offset",),
    "mixed layouts": ("sliced", "contiguous", "transposed", "offset"),
    "other mixed layouts": ("contiguous", "sliced", "offset", "transposed"),
}


def _lay_out_samples(cases: list[Case]) -> Iterator[Case]:
    """Yields a sample of each dtype with tensors offset in memory, and with mixed layouts.

    It is the one with the most tensors, of those the one with the fewest axes of size 0 or 1, whose strides do not
    matter, and of those the smallest.
    """
    for dtype in dict.fromkeys(_dtype_of(case) for case in cases):
        own = [case for case in cases if _dtype_of(case) == dtype and count_elements(case.values)]
        if not own:
            continue
        case = min(own, key=_rank_for_layouts)
        for what, layouts in _SAMPLE_LAYOUTS.items():
            yield replace(case, label=f"{case.label}, {what}", values=_put(case.values, layouts))


def _rank_for_layouts(case: Case) -> tuple[int, int, int]:
    tensors = tensors_of(case.values)
    return -len(tensors), sum(size < 2 for t in tensors for size in t.shape), count_elements(case.values)


def _put(values: tuple[Any, ...], layouts: Sequence[str]) -> tuple[Any, ...]:
    pending = itertools.cycle(layouts)
    return tree_map(lambda v: put_in_layout(v, next(pending)) if isinstance(v, torch.Tensor) else v, values)


def _extent(value: Any) -> str:
    """Returns the smallest and the largest of the values of an argument."""
    tensors = [t for t in tensors_of([value]) if t.numel()]
    if not tensors:
        return repr(value)
    flat = torch.cat([t.flatten().double() for t in tensors])
    return f"{flat.min().item():g} to {flat.max().item():g}"
