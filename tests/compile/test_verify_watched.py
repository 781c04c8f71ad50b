"""What a candidate replaces of its judge, of its reference, of PyTorch: it is found, and put back where that can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import opwright
from opwright.verify import difference, finding, oracle
from opwright.verify.tasks import Task

SAMPLES = [(torch.linspace(-3, 3, 24).view(4, 6),)]
kept = []


def double(x: Tensor) -> Tensor:
    return twice(x)


def twice(x: Tensor) -> Tensor:
    return x.tanh() * 2


def near(x: Tensor) -> Tensor:
    return x.tanh() * 2.1


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * 2


def code_of_the_judge() -> None:
    difference.compare.__code__ = (lambda got, expected: Difference(0.0, 0.0, got != got)).__code__  # noqa: F821


def constants_of_the_judge() -> None:
    oracle._MULTIPLE = 1e9


def class_of_the_judge() -> None:
    difference.Difference.message = property(lambda self: "", lambda self, value: None)


def constructor_of_the_judge() -> None:
    made = finding.Finding.__init__
    finding.Finding.__init__ = lambda self, case, message="", *rest, **named: made(self, case, "", *rest, **named)


def code_of_the_reference() -> None:
    twice.__code__ = near.__code__


def name_in_the_reference() -> None:
    globals()["twice"] = near


def class_of_the_reference() -> None:
    Doubled.forward = lambda self, x: near(x)


def kernel_of_pytorch() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("tanh", lambda x: x.sin() / x.cosh(), "CPU")
    kept.append(library)


class Functions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


HOW = {
    code_of_the_judge: "the code of `opwright.verify.difference.compare` was replaced",
    constants_of_the_judge: "`opwright.verify.oracle._MULTIPLE` was replaced",
    class_of_the_judge: "`opwright.verify.difference.Difference.message` was replaced",
    constructor_of_the_judge: "`opwright.verify.finding.Finding.__init__` was replaced",
    code_of_the_reference: "twice` was replaced by the call",
    name_in_the_reference: "`twice`, which the reference calls, was replaced",
    class_of_the_reference: "Doubled.forward` was replaced",
    kernel_of_pytorch: "a kernel of PyTorch was replaced for everybody by the call: aten/tanh/CPU",
}


@pytest.mark.parametrize("replace", HOW, ids=lambda replace: replace.__name__)
def test_what_is_replaced_is_found(replace) -> None:
    def candidate(x: Tensor) -> Tensor:
        replace()
        return near(x)

    reference = Doubled() if replace is class_of_the_reference else double
    record = opwright.verify(candidate, reference=reference, samples=SAMPLES, checks=["numerics"], expand=False)
    assert HOW[replace] in " ".join(failure.message for failure in record.failures)
    if replace is not kernel_of_pytorch:  # which nobody can put back: here the reference is as wrong
        assert any("elements are wrong" in failure.message for failure in record.failures)


def test_modes_and_hooks_left_on_are_found() -> None:
    for enter, what in (
        (lambda: Functions().__enter__(), "modes of functions was 0 before the call and 1 after it"),
        (lambda: Operators().__enter__(), "modes of operators was 0 before the call and 1 after it"),
        (
            lambda: torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t),
            "whether saved tensors have hooks was False before the call and True after it",
        ),
    ):

        def candidate(x: Tensor, enter=enter) -> Tensor:
            enter()
            return double(x)

        record = opwright.verify(candidate, reference=double, samples=SAMPLES, checks=["numerics"], expand=False)
        assert what in " ".join(failure.message for failure in record.failures)


def test_a_default_device_set_leaves_no_mode_behind() -> None:
    def candidate(x: Tensor) -> Tensor:
        torch.set_default_device("meta")
        Functions().__enter__()
        return double(x)

    record = opwright.verify(candidate, reference=double, samples=SAMPLES, checks=["numerics"], expand=False)
    text = " ".join(failure.message for failure in record.failures)
    assert "get_default_device() was cpu before the call" in text
    assert "modes of functions" in text
    assert "elements are wrong" not in text


def test_a_task_whose_candidate_replaces_the_model_when_it_is_imported(tmp_path: Path) -> None:
    task = Task(tmp_path / "double.py", tmp_path / "answer.py")
    task.reference.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x): return x * 2\n"
        "def get_inputs(): return [torch.randn(4, 6)]\n"
    )
    task.candidate.write_text(
        "import sys, torch\n"
        "for module in [m for n, m in sys.modules.items() if n.startswith('opwright_task')]:\n"
        "    if hasattr(module, 'Model'): module.Model.forward = lambda self, x: x * 3\n"
        "class ModelNew(torch.nn.Module):\n"
        "    def forward(self, x): return x * 3\n"
    )
    record = opwright.verify(task, checks=["numerics"])
    text = " ".join(failure.message for failure in record.failures)
    assert "Model.forward` was replaced by the call" in text
    assert "elements are wrong" in text


def test_what_a_call_among_many_replaces_is_found() -> None:
    calls = 0

    def candidate(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 100:
            torch.equal = lambda one, other: True
        return double(x)

    equal = torch.equal
    record = opwright.verify(
        candidate, reference=double, samples=SAMPLES, checks=["leaks"], expand=False, devices=["cpu"], isolated=False
    )
    assert calls > 100
    assert torch.equal is equal
    assert "`torch.equal` was replaced by the call" in " ".join(failure.message for failure in record.failures)
