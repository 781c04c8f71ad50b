"""Which library holds an operator's kernels: built and loaded on the first call, swapped on a new declaration."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from ctypes import PyDLL
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from opwright import settings
from opwright.backends.exports import refuse_kernel as refuse_kernel
from opwright.backends.protocol import Backend, CompiledBackend, LaunchedBackend
from opwright.backends.registry import all_backends, backend_of_device, device_types
from opwright.backends.sources import find_sources as find_sources
from opwright.contract.declaration import Declaration
from opwright.contract.schema import interface_of
from opwright.dispatch import registry
from opwright.dispatch.frames import is_of_the_library
from opwright.dispatch.launched import Launched
from opwright.dispatch.record import Operator
from opwright.errors import CompileError, NoCompilerError

if TYPE_CHECKING:  # only here: a process whose operators have no kernels never imports the builder
    from opwright.build.load import Library


def has_kernel(declaration: Declaration, device: str) -> bool:
    """Returns whether an operator has a kernel for a type of device."""
    return device in declaration.sources


def may_have_kernels(declaration: Declaration) -> bool:
    """Returns whether an operator has a kernel for some type of device, or that is not known yet."""
    return bool(declaration.sources)


def has_every_kernel(declaration: Declaration) -> bool:
    """Returns whether an operator has a kernel for each type of device that this build of torch has."""
    return declaration.sources.keys() >= {name for name in device_types() if backend_of_device(name).is_in_torch()}


class Registrable(Protocol):
    """A library whose kernels can be made those of the dispatcher, and be taken back.

    Attributes:
        handle: what holds the kernels; None where Python launches them.
    """

    @property
    def handle(self) -> PyDLL | None: ...
    def register(self, backend: str) -> None: ...
    def unregister(self, backend: str) -> None: ...


_loaded: dict[tuple, Registrable] = {}
_tried: set[tuple] = set()
_adopted: set[tuple | None] = set()
_offered: dict[tuple[str, str], Mapping[str, Registrable]] = {}
_warned: set[str] = set()
# Held while the library of a key is built, so that threads that need another one do not wait for it.
_builds: dict[tuple, threading.RLock] = {}
os.register_at_fork(after_in_child=_builds.clear)  # what a thread of the parent builds, it builds for the parent


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
    with registry.lock:
        found = [
            operator.declaration
            for operator in registry.operators.values()
            if unit_key(operator.declaration, key[1]) == key and _is_current(operator)
        ]
    return sorted(found, key=lambda declaration: declaration.qualified_name)


def _is_current(operator: Operator) -> bool:
    """Whether an operator is not the backward of a declaration that has been replaced."""
    forward = registry.operators.get(operator.declaration.forward or "")
    return operator.declaration.forward is None or (forward is not None and forward.backward_operator is operator)


def ensure_loaded(operator: Operator, backend: str) -> bool:
    """Loads the library of an operator's kernels, building it if need be; returns whether it is loaded.

    Other threads may declare operators meanwhile: the kernels are those of what is declared in the end.

    Raises:
        BuildError: the kernel cannot be built, and that is not just a missing compiler.
    """
    if unit_key(operator.declaration, backend) is None:
        return False
    while True:
        with registry.lock:
            current = operator.registration.current
            key = unit_key(current.declaration, backend)
            is_retired = registry.registrations.get(operator.declaration.qualified_name) is not operator.registration
            if key is None or is_retired or not _is_current(current):
                return False
            building = _builds.setdefault(key, threading.RLock())
        with building:
            is_loaded = _load(current, key)
        if is_loaded is not None:
            return is_loaded


def _load(operator: Operator, key: tuple) -> bool | None:
    """Loads the library of a key; returns whether it is loaded, None when its operators were declared again."""
    backend = key[1]
    with registry.lock:
        if operator.registration.current is not operator:
            return None
        if key in _loaded:
            return True
        if key in _tried and not settings.require_kernels():
            return False
        unit = unit_of(key)
        _import_loader()
    language = _language(operator.declaration, backend)
    try:
        obstacle = language.find_obstacle(operator.declaration.sources[backend], operator.declaration.name)
        if obstacle is not None:
            raise obstacle
        _check_is_taken(unit, backend)
        library = build(key)[0]
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"while `{operator.declaration.name}` was compiled for {backend}") from None
    except Exception as error:
        with registry.lock:
            if not _is_unchanged(unit, key):
                return None
            if not isinstance(error, NoCompilerError) or settings.require_kernels():
                raise
            _tried.add(key)
        _warn_once(backend, error)
        return False
    with registry.lock:
        if not _is_unchanged(unit, key):
            return None
        _register(library, backend, unit)
        _loaded[key] = library
        return True


def _register(library: Registrable, backend: str, unit: Iterable[Declaration]) -> None:
    library.register(backend)
    for declaration in unit:
        registration = registry.registrations[declaration.qualified_name]
        registration.forget_choices()
        if library.handle is not None:
            registration.direct.add(library.handle, backend, backend, declaration)


def _is_unchanged(unit: Sequence[Declaration], key: tuple) -> bool:
    now = unit_of(key)
    return len(now) == len(unit) and all(a is b for a, b in zip(now, unit, strict=True))


# Modules are imported under `registry.lock`: after a fork amid an import, the child cannot import them.


def _import_loader() -> None:
    """Imports what finds and loads a library that is built."""
    import opwright.build.load
    import opwright.build.tools  # noqa: F401

    settings.cache_dir()


def _import_builder() -> None:
    """Imports what a build needs, which takes longer."""
    import filelock  # noqa: F401

    import opwright.build.compile  # noqa: F401


def _language(declaration: Declaration, device: str) -> Backend:
    """Returns the backend that an operator's kernel for a type of device is written for."""
    return all_backends()[declaration.sources[device].backend]


def _warn_once(device: str, error: NoCompilerError) -> None:
    if device in _warned:
        return
    _warned.add(device)
    caller = _find_caller()
    named = "".join(f" ({row[1]})" for row in error.rows if row[0] == "got")
    warnings.warn_explicit(
        f"{error.subject}: no {error.missing} was found{named}, so operators run their PyTorch reference, "
        f"slower. hint: {error.hint}",
        RuntimeWarning,
        caller.f_code.co_filename,
        caller.f_lineno,
        caller.f_globals.get("__name__"),
    )


def _find_caller() -> FrameType:
    """Returns the frame that called an operator: the innermost outside of Opwright and PyTorch."""
    frame = sys._getframe()
    while frame.f_back and is_of_the_library(frame):
        frame = frame.f_back
    return frame


def build(*keys: tuple) -> tuple[Library | Launched, bool]:
    """Builds one library of the units of these keys, which hold the same operators, and opens it.

    The second result is whether a compiler ran.
    """
    unit = unit_of(keys[0])
    launched = _language(unit[0], keys[0][1])
    if isinstance(launched, LaunchedBackend):
        return Launched(launched, launched.load(unit, unit[0].sources[keys[0][1]])), False
    # Only here: a process whose operators have no kernels never imports them.
    from opwright.build.load import load
    from opwright.build.request import make_request
    from opwright.build.store import Store
    from opwright.build.tools import find_tools

    request, store = make_request(unit, [key[1] for key in keys]), Store()
    entry, is_new = store.find(request.key, find_tools(request, store).identity), False
    if entry is None:
        with registry.lock:
            _import_builder()
        from opwright.build.compile import ensure_built

        entry, is_new = ensure_built(request, store)
    with registry.lock:  # no fork amid it
        return load(entry), is_new


def _check_is_taken(unit: Sequence[Declaration], device: str) -> None:
    """Raises the error for an operator whose kernel is written for a backend that cannot take it."""
    for declaration in unit:
        language = _language(declaration, device)
        reason = language.find_refusal(declaration.contract)
        if reason:
            source = declaration.sources[device].origin
            rule = f"its {language.name} kernel cannot be used: {reason}"
            raise CompileError(declaration.name, rule, rows=[("source", source)])


def adopt(operator: Operator, libraries: Mapping[str, Registrable]) -> None:
    """Notes that an operator's kernels are those of libraries made elsewhere, by backend; of others it has none."""
    with registry.lock:
        for backend in device_types():
            key = unit_key(operator.declaration, backend)
            if key is None:
                continue
            if backend in libraries:
                _loaded[key] = libraries[backend]
                _adopted.add(key)
            else:
                _tried.add(key)


def offer(operators: Mapping[tuple[str, str], Mapping[str, Registrable]]) -> None:
    """Notes which libraries have registered kernels of operators that may be declared later.

    Args:
        operators: the libraries by backend, of operators by name and interface.
    """
    with registry.lock:
        _offered.update(operators)


def are_registered(declaration: Declaration) -> bool:
    """Returns whether kernels of an operator were registered before it is declared."""
    return bool(_offered) and _offered_key(declaration) in _offered


def _offered_key(declaration: Declaration) -> tuple[str, str]:
    return declaration.qualified_name, interface_of(declaration.contract, declaration.name)


def claim(operator: Operator) -> None:
    """Makes the kernels that were registered before an operator was declared its own."""
    libraries = _offered.pop(_offered_key(operator.declaration), None) if _offered else None
    if libraries is not None:
        adopt(operator, libraries)


def are_adopted(operator: Operator) -> bool:
    """Returns whether kernels of an operator come from a library made elsewhere, and not from its sources."""
    return any(unit_key(operator.declaration, backend) in _adopted for backend in device_types())


def libraries_of(operators: Iterable[Operator]) -> list[tuple[tuple, ...]]:
    """Returns the keys that go into each library when the kernels of all compiled backends are built.

    Backends share a library when their sources hold the same operators, as they do in a folder.
    """
    found: list[tuple[tuple, ...]] = []
    for operator in operators:
        keys = [
            key
            for b in device_types()
            if (key := unit_key(operator.declaration, b))
            and isinstance(_language(operator.declaration, b), CompiledBackend)
        ]
        shared = {tuple(d.qualified_name for d in unit_of(key)) for key in keys}
        for group in [tuple(keys)] if len(shared) == 1 else [(key,) for key in keys]:
            if group and group not in found:
                found.append(group)
    return sorted(found)


def unload(declaration: Declaration) -> None:
    """Takes the kernels of a declaration back, so that the next call builds and loads anew."""
    with registry.lock:
        for backend in device_types():
            key = unit_key(declaration, backend)
            _tried.discard(key)
            library = _loaded.pop(key, None)
            if library is not None:
                library.unregister(backend)


def retire(declaration: Declaration) -> None:
    """Makes room for another schema under the public name of an operator, whose kernels were taken back."""
    loader = sys.modules.get("opwright.build.load")  # else there never were kernels
    if loader is not None:
        loader.retire(declaration.namespace, declaration.name)


def library_of(operator: Operator, backend: str) -> Registrable | None:
    """Returns the library that holds the operator's kernels for a backend; None where none is loaded."""
    return _loaded.get(unit_key(operator.declaration, backend))


def is_loaded(operator: Operator, backend: str) -> bool:
    """Returns whether the operator's kernels for a backend are the registered ones."""
    return unit_key(operator.declaration, backend) in _loaded


def launched_by(operator: Operator, device: str) -> Launched | None:
    """Returns the library that Python launches an operator's kernels from; None where the dispatcher calls them."""
    library = library_of(operator, device)
    return library if isinstance(library, Launched) else None
