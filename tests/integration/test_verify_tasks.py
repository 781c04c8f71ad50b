"""Tasks of the KernelBench form, and candidates that pass where inputs are drawn from [0, 1) only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from opwright import verify
from opwright.cli import main
from opwright.errors import TargetError
from opwright.verify.tasks import Task, find_tasks

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"
GELU = (
    HEAD
    + """
class Model(nn.Module):
    def forward(self, x):
        return F.gelu(x)

def get_inputs():
    return [torch.rand(16, 64)]

def get_init_inputs():
    return []
"""
)
LAYER = (
    HEAD
    + """
class Model(nn.Module):
    def __init__(self, inputs, outputs, scale=1.0):
        super().__init__()
        self.linear, self.scale = nn.Linear(inputs, outputs), scale

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.scale

def get_inputs():
    return [torch.rand(16, 24)]

def get_init_inputs():
    return [[24, 8], {"scale": 2.0}]
"""
)


def new(body: str, head: str = "") -> str:
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    return f"{HEAD}{head}\nclass ModelNew(nn.Module):\n    cache = {{}}\n    def forward(self, x):\n{lines}\n"


CANDIDATES = {
    "right": (new("return 0.5 * x * torch.erfc(-x * 0.7071067811865476)"), set()),
    "polynomial": (
        new("return 0.0002 + x * (0.4952 + x * (0.4276 + x * (-0.0447 + x * -0.0367)))"),
        {"numerics", "gradient numerics"},
    ),
    "tanh form": (new('return F.gelu(x, approximate="tanh")'), {"numerics", "gradient numerics"}),
    "zeros": (new("return torch.zeros_like(x)"), {"numerics"}),
    "cached by pointer": (
        new("return self.cache.setdefault((x.data_ptr(), x.shape), F.gelu(x))"),
        {"determinism"},
    ),
    "mutates its input": (
        new("y = F.gelu(x)\nwith torch.no_grad():\n    x.mul_(0.5)\nreturn y"),
        {"numerics"},
    ),
    "patches at import": (
        new("return x", "torch.allclose = torch.equal = torch.where = lambda *a, **k: True"),
        {"numerics", "gradient numerics"},
    ),
    "crashes at import": (new("return x", "import os\nos.abort()"), {"outputs written"}),
}


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", CANDIDATES)
def test_candidates(kind: str, tmp_path: Path) -> None:
    text, checks = CANDIDATES[kind]
    task = Task(write(tmp_path, "gelu.py", GELU), write(tmp_path, "gelu_new.py", text))
    record = verify(task)
    assert record.name == "gelu"
    found = {failure.check for failure in record.failures}
    assert found >= checks
    assert bool(found) is (kind != "right")
    for failure in record.failures:
        assert failure.repeat.startswith(f"opwright verify {task.reference} --candidate {task.candidate} --check")


def test_what_a_candidate_patches_does_not_reach_the_oracle(tmp_path: Path) -> None:
    text, _ = CANDIDATES["patches at import"]
    task = Task(write(tmp_path, "gelu.py", GELU), write(tmp_path, "gelu_new.py", text))
    messages = " ".join(failure.message for failure in verify(task, checks=["numerics"]).failures)
    assert " wrong; worst at " in messages


def test_parameters_are_those_of_the_reference(tmp_path: Path) -> None:
    layer = """
class ModelNew(nn.Module):
    def __init__(self, inputs, outputs, scale=1.0):
        super().__init__()
        torch.randn(5)  # other random numbers than the reference's
        self.linear, self.scale = nn.Linear(inputs, outputs), scale

    def forward(self, x):
        return torch.clamp(x @ self.linear.weight.mT + self.linear.bias, min=0) * FACTOR
"""
    for factor, passes in (("self.scale", True), ("1.0", False)):
        path = write(tmp_path, "layer.py", LAYER + layer.replace("FACTOR", factor))
        record = verify(Task(path, path))
        assert record.passed is passes, record.failures


def test_where_tasks_and_candidates_are_found(tmp_path: Path) -> None:
    right = CANDIDATES["right"][0]
    same = write(tmp_path, "tasks/level1/same.py", GELU + right)
    beside = write(tmp_path, "tasks/level1/beside.py", GELU)
    sibling = write(tmp_path, "tasks/level1/beside_new.py", right)
    write(tmp_path, "tasks/notes.py", "x = 1\n")
    write(tmp_path, "tasks/broken.py", "def f(:\n")
    assert find_tasks(str(tmp_path / "tasks")) == [Task(beside, sibling), Task(same, same)]
    elsewhere = write(tmp_path, "answers/level1/beside.py", right)
    write(tmp_path, "answers/level1/same.py", right)
    found = find_tasks(str(tmp_path / "tasks"), tmp_path / "answers")
    assert [task.candidate.parent for task in found] == [elsewhere.parent] * 2
    assert find_tasks(str(beside), sibling) == [Task(beside, sibling)]
    assert find_tasks("opwright_ops") == []
    with pytest.raises(TargetError, match="this task has no candidate"):
        find_tasks(str(write(tmp_path, "alone.py", GELU)))
    with pytest.raises(TargetError, match="it has no task"):
        find_tasks(str(tmp_path / "tasks" / "notes.py"), sibling)


def run_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["opwright", *words])
    main()


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    """The next task goes on after one that crashes; nothing of a candidate runs in the command's own process."""
    write(tmp_path, "a.py", GELU)
    write(tmp_path, "a_new.py", CANDIDATES["crashes at import"][0])
    write(tmp_path, "b.py", GELU + CANDIDATES["right"][0])
    where = torch.where
    with pytest.raises(SystemExit) as end:
        run_command(monkeypatch, "verify", str(tmp_path), "--check", "numerics", "--check", "determinism")
    assert end.value.code == 1
    shown = capfd.readouterr()
    assert "crashed the process: SIGABRT (Aborted)" in shown.out
    assert "the candidate cannot be loaded" in shown.out
    assert "Verified b (callable)" in shown.out
    assert torch.where is where


def test_a_file_that_crashes_when_it_is_imported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch
) -> None:
    path = write(tmp_path, "op.py", "import os\nos._exit(0)\n")
    with pytest.raises(SystemExit) as end:
        run_command(monkeypatch, "verify", str(path))
    assert end.value.code == 1
    assert f"FAILED to import `{path}`: it ended the process, with exit code 0" in capfd.readouterr().err


def test_inputs_that_cannot_be_pickled(tmp_path: Path) -> None:
    """A function among the inputs: the process of the oracle has it from the one that made the inputs."""
    (tmp_path / "apply.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n    def forward(self, x, f):\n        return f(x)\n"
        "class ModelNew(torch.nn.Module):\n    def forward(self, x, f):\n        return 1.0 * f(x)\n"
        "def get_inputs():\n    return [torch.rand(4, 8), lambda x: 2 * x]\n"
    )
    record = verify(Task(tmp_path / "apply.py", tmp_path / "apply.py"), checks=["numerics"], timeout_s=60.0)
    assert record.passed, record.failures
    assert record.in_process == ""
