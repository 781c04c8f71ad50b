"""The operators that this process has declared."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection
from types import CodeType
from typing import Any

import torch

from opwright import _torch
from opwright.contract.declaration import Declaration, code_of
from opwright.dispatch.lock import lock as lock
from opwright.dispatch.record import Operator
from opwright.dispatch.registration import Registration
from opwright.errors import NameTakenError

operators: dict[str, Operator] = {}
registrations: dict[str, Registration] = {}


def check_free(declaration: Declaration, *, has_kernels: bool) -> Operator | None:
    """Returns the operator that this declaration replaces, if there is one.

    Args:
        declaration: of an operator that may be new.
        has_kernels: kernels that a library has registered under its name are its own.

    Raises:
        NameTakenError: the name belongs to an operator that was declared elsewhere.
    """
    name = declaration.qualified_name
    old = operators.get(name)
    if old is not None:
        before = old.declaration
        if declaration.body is not None and declaration.body is before.body:
            _check_same(before, declaration)
        if declaration.file == before.file or declaration.module == before.module:
            return old
        raise NameTakenError(
            declaration.name,
            "an operator of this name is declared elsewhere",
            rows=[
                ("there", f"{before.file}:{before.line}"),
                ("here", f"{declaration.file}:{declaration.line}"),
            ],
            hint=f'`@operator("{declaration.namespace}_2::{declaration.name}")`',
        )
    if name not in registrations and ((_torch.has_kernel(name) and not has_kernels) or _has_schema(name)):
        raise NameTakenError(
            declaration.name,
            "PyTorch already has an operator of this name",
            rows=[("name", name)],
            hint=f'`@operator("{declaration.namespace}_2::{declaration.name}")`',
        )
    return None


def _check_same(before: Declaration, declaration: Declaration) -> None:
    """Raises NameTakenError for two functions that one run of a module declares under one name."""
    name, own = declaration.reference.__name__, f"{declaration.namespace}::{declaration.name}"
    if code_of(declaration.reference) is not code_of(before.reference):
        if not (before.is_direct and declaration.is_direct):  # a program that calls functions, as one that runs tests
            return
        raise NameTakenError(
            declaration.name,
            "two functions of this file are declared under one name",
            rows=[("first", f"{before.file}:{before.line}"), ("second", f"{declaration.file}:{declaration.line}")],
            hint=f'`@operator("{declaration.namespace}::{name if name != before.name else f"{name}_2"}")`',
        )
    old, new = captured(before.reference), captured(declaration.reference)
    for variable, text in old.items():
        if new.get(variable, text) != text:
            is_function = text.startswith(_FUNCTION)
            hint = "" if is_function else f'a name for each, as in `@operator(f"{own}_{{{variable}}}")`, or '
            raise NameTakenError(
                declaration.name,
                f"it is declared again with another `{variable}`, and both functions would use the second value",
                rows=[("first", text.partition("\n")[0]), ("second", new[variable].partition("\n")[0])],
                hint=hint + ("a name for each" if is_function else f"an argument `{variable}`"),
            )


def captured(reference: Callable[..., Any], above: Collection[CodeType] = ()) -> dict[str, str]:
    """Returns, as text, what a reference takes from the functions around it: plain values, and functions.

    Args:
        above: the functions that this one is captured by.
    """
    function, found = inspect.unwrap(reference), {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it has no value yet, such as the operator itself
            if text := _text_of(cell.cell_contents, (*above, function.__code__)):
                found[name] = text
    return found


_FUNCTION = "the function "


def _text_of(value: Any, above: Collection[CodeType]) -> str:
    if _is_plain(value):
        return repr(value)
    name = getattr(value, "__qualname__", "")
    code = getattr(inspect.unwrap(value), "__code__", None) if name else None
    text = f"{_FUNCTION}{name}" if name else ""
    if code is None:
        return text
    inner = captured(value, above) if code not in above else {}
    return f"{text} at {code.co_filename}:{code.co_firstlineno}\n{listing(code)}{inner}"


def listing(code: CodeType) -> str:
    """Returns what the code of a function does, as text that is the same in every process."""
    constants = [
        listing(v) if isinstance(v, CodeType) else sorted(map(repr, v)) if isinstance(v, frozenset) else v
        for v in code.co_consts
    ]
    return repr((code.co_code, code.co_names, constants))


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


def _has_schema(name: str) -> bool:
    return bool(_torch.schemas_of(name))


def operator_of(target: Any) -> Operator | None:
    """Returns the Operator behind a declared function or a `torch.ops` entry, or None."""
    found = getattr(target, "operator", None)
    if isinstance(found, Operator):
        return found
    name = getattr(target, "_qualified_op_name", None) or getattr(target, "_name", None)
    return operators.get(str(name).removesuffix(".default")) if name else None
