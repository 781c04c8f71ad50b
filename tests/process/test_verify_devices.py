"""What verify does about devices, as far as a machine without a GPU can show it."""

from __future__ import annotations

import itertools

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opwright
from opwright.contract.fill import LAYOUTS, lay_out
from opwright.errors import CheckError
from opwright.verify import api, devices, request, runner
from opwright.verify.checks import threads_and_streams
from opwright.verify.compare import compare
from opwright.verify.oracle import expect
from opwright.verify.target import make_target
from opwright.verify.tensors import copy_of, is_same, storage_bytes

_numbers = itertools.count()
GPU_CHECKS = ["side stream", "other device", "graph"]


def make(**sources: str):
    @opwright.operator(f"devices{next(_numbers)}::twice", **sources)
    def twice(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x * 2

    return twice


def test_checks_name_their_device_and_gpu_checks_say_why_they_skip() -> None:
    record = opwright.verify(make(), checks=["numerics", *GPU_CHECKS])
    assert [(c.name, c.outcome, c.device) for c in record.checks] == [
        ("numerics", "passed", "cpu"),
        *((name, "skipped", "cpu") for name in GPU_CHECKS),
    ]
    assert {c.reason for c in record.checks[1:]} == {"only on a GPU"}
    assert record.backends == ["reference"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tpu", "unknown device"),
        ("meta", "on CUDA GPUs only"),
        ("cuda:99", "there is no such device here"),
    ],
)
def test_a_device_that_is_not_there(name: str, text: str) -> None:
    with pytest.raises(CheckError, match=text):
        opwright.verify(make(), devices=[name])
    with pytest.raises(CheckError, match=text):
        opwright.bench(make(), device=name)


def test_default_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    source = "template <typename T> void twice();\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.devices_for(make(cuda=source).operator, []) == [devices.CPU, cuda]
    assert devices.devices_for(make().operator, []) == [devices.CPU]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.devices_for(make(cuda=source).operator, []) == [devices.CPU]


@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (0, 3)])
def test_a_copy_keeps_the_layout_and_owns_its_memory(layout: str, shape: tuple[int, ...]) -> None:
    tensor = lay_out(torch.randn, shape, layout)
    copied = copy_of([tensor, {"x": tensor}], torch.device("cpu"))
    for copy in (copied[0], copied[1]["x"]):
        assert is_same(copy, tensor)
        assert (copy.stride(), copy.storage_offset()) == (tensor.stride(), tensor.storage_offset())
        assert storage_bytes(copy).numel() == storage_bytes(tensor).numel()
        if tensor.numel():
            assert copy.data_ptr() != tensor.data_ptr()


def test_a_lost_device_ends_its_checks_and_names_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault on the second sample, simulated: the process goes on, the device does not."""
    lost: list[bool] = []
    operator = make()
    target = make_target(operator, None, [(torch.ones(5),), (torch.ones(13),), (torch.ones(7),)])

    def call(values):
        if values[0].numel() == 13:
            lost.append(True)
            raise RuntimeError("an illegal memory access was encountered")
        return [values[0] * 2]

    target.call = call
    monkeypatch.setattr(request, "make_target", lambda *_: target)
    for module in (runner, devices):
        monkeypatch.setattr(module, "is_lost", lambda device: bool(lost))
    record = api.verify(operator, samples=[], checks=["numerics", "determinism"], devices=["cpu"], isolated=False)
    first, second = record.checks
    assert (first.outcome, second.outcome) == ("failed", "skipped")
    assert record.failures[0].case == "f32[13] (sample 1)"
    assert record.failures[0].message.startswith("the GPU accepts no more work after this call: an illegal")
    assert second.reason == "a fault on x=f32[13] (sample 1) has ended all work on the GPU"
    assert not record.passed


def test_a_check_that_breaks_down_names_the_case() -> None:
    def picky(x: Tensor) -> Tensor:
        assert x.numel() != 13
        return x * 2

    samples = [(torch.ones(5),), (torch.ones(13),)]
    record = opwright.verify(picky, reference=lambda x: x * 2, samples=samples, checks=["determinism"])
    assert record.failures[0].case == "f32[13] (sample 1)"


def test_samples_of_an_operator_are_checked_where_they_are_asked_for() -> None:
    """The oracle's copy stays on the CPU: on `meta` there would be no values to compare with."""
    target = make_target(make(), None, [(torch.randn(4, 6)[:, ::2],)])
    there = target.on(torch.device("meta"))
    case, *_ = there.cases()  # the sample, before the copies of it in other layouts
    (given,) = there.inputs(case)
    assert case.values[0].device.type == "cpu"
    assert given.device.type == "meta"
    assert (given.shape, given.stride()) == (case.values[0].shape, case.values[0].stride())


def test_outputs_are_compared_where_the_oracle_is() -> None:
    moved: list[torch.device] = []

    class Elsewhere(torch.Tensor):
        def to(self, *args, **kwargs):
            moved.extend(a for a in args if isinstance(a, torch.device))
            return self.as_subclass(torch.Tensor).to(*args, **kwargs)

    x = torch.randn(5)
    (expected,) = expect(lambda values: [values[0] * 2], [x])
    assert not compare((x * 2).as_subclass(Elsewhere), expected).message
    assert compare((x * 2.1).as_subclass(Elsewhere), expected).message
    assert moved == [torch.device("cpu")] * 2


# --- trials: what the checks on a GPU run --------------------------------------------------------------------


@opwright.operator("devices::scale_rows")
def scale_rows(x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    return x * w


def test_trials_are_forward_and_gradient_of_a_small_and_a_large_case() -> None:
    found = list(threads_and_streams.trials(make_target(scale_rows, None, None)))
    assert [("gradient" in t.label, "large" in t.label) for t in found] == [
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    ]
    forward, gradient = found[0], found[1]
    x, w = forward.values
    assert torch.equal(forward.compute([x, w])[0], x * w)
    (x, w), (seed,) = gradient.values
    grad_x, grad_w = gradient.compute([[x, w], [seed]])
    torch.testing.assert_close(grad_x, seed * w)
    torch.testing.assert_close(grad_w, (seed * x).sum((0, 1)))


def test_trials_depend_on_all_that_they_are_given() -> None:
    """A check fills tensors that a call has been given already: what it compares must come from those."""
    for trial in threads_and_streams.trials(make_target(scale_rows, None, None)):
        wanted = [t.clone() for t in trial.compute(copy_of(trial.values))]
        early = threads_and_streams.clear(trial.values)
        assert not any(t.any() for t in trial.compute(early))
        threads_and_streams.fill_storage(early, trial.values)
        assert all(is_same(a, b) for a, b in zip(wanted, trial.compute(early), strict=True))
        other = threads_and_streams.other_values(trial.values)
        assert not any(is_same(a, b) for a, b in zip(wanted, trial.compute(other), strict=True))


def test_trials_of_an_operator_that_mutates_return_what_it_left() -> None:
    @opwright.operator("devices::decay_")
    def decay_(state: opwright.Mutates[Float[Tensor, "*s"]]) -> None:
        state.mul_(0.5)

    for trial in threads_and_streams.trials(make_target(decay_, None, None)):
        (left,) = trial.compute(copy_of(trial.values))
        assert torch.equal(left, trial.values[0] * 0.5)
