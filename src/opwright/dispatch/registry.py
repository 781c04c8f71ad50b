"""The operators that this process has declared."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from opwright.errors import NameTakenError
from opwright.spec.declaration import Declaration

if TYPE_CHECKING:
    from opwright.dispatch.entries import Entries
    from opwright.dispatch.operator import Operator

# Of all that is declared, loaded and registered. It is held for short moments only, never during a build: a fork
# waits for it, so that the child finds everything whole.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)

operators: dict[str, Operator] = {}
entries: dict[str, Entries] = {}


def check_free(declaration: Declaration) -> Operator | None:
    """Returns the operator that this declaration replaces, if there is one.

    Raises:
        NameTakenError: the name belongs to an operator that was declared elsewhere.
    """
    from opwright import _torch

    name = declaration.qualified_name
    old = operators.get(name)
    if old is not None:
        before = old.declaration
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
    if name not in entries and (_torch.has_kernel(name) or _has_schema(name)):
        raise NameTakenError(
            declaration.name,
            "PyTorch already has an operator of this name",
            rows=[("name", name)],
            hint=f'`@operator("my_ops::{declaration.name}")`',
        )
    return None


def _has_schema(name: str) -> bool:
    from opwright import _torch

    return bool(_torch.schemas_of(name))
