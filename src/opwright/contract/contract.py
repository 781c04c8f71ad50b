"""The contract of an operator: what its arguments and outputs are, and the check of a call."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from opwright import _torch
from opwright.contract.axes import Axis, Computed, Fixed, Named, Variadic
from opwright.contract.domains import Domain
from opwright.contract.dtypes import Family, describe, describe_undense, short_name
from opwright.contract.memory import find_shared, overlaps_itself
from opwright.errors import (
    ContractError,
    DeviceError,
    DtypeError,
    NotATensorError,
    OptionError,
    OptionTypeError,
    OverlapError,
    RankError,
    ShapeError,
)

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "<required>"})()


class TensorType(NamedTuple):
    """`Float[Tensor, "*batch n"]`: a dtype family and axes."""

    family: Family
    axes: tuple[Axis, ...]

    def __str__(self) -> str:
        return f'{self.family}[Tensor, "{" ".join(map(str, self.axes))}"]'

    @property
    def rank(self) -> int:
        """The rank of the kernel's View: a variadic axis counts as one dimension."""
        return len(self.axes)

    @property
    def variadic_at(self) -> int | None:
        """The position of the variadic axis, if there is one."""
        return next((i for i, axis in enumerate(self.axes) if isinstance(axis, Variadic)), None)

    def spans(self, ndim: int) -> Iterator[tuple[Axis, slice]]:
        """Yields each axis with the dimensions of a tensor of rank `ndim` that it covers."""
        extra = ndim - (self.rank - 1) if self.variadic_at is not None else 1
        start = 0
        for axis in self.axes:
            length = extra if isinstance(axis, Variadic) else 1
            yield axis, slice(start, start + length)
            start += length

    def accepts_rank(self, ndim: int) -> bool:
        """Whether a tensor of rank `ndim` can have these axes."""
        return ndim >= self.rank - 1 if self.variadic_at is not None else ndim == self.rank


class Parameter(NamedTuple):
    """One argument of an operator.

    Attributes:
        kind: "tensor", "tensors" (a list), "int", "float", "bool" or "choice" (a Literal of strings).
        domain: the values that it takes, where that is declared.
        likely: where none is declared, the values for which the reference gives numbers.
    """

    name: str
    kind: str
    type: TensorType | None = None
    optional: bool = False
    mutated: bool = False
    choices: tuple[str, ...] = ()
    default: Any = MISSING
    keyword_only: bool = False
    domain: Domain | None = None
    likely: Domain | None = None

    def __str__(self) -> str:
        text = str(self.type) if self.type else "|".join(self.choices) or self.kind
        text = f"list[{text}]" if self.kind == "tensors" else text
        text = f"Annotated[{text}, {self.domain}]" if self.domain else text
        return f"{text} | None" if self.optional else text

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor or a list of tensors."""
        return self.type is not None

    @property
    def is_differentiable(self) -> bool:
        """Whether a gradient can flow to it."""
        return self.type is not None and self.type.family.has_floats


class Output(NamedTuple):
    """One output of an operator.

    `gradient_of` names the optional input whose absence empties it; `is_constant` says that no gradient
    flows through it.
    """

    name: str
    type: TensorType
    gradient_of: str | None = None
    is_constant: bool = False


@dataclass
class Bindings:
    """What the arguments of one call bound: sizes of axes, dtypes of families, the device."""

    sizes: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    device: torch.device | None = None
    source: dict[str, str] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)


class Contract(NamedTuple):
    """The arguments and outputs of one operator.

    Attributes:
        subject: the operator's short name, used in messages.
        data_dependent: axes of outputs whose size only the reference knows.
        result_type: the NamedTuple that the Python function returns its outputs in.
    """

    subject: str
    parameters: tuple[Parameter, ...]
    outputs: tuple[Output, ...]
    data_dependent: tuple[str, ...] = ()
    result_type: type | None = None

    @property
    def tensors(self) -> tuple[Parameter, ...]:
        """The parameters that are tensors or lists of tensors."""
        return tuple(p for p in self.parameters if p.is_tensor)

    @property
    def mutated(self) -> tuple[Parameter, ...]:
        """The parameters that the operator writes into."""
        return tuple(p for p in self.parameters if p.mutated)

    @property
    def scalar_family(self) -> Family | None:
        """The family that the kernel's template parameter ranges over.

        It is the first one with more than one dtype, floating-point families first; None when every
        tensor has a fixed dtype.
        """
        types = [p.type for p in self.parameters if p.type] + [o.type for o in self.outputs]
        families = [t.family for t in types if not t.family.is_single]
        return next((f for f in families if f.is_floating), families[0] if families else None)

    @property
    def scalar_dtypes(self) -> tuple[torch.dtype | None, ...]:
        """The dtypes of that family; None alone where there is none."""
        return self.scalar_family.dtypes if self.scalar_family is not None else (None,)

    def bind(self, arguments: Mapping[str, Any]) -> Bindings:
        """Checks the arguments of a call and returns what they bind.

        Raises:
            ContractError: the subclass for the rule that was broken.
        """
        return _Binder(self, arguments).bind()

    def fits(self, values: Sequence[Any]) -> bool:
        """Returns whether a call, its arguments in schema order, keeps the contract: no output has a negative size."""
        try:
            self.bind(self.name_arguments(values))
        except ContractError:
            return False
        return True

    def name_arguments(self, values: Sequence[Any]) -> dict[str, Any]:
        """Returns the arguments of a call, given in schema order, by name."""
        return dict(zip([p.name for p in self.parameters], values, strict=True))

    def split_arguments(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call, given in schema order, as positional and keyword-only ones."""
        pairs = list(zip(self.parameters, values, strict=True))
        return tuple(v for p, v in pairs if not p.keyword_only), {p.name: v for p, v in pairs if p.keyword_only}

    def find_outside(self, values: Sequence[Any]) -> Parameter | None:
        """Returns the first parameter whose value, in a call that fits the contract, lies outside of its domain."""
        if not any(p.domain for p in self.parameters):
            return None
        sizes = _Binder(self, self.name_arguments(values)).bind_arguments().sizes
        for parameter, value in zip(self.parameters, values, strict=True):
            if parameter.domain is None or value is None:
                continue
            allowed = parameter.domain.within(sizes)
            for each in value if isinstance(value, (list, tuple)) else [value]:
                is_empty = isinstance(each, torch.Tensor) and not each.numel()
                if not is_empty and (allowed is None or not allowed.contains(each)):
                    return parameter
        return None

    def output_shape(self, output: Output, bindings: Bindings) -> tuple[Any, ...]:
        """Returns the shape of an output. Data-dependent axes are not known here (KeyError)."""
        if output.gradient_of in bindings.absent:
            return (0,)
        shape: list[Any] = []
        for axis in output.type.axes:
            match axis:
                case Fixed(size):
                    shape.append(size)
                case Named(name):
                    shape.append(bindings.sizes[name])
                case Variadic(name):
                    shape.extend(bindings.shapes[name or ""])
                case Computed():
                    shape.append(axis.evaluate(bindings.sizes))
        return tuple(shape)

    def output_dtype(self, output: Output, bindings: Bindings) -> torch.dtype:
        """Returns the dtype of an output."""
        family = output.type.family
        return family.dtypes[0] if family.is_single else bindings.dtypes[family.name]


class _Binder:
    """One check of one call."""

    def __init__(self, contract: Contract, arguments: Mapping[str, Any]) -> None:
        self.contract, self.arguments = contract, arguments
        self.found = Bindings()

    def bind(self) -> Bindings:
        self.bind_arguments()
        self._check_outputs()
        return self.found

    def bind_arguments(self) -> Bindings:
        """Checks the arguments alone: an output may have no size, as along an axis `n-3` where n is 2."""
        for parameter in self.contract.parameters:
            self._check_kind(parameter, self.arguments[parameter.name])
        tensors = list(self._tensors())
        for label, parameter, tensor in tensors:
            self._check_layout(label, tensor)
            self._bind_dtype(label, parameter, tensor)
            self._bind_device(label, tensor)
            self._bind_sizes(label, parameter, tensor)
        for label, parameter, tensor in tensors:
            self._check_computed(label, parameter, tensor)
        if self.contract.mutated:
            self._check_mutated(tensors)
        if not tensors:
            raise NotATensorError(
                self.contract.subject,
                "a call needs at least one tensor",
                rows=[(name, describe(value)) for name, value in self.arguments.items()],
                hint="its device and dtype decide where and how the operator computes",
            )
        return self.found

    def _tensors(self) -> Iterator[tuple[str, Parameter, torch.Tensor]]:
        for parameter in self.contract.tensors:
            value = self.arguments[parameter.name]
            if parameter.kind == "tensors":
                for i, tensor in enumerate(value):
                    yield f"{parameter.name}[{i}]", parameter, tensor
            elif value is not None:
                yield parameter.name, parameter, value
            else:
                self.found.absent.add(parameter.name)

    def _check_kind(self, parameter: Parameter, value: Any) -> None:
        def refuse(expected: str) -> ContractError:
            label, got = parameter.name, value
            if parameter.kind == "tensors" and isinstance(value, (list, tuple)):
                at = next(i for i, item in enumerate(value) if not isinstance(item, torch.Tensor))
                label, got, expected = f"{label}[{at}]", value[at], str(parameter.type)
            rows = [("got", describe(got)), ("expected", expected)]
            if isinstance(got, torch.Tensor) and parameter.kind == "tensors":
                hint = f"`[{label}]`, or `list({label})` for its rows"
            elif got is None and label != parameter.name:
                hint = "leave it out of the list"
            elif got is None and parameter.default is not MISSING:
                hint = f"leave it out: it is {parameter.default!r} then"
            elif got is None:
                hint = (
                    f"`{label}: {parameter.type} | None` in the declaration, if it is optional"
                    if parameter.is_tensor
                    else "give a value"
                )
            elif parameter.is_tensor:
                hint = f"`torch.as_tensor({label})`"
            elif isinstance(got, torch.Tensor):
                hint = f"`{label}.item()` for a tensor of one number; one of several needs its index first"
            elif isinstance(got, (bool, int, float)) and not (parameter.kind == "int" and got != got // 1):
                hint = f"`{parameter.kind}({label})`"
            else:
                example = {"int": "1", "float": "1.0", "bool": "True"}[parameter.kind]
                hint = f"`{label}={example}`, for example"
            error = NotATensorError if parameter.is_tensor else OptionTypeError
            rule = f"`{label}` has the wrong type"
            return error(self.contract.subject, rule, rows=rows, hint=hint)

        match parameter.kind:
            case "tensor":
                if not isinstance(value, torch.Tensor) and not (value is None and parameter.optional):
                    raise refuse(str(parameter.type) + (" or None" if parameter.optional else ""))
            case "tensors":
                if not isinstance(value, (list, tuple)) or not all(isinstance(item, torch.Tensor) for item in value):
                    raise refuse(f"list of {parameter.type}")
            case "int":
                if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
                    raise refuse("int")
                if type(value) is int and not -(2**63) <= value < 2**63:
                    raise self._too_large(parameter, value, "from -2**63 to 2**63 - 1")
                self.found.sizes[parameter.name] = value
                self.found.source[parameter.name] = parameter.name
            case "float":
                number = (int, float, torch.SymInt, torch.SymFloat)
                if isinstance(value, bool) or not isinstance(value, number):
                    raise refuse("float")
                if type(value) is int and value.bit_length() > sys.float_info.max_exp:
                    raise self._too_large(parameter, value, f"up to {sys.float_info.max:.3g}")
            case "bool":
                if not isinstance(value, (bool, torch.SymBool)):
                    raise refuse("bool")
            case "choice":
                if value not in parameter.choices:
                    raise OptionError(
                        self.contract.subject,
                        f"`{parameter.name}` has no choice {value!r}",
                        rows=[
                            ("got", repr(value)),
                            ("expected", " | ".join(map(repr, parameter.choices))),
                        ],
                        hint=f"`{parameter.name}={self._likely(parameter, value)!r}`",
                    )

    def _too_large(self, parameter: Parameter, value: int, expected: str) -> OptionTypeError:
        rows = [("got", f"int of {value.bit_length():,} bits"), ("expected", f"{parameter.kind} {expected}")]
        hint = f"`{parameter.name}: float` in the declaration takes larger numbers" if parameter.kind == "int" else ""
        return OptionTypeError(
            self.contract.subject, f"`{parameter.name}` does not fit in 64 bits", rows=rows, hint=hint
        )

    def _likely(self, parameter: Parameter, value: Any) -> str:
        """Returns the choice that was meant: the default, where nothing is like it."""
        if value is None and parameter.default is not MISSING:
            return parameter.default
        return _nearest(value, parameter.choices)

    def _check_layout(self, label: str, tensor: torch.Tensor) -> None:
        found = describe_undense(label, tensor)
        if found:
            raise NotATensorError(
                self.contract.subject,
                f"`{label}` must be a dense tensor, with strides",
                rows=[("got", found[0])],
                hint=f"`{found[1]}`",
            )

    def _bind_dtype(self, label: str, parameter: Parameter, tensor: torch.Tensor) -> None:
        family = parameter.type.family
        if tensor.dtype not in family.dtypes:
            allowed = " ".join(map(short_name, family.dtypes))
            raise DtypeError(
                self.contract.subject,
                f"`{label}` must have a dtype of `{family}`",
                rows=self._rows({label: f"expected one of {allowed}"}),
                hint=f"`torch.view_as_real({label})` has both parts as a last axis of 2"
                if tensor.is_complex()
                else f"`{label}.to({family.dtypes[0]})`",
            )
        bound = self.found.dtypes.get(family.name)
        if bound is None:
            self.found.dtypes[family.name] = tensor.dtype
            self.found.source[family.name] = label
        elif bound != tensor.dtype:
            source = self.found.source[family.name]
            raise DtypeError(
                self.contract.subject,
                f"`{label}` must have the dtype of `{source}`",
                rows=self._rows({source: "", label: f"expected {short_name(bound)}"}),
                hint=f"`{label}.to({source}.dtype)`",
            )

    def _bind_device(self, label: str, tensor: torch.Tensor) -> None:
        if self.found.device is None:
            self.found.device = tensor.device
            self.found.source["device"] = label
        elif tensor.device != self.found.device:
            source = self.found.source["device"]
            raise DeviceError(
                self.contract.subject,
                f"`{label}` must be on the device of `{source}`",
                rows=self._rows({source: "", label: f"expected {self.found.device}"}),
                hint=f"`{label}.to({source}.device)`",
            )

    def _bind_sizes(self, label: str, parameter: Parameter, tensor: torch.Tensor) -> None:
        type_ = parameter.type
        if not type_.accepts_rank(tensor.ndim):
            least = "at least " if type_.variadic_at is not None else ""
            count = type_.rank - (type_.variadic_at is not None)
            raise RankError(
                self.contract.subject,
                f"`{label}` must have {least}{count} {'axis' if count == 1 else 'axes'}",
                rows=self._rows({label: f'expected "{" ".join(map(str, type_.axes))}"'}),
                hint=_rank_hint(label, tensor, count),
            )
        for axis, span in type_.spans(tensor.ndim):
            got = tuple(tensor.shape[span])
            if isinstance(axis, Fixed):
                self._require(got[0], axis.size, label, tensor, span, f"{axis.size}")
            elif isinstance(axis, Named):
                bound = self.found.sizes.setdefault(axis.name, got[0])
                source = self.found.source.setdefault(axis.name, label)
                self._require(got[0], bound, label, tensor, span, f"{axis.name} = {bound}", source, axis.name)
            elif isinstance(axis, Variadic) and axis.name:
                bound_shape = self.found.shapes.setdefault(axis.name, got)
                source = self.found.source.setdefault(f"*{axis.name}", label)
                if len(got) != len(bound_shape) or not all(map(_equal, got, bound_shape)):
                    text = f"*{axis.name} = {list(bound_shape)}"
                    raise ShapeError(
                        self.contract.subject,
                        f"`{label}` must have the axes {text} of `{source}`",
                        rows=self._rows({source: text, label: f"got *{axis.name} = {list(got)}"}),
                        hint=_expand_hint(label, tensor, span, bound_shape, source),
                    )

    def _check_computed(self, label: str, parameter: Parameter, tensor: torch.Tensor) -> None:
        for axis, span in parameter.type.spans(tensor.ndim):
            if not isinstance(axis, Computed):
                continue
            size = tensor.shape[span.start]
            unknown = [name for name in axis.names if name not in self.found.sizes]
            if unknown:
                value = axis.solve(size, unknown[0], self.found.sizes) if len(unknown) == 1 else None
                if value is None:
                    raise ShapeError(
                        self.contract.subject,
                        f"`{label}` must have a size of the form {axis} as its axis {span.start}",
                        rows=self._rows({label: f"got {size}"}),
                        hint=_shape_hint(label, {}, None, size, span.start, parameter.type),
                    )
                self.found.sizes[unknown[0]] = value
                self.found.source[unknown[0]] = label
            expected = self._evaluate(axis)
            text = f"{axis} = {expected}"
            self._require(size, expected, label, tensor, span, text, name=str(axis))

    def _check_outputs(self) -> None:
        for output in self.contract.outputs:
            if output.gradient_of in self.found.absent:
                continue
            self._require_known(output)
            for axis in output.type.axes:
                names = axis.names if isinstance(axis, Computed) else (axis.name,) if isinstance(axis, Named) else ()
                if not names or not self.found.sizes.keys() >= set(names):
                    continue
                size = self._evaluate(Computed(str(axis)))
                if isinstance(size, int) and not 0 <= size < 1 << 63:
                    raise self._no_size(f"`{output.name}` would have {axis} = {size} elements along an axis", names)

    def _require_known(self, output: Output) -> None:
        try:
            what = "size of"
            self.contract.output_shape(output, self.found)
            what = "dtype of the family"
            self.contract.output_dtype(output, self.found)
        except ZeroDivisionError:
            pass  # another check tells it
        except KeyError as unknown:
            if (name := unknown.args[0]) not in self.contract.data_dependent:
                rule = f"`{output.name}`: the {what} `{name}` is not known, since every tensor that has it is absent"
                absent = [p.name for p in self.contract.tensors if name in re.findall(r"\w+", str(p.type))]
                hint = f"give {' or '.join(f'`{label}`' for label in absent)}"
                raise ShapeError(self.contract.subject, rule, hint=hint) from None

    def _evaluate(self, axis: Computed) -> Any:
        try:
            return axis.evaluate(self.found.sizes)
        except ZeroDivisionError:
            raise self._no_size(f"the size {axis} divides by zero", axis.names) from None

    def _no_size(self, rule: str, names: Sequence[str]) -> ShapeError:
        notes: dict[str, str] = {}
        for name in names:
            source = self.found.source[name]
            note = "" if source == name else f"{name} = {self.found.sizes[name]}"
            notes[source] = ", ".join(filter(None, [notes.get(source, ""), note]))
        return ShapeError(
            self.contract.subject,
            rule,
            rows=self._rows(notes),
            hint=f"the size follows from {' and '.join(f'`{label}`' for label in notes)}",
        )

    def _check_mutated(self, tensors: Sequence[tuple[str, Parameter, torch.Tensor]]) -> None:
        for label, parameter, tensor in tensors:
            if parameter.mutated and overlaps_itself(tensor):
                raise ShapeError(
                    self.contract.subject,
                    f"`{label}` is an expanded tensor, whose elements share memory: it cannot be written into",
                    rows=[(label, describe(tensor)), ("strides", str(list(tensor.stride())))],
                    hint=f"`{label} = {label}.contiguous()` before the call: it is that copy that is written into then",
                )
        found = find_shared([t for _, _, t in tensors], [p.mutated for _, p, _ in tensors])
        if found is None:
            return
        (written, _, one), (label, parameter, other) = tensors[found[0]], tensors[found[1]]
        rule = (
            "two mutated arguments share memory"
            if parameter.mutated
            else f"`{written}` is written and shares memory with `{label}`"
        )
        raise OverlapError(
            self.contract.subject,
            rule,
            rows=[(written, describe(one)), (label, describe(other))],
            hint=f"`{label}.clone()` in place of `{label}`",
        )

    def _require(
        self,
        got: Any,
        expected: Any,
        label: str,
        tensor: torch.Tensor,
        span: slice,
        text: str,
        source: str | None = None,
        name: str | None = None,
    ) -> None:
        if _equal(got, expected):
            return
        sizes = list(tensor.shape)
        sizes[span.start] = expected
        notes = {label: f"expected [{', '.join(map(str, sizes))}]"}
        origin = ""
        if source and source != label:
            notes = {source: text, **notes}
            origin = f", from `{source}`"
        elif name:
            names = [n for n in _names(name) if n in self.found.source]
            for n in names:
                note = f"{n} = {self.found.sizes[n]}"
                if self.found.source[n] != label:
                    notes = {self.found.source[n]: note, **notes}
        raise ShapeError(
            self.contract.subject,
            f"`{label}` must have {text} as its axis {span.start}{origin}",
            rows=self._rows(notes),
            hint=_shape_hint(label, self.arguments, source, expected, span.start, self._annotation_of(label)),
        )

    def _annotation_of(self, label: str) -> Any:
        return next((parameter.type for name, parameter, _ in self._tensors() if name == label), "")

    def _rows(self, notes: Mapping[str, str]) -> list[tuple[str, ...]]:
        labels = {label: tensor for label, _, tensor in self._tensors()}
        rows = []
        for label, note in notes.items():
            value = labels.get(label, self.arguments.get(label))
            rows.append((label, describe(value), note))
        return rows


def _names(expression: str) -> Sequence[str]:
    return (expression,) if expression.isidentifier() else Computed(expression).names


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    # Symbolic sizes: a definite mismatch is an error now, an unknown one is assumed away and
    # becomes a run-time assertion of the traced graph.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if not guard_or_true(a == b):
        return False
    _torch.assume(a == b)
    return True


def _nearest(value: Any, choices: Sequence[str]) -> str:
    import difflib

    return (difflib.get_close_matches(str(value), choices, n=1, cutoff=0.0) or choices)[0]


def _rank_hint(label: str, tensor: torch.Tensor, expected: int) -> str:
    if tensor.ndim < expected:
        return f"`{label}.unsqueeze(0)` adds an axis of size 1"
    if list(tensor.shape).count(1) >= tensor.ndim - expected:
        return f"`{label}.squeeze()` removes axes of size 1"
    return (
        f"`{label}.flatten(0, {tensor.ndim - expected})` makes one axis of the first" if expected else f"`{label}[0]`"
    )


def _expand_hint(label: str, tensor: torch.Tensor, span: slice, shape: Sequence[Any], source: str) -> str:
    sizes = [*tensor.shape[: span.start], *shape, *tensor.shape[span.stop :]]
    own = [1] * (len(sizes) - tensor.ndim) + list(tensor.shape)
    if len(own) == len(sizes) and all(a in (1, b) for a, b in zip(own, sizes, strict=True)):
        return f"`{label}.expand({', '.join(map(str, sizes))})` when one tensor serves all entries"
    return f"axes of the same name have the same sizes in all tensors; `{source}` came first"


def _shape_hint(
    label: str, arguments: Mapping[str, Any], source: str | None, size: Any, axis: int, annotation: Any
) -> str:
    for name, value in arguments.items():
        if name in (label, source) or not isinstance(value, torch.Tensor):
            continue
        if value.ndim == 1 and value.shape[0] == size:
            return f"`{name}` has that size; are `{label}` and `{name}` in the right order?"
    tensor = arguments.get(label)
    if isinstance(tensor, torch.Tensor) and tensor.ndim == 2 and tensor.shape[1 - axis] == size:
        return f"`{label}.T` has that size as its axis {axis}"
    if source and source != label:
        return f"an axis of the same name has the same size in all tensors; `{source}` came first"
    return f"the declaration writes the axes of `{label}` as `{annotation}`"


__all__ = [
    "MISSING",
    "Bindings",
    "Contract",
    "ContractError",
    "Output",
    "Parameter",
    "TensorType",
]
