"""Which library holds an operator's kernels: the one that lies in the package. In place of `dispatch/kernels.py`."""

from __future__ import annotations

import ctypes
import functools
import json
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from opwright.contract.declaration import Declaration
from opwright.contract.schema import interface_of
from opwright.dispatch import registry
from opwright.dispatch.launched import Launched
from opwright.dispatch.record import Operator
from opwright.errors import PackageError

_FOLDER = Path(__file__).resolve().parent.parent
_registered: dict[str, str] = {}  # the library's name of the set of kernels, by backend


def find_sources(subject: str, file: str, kernels: Mapping[str, str | Path | None]) -> dict[str, Any]:
    """Returns nothing: sources are not shipped."""
    return {}


def refuse_kernel(declaration: Declaration, kernels: Mapping[str, str | Path | None]) -> None:
    """Does nothing: the wheel was built from sources that were checked."""


def has_kernel(declaration: Declaration, device: str) -> bool:
    """Returns whether the wheel has a kernel of an operator for a type of device."""
    name = declaration.qualified_name
    return device in _backends_of(name) or device in _held(name).get("launched", {})


@functools.cache
def _backends_of(qualified_name: str) -> tuple[str, ...]:
    return tuple(_held(qualified_name).get("backends", ()))


def _held(qualified_name: str) -> dict[str, Any]:
    return provenance()["operators"].get(qualified_name, {})


def may_have_kernels(declaration: Declaration) -> bool:
    """Returns True: an import would read what the library holds."""
    return True


def has_every_kernel(declaration: Declaration) -> bool:
    """Returns False: an import would read what the library holds."""
    return False


def launched_by(operator: Operator, device: str) -> Launched | None:
    """Returns what Python launches an operator's kernels with; None where the library has them, or nothing does."""
    module = _held(operator.declaration.qualified_name).get("launched", {}).get(device)
    return None if module is None else _launcher(module)


@functools.cache
def _launcher(module: str) -> Launched | None:
    """Imports a module of Triton kernels; warns where that fails, since the references run then."""
    from opwright.dispatch import triton_file

    package = __name__.split("._opwright")[0]
    try:
        return triton_file.load(module)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        warnings.warn(
            f"{package}: the kernels of `{module}` cannot be imported ({error}), so the slower references run. "
            f"hint: `pip install {missing or 'triton'}`",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@functools.cache
def provenance() -> dict[str, Any]:
    """Returns what the library holds and what it was made from."""
    path = _FOLDER / "provenance.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        rows = [("missing, or damaged", str(path))]
        raise _error("its files are not whole", rows) from None


def ensure_loaded(operator: Operator, backend: str) -> bool:
    """Registers the kernels of a backend, at the first call of any operator; returns whether it has the operator's.

    Raises:
        PackageError: the library cannot be used here, or is another build's.
    """
    name = operator.declaration.qualified_name
    held = _held(name)
    if backend in held.get("launched", {}):
        return launched_by(operator, backend) is not None
    if backend not in held.get("backends", ()):
        return False
    if backend in _registered:
        return True
    with registry.lock:
        if backend not in _registered:
            for each in registry.operators.values():  # their calls find the kernels without a look at this module
                _check_build(each.declaration)
            library = _library()
            level = library.opwright_level().decode()
            if backend == "cpu" and not level:
                return False  # a machine older than all of its kernels: the reference runs
            variant = f"cpu_{level}" if backend == "cpu" else backend
            if library.opwright_register(variant.encode()) != 0:
                raise _error(f"PyTorch refuses its {backend} kernels", rows=[("kernels", variant)])
            _registered[backend] = variant
            for each in registry.operators.values():
                _use_registered(each, backend)
    return True


def _check_build(declaration: Declaration) -> None:
    """Raises PackageError where the library has kernels of another operator under this name."""
    held, here = _held(declaration.qualified_name), interface_of(declaration.contract, declaration.name)
    if held.get("schema", here) != here:
        raise _error(
            "its Python files are of another build than its library",
            rows=[("library", held["schema"]), ("files", here)],
        )


def _use_registered(operator: Operator, backend: str) -> None:
    """Lets the calls of an operator find its kernels for a backend, which are registered."""
    if backend in _backends_of(operator.declaration.qualified_name):
        operator.registration.forget_choices()
        operator.registration.direct.add(_library(), backend, _registered[backend], operator.declaration)


def are_registered(declaration: Declaration) -> bool:
    """Returns whether kernels of an operator were registered before it is declared: another one was called.

    Raises:
        PackageError: they are another build's.
    """
    is_registered = not _registered.keys().isdisjoint(_backends_of(declaration.qualified_name))
    if is_registered:
        _check_build(declaration)
    return is_registered


def claim(operator: Operator) -> None:
    """Lets the calls of an operator find kernels that were registered before it was declared."""
    for backend in _registered:
        _use_registered(operator, backend)


@functools.cache
def _library() -> ctypes.PyDLL:
    check_torch()
    made = provenance()
    path = _FOLDER / "library.so"
    if platform.system() != "Linux" or platform.machine() != made["machine"]:
        raise _error(
            "this wheel is for another platform",
            rows=[
                ("wheel", f"Linux {made['machine']}"),
                ("here", f"{platform.system()} {platform.machine()}"),
            ],
        )
    size = path.stat().st_size if path.exists() else 0
    if size != made["bytes"]:  # the loader would kill the process
        rows = [("library", str(path)), ("bytes", f"{size}, not {made['bytes']}")]
        raise _error("its library is damaged, or of another build", rows=rows)
    try:
        library = ctypes.PyDLL(str(path))  # with the GIL, see `opwright_register`
    except OSError as error:
        # Such as a function that this torch lacks.
        reason = str(error).removeprefix(f"{path}: ")
        needed = ".".join(map(str, made["minimum_torch"]))
        raise _error(
            "its library cannot be loaded",
            rows=[
                ("library", str(path)), ("reason", reason), ("torch here", torch.__version__),
                ("needed", f"{needed} or newer"), ("made with", ", ".join(made["compilers"])),
            ],
            hint=f"`pip install --upgrade {project()}`, or another torch",
        ) from None  # fmt: skip
    library.opwright_level.restype = ctypes.c_char_p
    return library


def check_torch() -> None:
    """Raises PackageError if this torch is older than the library needs."""
    needed = tuple(provenance()["minimum_torch"])
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < needed:
        text = ".".join(map(str, needed))
        raise _error(
            "it needs a newer torch", rows=[("torch here", torch.__version__), ("needed", f"{text} or newer")],
            hint=f"`pip install 'torch>={text}'`, or an older version of this package",
        )  # fmt: skip


def _error(rule: str, rows: list[tuple[str, str]], hint: str = "") -> PackageError:
    package = __name__.split("._opwright")[0]
    return PackageError(package, rule, rows=rows, hint=hint or f"`pip install --force-reinstall --no-deps {project()}`")


def project() -> str:
    """Returns the name that the package is installed by."""
    from importlib.metadata import packages_distributions  # slow, and only errors need it

    package = __name__.split("._opwright")[0]
    return next(iter(packages_distributions().get(package, [])), package.replace("_", "-"))


def unload(declaration: Declaration) -> None:
    """Does nothing: what is declared again has the kernels that it had."""


def retire(declaration: Declaration) -> None:
    """Makes room for another schema under the public name of an operator."""
    if _registered:
        _library().opwright_retire(declaration.namespace.encode(), declaration.name.encode())


def is_loaded(operator: Operator, backend: str) -> bool:
    """Returns whether the operator's kernels for a backend are the registered ones."""
    held = _held(operator.declaration.qualified_name)
    if backend in held.get("launched", {}):
        return launched_by(operator, backend) is not None
    return backend in _registered and backend in held.get("backends", ())
