"""The operators that this process has declared."""

from __future__ import annotations

from typing import Any

from opwright import _torch
from opwright.contract.declaration import Declaration, code_of
from opwright.dispatch.lock import lock as lock
from opwright.dispatch.record import Operator
from opwright.dispatch.registration import Registration
from opwright.errors import NameTakenError

operators: dict[str, Operator] = {}
registrations: dict[str, Registration] = {}


def check_free(declaration: Declaration) -> Operator | None:
    """Returns the operator that this declaration replaces, if there is one.

    Raises:
        NameTakenError: the name belongs to an operator that was declared elsewhere.
    """
    name = declaration.qualified_name
    old = operators.get(name)
    if old is not None:
        before = old.declaration
        is_other = code_of(declaration.reference) is not code_of(before.reference)
        if declaration.body is not None and declaration.body is before.body and is_other:
            name = declaration.reference.__name__
            raise NameTakenError(
                declaration.name,
                "two functions of this file are declared under one name",
                rows=[
                    ("first", f"{before.file}:{before.line}"),
                    ("second", f"{declaration.file}:{declaration.line}"),
                ],
                hint=f'`@operator("{declaration.namespace}::{name if name != before.name else f"{name}_2"}")`',
            )
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
    if name not in registrations and (_torch.has_kernel(name) or _has_schema(name)):
        raise NameTakenError(
            declaration.name,
            "PyTorch already has an operator of this name",
            rows=[("name", name)],
            hint=f'`@operator("{declaration.namespace}_2::{declaration.name}")`',
        )
    return None


def _has_schema(name: str) -> bool:
    return bool(_torch.schemas_of(name))


def operator_of(target: Any) -> Operator | None:
    """Returns the Operator behind a declared function or a `torch.ops` entry, or None."""
    found = getattr(target, "operator", None)
    if isinstance(found, Operator):
        return found
    name = getattr(target, "_qualified_op_name", None) or getattr(target, "_name", None)
    return operators.get(str(name).removesuffix(".default")) if name else None
