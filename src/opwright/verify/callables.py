"""Any callable as something to verify: functions, modules, autograd functions; nested arguments and results.

The checks work on flat lists. A case holds the tensors and other values that the arguments consist of, then
the parameters and buffers of a reference that is a module, and last how they are put together. So the oracle
computes with parameters in float64 too, and gradients flow to them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call

from opwright._torch import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from opwright.contract.declared import Labelled, split_sample
from opwright.contract.dtypes import describe, describe_undense
from opwright.contract.sweep import Case
from opwright.errors import CheckError, plural
from opwright.verify.formulas import oracle_formulas
from opwright.verify.tensors import has_double, shares_memory


@dataclasses.dataclass(frozen=True)
class Assembly:
    """How the leaves of a case become a call.

    Attributes:
        spec: of the arguments.
        arguments: how many leaves they have; parameters and buffers follow.
        complex_at: leaves that are complex numbers; the oracle knows real ones, so they come as pairs.
        is_double: whether some are in float64, so that the oracle computes as any other call does.
    """

    spec: TreeSpec
    arguments: int
    complex_at: frozenset[int]
    is_double: bool

    def split(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], list[Any]]:
        """Returns positional arguments, named arguments, parameters and buffers."""
        leaves = [torch.view_as_complex(v) if i in self.complex_at else v for i, v in enumerate(leaves)]
        args, kwargs = tree_unflatten(leaves[: self.arguments], self.spec)
        return args, kwargs, leaves[self.arguments :]


def _refuse_undense(subject: str, name: str, value: Any, place: str) -> None:
    """Raises CheckError for a tensor without strides or data: what verify compares, copies and moves are elements."""
    if not isinstance(value, torch.Tensor):
        return
    if found := describe_undense(name, value):
        got, hint = found[0], f"give `{found[1]}`, and convert it back within both callables"
    elif value.is_meta:
        got, hint = describe(value), f"give a tensor with data: `torch.rand({list(value.shape)})`"
    else:
        return
    raise CheckError(
        subject, f"`{name}` of {place} must be a dense tensor, with strides and data", rows=[("got", got)], hint=hint
    )


def case_of(label: str, sample: Any, parameters: Sequence[torch.Tensor] = ()) -> Case:
    """Returns the case of a sample: a tuple of arguments, or `(args, kwargs)`."""
    args, kwargs = split_sample(sample)
    leaves, spec = tree_flatten((args, kwargs))
    complex_at = frozenset(i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor) and v.is_complex())
    values = [torch.view_as_real(v.resolve_conj()) if i in complex_at else v for i, v in enumerate(leaves)]
    options = {name: v for name, v in kwargs.items() if isinstance(v, (bool, int, float, str, type(None)))}
    return Case(label, (*values, *parameters, Assembly(spec, len(leaves), complex_at, has_double(values))), options)


@dataclasses.dataclass(frozen=True)
class Form:
    """How the result of a reference is made up.

    Attributes:
        keys: what each output is under.
        names: what each is called.
        may_alias: whether one shares memory with an argument.
    """

    keys: list[str]
    names: list[str]
    may_alias: bool


class Callables:
    """A candidate and its reference.

    Attributes:
        name: of the candidate.
        parameters: parameters and buffers of a reference that is a module, if the candidate, a module too, gets them.
        are_shared: whether it does.
        note: how its parameters differ, where they do.
        reference: what is called as the reference.
        form: of the last result of the reference.
    """

    def __init__(self, target: Any, reference: Any) -> None:
        self.name = name_of(target)
        self._target, self.reference = _unwrap(target), _unwrap(reference)
        self.parameters: dict[str, torch.Tensor] = {}
        self.are_shared, self.note = False, ""
        self._renamed: dict[str, str] = {}
        self._differentiable = 0  # parameters come before buffers
        if isinstance(self.reference, torch.nn.Module) and isinstance(self._target, torch.nn.Module):
            for place, module in (("the candidate", self._target), ("the reference", self.reference)):
                for name, value in _state_of(module).items():
                    _refuse_undense(self.name, name, value, place)
            self._renamed = _match_names(self._target, self.reference)
            self.note = "" if self._renamed else _mismatch(self._target, self.reference)
            self.are_shared = not self.note
        if self.are_shared:
            self.parameters = {name: tensor.detach().clone() for name, tensor in _state_of(self.reference).items()}
            self._differentiable = len(list(self.reference.parameters()))
        self.form: Form | None = None

    def cases(self, samples: Iterable[Any] | Callable[[], Iterable[Any]]) -> list[Case]:
        """Returns a case for each sample."""
        given = samples() if callable(samples) else samples
        parameters = list(self.parameters.values())

        def label_of(number: int, sample: Any) -> str:
            return f"sample {number}" + (f": {sample.label}" if isinstance(sample, Labelled) else "")

        found = [case_of(label_of(i, sample), sample, parameters) for i, sample in enumerate(given)]
        for case in found:
            for name, value in zip(self.argument_names(case), case.values, strict=False):
                _refuse_undense(self.name, name.strip("`"), value, case.label.partition(":")[0])
        return found

    def count_differentiable(self, case: Case) -> int:
        """Returns how many of the first values both can differentiate by: arguments and parameters, but not buffers."""
        return case.values[-1].arguments + self._differentiable

    def call_reference(self, values: Sequence[Any]) -> list[Any]:
        """Calls the reference with the values of a case; returns the leaves of its result."""
        with self.formulas_for(values):
            outputs, keys, names = self._call(self.reference, values)
        self.form = Form(keys, names, shares_memory(values, outputs))
        return outputs

    def formulas_for(self, values: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the reference computes as an oracle, where these values are an oracle's."""
        return oracle_formulas() if self._is_oracle(values) else contextlib.nullcontext()

    def _is_oracle(self, values: Sequence[Any]) -> bool:
        return has_double(values) and not values[-1].is_double

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Calls the candidate with the values of a case; returns the leaves of its result.

        What shares memory with an argument is copied if the reference's result has just done so as well.
        """
        outputs, keys, _ = self._call(self._target, values)
        if self.form is not None and keys != self.form.keys:
            raise TypeError(f"returned {_describe(keys)}, expected {_describe(self.form.keys)}")
        if self.form is not None and self.form.may_alias:
            outputs = [o.clone() if o is not None and shares_memory([o], values) else o for o in outputs]
        return outputs

    def argument_names(self, case: Case) -> list[str]:
        """Returns what each value of a case is called in messages: a parameter of the reference, of a module its path."""
        assembly = case.values[-1]
        args, kwargs = tree_unflatten(list(range(assembly.arguments)), assembly.spec)
        parameters = _parameters_of(self.reference) or _parameters_of(self._target)
        named = {**dict(zip(parameters, args)), **kwargs}
        found = [f"argument {i}" for i in range(assembly.arguments)]
        for path, at in tree_flatten_with_path(named)[0]:
            found[at] = f"`{path[0].key}{keystr(path[1:])}`"
        return [*found, *(f"`{name}`" for name in self.parameters)]

    def output_names(self, count: int) -> list[str]:
        """Returns what each output of the reference is called: `output`, or what one would write for a part of it."""
        if self.form is not None and len(self.form.names) == count:
            return [
                f"`output{name}`" if name.startswith(("[", ".")) or not name else f"`{name}`"
                for name in self.form.names
            ]
        return [f"output {i}" for i in range(count)]

    def _call(self, function: Any, values: Sequence[Any]) -> tuple[list[Any], list[str], list[str]]:
        """Returns the leaves of a result, the keys that they are under, and what each is called."""
        *leaves, assembly = values
        args, kwargs, given = assembly.split(leaves)
        is_reference = function is self.reference
        are_shared = bool(given)  # as in the process that made the case
        if not isinstance(function, torch.nn.Module) or not (are_shared or is_reference):
            return flatten(function(*args, **kwargs))
        own = _state_of(function)
        if are_shared:
            state = dict(zip(self.parameters, given, strict=True))
            state = state if is_reference else {self._renamed.get(name, name): v for name, v in state.items()}
        else:  # of the reference alone: the candidate has its own
            is_wide = self._is_oracle(values)
            state = {name: v.double() if is_wide and v.is_floating_point() else v for name, v in own.items()}
        paths = {_own_name(name): name for name, _ in (*function.named_parameters(), *function.named_buffers())}
        buffers = {_own_name(name) for name, _ in function.named_buffers()}
        state = {name: v.clone() if name in buffers else v for name, v in state.items() if name in own}
        result = functional_call(function, {paths[name]: v for name, v in state.items()}, args, kwargs)
        outputs, keys, names = flatten(result)
        if are_shared and self.reference.training:  # statistics of a batch norm, say
            outputs += [v.detach() for name, v in state.items() if name in buffers]
            names += [name for name in state if name in buffers]
        return outputs, keys, names


def name_of(target: Any) -> str:
    """Returns what a callable is called in messages."""
    for holder in (target, getattr(target, "func", None), getattr(target, "_orig_mod", None)):
        if isinstance(name := getattr(holder, "__name__", None), str):
            return name
        if isinstance(holder, torch.nn.Module) and not hasattr(holder, "_orig_mod"):
            return type(holder).__name__
    return type(target).__name__


def _unwrap(function: Any) -> Any:
    """Returns what is called: of a torch.autograd.Function its `apply`, of a module a copy."""
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        return function.apply
    if isinstance(function, torch.nn.Module):
        with contextlib.suppress(Exception):  # some cannot be copied: then it is that one
            return copy.deepcopy(function)
    return function


def _own_name(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile puts that in front


def _state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the parameters of a module, then its buffers, by name."""
    return {_own_name(name): tensor for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _match_names(target: torch.nn.Module, reference: torch.nn.Module) -> dict[str, str]:
    """Returns the name in the target of each part of a reference's state; none, unless names alone differ."""
    own, wanted = _state_of(target), _state_of(reference)
    alike = len(own) == len(wanted) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(own.values(), wanted.values(), strict=True)
    )
    return dict(zip(wanted, own, strict=True)) if alike and set(own) != set(wanted) else {}


def _mismatch(target: torch.nn.Module, reference: torch.nn.Module) -> str:
    """Returns how the states of two modules differ in names or shapes, "" if they do not."""
    own, wanted = (
        {_own_name(name): tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        for module in (target, reference)
    )
    lines = [f"`{name}` is missing" for name in wanted if name not in own]
    lines += [f"`{name}` is not the reference's" for name in own if name not in wanted]
    lines += [
        f"`{name}` is {list(own[name])} where the reference has {list(shape)}"
        for name, shape in wanted.items()
        if name in own and own[name] != shape
    ]
    return "; ".join(lines[:4])


def _parameters_of(function: Any) -> list[str]:
    """Returns the names of the parameters that a function takes by position; none where nobody knows."""
    function = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in itertools.takewhile(lambda p: p.kind in by_position, parameters)]


def flatten(result: Any) -> tuple[list[Any], list[str], list[str]]:
    """Returns the tensors of a result, None for what is absent, the keys under which they are, and what each is called.

    Numbers become tensors, complex tensors pairs of real numbers; what is not a number is skipped.
    """
    found = list(_iterate_leaves(result, "", "")) if result is not None else []
    return [output for output, _, _ in found], [key for _, key, _ in found], [name for _, _, name in found]


def _iterate_leaves(value: Any, key: str, name: str) -> Iterator[tuple[Any, str, str]]:
    """Yields what a value holds. `key` tells which results are alike, and `name` also where in a list each lies."""
    parts: Iterable[tuple[Any, str, str]] = ()
    if isinstance(value, torch.Tensor):
        value = value.to_dense() if value.layout != torch.strided else value
        yield torch.view_as_real(value.resolve_conj()) if value.is_complex() else value, key, name
    elif isinstance(value, (bool, int, float)):
        yield torch.tensor(value), key, name
    elif value is None:
        yield None, key, name
    elif isinstance(value, Mapping):
        parts = ((value[each], f"[{each!r}]", f"[{each!r}]") for each in sorted(value, key=str))
    elif isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)  # of a named tuple
        parts = ((item, "", f".{fields[i]}" if fields else f"[{i}]") for i, item in enumerate(value))
    elif dataclasses.is_dataclass(value):
        parts = ((getattr(value, f.name), f".{f.name}", f".{f.name}") for f in dataclasses.fields(value))
    for part, of_key, of_name in parts:
        yield from _iterate_leaves(part, key + of_key, name + of_name)


def _describe(keys: list[str]) -> str:
    names = [key for key in dict.fromkeys(keys) if key]
    return f"{plural(len(keys), 'output')}" + (f" under {', '.join(names)}" if names else "")
