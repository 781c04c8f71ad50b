"""Annotations of a reference, read into parameters and outputs."""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import torch

from opwright.contract.axes import parse_axes
from opwright.contract.contract import MISSING, Output, Parameter, TensorType
from opwright.contract.domains import Domain, Index, Range
from opwright.contract.dtypes import family, family_names
from opwright.errors import AnnotationError, AxisError

_MUTATED = "opwright: this argument is written into"
_FAMILIES_OF = {int: "Int64", float: "Float64", bool: "Bool"}


class Mutates:
    """Marks a tensor argument that the operator writes into: `Mutates[Float[Tensor, "n"]]`."""

    def __class_getitem__(cls, annotation: Any) -> Any:
        return Annotated[annotation, _MUTATED]


def read_parameters(
    function: Callable[..., Any], subject: str, local_names: Mapping[str, Any]
) -> tuple[tuple[Parameter, ...], Any]:
    """Returns the parameters of a reference and its return annotation (MISSING when there is none).

    Raises:
        AnnotationError: a parameter has no annotation, or one that no schema can express.
        AxisError: the axes of a tensor cannot be read.
    """
    signature = read_signature(function, subject, local_names)
    parameters = tuple(_read_parameter(p, subject) for p in signature.parameters.values())
    returns = signature.return_annotation
    return parameters, MISSING if returns is inspect.Signature.empty else returns


def read_signature(function: Callable[..., Any], subject: str, local_names: Mapping[str, Any]) -> inspect.Signature:
    """Returns the signature of a function, with its annotations evaluated.

    Raises:
        AnnotationError: an annotation has a name that is not defined.
        AxisError: the axes of a tensor cannot be read.
    """
    with _refuse_unreadable(function, subject):
        return inspect.signature(function, eval_str=True, locals=dict(local_names))


@contextlib.contextmanager
def _refuse_unreadable(function: Callable[..., Any], subject: str) -> Iterator[None]:
    try:
        yield
    except NameError as error:
        raise AnnotationError(
            subject,
            f"the annotation names `{error.name}`, which is not defined",
            hint=_hint_for_name(function, error.name),
        ) from None
    except Exception as error:  # jaxtyping's own, of axes that it cannot read
        raise AxisError(subject, f"an annotation cannot be read: {error}") from None


def _hint_for_name(function: Callable[..., Any], name: str) -> str:
    """Returns what to type for a name in an annotation that is not defined."""
    if name in family_names():
        return f"`from jaxtyping import {name}`"
    if name == "Tensor":
        return "`from torch import Tensor`"
    texts = [text for text in function.__annotations__.values() if isinstance(text, str)]
    found = next(filter(None, (re.search(rf"(\w+\[[\w.]+, *){name}]", text) for text in texts)), None)
    return f'`{found[1]}"{name}"]`: axes are in quotes' if found else "import or define it above the operator"


def _read_parameter(parameter: inspect.Parameter, subject: str) -> Parameter:
    name, annotation = parameter.name, parameter.annotation
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        raise AnnotationError(
            subject,
            f"`{parameter}`: an operator has a fixed number of arguments",
            hint=f'`{name}: list[Float[Tensor, "n"]]` takes any number of tensors',
        )
    if name == "out" or name.startswith("_") or not name.isascii():
        every = "`out` is the argument that every operator has"
        hint = every if name == "out" else "a name is ASCII letters, digits and `_`, and starts with a letter"
        raise AnnotationError(subject, f"`{name}` cannot be the name of an argument", hint=hint)
    if annotation is inspect.Parameter.empty:
        raise AnnotationError(
            subject,
            f"`{name}` has no annotation",
            hint=f"`{parameter.replace(annotation=type(parameter.default))}`"
            if isinstance(parameter.default, (bool, int, float))
            else f'`{name}: Float[Tensor, "..."]`, or int, float, bool, Literal["a", "b"]',
        )
    default = MISSING if parameter.default is inspect.Parameter.empty else parameter.default
    common = {"default": default, "keyword_only": parameter.kind is parameter.KEYWORD_ONLY}
    read = _read_annotation(annotation, name, subject)
    _check_default(read, default, name, subject)
    if default is not MISSING and default is not None and type(default) not in _PLAIN:  # of an enumeration, or NumPy's
        plain = {"int": int, "float": float}.get(read["kind"])
        common["default"] = plain(default) if plain else next(each for each in read["choices"] if each == default)
    return Parameter(name=name, **read, **common)


_PLAIN = (bool, int, float, str)


def _aliased(annotation: Any) -> Any:
    """Returns what a `type X = ...` stands for; anything else as it is."""
    while type(annotation).__name__ == "TypeAliasType":
        annotation = annotation.__value__
    return annotation


def _read_annotation(annotation: Any, name: str, subject: str) -> dict[str, Any]:
    annotation = _aliased(annotation)
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        read = _read_annotation(inner, name, subject)
        if _MUTATED in marks:
            if not read.get("type"):
                raise AnnotationError(
                    subject, f"`{name}`: only tensors can be written into", hint=f"`{name}: {_text(inner)}`"
                )
            read["mutated"] = True
        domain = _read_domain(marks, read, name, subject)
        return {**read, "domain": domain} if domain else read
    if annotation in (int, float, bool):
        return {"kind": annotation.__name__}
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        if all(isinstance(choice, str) for choice in arguments):
            _check_choices(arguments, name, subject)
            return {"kind": "choice", "choices": tuple(arguments)}
        hint = f"`{name}: int` for numbers, `{name}: bool` for a switch"
        if None in arguments and all(isinstance(choice, (str, types.NoneType)) for choice in arguments):
            hint = _choices_of(name, ("none" if choice is None else choice for choice in arguments))
        raise AnnotationError(subject, f"`{name}`: a Literal of strings is expected", hint=hint)
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        inner = next(a for a in arguments if a is not type(None))
        read = _read_annotation(inner, name, subject)
        if read["kind"] != "tensor":
            raise AnnotationError(
                subject,
                f"`{name}`: only a tensor can be optional",
                rows=[("got", _text(annotation))],
                hint="an empty list"
                if read["kind"] == "tensors"
                else _choices_of(name, ("none", *(read.get("choices") or ("true", "false"))))
                if read["kind"] in ("bool", "choice")
                else f"give `{name}` a default that means 'none', such as -1",
            )
        return {**read, "optional": True}
    if origin is list and _is_tensor(*arguments):
        return {**_read_annotation(arguments[0], name, subject), "kind": "tensors"}
    return {"kind": "tensor", "type": read_tensor_type(annotation, name, subject)}


def _read_domain(marks: Sequence[Any], read: Mapping[str, Any], name: str, subject: str) -> Domain | None:
    """Returns the domain among the marks of an `Annotated`, None where there is none; other marks mean nothing here."""
    for mark in marks:
        if mark is Range or mark is Index:
            bounded = "Range(0, 1)" if mark is Range else 'Index("n")'
            hint = f"`{name}: Annotated[..., {bounded}]`"
            raise AnnotationError(subject, f"`{name}`: `{mark.__name__}` needs its bounds", hint=hint)
    found = [mark for mark in marks if isinstance(mark, (Range, Index))]
    if not found:
        return None
    dtypes = read["type"].family.dtypes if read.get("type") else ()
    takes_indices = read["kind"] == "int" or (
        dtypes and not any(d.is_floating_point or d == torch.bool for d in dtypes)
    )
    takes_numbers = takes_indices or read["kind"] == "float" or (dtypes and torch.bool not in dtypes)
    rows = [("got", " ".join(map(str, found)))]
    if len(found) > 1 or read.get("domain"):
        raise AnnotationError(subject, f"`{name}` has more than one domain", rows=rows, hint="keep the narrower one")
    if not takes_numbers:
        raise AnnotationError(subject, f"`{name}`: only numbers have a domain", rows=rows, hint="remove it")
    if isinstance(found[0], Index) and not takes_indices:
        hint = f'`{name}: Annotated[Int64[Tensor, "..."], {found[0]}]`'
        raise AnnotationError(subject, f"`{name}`: only integers are indices", rows=rows, hint=hint)
    if isinstance(found[0], Index):
        parse_axes(found[0].axis, subject, name)
    return found[0]


def read_tensor_type(annotation: Any, name: str, subject: str) -> TensorType:
    """Reads a jaxtyping annotation of a torch.Tensor.

    Raises:
        AnnotationError: it is something else, or a dtype that operators cannot have.
    """
    dtype = getattr(annotation, "dtype", None)
    text = getattr(annotation, "dim_str", None)
    if dtype is None or not isinstance(text, str):
        plain = getattr(annotation, "__name__", "") == "Tensor"
        raise AnnotationError(
            subject,
            f"`{name}`: " + ("a bare Tensor has no contract" if plain else "this type cannot be passed"),
            rows=[("got", _text(annotation))],
            hint=_instead_of(annotation, name),
        )
    array = getattr(annotation, "array_type", None)
    if isinstance(array, type) and not issubclass(array, torch.Tensor):
        raise AnnotationError(
            subject,
            f"`{name}`: it is not a PyTorch tensor",
            rows=[("got", f'{dtype.__name__}[{_text(array)}, "{text}"]')],
            hint=f'`{name}: {dtype.__name__}[Tensor, "{text}"]`, with `from torch import Tensor`',
        )
    found = family(dtype.__name__)
    if found is None:
        raise AnnotationError(
            subject,
            f"`{name}`: dtype `{dtype.__name__}` is not supported",
            rows=[("expected", " ".join(family_names()))],
            hint=_instead_of_dtype(dtype.__name__, name),
        )
    return TensorType(found, parse_axes(text, subject, name))


def read_outputs(
    annotation: Any, function: Callable[..., Any], subject: str, local_names: Mapping[str, Any]
) -> tuple[Output, ...]:
    """Reads the return annotation of a function: a tensor, a tuple or NamedTuple of tensors, or None.

    Raises:
        AnnotationError: it is missing or something else.
        AxisError: the axes of a tensor cannot be read.
    """
    annotation = _aliased(annotation)
    if annotation is MISSING:
        raise AnnotationError(
            subject,
            "the result has no annotation",
            hint='`-> Float[Tensor, "..."]`, a tuple of them, or `-> None` if it only mutates',
        )
    if annotation is None or annotation is type(None):
        return ()
    if isinstance(annotation, type) and hasattr(annotation, "_fields"):
        names = {}
        if annotation.__module__ == function.__module__:  # it may be as local as the function
            names = {"globalns": inspect.unwrap(function).__globals__, "localns": dict(local_names)}
        with _refuse_unreadable(function, subject):
            hints = typing.get_type_hints(annotation, **names)
        bare = next((name for name in annotation._fields if name not in hints), None)
        if bare is not None:
            raise AnnotationError(
                subject,
                f"`{annotation.__name__}`: its field `{bare}` has no annotation",
                hint=f'`class {annotation.__name__}(NamedTuple):` with `{bare}: Float[Tensor, "..."]`',
            )
        return tuple(Output(name, _read_output(hints[name], name, subject)) for name in annotation._fields)
    if get_origin(annotation) is tuple:
        if len(get_args(annotation)) == 1:
            item = _text(get_args(annotation)[0])
            raise AnnotationError(
                subject, "the result is a tuple of one tensor", hint=f"`-> {item}`: the tensor itself"
            )
        return tuple(
            Output(f"output{i}", _read_output(item, f"output{i}", subject))
            for i, item in enumerate(get_args(annotation))
        )
    return (Output("output", _read_output(annotation, "output", subject)),)


def _read_output(annotation: Any, name: str, subject: str) -> TensorType:
    annotation = _aliased(annotation)
    arguments = get_args(annotation)
    if get_origin(annotation) is list or annotation is ...:
        item = _text(arguments[0]) if _is_tensor(*arguments[:1]) else 'Float[Tensor, "..."]'
        hint = f"`tuple[{item}, {item}]`, as many as there are, or one tensor with an axis more"
    elif annotation in (int, float, bool):
        family = "Float" if annotation is float else _FAMILIES_OF[annotation]
        hint = f'`{family}[Tensor, ""]`, a tensor without axes'
    elif type(None) in arguments:
        hint = "a result is always there: an empty tensor can stand for none"
    elif getattr(annotation, "dtype", None) is None and getattr(annotation, "__name__", "") != "Tensor":
        hint = '`Float[Tensor, "..."]`, a tuple or a NamedTuple of them, or None'
    else:
        return read_tensor_type(annotation, name, subject)
    got = [("got", "..." if annotation is ... else _text(annotation))]
    raise AnnotationError(subject, f"`{name}`: this type cannot be returned", rows=got, hint=hint)


def _check_default(read: Mapping[str, Any], default: Any, name: str, subject: str) -> None:
    if default is MISSING:
        return
    kind = read["kind"]
    good = {
        "tensor": lambda: default is None and read.get("optional", False),
        "tensors": lambda: False,
        "int": lambda: isinstance(default, int) and not isinstance(default, bool),
        "float": lambda: isinstance(default, (int, float)) and not isinstance(default, bool) and math.isfinite(default),
        "bool": lambda: isinstance(default, bool),
        "choice": lambda: default in read["choices"],
    }[kind]()
    domain = read.get("domain")
    if good and isinstance(domain, Range) and default is not None and not domain.contains(default):
        rows = [("default", repr(default)), ("domain", str(domain))]
        raise AnnotationError(subject, f"`{name}`: the default is outside of its domain", rows=rows)
    if not good:
        hints = {
            "tensor": f"`{name}: {read['type']} | None = None`" if read.get("type") else "",
            "tensors": "remove the default",
            "float": "a finite number; a schema cannot say inf or nan",
            "choice": f"one of {' '.join(map(repr, read.get('choices', ())))}",
        }
        raise AnnotationError(
            subject,
            f"`{name}`: the default does not fit the annotation",
            rows=[("default", repr(default))],
            hint=hints.get(kind, f"a default of type {kind}"),
        )


def _check_choices(choices: tuple[str, ...], name: str, subject: str) -> None:
    # The enumerator of a choice is the choice with every other character replaced by "_".
    plain = all(re.fullmatch(r"[A-Za-z0-9_.+ -]+", choice) for choice in choices)
    distinct = len({re.sub(r"\W", "_", choice) for choice in choices}) == len(set(choices)) == len(choices)
    if not plain or not distinct:
        raise AnnotationError(
            subject,
            f"`{name}`: its choices have no distinct names in C++",
            rows=[("got", ", ".join(map(repr, choices)))],
            hint="letters, digits and _ are enough for a choice",
        )


def _is_tensor(annotation: Any = None) -> bool:
    return isinstance(getattr(annotation, "dim_str", None), str)


def _instead_of(annotation: Any, name: str) -> str:
    """Returns what to annotate an argument with, instead of a type that cannot be passed."""
    if get_origin(annotation) in (tuple, Sequence) and _is_tensor(*get_args(annotation)[:1]):
        return f"`{name}: list[{_text(get_args(annotation)[0])}]`"
    if get_origin(annotation) in (list, tuple, Sequence):
        items = [item for item in get_args(annotation) if item is not ...]
        if len(items) > 1:
            return f"an argument for each: `{', '.join(f'{name}{i}: {_text(item)}' for i, item in enumerate(items))}`"
        if items and get_origin(items[0]) in (Union, types.UnionType):
            return f"a list without None, or `{name}0: {_text(items[0])}` and so on"
        family = _FAMILIES_OF.get(items[0], "Int64") if items else "Int64"
        return f'`{name}: {family}[Tensor, "k"]`, or an argument for each number'
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _choices_of(name, (str(choice.value) for choice in annotation))
    if set(get_args(annotation)) == {int, float}:
        return f"`{name}: float`, which takes whole numbers too"
    if len(get_args(annotation)) > 1 and all(map(_is_tensor, get_args(annotation))):
        return f'`{name}: Shaped[Tensor, "{get_args(annotation)[0].dim_str}"]` for any dtype, `Real` for all but bool'
    if annotation is str:
        return f'`{name}: Literal["a", "b"]`, with its choices'
    return f'`{name}: Float[Tensor, "..."]`, or int, float, bool, Literal["a", "b"]'


def _choices_of(name: str, choices: Iterable[str]) -> str:
    return f"`{name}: Literal[{', '.join(json.dumps(choice) for choice in choices)}]`"


def _instead_of_dtype(dtype: str, name: str) -> str:
    """Returns what to do with a dtype that operators cannot have."""
    if dtype.startswith("Complex"):
        return f"complex numbers: take `torch.view_as_real({name})`, with a last axis of 2"
    bits = re.search("8|16|32|64", dtype)
    same = {"8": "UInt8", "16": "Int16", "32": "Int32", "64": "Int64"}[bits[0]] if bits else ""
    return f"take `{name}.view(torch.{same.lower()})`, the same bits as `{same}`" if same else ""


def _text(annotation: Any) -> str:
    if get_origin(annotation) is not None:
        return str(annotation)
    if _is_tensor(annotation):
        return f'{annotation.dtype.__name__}[Tensor, "{annotation.dim_str}"]'
    return getattr(annotation, "__name__", None) or str(annotation)
