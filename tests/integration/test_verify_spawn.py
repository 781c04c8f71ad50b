"""Candidates in a process that starts anew, as for a GPU: made again there, and their harm is a finding too."""

from __future__ import annotations

import functools
import itertools
import sys
from pathlib import Path

import pytest
import torch
from candidate_modules import ACTING

import opwright
from opwright.isolation import Unfit
from opwright.verify import runner
from opwright.verify.child_processes import children
from opwright.verify.request import Request, pack, unpack
from opwright.verify.tasks import Task

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are supervised on Linux only")

_numbers = itertools.count()
SAMPLES = [(torch.linspace(-3, 3, 35).view(5, 7),), (torch.linspace(-2, 2, 16),)]


@pytest.fixture(autouse=True)
def no_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "can_fork", lambda device: False)


def check(made, **options):
    usual = {"checks": ["numerics", "side stream"], "timeout_s": 5.0, "samples": SAMPLES, "expand": False}
    return opwright.verify(made.candidate, reference=made.reference, **(usual | options))


HARM = {
    "crash": ("ctypes.string_at(0)", "SIGSEGV (Segmentation fault)"),
    "abort": ("os.abort()", "SIGABRT (Aborted)"),
    "hang": ("time.sleep(600)", "did not return within 5 s"),
    "os._exit": ("os._exit(3)", "ended the process, with exit code 3"),
    "sys.exit": ("sys.exit(3)", "raised SystemExit: 3"),
    "interrupt": ("raise KeyboardInterrupt", "raised KeyboardInterrupt"),
    "memory": ("HERE['kept'] = torch.ones(2**28)", "took more than 0.25 GiB of memory"),
    "subprocess": ("import subprocess; subprocess.Popen(['sleep', '600'])", "sleep 600"),
    "threads": ("torch.set_num_threads(torch.get_num_threads() + 1)", "torch.get_num_threads() was"),
}


@pytest.mark.parametrize("kind", HARM)
def test_harm_is_a_finding_and_the_run_goes_on(kind: str, module) -> None:
    action, text = HARM[kind]
    before = children()
    made = module(ACTING.format(action=action))
    record = check(made, memory_bytes=2**28)
    assert record.in_process == ""
    assert [c.outcome for c in record.checks] == ["failed", "skipped"]
    assert record.checks[1].reason == "only on a GPU"  # and not because the process was gone
    assert text in record.failures[0].message
    assert children() == before
    assert made.HERE == {}  # none of this was here


def test_it_finds_what_a_fork_finds(module, monkeypatch: pytest.MonkeyPatch) -> None:
    made = module(ACTING.format(action="pass"))
    spawned = check(made, checks=["numerics", "gradient numerics", "determinism"], expand=True)
    monkeypatch.setattr(runner, "can_fork", lambda device: True)
    forked = check(made, checks=["numerics", "gradient numerics", "determinism"], expand=True)
    assert spawned.passed
    assert spawned.in_process == forked.in_process == ""
    assert [(c.name, c.outcome, c.errors) for c in spawned.checks] == [
        (c.name, c.outcome, c.errors) for c in forked.checks
    ]


def test_settings_of_the_caller_hold_there(module) -> None:
    made = module(ACTING.format(action="assert torch.get_float32_matmul_precision() == 'high'"))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        record = check(made, checks=["numerics"])
    finally:
        torch.set_float32_matmul_precision(before)
    assert record.passed, record.failures


def test_a_module_and_a_partial_are_made_again(module) -> None:
    """With the state that they have here."""
    made = module(
        "import functools, torch\n"
        "class Scale(torch.nn.Module):\n"
        "    def __init__(self, by):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.full((3,), by))\n"
        "    def forward(self, x):\n"
        "        return x * self.weight\n"
        "def scale(x, by):\n"
        "    return x * by\n"
        "twice = functools.partial(scale, by=2.0)\n"
    )
    given = {"samples": [(torch.randn(5, 3),)], "checks": ["numerics"], "expand": False}
    record = opwright.verify(made.Scale(2.0), reference=made.Scale(2.0), **given)
    assert (record.passed, record.in_process) == (True, "")
    for by, passes in ((2.0, True), (3.0, False)):
        record = opwright.verify(made.twice, reference=functools.partial(made.scale, by=by), **given)
        assert (record.passed, record.in_process) == (passes, "")


def test_what_cannot_be_made_again_runs_here_and_the_record_says_why() -> None:
    def candidate(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)

    record = opwright.verify(candidate, reference=torch.sin, samples=SAMPLES, checks=["numerics"])
    assert record.passed
    assert "cannot be pickled" in record.in_process
    assert "candidate" in record.in_process


def test_a_module_that_cannot_be_imported_again(module, tmp_path: Path) -> None:
    made = module(ACTING.format(action="pass"))
    Path(made.__file__).unlink()
    record = check(made, checks=["numerics"])
    assert record.passed
    assert "cannot be imported again" in record.in_process


# --- tasks ---------------------------------------------------------------------------------------------------

TASK = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x)
def get_inputs():
    return [torch.rand(16, 64)]
"""


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return torch.sin(x)", ""),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("return torch.cos(x)", " wrong; worst at "),
    ],
)
def test_a_task(body: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "sine.py").write_text(TASK)
    (tmp_path / "sine_new.py").write_text(
        f"import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        {body}\n"
    )
    task = Task(tmp_path / "sine.py", tmp_path / "sine_new.py")
    record = opwright.verify(task, checks=["numerics"], timeout_s=20.0)
    assert record.in_process == ""
    assert record.passed is not bool(text)
    assert text in " ".join(failure.message for failure in record.failures)


def test_a_task_that_crashes_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "sine.py").write_text(TASK)
    (tmp_path / "sine_new.py").write_text("import ctypes\nctypes.string_at(0)\nclass ModelNew: pass\n")
    record = opwright.verify(
        Task(tmp_path / "sine.py", tmp_path / "sine_new.py"), checks=["numerics", "determinism"], timeout_s=20.0
    )
    (failure,) = record.failures
    assert failure.case == "while it was loaded"
    assert "SIGSEGV" in failure.message
    assert [c.outcome for c in record.checks] == ["failed", "skipped"]


# --- operators -----------------------------------------------------------------------------------------------

OPERATOR = '''
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("spawned{number}::twice", cpu="""
#include <opwright/kernel.h>
template <typename T>
void twice(opwright::View<const T, 1> x, opwright::View<T, 1> output) {{
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i) + x(i);
  {action}
}}
OPWRIGHT_KERNEL(twice, float, double, opwright::half, opwright::bfloat16)
""")
def twice(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x * 2
'''


@pytest.mark.compiler
def test_an_operator(module) -> None:
    right = module(OPERATOR.format(number=next(_numbers), action=""))
    record = opwright.verify(right.twice, checks=["numerics", "refusals"], quick=True)
    assert (record.passed, record.in_process, record.backends) == (True, "", ["cpu"])
    crashing = module(OPERATOR.format(number=next(_numbers), action="if (x.size(0) == 7) *(volatile int*)0 = 1;"))
    record = opwright.verify(crashing.twice, checks=["numerics", "refusals"], quick=True)
    assert [c.outcome for c in record.checks] == ["failed", "passed"]
    assert "SIGSEGV" in record.failures[0].message


def test_an_operator_that_was_declared_anew_is_not_taken_for_that_of_its_file(module) -> None:
    text = OPERATOR.format(number=next(_numbers), action="")
    made = module(text)
    packed = pack(Request(made.twice, None, None, "default", True))
    assert unpack(packed)[0].target is made.twice
    source = text.replace("x(i) + x(i)", "x(i) * 2")
    exec(compile(source, made.__file__, "exec"), made.__dict__)
    with pytest.raises(Unfit, match="is declared in another way"):
        unpack(packed)


def test_a_worker_that_compiles_triton_kernels_may_stay(module) -> None:
    """It waits for the next kernel, as the one of opwright::triton does."""
    start = (
        "import subprocess; from opwright.triton.packs.workers import FOLDER; "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)  # worker.main()', str(FOLDER)])"
    )
    record = check(module(ACTING.format(action=start)), checks=["numerics"])
    assert record.passed, record.failures
