"""TARGET: an importable module, a file, or a folder with `op.py`; any with `::name`."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
import traceback
import zlib
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING

from opwright.errors import OpwrightError, TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from opwright.dispatch.operator import Operator


def find_operators(target: str, *, with_backward: bool = False) -> list[Operator]:
    """Imports a TARGET and returns the operators that it declares.

    Raises:
        TargetError: it cannot be imported, or declares none.
    """
    from opwright.dispatch import registry

    place, _, name = target.partition("::")
    if not place:
        hint = "name a module or a file, as in `opwright_ops`, `./op.py` or `./op.py::scale_shift`"
        raise TargetError(target, "a target is missing" if not target else "it names no module or file", hint=hint)
    before = set(registry.operators)
    module = _import_target_file(place) if _is_file(place) else _import_module(place)
    files = {getattr(sys.modules[m], "__file__", None) for m in _modules_of(module)}
    found = [
        operator
        for operator in registry.operators.values()
        if operator.declaration.file in files or operator.declaration.module == module
    ]
    if not found:  # those of modules that it imports, or that it names where they were imported before
        functions = [value for value in vars(sys.modules[module]).values() if isinstance(value, FunctionType)]
        named = {id(getattr(function, "operator", None)) for function in functions}
        found = [o for qualified, o in registry.operators.items() if qualified not in before or id(o) in named]
    if not with_backward:
        found = [operator for operator in found if operator.declaration.forward is None]
    if not found and (frozen := _frozen_package(module)):
        raise TargetError(
            target,
            "it is installed from a wheel, which holds its kernels built, and no declarations",
            rows=[("found in", str(frozen))],
            hint="`opwright verify TARGET --wheel WHEEL`, with TARGET in the sources that the wheel was made from",
        )
    if name:
        named = [o for o in found if name in (o.declaration.name, o.declaration.qualified_name)]
        if not named:
            backward = next(
                (o for o in found if o.backward_operator and o.backward_operator.declaration.name == name), None
            )
            raise TargetError(
                target,
                f"`{name}` is a backward" if backward else f"there is no operator `{name}`",
                rows=[("there", ", ".join(o.declaration.name for o in found) or "none")],
                hint=f"its checks are among those of `{place}::{backward.declaration.name}`"
                if backward
                else _nearest(place, name, found) or f"`opwright list {place}`",
            )
        return named
    if not found:
        raise TargetError(target, "it declares no operator", hint='`@operator("my_ops::name")` declares one')
    return sorted(found, key=lambda operator: operator.declaration.qualified_name)


def _nearest(place: str, name: str, found: Sequence[Operator]) -> str:
    """Returns what to type for the operator with the most similar name; "" if none is similar."""
    near = difflib.get_close_matches(name, [operator.declaration.name for operator in found], n=1)
    return f"did you mean `{place}::{near[0]}`?" if near else ""


def _is_file(place: str) -> bool:
    path = Path(place)
    is_folder = (path / "op.py").is_file() and not (path / "__init__.py").is_file()
    return place.endswith(".py") or place.startswith(".") or "/" in place or path.is_file() or is_folder


def _import_target_file(place: str) -> str:
    path = Path(place).resolve()
    usual = "a target is a module, a Python file, or a folder with `op.py`"
    if path.is_dir():
        path = path / "op.py"
        if not path.is_file():
            raise TargetError(place, "this folder has no `op.py`", rows=[("expected", str(path))], hint=usual)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], n=1)
        hint = f"there is `{Path(place).parent / near[0]}`" if near else usual
        raise TargetError(place, "there is no such file", rows=[("expected", str(path))], hint=hint)
    if path.suffix != ".py":
        hint = "`opwright verify TARGET --wheel` checks the kernels of a wheel" if path.suffix == ".whl" else ""
        raise TargetError(place, "it is not a Python file", rows=[("got", str(path))], hint=hint)
    package = _package_of(path)
    if package is not None:
        # A file of a package is imported under its own name, so that it is not declared twice.
        root, name = package
        if str(root) not in sys.path:
            sys.path.insert(0, str(root))
        return _import_module(name)
    # Files of one name in several folders are several modules.
    name = f"opwright_target_{path.stem}_{zlib.crc32(os.fsencode(path)):08x}"
    sys.path.insert(0, str(path.parent))
    with _explain_failed_import(place):
        import_file(name, path)
    return name


def import_file(name: str, path: str | Path) -> ModuleType:
    """Imports a file as the module of a name, with the file's folder in front of `sys.path` meanwhile.

    Raises:
        ImportError: the ending of the file is not that of a module.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"module `{name}` cannot be imported from {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton and dataclasses look for it there
    folder = str(Path(path).parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
    return module


def _package_of(path: Path) -> tuple[Path, str] | None:
    parts = [path.stem]
    folder = path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    return (folder, ".".join(parts)) if len(parts) > 1 else None


def _import_module(name: str) -> str:
    sys.path.insert(0, "")
    with _explain_failed_import(name):
        module = importlib.import_module(name)
        for info in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
            if not info.name.rsplit(".", 1)[-1].startswith(("test_", "triton")) and _is_source(info):
                importlib.import_module(info.name)
    return name


@contextlib.contextmanager
def _explain_failed_import(place: str) -> Iterator[None]:
    """Turns an error during the import of a target into a TargetError; errors of its declarations pass through."""
    from opwright.dispatch import registry

    try:
        yield
    except OpwrightError:
        raise
    except (Exception, SystemExit) as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and (place == absent or place.startswith(absent + ".")):
            module, _, name = place.rpartition(".")
            found = [o for o in registry.operators.values() if o.declaration.module == module]
            hint = _nearest(module, name, found) or ("" if "." in absent else _source_of(place))
            hint = hint or f"a file is written with its folder or ending: `./{place}.py`"
            raise TargetError(place, "there is no such module", hint=hint) from None
        shown = traceback.TracebackException.from_exception(error)
        own = [frame for frame in shown.stack if frame.filename != __file__ and "importlib" not in frame.filename]
        shown.stack = traceback.StackSummary.from_list(own)
        hint = f"it needs the module `{absent}`, which {sys.executable} does not have" if absent else ""
        raise TargetError(place, "its import failed", body="".join(shown.format()), hint=hint) from None


def _source_of(module: str) -> str:
    """Returns what to type for a module of the project in this folder that is not installed; "" if there is none."""
    package = Path("src") / module.partition(".")[0]
    if not Path("pyproject.toml").is_file() or not (package / "__init__.py").is_file():
        return ""
    files = sorted(Path("src", *module.split(".")).rglob("op.py"))
    file = f"; or name a file of it: `{files[0]}`" if files else ""
    return f"`pip install --no-build-isolation --editable .` installs `{package}`{file}"


def _is_source(info: pkgutil.ModuleInfo) -> bool:
    """Tells a Python file from a compiled module, which declares nothing, and from other libraries beside it."""
    spec = info.module_finder.find_spec(info.name, None)
    return spec is not None and not isinstance(spec.loader, importlib.machinery.ExtensionFileLoader)


def _frozen_package(name: str) -> Path | None:
    """Returns the folder of the package of a module if `opwright wheel` has made it."""
    file = getattr(sys.modules[name.partition(".")[0]], "__file__", None)
    folder = Path(file).parent if file else None
    return folder if folder and (folder / "_opwright" / "provenance.json").is_file() else None


def _modules_of(name: str) -> list[str]:
    return [m for m in sys.modules if m == name or m.startswith(name + ".")]
