"""Collects the operators that a package declares, without torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import opwright
from opwright.backends.exports import refuse_kernel
from opwright.backends.sources import find_sources
from opwright.contract.declaration import Declaration, declare, declare_backward
from opwright.errors import PackageError
from opwright.package import torch_stand_in

_found: dict[str, Declaration] = {}


def operator(
    qualified_name: str,
    cpu: str | Path | None = None,
    cuda: str | Path | None = None,
    triton: str | Path | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Any]:
    """Notes a declaration, as `opwright.operator` reads it.

    Args:
        options: those that `declare` takes too.
    """
    names = sys._getframe(1).f_locals
    named = {"cpu": cpu, "cuda": cuda, "triton": triton}

    def decorate(reference: Callable[..., Any]) -> Any:
        declaration = declare(
            qualified_name,
            reference,
            find_sources=partial(find_sources, kernels=named),
            local_names=names,
            **options,
        )
        refuse_kernel(declaration, named)
        return _Declared(declaration)

    return decorate


class _Declared(torch_stand_in.Anything):
    """What the name of an operator is bound to."""

    def __init__(self, declaration: Declaration) -> None:
        name = declaration.qualified_name
        before = _found.get(name)
        if before is not None:
            raise PackageError(
                declaration.name,
                "it is declared twice",
                rows=[
                    ("there", f"{before.file}:{before.line}"),
                    ("here", f"{declaration.file}:{declaration.line}"),
                ],
                hint="rename one of them",
            )
        _found[name] = declaration
        self.declaration = declaration

    def backward(self, reference: Callable[..., Any]) -> Any:
        """Notes the declaration of a backward."""
        return _Declared(declare_backward(self.declaration, reference, sys._getframe(1).f_locals))


def collect(root: Path, package: str) -> list[Declaration]:
    """Imports every module of a package, but its tests, and returns what they declare, by name.

    To be called where torch is the stand-in.

    Args:
        root: the folder that the package lies in.

    Raises:
        PackageError: a module cannot be imported without torch, or nothing is declared.
        DeclarationError: a declaration cannot be honoured.
    """
    opwright._HOMES["operator"] = __name__
    sys.path.insert(0, str(root))
    for path in sorted((root / package).rglob("*.py")):
        relative = path.relative_to(root).with_suffix("")
        is_test = path.name.startswith(("test_", "conftest"))
        is_hidden = any(part.startswith(".") for part in relative.parts)  # `.ipynb_checkpoints`, say
        if is_test or is_hidden or path.name in ("__main__.py", "triton.py"):
            continue
        name = ".".join(relative.parts).removesuffix(".__init__")
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise PackageError(
                name,
                "it cannot be imported where the wheel is built",
                rows=[("reason", str(error))],
                hint="add what it imports to `requires` in [build-system], or import it where it is used",
            ) from error
    if not _found:
        raise PackageError(package, "it declares no operator", hint=f"`opwright new --op {package}/my_op` adds one")
    return [_found[name] for name in sorted(_found)]
