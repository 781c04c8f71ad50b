"""Tasks in the form of KernelBench: a file with `Model`, `get_inputs` and `get_init_inputs`, and a `ModelNew`.

The candidate is imported in the process of the checks only: nothing of its file runs before.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from opwright._torch import tree_map
from opwright.contract.declared import split_sample
from opwright.errors import TargetError
from opwright.target import import_file
from opwright.verify.global_state import Guard
from opwright.verify.target import Target, make_target

_REFERENCE = {"Model", "get_inputs"}
_CANDIDATE = "ModelNew"
_SEEDS = (0, 1)  # of the inputs; both models are made with the first


class Reference(NamedTuple):
    """The reference of a task, and its inputs."""

    module: ModuleType
    model: torch.nn.Module
    samples: list[Any]


@dataclass(frozen=True)
class Task:
    """A reference and a candidate, in files.

    Attributes:
        reference: the file with `Model`, `get_inputs` and, if the model takes arguments, `get_init_inputs`.
        candidate: the file with `ModelNew`; may be the same.
    """

    reference: Path
    candidate: Path

    @property
    def name(self) -> str:
        return self.reference.stem

    @property
    def command(self) -> str:
        """The command that verifies it, without flags."""
        candidate = [] if self.candidate == self.reference else ["--candidate", str(self.candidate)]
        return shlex.join(["opwright", "verify", str(self.reference), *candidate])

    def load(
        self, guard: Guard, device: torch.device, effort: str, expand: bool, reference: Reference | None = None
    ) -> Target:
        """Returns what is checked, made in this process.

        Args:
            guard: of all that the candidate's file does.
            reference: the reference, where it has been loaded already.
        """
        new, model, samples = self.make(device, guard.run, reference)
        target = make_target(new, model, samples, effort, expand)
        target.name, target.device = self.name, device
        return target

    def make_oracle_target(self, device: torch.device, reference: Reference | None = None) -> Target:
        """Returns what the oracle needs: the reference, in the place of the candidate too, and no inputs."""
        model = (reference or self.load_reference()).model.to(device)
        target = make_target(model, model, ())
        target.device = device
        return target

    def make(
        self,
        device: torch.device,
        run: Callable[..., Any] = lambda function, *args: function(*args),
        reference: Reference | None = None,
    ) -> tuple[torch.nn.Module, torch.nn.Module, list[Any]]:
        """Imports both files; returns the candidate, the reference and samples, on a device.

        The models are made after the same seed, so that parameters of equal names have equal values.

        Args:
            run: calls what is of the candidate's file.
        """
        reference = reference or self.load_reference()
        candidate = reference.module
        if self.candidate != self.reference:
            candidate = run(_import, self.candidate)
        new = _run_seeded(lambda: run(_make_model, candidate.ModelNew, _init_inputs(reference.module)))
        samples = tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, reference.samples)
        return new.to(device), reference.model.to(device), samples

    def load_reference(self) -> Reference:
        """Imports the file of the reference; nothing of the candidate's runs, unless they are one file."""
        module = _import(self.reference)
        model = _run_seeded(lambda: _make_model(module.Model, _init_inputs(module)))
        return Reference(module, model, [_run_seeded(module.get_inputs, seed) for seed in _SEEDS])


def find_tasks(place: str, candidate: Path | None = None) -> list[Task]:
    """Returns the tasks of a file or a folder; none if it has another form.

    The candidate of a file is in `candidate`, else in the same file, else next to it: `gelu_new.py` for `gelu.py`.
    Those of a folder are in files of the same names in the folder `candidate`, or found likewise.

    Raises:
        TargetError: a task has no candidate.
    """
    path = Path(place).resolve()
    if not path.exists():
        return []
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    root = path if path.is_dir() else path.parent
    references = [file for file in files if file.suffix == ".py" and _names_in(file) >= _REFERENCE]
    if candidate is not None and not references:
        raise TargetError(place, "it has no task", rows=[("expected", "a file with `Model` and `get_inputs`")])
    return [Task(file, _candidate_for(file, root, candidate)) for file in references]


def _candidate_for(reference: Path, root: Path, given: Path | None) -> Path:
    if given is not None and given.is_dir():
        tried = [given.resolve() / reference.relative_to(root)]
    elif given is not None:
        tried = [given.resolve()]
    else:
        tried = [reference, reference.with_name(f"{reference.stem}_new.py")]
    for path in tried:
        if path.is_file() and _CANDIDATE in _names_in(path):
            return path
    raise TargetError(
        str(reference),
        "this task has no candidate",
        rows=[("looked for", f"`{_CANDIDATE}` in {' and '.join(map(str, tried))}")],
        hint=f"`opwright verify {reference} --candidate FILE`",
    )


def _names_in(file: Path) -> set[str]:
    """Returns what a file defines; nothing of it runs."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError, OSError):
        return set()
    found = {each.name for each in body if isinstance(each, (ast.ClassDef, ast.FunctionDef))}
    targets = (target for each in body if isinstance(each, ast.Assign) for target in each.targets)
    return found | {target.id for target in targets if isinstance(target, ast.Name)}


def _import(path: Path) -> ModuleType:
    return import_file(f"opwright_task_{abs(hash(path))}", path)


def _init_inputs(reference: ModuleType) -> Any:
    return getattr(reference, "get_init_inputs", list)()


def _make_model(model: Any, init: Any) -> torch.nn.Module:
    args, kwargs = split_sample(init)
    return model(*args, **kwargs)


def _run_seeded(make: Callable[[], Any], seed: int = _SEEDS[0]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()
