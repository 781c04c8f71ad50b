"""Where a call goes: each step of the probe does what it says, and nothing of a later one."""

from __future__ import annotations

import ctypes
import json
import resource
import subprocess
import sys

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import opwright
from opwright.bench import call_split
from opwright.bench.call_split import where_a_call_goes
from opwright.build.probe import STEPS, load_probe
from opwright.dispatch import kernels
from opwright.errors import CheckError

pytestmark = pytest.mark.compiler

# The kernel counts its calls in its first input, which a kernel must never do.
SOURCE = """
#include <opwright/kernel.h>
using opwright::View;
template <typename T>
void counting(View<const T, 1> x, View<const T, 1> w, int64_t by, Kind kind, View<T, 1> output, View<T, 1> second) {
  const_cast<T*>(x.data())[0] += T(by) + T(int(kind));
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = x(i), second(i) = T(2);
}
OPWRIGHT_KERNEL(counting, float)
"""


def declare():
    from typing import Literal

    @opwright.operator("call_split::counting", cpu=SOURCE)
    def counting(
        x: Float[Tensor, "n"],
        w: Float[Tensor, "m"] | None = None,
        by: int = 1,
        kind: Literal["a", "b"] = "a",
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        return x + 0, torch.full_like(x, 2)

    return counting


def probe_of(operator):
    unit = kernels.unit_of(kernels.unit_key(operator.declaration, "cpu"))
    return load_probe(unit, operator.declaration, "cpu")


def test_only_the_last_step_runs_the_kernel_and_runs_it_as_often_as_asked() -> None:
    operator = declare().operator
    probe = probe_of(operator)
    x, w = torch.zeros(5), torch.ones(3)
    given = call_split._Given(operator, (x, w, 3, "b"))
    assert given.coded == (x, w, 3, 1)
    for step in range(len(STEPS) - 1):
        assert probe(given.words, step, 4) is None
        assert x.tolist() == [0.0] * 5
    assert probe(given.words, len(STEPS) - 1, 4) is None
    assert x.tolist() == [4 * (3 + 1), 0, 0, 0, 0]
    absent = call_split._Given(operator, (x, None, 1, "a"))
    assert probe(absent.words, len(STEPS) - 1, 1) is None
    assert x[0] == 17


def test_a_step_that_fails_says_why_and_steps_before_it_do_not_fail() -> None:
    operator = declare().operator
    probe = probe_of(operator)
    wrong = call_split._Given(operator, (torch.zeros(5, 2), None, 1, "a"))
    assert probe(wrong.words, STEPS.index("read"), 1) is None
    assert b"`x` has 2 axes, expected 1" in probe(wrong.words, STEPS.index("check"), 1)
    other = call_split._Given(operator, (torch.zeros(5, dtype=torch.float64), None, 1, "a"))
    assert b"no kernel for this dtype" in probe(other.words, STEPS.index("check"), 1)


def test_no_step_keeps_memory() -> None:
    """Twenty thousand outputs of 400 KB that are kept would be 16 GB."""
    operator = declare().operator
    probe = probe_of(operator)
    given = call_split._Given(operator, (torch.zeros(100_000), torch.ones(3), 1, "a"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in range(len(STEPS) - 1):
        assert probe(given.words, step, 20_000) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KB


def test_the_record_names_the_parts_in_the_order_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from opwright_ops.bias_gelu import bias_gelu

    monkeypatch.setattr(call_split, "_ROUNDS", 40)
    record = where_a_call_goes(bias_gelu, device="cpu")
    names = [part.name for part in record.parts]
    assert names == ["python", "binding", "checks", "allocation", "views", "launch", "kernel"]
    assert (record.name, record.case) == ("opwright_ops::bias_gelu", "f32[1, 1] f32[1] approximate='none'")
    assert record.parts[0].obtained == "operator - binding"
    assert record.rounds == 40
    assert set(record.peers_us) == {"torch.add"}
    monkeypatch.setattr(bias_gelu.operator.registration.direct, "call", lambda *values: None)
    through_dispatcher = where_a_call_goes(bias_gelu, device="cpu")
    assert [part.name for part in through_dispatcher.parts] == ["python", "dispatcher", *names[2:]]


def test_the_command_splits_a_call() -> None:
    """Its worker passed the device as the second argument, which is named."""
    command = [sys.executable, "-m", "opwright", "bench", "opwright_ops.d_sigmoid", "--call", "--device", "cpu"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    assert record["name"] == "opwright_ops::d_sigmoid"
    assert record["total_us"] > 0


def test_parts_are_differences_within_a_round() -> None:
    """On made-up samples: a machine that becomes slower all the time, of which a difference knows nothing."""
    steps = {"operator": 2.0, "binding": 1.5}
    samples = {name: [us + 0.1 * i for i in range(40)] for name, us in steps.items()}
    python = call_split._part(samples, "python", "operator", "binding")
    assert python.us == pytest.approx(0.5)
    assert python.uncertainty_us == pytest.approx(0.0, abs=1e-9)


def test_an_operator_without_a_kernel_has_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    @opwright.operator("call_split::plain")
    def plain(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x * 2

    monkeypatch.setattr(call_split, "_ROUNDS", 20)
    record = where_a_call_goes(plain)
    assert [part.name for part in record.parts] == ["python, dispatcher", "reference"]
    with pytest.raises(CheckError, match="only the calls of an operator can be split"):
        where_a_call_goes(torch.relu)


def test_a_list_of_tensors_is_handed_over() -> None:
    @opwright.operator("call_split::listed", cpu="""
#include <opwright/kernel.h>
using opwright::List;
using opwright::View;
template <typename T>
void listed(List<View<const T, 1>> xs, View<T, 1> output) {
  for (int64_t i = 0; i < output.size(0); ++i) output(i) = xs[0](i) + xs[1](i);
  const_cast<T*>(xs[1].data())[0] += T(1);
}
OPWRIGHT_KERNEL(listed, float)
""")  # fmt: skip
    def listed(xs: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
        return xs[0] + xs[1]

    a, b = torch.zeros(3), torch.zeros(3)
    given = call_split._Given(listed.operator, ([a, b],))
    assert isinstance(given.words, ctypes.Array)
    assert probe_of(listed.operator)(given.words, len(STEPS) - 1, 6) is None
    assert (a.tolist(), b.tolist()) == ([0, 0, 0], [6, 0, 0])
