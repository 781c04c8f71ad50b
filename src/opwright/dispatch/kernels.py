"""Which library holds an operator's kernels: built and loaded on the first call, swapped on a new declaration."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from opwright import settings
from opwright.dispatch import registry
from opwright.errors import NoCompilerError

if TYPE_CHECKING:
    from opwright.build.load import Library
    from opwright.dispatch.operator import Operator
    from opwright.spec.declaration import Declaration

BACKENDS = ("cpu",)

_loaded: dict[tuple, Library] = {}
_tried: set[tuple] = set()
_has_warned = False


def unit_key(declaration: Declaration, backend: str) -> tuple | None:
    """Returns what identifies the library of an operator; None when it has no kernel for the backend.

    Operators of one namespace that share a source share a library.
    """
    source = declaration.sources.get(backend)
    if source is None:
        return None
    if source.path is not None:
        return (declaration.namespace, backend, str(source.path))
    return (declaration.namespace, backend, declaration.forward or declaration.qualified_name)


def unit_of(key: tuple) -> list[Declaration]:
    """Returns the declarations that belong to a library, in a fixed order."""
    found = [
        operator.declaration
        for operator in registry.operators.values()
        if unit_key(operator.declaration, key[1]) == key and _is_current(operator)
    ]
    return sorted(found, key=lambda declaration: declaration.qualified_name)


def _is_current(operator: Operator) -> bool:
    """Whether an operator is not the backward of a declaration that has been replaced."""
    forward = registry.operators.get(operator.declaration.forward or "")
    return operator.declaration.forward is None or (
        forward is not None and forward.backward_operator is operator
    )


def ensure_loaded(operator: Operator, backend: str) -> bool:
    """Loads the library of an operator's kernels, building it if need be; returns whether it is loaded.

    Raises:
        BuildError: the kernel cannot be built, and that is not just a missing compiler.
    """
    global _has_warned
    key = unit_key(operator.declaration, backend)
    if key is None:
        return False
    if key in _loaded:
        return True
    with registry.lock:
        if key in _loaded:
            return True
        if key in _tried and not settings.require_kernels():
            return False
        try:
            library = build(key)[0]
        except NoCompilerError as error:
            if settings.require_kernels():
                raise
            _tried.add(key)
            if not _has_warned:
                _has_warned = True
                warnings.warn(
                    f"{error.subject}: no C++ compiler was found, so operators run their PyTorch reference, "
                    f"slower. hint: {error.hint}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return False
        library.register()
        _loaded[key] = library
        return True


def build(key: tuple) -> tuple[Library, bool]:
    """Builds the library of a unit and opens it; the second result is whether a compiler ran."""
    # Only here: a process whose operators have no kernels never imports the builder.
    from opwright.build.compile import ensure_built, make_request
    from opwright.build.load import load
    from opwright.build.store import Store

    entry, is_new = ensure_built(make_request(unit_of(key), key[1]), Store())
    return load(entry), is_new


def unload(declaration: Declaration) -> None:
    """Takes the kernels of a declaration back, so that the next call builds and loads anew."""
    with registry.lock:
        for backend in BACKENDS:
            key = unit_key(declaration, backend)
            _tried.discard(key)
            library = _loaded.pop(key, None)
            if library is not None:
                library.unregister()


def is_loaded(operator: Operator, backend: str) -> bool:
    """Returns whether the operator's kernels for a backend are the registered ones."""
    return unit_key(operator.declaration, backend) in _loaded
