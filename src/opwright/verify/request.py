"""How the targets of a candidate are made: here, and again in a process that has nothing of this one.

A fork has all that lives here. A process that starts anew imports modules and unpickles: an operator is found by its name
when its module has been imported, functions and classes likewise, a task is files anyway.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import pickle
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, ModuleType
from typing import Any

import torch

from opwright import _torch
from opwright._torch import tree_leaves
from opwright.contract.precision import Precision
from opwright.contract.schema import schema_of
from opwright.dispatch import kernels, registry
from opwright.dispatch.operator import Operator, operator_of
from opwright.isolation import Unfit, hide_warnings_of_pytorch
from opwright.target import import_file
from opwright.verify.checks.finding import first_line
from opwright.verify.devices import CPU
from opwright.verify.global_state import Guard, read_settings, write_settings
from opwright.verify.oracle import few_threads
from opwright.verify.target import Target, make_target
from opwright.verify.tasks import Reference, Task


@contextlib.contextmanager
def showing_warnings() -> Iterator[None]:
    """Shows warnings that would be errors, as pytest can make them: a reference that warns does take its input."""
    with warnings.catch_warnings():
        if any(action == "error" for action, *_ in warnings.filters):
            warnings.simplefilter("default")
        hide_warnings_of_pytorch()
        yield


@dataclass
class Request:
    """What is verified.

    Attributes:
        target: an operator, a callable, or a task.
        samples: None, or a list where another process is to make it again.
        precision: how much less precise than the reference a callable may be; an operator declares that itself.
    """

    target: Any
    reference: Callable[..., Any] | None
    samples: Any
    effort: str
    expand: bool
    precision: Precision | None = None
    _made: dict[str, Target] | None = field(default=None, repr=False)
    _reference: Reference | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.target.name if isinstance(self.target, Task) else self.made()[""].name

    @property
    def operator(self) -> Operator | None:
        return None if isinstance(self.target, Task) else self.made()[""].operator

    @property
    def prefixes(self) -> list[str]:
        """What its targets are called in front of the names of checks."""
        return list(self.made()) or [""]

    @property
    def command(self) -> str:
        """The command that verifies it again, without flags; "" where there is none."""
        if isinstance(self.target, Task) or self.operator is None:
            return self.target.command if isinstance(self.target, Task) else ""
        declaration = self.operator.declaration
        owner = (declaration.forward or declaration.qualified_name).split("::")[1]
        return shlex.join(["opwright", "verify", f"{declaration.file}::{owner}"])

    def made(self) -> dict[str, Target]:
        """Returns the targets by prefix; of a task none, for nothing of its files runs here."""
        if self._made is None and not isinstance(self.target, Task):
            target = make_target(self.target, self.reference, self.samples, self.effort, self.expand, self.precision)
            self._made = {"": target}
            own = target.operator.backward_operator if target.operator is not None else None
            if own is not None and self.samples is None:
                self._made["backward: "] = make_target(own.function, None, None, self.effort)
        return self._made or {}

    def make_cases(self) -> None:
        """Makes all inputs now: forks have them then."""
        with showing_warnings(), few_threads(()):
            for target in self.made().values():
                target.cases()

    def prepare(self) -> list[Any]:
        """Makes what the oracle has in common with the checks, and returns the values of the inputs."""
        if isinstance(self.target, Task):
            with contextlib.suppress(Exception):  # raised again when it is loaded
                self._reference = self.target.load_reference()
            return tree_leaves(self._reference.samples) if self._reference is not None else []
        made = [target.cases() for target in self.made().values()]
        return [leaf for cases in made for case in cases for leaf in tree_leaves(case.values)]

    def targets(self, device: torch.device, guard: Guard) -> dict[str, Target]:
        """Returns the targets by prefix, for a device."""
        if isinstance(self.target, Task):
            return {"": self.target.load(guard, device, self.effort, self.expand, self._reference)}
        return {prefix: replace(target.on(device), key=prefix) for prefix, target in self.made().items()}

    def references(self, device: torch.device) -> dict[str, Target]:
        """Returns the targets by prefix, for an oracle: without inputs."""
        if isinstance(self.target, Task):
            return {"": self.target.make_oracle_target(device, self._reference)}
        # Of an operator the oracle computes on the CPU, wherever its kernels run.
        return {
            prefix: replace(target, device=CPU if target.operator is not None else device)
            for prefix, target in self.made().items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_made": None}


def pack(*values: Any) -> bytes:
    """Returns values, a request among them, as another process can read them.

    Raises:
        Unfit: it cannot.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(values)
    except Unfit:
        raise
    except Exception as error:  # whatever a __reduce__ may raise
        raise Unfit(f"the candidate cannot be pickled: {first_line(error)}") from None
    return pickle.dumps((read_settings(), list(pickler.modules.items()), buffer.getvalue()))


def unpack(data: bytes) -> tuple[Any, ...]:
    """Returns what was packed, and takes over the settings of the process that did.

    Raises:
        Unfit: something is not there, or is another one than there.
    """
    settings, modules, pickled = pickle.loads(data)
    try:
        for name, file in modules:
            _import(name, file)
        write_settings(settings)
        return pickle.loads(pickled)
    except Unfit:
        raise
    except Exception as error:  # whatever a module may raise
        raise Unfit(f"the candidate cannot be imported again: {type(error).__name__}: {first_line(error)}") from None


class _Pickler(pickle.Pickler):
    """Notes the modules that functions and classes are found in, and finds operators by their names.

    Attributes:
        modules: their files, by name.
    """

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: dict[str, str] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType):
            raise Unfit(f"the candidate holds a module, `{value.__name__}`")
        operator = value if isinstance(value, Operator) else None
        if isinstance(value, FunctionType) or type(value).__module__ == _torch.OPERATOR_MODULE:
            operator = operator_of(value)
        if operator is not None:
            return self._operator(operator, as_function=not isinstance(value, Operator))
        if isinstance(value, (FunctionType, type)):
            self._note(value.__module__, value.__qualname__)
        return NotImplemented

    def _operator(self, operator: Operator, as_function: bool) -> Any:
        declaration = operator.declaration
        if kernels.are_adopted(operator):
            raise Unfit(f"`{declaration.name}` runs kernels that were not built from its sources")
        if "<locals>" in declaration.reference.__qualname__:
            raise Unfit(f"`{declaration.name}` is declared within a function")
        self._note(declaration.module, declaration.name)
        return _find_operator, (declaration.qualified_name, _what(operator), as_function)

    def _note(self, module: str, name: str) -> None:
        found = sys.modules.get(module)
        if module == "__main__":
            raise Unfit(f"`{name}` is of the program itself, which another process does not import")
        file = getattr(found, "__file__", None)
        if found is not None and file is not None:
            self.modules.setdefault(module, os.path.abspath(file))


def _what(operator: Operator) -> tuple[Any, ...]:
    """Returns what tells a declaration from another one of the same name."""
    declaration = operator.declaration
    sources = {b: source.inline or str(source.path) for b, source in declaration.sources.items()}
    return declaration.line, schema_of(operator.contract, declaration.name), sources


def _find_operator(name: str, what: tuple[Any, ...], as_function: bool) -> Any:
    operator = registry.operators.get(name)
    if operator is None or _what(operator) != what:
        how = "is not declared" if operator is None else "is declared in another way"
        raise Unfit(f"`{name}` {how} when its module is imported")
    return operator.function if as_function else operator


def _import(name: str, file: str) -> None:
    """Imports a module by its name, or as it was by its file."""
    if name in sys.modules:
        return
    spec = None
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file):
        importlib.import_module(name)
        return
    import_file(name, file)


def list_samples(samples: Any) -> Any:
    """Returns samples that may be asked for more than once."""
    if samples is None or isinstance(samples, Sequence):
        return samples
    return list(samples() if callable(samples) else samples)
