"""A declaration: the reference with everything that follows from its text."""

from __future__ import annotations

import difflib
import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, MappingProxyType
from typing import Any, NamedTuple

from opwright.contract.annotations import read_outputs, read_parameters, read_signature
from opwright.contract.axes import Anonymous, Axis, Computed, Named, Variadic
from opwright.contract.contract import MISSING, Contract, Output, Parameter, TensorType
from opwright.contract.domains import Index
from opwright.contract.names import CPP_KEYWORDS, PYTORCH_NAMESPACES
from opwright.contract.precision import Precision, check_precision
from opwright.contract.sources import Source
from opwright.errors import AnnotationError, AxisError, BackwardError, DeclarationError, NameTakenError

AUTOCAST_POLICIES = ("promote", "lower", "float32")


class Declaration(NamedTuple):
    """One declared operator.

    Attributes:
        qualified_name: `ns::name`.
        reference: the function that was decorated.
        contract: its arguments and outputs.
        sources: kernels by backend, and by type of device: the one that runs there. Empty where the reference always
            runs.
        backward_sources: those of its backward.
        random: whether the reference draws random numbers.
        autocast: what happens under autocast: "promote" (floats to the widest of them), "lower" (to
            autocast's dtype), "float32", or None (nothing).
        module, file, line: where it was declared.
        body: the code of the module that declares it, another one each time it is executed; None where it is unknown.
        is_direct: whether that module declares it, or a function that it calls.
        forward: for a backward, the name of the operator that it belongs to.
        deterministic: whether the same input gives the same bits again.
        precision: how much less precise than PyTorch it may be; None: not at all.
        batch_invariant: whether an entry of the variadic axis has the same bits in every batch.
        shared_gradients: groups of inputs whose gradient is one tensor, which a backward returns for the first of them.
        derived_gradients: inputs whose gradient follows from the reference, also beside a declared backward.
        generation: how often the schema of this name has changed in this process.
    """

    qualified_name: str
    reference: Callable[..., Any]
    contract: Contract
    sources: Mapping[str, Source]
    random: bool
    autocast: str | None
    module: str
    file: str
    line: int
    forward: str | None = None
    generation: int = 0
    deterministic: bool = True
    precision: Precision | None = None
    batch_invariant: bool = False
    shared_gradients: tuple[tuple[str, ...], ...] = ()
    derived_gradients: tuple[str, ...] = ()
    body: CodeType | None = None
    is_direct: bool = True
    backward_sources: Mapping[str, Source] = MappingProxyType({})

    @property
    def namespace(self) -> str:
        """The part before `::`."""
        return self.qualified_name.split("::")[0]

    @property
    def name(self) -> str:
        """The part after `::`."""
        return self.qualified_name.split("::")[1]

    @property
    def description(self) -> str:
        """The reference's docstring."""
        return inspect.getdoc(self.reference) or ""


def declare(
    qualified_name: str,
    reference: Callable[..., Any],
    *,
    find_sources: Callable[[str, str], Mapping[str, Source]],
    random: bool = False,
    data_dependent: Sequence[str] = (),
    non_differentiable: Sequence[str] = (),
    autocast: str | None = "promote",
    deterministic: bool = True,
    precision: Precision | None = None,
    batch_invariant: bool = False,
    shared_gradients: Sequence[Sequence[str]] = (),
    derived_gradients: Sequence[str] = (),
    local_names: Mapping[str, Any] | None = None,
    body: CodeType | None = None,
    is_direct: bool = True,
) -> Declaration:
    """Reads a reference into a declaration.

    Args:
        find_sources: returns the sources of the kernels, from the name of the operator and the declaring file.
        body: the code of the module that declares it.
        is_direct: whether it does so itself, or by a function that it calls.

    Raises:
        DeclarationError: the subclass for what cannot be honoured.
    """
    code = code_of(reference)
    namespace, separator, subject = qualified_name.partition("::")
    if not separator or not namespace.isidentifier() or not subject.isidentifier() or not qualified_name.isascii():
        raise DeclarationError(
            "",
            f"invalid operator name `{qualified_name}`; expected `namespace::name`",
            hint=f'`@operator("my_ops::{reference.__name__}")`',
        )
    of_python = keyword.iskeyword(subject)
    if subject in CPP_KEYWORDS or of_python or subject == "main":
        raise DeclarationError(
            subject,
            f"{'Python' if of_python else 'C++'} uses the name `{subject}`, so an operator cannot have it: its "
            f"{'entry point' if of_python else 'kernel'} is a function of that name",
            hint=f'`@operator("{namespace}::{subject}_op")`',
        )
    if namespace in PYTORCH_NAMESPACES:
        raise NameTakenError(
            subject,
            f"the namespace `{namespace}` is PyTorch's own",
            rows=[("name", qualified_name)],
            hint=f'`@operator("my_ops::{subject}")`',
        )
    if autocast is not None and autocast not in AUTOCAST_POLICIES:
        raise DeclarationError(
            subject,
            f"there is no autocast policy {autocast!r}",
            rows=[("expected", " | ".join(map(repr, AUTOCAST_POLICIES)) + " | None")],
        )
    for option, names in (("data_dependent", data_dependent), ("non_differentiable", non_differentiable)):
        if isinstance(names, str):
            raise DeclarationError(subject, f"`{option}` takes a list of names", hint=f'`{option}=["{names}"]`')
    check_precision(precision, subject)
    contract = read_contract(
        reference,
        subject,
        data_dependent=data_dependent,
        non_differentiable=non_differentiable,
        local_names=local_names,
    )
    if batch_invariant and all(o.type.variadic_at is None for o in contract.outputs):
        raise DeclarationError(
            subject,
            "`batch_invariant=True` is about the entries of a variadic axis, and no output has one",
            hint='`-> Float[Tensor, "*batch n"]`',
        )
    sources = find_sources(subject, code.co_filename)
    return Declaration(
        qualified_name=qualified_name,
        reference=reference,
        contract=contract,
        sources={} if random or data_dependent else sources,
        random=random,
        autocast=autocast,
        module=reference.__module__,
        file=code.co_filename,
        line=code.co_firstlineno,
        deterministic=deterministic,
        precision=precision,
        batch_invariant=batch_invariant,
        shared_gradients=_check_shared(contract, shared_gradients),
        derived_gradients=_check_derived(contract, derived_gradients),
        body=body,
        is_direct=is_direct,
        backward_sources=sources,
    )


def code_of(reference: Callable[..., Any]) -> CodeType:
    """Returns the code of a reference, which decorators such as `@torch.no_grad()` may wrap.

    Raises:
        DeclarationError: it is not a function.
    """
    code = getattr(inspect.unwrap(reference), "__code__", None)
    if code is None:
        raise DeclarationError(
            "",
            f"a reference is a function, and this is an object of type `{type(reference).__name__}`",
            hint='write a function that calls it: `def name(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]: return f(x)`',
        )
    return code


def read_contract(
    function: Callable[..., Any],
    subject: str,
    *,
    data_dependent: Sequence[str] = (),
    non_differentiable: Sequence[str] = (),
    local_names: Mapping[str, Any] | None = None,
) -> Contract:
    """Reads the annotations of a function into a contract.

    Raises:
        DeclarationError: the subclass for what cannot be honoured.
    """
    local_names = local_names or {}
    parameters, returns = read_parameters(function, subject, local_names)
    outputs = read_outputs(returns, function, subject, local_names)
    outputs = _mark_constant(outputs, non_differentiable, subject)
    result_type = returns if isinstance(returns, type) and hasattr(returns, "_fields") else None
    contract = Contract(subject, parameters, outputs, tuple(data_dependent), result_type)
    _check_contract(contract)
    return contract


def _mark_constant(outputs: tuple[Output, ...], constant: Sequence[str], subject: str) -> tuple[Output, ...]:
    names = [output.name for output in outputs]
    unknown = [name for name in constant if name not in names]
    if unknown:
        raise DeclarationError(
            subject,
            f"`non_differentiable` names `{unknown[0]}`, which is not an output",
            rows=[("outputs", ", ".join(names) or "none")],
            hint=f'`non_differentiable=["{names[-1]}"]`; a NamedTuple names outputs' if names else "",
        )
    return tuple(output._replace(is_constant=output.name in constant) for output in outputs)


def _check_shared(contract: Contract, groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Returns groups of inputs with one gradient.

    Raises:
        DeclarationError: one is not an input that has a gradient, or has other axes or another dtype than the first.
    """
    known = {p.name: p for p in contract.parameters if p.is_differentiable and not p.optional and p.kind == "tensor"}
    for group in groups:
        for name in group:
            if name not in known or known[name].type != known.get(group[0], known[name]).type:
                reason = "is not a tensor that always has a gradient"
                if name in known:
                    reason = f"is `{known[name]}`, and `{group[0]}` is `{known[group[0]]}`: their gradients differ"
                raise DeclarationError(
                    contract.subject,
                    f"`shared_gradients`: `{name}` {reason}",
                    rows=[("expected", 'groups of names, as in `[("input", "residual")]`')],
                )
    return tuple(tuple(group) for group in groups if group)


def _check_derived(contract: Contract, names: Sequence[str]) -> tuple[str, ...]:
    """Returns inputs whose gradient is derived.

    Raises:
        DeclarationError: one is not a tensor that has a gradient, or none is left for a declared backward.
    """
    known = [p.name for p in contract.parameters if p.is_differentiable and not p.mutated and p.kind == "tensor"]
    unknown = [name for name in names if name not in known]
    if unknown or (names and not set(known) - set(names)):
        raise DeclarationError(
            contract.subject,
            f"`derived_gradients` names `{unknown[0]}`, which is not a tensor that has a gradient"
            if unknown
            else "`derived_gradients` names every input that has a gradient",
            rows=[("inputs", ", ".join(known) or "none")],
            hint="" if unknown else "without `@name.backward`, all gradients are derived",
        )
    return tuple(names)


def declare_backward(
    forward: Declaration, reference: Callable[..., Any], local_names: Mapping[str, Any]
) -> Declaration:
    """Reads the reference of a backward; annotations that it leaves out follow from the forward.

    Raises:
        BackwardError: its parameters do not fit the forward.
    """
    code = code_of(reference)
    subject = f"{forward.name}_backward"
    known = _backward_parameters(forward.contract)
    written = inspect.signature(reference).parameters
    names = list(written)
    unknown = [name for name in names if name not in known]
    gradients = _gradient_names(forward.contract)
    taken = [p.name for p in forward.contract.parameters if p.name in gradients]
    if taken:
        raise BackwardError(
            subject,
            f"`{taken[0]}` is an argument of `{forward.name}`, and the gradient of its result has that name",
            hint=f"rename the argument of `{forward.name}`, to `{taken[0].removeprefix('grad_')}_gradient` for example",
        )
    if unknown or not set(gradients) <= set(names):
        inputs = ", ".join(p.name for p in forward.contract.parameters)
        expected = ", ".join(gradients)
        raise BackwardError(
            subject,
            f"`{unknown[0]}` is not an input, output or gradient of `{forward.name}`"
            if unknown
            else "a backward takes the gradient of every output",
            rows=[("got", ", ".join(names)), ("known", ", ".join(known))],
            hint=f"`def {reference.__name__}({expected}, {inputs}):`",
        )
    parameters = _in_order(
        known[name]._replace(keyword_only=True) if p.kind is p.KEYWORD_ONLY else known[name]
        for name, p in written.items()
    )
    lists = [p.name for p in forward.contract.parameters if p.kind == "tensors" and p.is_differentiable]
    if lists:
        raise BackwardError(
            subject,
            f"`{lists[0]}` is a list, and a backward returns one tensor for each input",
            hint=f"leave the backward out: the gradient follows from the reference of `{forward.name}`",
        )
    seen = {*names, *forward.derived_gradients}
    unseen = [p.name for p in forward.contract.parameters if p.optional and p.is_differentiable and p.name not in seen]
    if unseen:
        raise BackwardError(
            subject,
            f"`{unseen[0]}` may be absent, so the backward must take it to know",
            hint=f"`def {reference.__name__}({', '.join([*names, unseen[0]])}):`",
        )
    returns = read_signature(reference, subject, local_names).return_annotation
    annotated = returns is not inspect.Signature.empty
    outputs = read_outputs(returns, reference, subject, local_names) if annotated else ()
    given_elsewhere = {name for _, *others in forward.shared_gradients for name in others}
    given_elsewhere |= set(forward.derived_gradients)
    derived = tuple(
        Output(f"grad_{p.name}", p.type, p.name if p.optional else None)
        for p in forward.contract.parameters
        if p.is_differentiable and not p.mutated and p.name not in given_elsewhere
    )
    if annotated and len(outputs) != len(derived):
        raise BackwardError(
            subject,
            "a backward returns one gradient for each floating-point tensor input that is not in `derived_gradients`"
            if forward.derived_gradients
            else "a backward returns one gradient for each floating-point tensor input",
            rows=[("got", str(len(outputs))), ("expected", ", ".join(o.name for o in derived))],
        )
    contract = Contract(subject, parameters, derived, ())
    _check_contract(contract)
    return forward._replace(
        qualified_name=f"{forward.namespace}::{subject}",
        reference=reference,
        contract=contract,
        sources=forward.backward_sources,
        shared_gradients=(),
        derived_gradients=(),
        file=code.co_filename,
        line=code.co_firstlineno,
        forward=forward.qualified_name,
        body=None,
    )


def _gradient_names(contract: Contract) -> list[str]:
    return [f"grad_{output.name}" for output in contract.outputs if not output.is_constant]


def _backward_parameters(contract: Contract) -> dict[str, Parameter]:
    known: dict[str, Parameter] = {}
    for output in contract.outputs:
        if not output.is_constant:
            known[f"grad_{output.name}"] = Parameter(f"grad_{output.name}", "tensor", output.type)
    for parameter in contract.parameters:
        # Every argument is passed, by autograd; options stay keyword-only with their defaults.
        default = MISSING if parameter.is_tensor else parameter.default
        keyword_only = parameter.keyword_only and not parameter.is_tensor
        known[parameter.name] = parameter._replace(default=default, keyword_only=keyword_only)
    for output in contract.outputs:
        known.setdefault(output.name, Parameter(output.name, "tensor", output.type))
    return known


def _in_order(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Returns the parameters of a backward in the order of its function.

    An option before a tensor loses its default and becomes positional: a schema has no default before an argument
    without one, and autograd passes every argument.
    """
    found: list[Parameter] = []
    for parameter in reversed([*parameters]):
        is_in_front = any(not p.keyword_only and p.default is MISSING for p in found)
        found.append(parameter._replace(default=MISSING, keyword_only=False) if is_in_front else parameter)
    return tuple(reversed(found))


def _names_in(axis: Axis) -> Sequence[str]:
    if isinstance(axis, Named):
        return (axis.name,)
    return axis.names if isinstance(axis, Computed) else ()


# What the tables of the glue hold: dimensions of a View, bits in a mask of sizes.
_MOST_AXES, _MOST_SIZES, _MOST_ARGUMENTS = 16, 64, 64


def _check_contract(contract: Contract) -> None:
    subject = contract.subject
    _check_limits(contract)
    named, variadics, families = _bound_names(contract)
    for parameter in contract.parameters:
        unknown = [n for n in parameter.domain.names if n not in named] if isinstance(parameter.domain, Index) else []
        if unknown:
            raise AxisError(
                subject,
                f"`{parameter.name}`: no input has the axis `{unknown[0]}` of {parameter.domain}",
                rows=[("bound", " ".join(named) or "nothing")],
                hint=f'`x: Float[Tensor, "{unknown[0]} ..."]` names an axis; `Range(0, 9)` has fixed ends',
            )
    inputs = [parameter.name for parameter in contract.parameters]
    of_outputs = {name for output in contract.outputs for axis in output.type.axes for name in _names_in(axis)}
    for name in contract.data_dependent:
        if name not in of_outputs - set(named):
            what, new = (
                ("an axis of an input", f"{name}_found") if name in named else ("not an axis of an output", name)
            )
            raise AxisError(
                subject,
                f"`data_dependent` names `{name}`, which is {what}",
                hint=f'`data_dependent=["{new}"]`, and `-> Float[Tensor, "{new} ..."]` for the axis that varies',
            )
    for output in contract.outputs:
        if output.name in inputs:
            raise AnnotationError(
                subject,
                f"`{output.name}` is the name of an argument and of a result",
                hint=f"rename the argument, to `{output.name}_input` for example",
            )
        for axis in output.type.axes:
            if isinstance(axis, (Variadic, Anonymous)) and not getattr(axis, "name", None):
                raise AxisError(
                    subject,
                    f"`{output.name}`: `{axis}` does not say which size it has",
                    hint="name the axis, in the inputs and in the result; a name that starts with `_` binds nothing",
                )
            missing = [n for n in _names_in(axis) if n not in named and n not in contract.data_dependent]
            if isinstance(axis, Variadic) and axis.name not in variadics:
                missing = [f"*{axis.name}"]
            if missing:
                bound = [*named, *(f"*{v}" for v in variadics)]
                near = difflib.get_close_matches(missing[0], [name for name in bound if len(name) > 1], n=1)
                if near:
                    hint = f"`{near[0]}` has almost that name"
                elif isinstance(axis, Variadic):
                    hint = f'annotate an input with it, as in `x: Float[Tensor, "{missing[0]} n"]`'
                else:
                    unused = [name for name in named if name not in of_outputs]
                    hint = f"did you mean `{unused[0]}`? Else " if len(unused) == 1 else ""
                    hint += (
                        f"take it as an argument `{missing[0]}: int`, or, if only the data know it, "
                        f'`@operator(..., data_dependent=["{missing[0]}"])`'
                    )
                raise AxisError(
                    subject,
                    f"`{output.name}`: the size of `{missing[0]}` does not follow from the inputs",
                    rows=[("bound", " ".join(bound) or "nothing")],
                    hint=hint,
                )
        family = output.type.family
        if not family.is_single and not output.gradient_of and family.name not in families:
            absent = [p.name for p in contract.tensors if p.type.family.name == family.name]
            raise AnnotationError(
                subject,
                f"`{output.name}`: its dtype follows from `{absent[0]}`, which callers may leave out"
                if absent
                else f"`{output.name}`: no input has the dtype family `{family}` to take the dtype from",
                hint=f"a single dtype, as in `{family.dtypes[0]}`: "
                f"`{str(family.dtypes[0]).removeprefix('torch.').capitalize()}[Tensor, ...]`",
            )
    if not contract.outputs and not contract.mutated:
        raise AnnotationError(
            subject,
            "an operator returns something or mutates something",
            hint='annotate the result, or the argument as `Mutates[Float[Tensor, "n"]]`',
        )
    if not contract.tensors:
        raise AnnotationError(
            subject,
            "an operator takes at least one tensor",
            hint="a function of numbers alone needs no dispatcher: leave it a Python function",
        )


def _check_limits(contract: Contract) -> None:
    subject = contract.subject
    types = {p.name: p.type for p in contract.tensors} | {o.name: o.type for o in contract.outputs}
    for name, type_ in types.items():
        if type_.rank > _MOST_AXES:
            raise AxisError(
                subject,
                f"`{name}` has more than {_MOST_AXES} axes",
                rows=[("got", str(type_.rank))],
                hint="collect those that vary together in one `*name`",
            )
    sizes = {n for t in types.values() for a in t.axes for n in getattr(a, "names", None) or [getattr(a, "name", None)]}
    sizes |= {p.name for p in contract.parameters if p.kind == "int"}
    if len(contract.parameters) + len(contract.outputs) > _MOST_ARGUMENTS or len(sizes) > _MOST_SIZES:
        raise AnnotationError(
            subject,
            "it has more arguments, or more named axes and int arguments, than an operator can have",
            rows=[
                ("arguments", f"at most {_MOST_ARGUMENTS}"),
                ("named axes and int arguments", f"at most {_MOST_SIZES}"),
            ],
            hint="pass tensors of one kind as a list",
        )


def _bound_names(contract: Contract) -> tuple[dict[str, None], dict[str, None], set[str]]:
    named: dict[str, None] = {p.name: None for p in contract.parameters if p.kind == "int"}
    variadics: dict[str, None] = {}
    families: set[str] = set()
    for parameter in contract.tensors:
        if not parameter.optional:
            families.add(parameter.type.family.name)
        for axis in parameter.type.axes:
            if isinstance(axis, Named):
                named[axis.name] = None
            elif isinstance(axis, Variadic) and axis.name:
                variadics[axis.name] = None
    for parameter in contract.tensors:
        for axis in parameter.type.axes:
            if isinstance(axis, Computed):
                unknown = [name for name in axis.names if name not in named]
                if len(unknown) > 1:
                    raise AxisError(
                        contract.subject,
                        f"`{parameter.name}`: `{axis}` has more than one unknown size",
                        rows=[("unknown", " ".join(unknown))],
                        hint="give each of them an axis of its own in some input",
                    )
                if unknown and axis.solve(axis.evaluate(_probe(axis, 6)), unknown[0], _probe(axis, 6)) != 6:
                    raise AxisError(
                        contract.subject,
                        f"`{parameter.name}`: `{axis}` cannot be solved for `{unknown[0]}`",
                        hint=f"give `{unknown[0]}` an axis of its own in some input",
                    )
                named.update(dict.fromkeys(unknown))
    return named, variadics, families


def _probe(axis: Computed, value: int) -> dict[str, int]:
    return dict.fromkeys(axis.names, value)


__all__ = [
    "AUTOCAST_POLICIES",
    "Declaration",
    "Source",
    "TensorType",
    "code_of",
    "declare",
    "declare_backward",
]
