"""What a benchmark measures: inputs, devices, results checked again behind the clock."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from fork_server import run_opwright
from jaxtyping import Float, Int64
from torch import Tensor

import opwright
from opwright import Index, Mutates
from opwright.bench import api
from opwright.bench import measure as bench_measure
from opwright.bench.roofline import CpuBench
from opwright.bench.statistics import compare_all
from opwright.bench.timers import Timed, summarize
from opwright.bench.workload import DeviceSweep, plans
from opwright.cli.bench_tables import print_bench
from opwright.errors import CheckError, NotVerifiedError
from opwright.records import Check, Limits, Machine, VerifyRecord
from opwright.verify.tasks import Task

CPU = torch.device("cpu")


@opwright.operator("bench_tests::scale")
def scale(x: Float[Tensor, "*batch n"], w: Float[Tensor, "n"], by: float = 2.0) -> Float[Tensor, "*batch n"]:
    return x * w * by


class PretendGpu(CpuBench):
    """Measures nothing: keeps what it is given, and claims three sets of inputs."""

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def input_sets(self, bytes_moved: int, candidates: int) -> int:
        return 3

    def time(self, calls, bytes_moved, seconds, precision, before_block, on_result):
        self.calls.append({name: [call()[0] for call in sets] for name, sets in calls.items()})
        blocks = [{name: [10.0, 10.0, 10.0] for name in calls}] * 8
        timings = [summarize(name, blocks) for name in calls]
        timings[0].warm_us, timings[0].host_us = 5.0, 3.0
        return Timed(timings, blocks, compare_all(blocks), copy_us=8.0)


HERE = Machine("CPU", 1, "", "Linux", "3", "2", "g++", 0.0)
PASSED = VerifyRecord("elsewhere", [Check("numerics", "passed")], [], ["callable"], HERE, 0.0, 0.0)
LIMITS = Limits(100.0, 100.0, 100.0, {"f32": 1000.0}, 1.0, None, 1, 0.0)


@pytest.fixture
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "limits_of", lambda place, machine, again=False: LIMITS)


@pytest.fixture
def verified(known_limits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured has passed verify, elsewhere."""
    monkeypatch.setattr(api, "verify", lambda *args, **kwargs: PASSED)


def measure(monkeypatch: pytest.MonkeyPatch, target=scale, **options):
    place = PretendGpu()
    monkeypatch.setattr(api, "bench_on", lambda device: place)
    return opwright.bench(target, ["eager"], **options), place.calls


def test_sets_of_inputs_differ_and_candidates_share_them(verified, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = {"batch": [(3,)], "n": [5]}
    record, calls = measure(monkeypatch, sweep=sweep, dtypes=[torch.float32])
    assert [m.direction for m in record.measurements] == ["forward", "backward"]
    forward = calls[0]
    assert len(forward["opwright"]) == 3
    for ours, eager in zip(forward["opwright"], forward["eager"], strict=True):
        assert torch.equal(ours, eager)
    for a, b in itertools.combinations(forward["opwright"], 2):
        assert not torch.equal(a, b)


def test_shares_come_from_the_copy_of_the_device_and_of_the_size(verified, monkeypatch: pytest.MonkeyPatch) -> None:
    record, _ = measure(monkeypatch, sweep={"batch": [(3,)], "n": [5]}, directions=["forward"])
    m = record.measurements[0]
    assert m.bytes_moved == 4 * (15 + 15 + 5)
    assert m.roof_share == pytest.approx(m.bytes_moved / 10e-6 / 100e9)
    assert m.copy_share == pytest.approx(0.8)
    assert (m.timings[0].warm_us, m.timings[0].host_us) == (5.0, 3.0)
    assert record.device == "cpu"


def test_a_call_that_writes_a_part_of_an_argument_has_no_share(verified, ns, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract counts every byte of the cache, although a call writes only 4 of its rows."""

    @opwright.operator(f"{ns}::put_rows", autocast=None)
    def put_rows(
        cache: Mutates[Float[Tensor, "s d"]], rows: Float[Tensor, "t d"], at: Annotated[Int64[Tensor, "t"], Index("s")]
    ) -> Float[Tensor, "t d"]:
        cache.index_copy_(0, at, rows)
        return rows + 0

    sweep = {"s": [512], "t": [4], "d": [8]}
    record, _ = measure(monkeypatch, put_rows, sweep=sweep, dtypes=[torch.float32])
    assert record.measurements[0].roof_share is None
    reason = "not known, since a call leaves elements of `cache` as they are; `@put_rows.cost` declares the bytes"
    assert record.notes == [f"of copy: {reason} that it moves"]

    put_rows.cost(lambda cache, rows, at: (3 * 4 * rows.numel() + 8 * at.numel(), None))
    record, _ = measure(monkeypatch, put_rows, sweep=sweep, dtypes=[torch.float32])
    assert record.measurements[0].roof_share == pytest.approx((3 * 4 * 32 + 8 * 4) / 10e-6 / 100e9)
    assert record.notes == []

    @opwright.operator(f"{ns}::twice_", autocast=None)
    def twice_(x: Mutates[Float[Tensor, "s d"]]) -> Float[Tensor, ""]:
        return x.mul_(2).sum()

    record, _ = measure(monkeypatch, twice_, sweep={"s": [512], "d": [8]}, dtypes=[torch.float32])
    assert record.measurements[0].roof_share == pytest.approx((2 * 4 * 512 * 8 + 4) / 10e-6 / 100e9)


@opwright.operator("bench_tests::shift")
def shift(x: Float[Tensor, "*batch n"], b: Float[Tensor, "n"]) -> Float[Tensor, "*batch n"]:
    return x + b


shift.sweep(batch=[(2,), (4,)], n=[8, 16])


def test_axes_that_a_run_does_not_name_keep_their_sizes() -> None:
    def axes_of(operator, sweep: dict) -> list[tuple]:
        found = plans(operator.operator, None, sweep, None, [torch.float32], CPU)
        return [tuple(plan.make(0).values[0].shape) for plan in found]

    assert axes_of(shift, {"n": [5]}) == [(2, 5), (4, 5)]
    assert axes_of(shift, {"batch": [(3,)]}) == [(3, 8), (3, 16)]
    assert axes_of(scale, {"batch": [(3,)]}) == [(3, 1024)]


@opwright.operator("bench_tests::star_last")
def star_last(x: Float[Tensor, "b c *spatial"], a: Float[Tensor, "c"]) -> Float[Tensor, "b c *spatial"]:
    return (x.movedim(1, -1) * a).movedim(-1, 1)


@opwright.operator("bench_tests::four_axes")
def four_axes(x: Float[Tensor, "n c h w"]) -> Float[Tensor, "n c h w"]:
    return x * 2


@opwright.operator("bench_tests::outer")
def outer(x: Float[Tensor, "*batch n"], y: Float[Tensor, "m"]) -> Float[Tensor, "*batch n m"]:
    return x[..., None] * y


@pytest.mark.parametrize(
    ("operator", "smallest", "largest"),
    [(star_last, 8 << 10, 8 << 20), (four_axes, 2 << 20, 8 << 20), (outer, 1024, 8 << 20)],
)
def test_the_usual_inputs_are_of_usual_size_whatever_the_number_of_axes(operator, smallest: int, largest: int) -> None:
    """Each fixed axis had 1024: four of them are a tensor of 4 TiB."""

    def elements(case) -> int:
        return max(value.numel() for value in [*case.values, operator(*case.values)])

    found = [plan.make(0) for plan in plans(operator.operator, None, None, None, [torch.float32], CPU)]
    sizes = list(map(elements, found))
    assert max(sizes) <= largest
    assert max(sizes) > largest // 4
    assert min(sizes) >= smallest


def test_a_star_has_the_name_that_was_declared() -> None:
    def shapes(sweep: dict) -> list[tuple]:
        found = plans(star_last.operator, None, sweep, None, [torch.float32], CPU)
        return [tuple(plan.make(0).values[0].shape) for plan in found]

    assert shapes({"spatial": [(5, 7), 3], "c": [2], "b": [4]}) == [(4, 2, 5, 7), (4, 2, 3)]
    assert shapes({"batch": [3], "c": [2], "b": [4]}) == [(4, 2, 3)]
    for unknown in ("foo", "x", "a"):  # a tensor has no sizes of its own
        with pytest.raises(CheckError, match=f"it has no axis `{unknown}`") as caught:
            shapes({unknown: [5]})
        assert caught.value.rows == [("axes", "b, c, *spatial")]
    with pytest.raises(CheckError, match=r"`spatial` cannot have this value") as caught:
        shapes({"spatial": ["tanh"]})
    assert caught.value.rows[1] == ("expected", "sizes, as spatial=512 or spatial=8x128")


@opwright.operator("bench_tests::count_ones")
def count_ones(x: Int64[Tensor, "n"]) -> Int64[Tensor, ""]:
    return (x == 1).sum()


def test_an_operator_of_integers_is_measured_once() -> None:
    both = [plans(count_ones.operator, None, None, None, dtypes, CPU) for dtypes in (None, [torch.int64])]
    assert len(both[0]) == len(both[1])


@opwright.operator("bench_tests::fixed_batch")
def fixed_batch(x: Float[Tensor, "batch n"], scale: Float[Tensor, "n"] | None = None) -> Float[Tensor, "batch n"]:
    return x * (2 if scale is None else scale)


def test_a_named_axis_may_be_called_batch_and_an_optional_tensor_is_left_out() -> None:
    sweep = {"batch": [5], "n": [3], "scale": [None]}
    (plan,) = plans(fixed_batch.operator, None, sweep, None, [torch.float32], CPU)
    x, scale = plan.make(0).values
    assert (tuple(x.shape), scale) == ((5, 3), None)
    with pytest.raises(CheckError, match="`scale` cannot have this value"):
        plans(fixed_batch.operator, None, {"scale": [5]}, None, [torch.float32], CPU)


@opwright.operator("bench_tests::hungry")
def hungry(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x + torch.empty(2**50).sum() if len(x) >= 4000 and x.device.type == "cpu" else x * 2


def test_an_input_that_does_not_fit_in_memory_is_left_out(verified, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"dtypes": [torch.float32], "directions": ["forward"], "seconds": 0.0}
    smaller = "`--axis` chooses smaller sizes, as `--axis n=256,1024`"
    record = opwright.bench(hungry, [], sweep={"n": [3, 4000, 5000, 5]}, **options)
    assert [m.case for m in record.measurements] == ["f32[3]", "f32[5]"]
    assert record.left_out == [
        f"forward x=f32[4000]: it does not fit in memory; {smaller}",
        f"forward on 5,000 elements: it does not fit in memory; {smaller}",
    ]
    monkeypatch.setattr(bench_measure, "free_memory", lambda: 2**10)
    record = opwright.bench(hungry, [], sweep={"n": [3, 400]}, **options)
    assert record.left_out == [f"forward on 400 elements: it does not fit in memory; {smaller}"]
    with pytest.raises(NotVerifiedError, match="forward on 400 elements: it does not fit in memory") as caught:
        opwright.bench(hungry, [], sweep={"n": [400]}, **options)
    assert caught.value.hint == smaller


def test_samples_that_do_not_fit_in_memory_are_not_sent_to_axis(verified, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_measure, "free_memory", lambda: 2**14)
    samples = [(torch.ones(3),), (torch.ones(40000),)]
    options = {"directions": ["forward"], "seconds": 0.0}
    record = opwright.bench(hungry, [], samples=samples, **options)
    assert record.left_out == ["forward on 40,000 elements: it does not fit in memory; pass smaller samples"]
    with pytest.raises(NotVerifiedError) as caught:
        opwright.bench(hungry, [], samples=samples[1:], **options)
    assert caught.value.hint == "pass smaller samples"
    path = tmp_path / "linear_relu.py"
    path.write_text(TASK.replace("randn(8, 16)", "randn(8000, 16)"))
    with pytest.raises(NotVerifiedError) as caught:
        opwright.bench(Task(path, path), [], **options)
    assert caught.value.hint == "return smaller tensors from `get_inputs`"


def test_what_no_check_applies_to_is_measured_with_a_warning() -> None:
    @opwright.operator("bench_tests::fill_random", random=True)
    def fill_random(x: Mutates[Float[Tensor, "n"]]) -> None:
        x.uniform_()

    record = opwright.bench(fill_random, seconds=0.0, sweep={"n": [8]}, dtypes=[torch.float32])
    assert [m.case for m in record.measurements] == ["f32[8]"]
    assert not record.verified
    assert any(w.startswith("its results were not compared with the reference: ") for w in record.warnings)


def test_an_input_on_which_calls_take_too_long_is_left_out(verified, monkeypatch, capsys) -> None:
    """Not for the call that compiles, or loads: that one is made before."""
    slow_calls = itertools.count()

    def slow(x: Tensor) -> Tensor:
        if len(x) > 3 or next(slow_calls) == 0:
            time.sleep(0.1)
        return x * 2.0

    samples = [(torch.randn(3),), (torch.randn(4),)]
    options = {"reference": lambda x: x * 2.0, "samples": samples, "directions": ["forward"], "seconds": 0.0}
    monkeypatch.setattr(bench_measure, "_MIN_CALL_LIMIT_SECONDS", 0.05)
    record = opwright.bench(slow, [], **options)
    assert [m.case for m in record.measurements] == ["f32[3]"]
    (left_out,) = record.left_out
    assert re.fullmatch(r"forward f32\[4\]: a call of opwright takes 1\d\d ms; `--seconds \d+` measures it", left_out)
    print_bench(record)
    assert f"skipped: {left_out}\n" in capsys.readouterr().out


def test_results_that_change_while_they_are_timed_are_refused(verified) -> None:
    """By the 30th call it has drifted: by less than verify sees, by more than sums in another order."""
    count = itertools.count()

    def drifting(x: Tensor) -> Tensor:
        return x * (2.0 if next(count) < 30 else 2.0 + 1e-9)

    def steady(x: Tensor) -> Tensor:
        return x * 2.0

    x = torch.randn(100, dtype=torch.float64)
    options = {"reference": steady, "samples": [(x,)], "directions": ["forward"], "seconds": 0.0}
    with pytest.raises(NotVerifiedError, match="a timed call returned a wrong result"):
        opwright.bench(drifting, [], **options)
    assert opwright.bench(steady, [], **options).measurements


def test_a_record_of_another_device_or_callable_does_not_count(known_limits, monkeypatch) -> None:
    """Right on the CPU says nothing about the kernel of a GPU, and the other way round."""

    def right(x: Tensor) -> Tensor:
        return x * 2

    def wrong(x: Tensor) -> Tensor:
        return x * 2.1

    options = {"reference": right, "samples": [(torch.ones(3),)], "directions": ["forward"], "seconds": 0.0}
    checked = opwright.verify(right, right, options["samples"])
    ran: list[str] = []
    again = api.verify
    monkeypatch.setattr(api, "verify", lambda *a, **k: ran.append("again") or again(*a, **k))
    assert opwright.bench(right, [], verified=checked, **options).verified
    assert ran == []
    with pytest.raises(NotVerifiedError, match="does not pass verify"):
        opwright.bench(wrong, [], verified=checked, **options)
    for check in checked.checks:
        check.device = "cuda:0"
    assert opwright.bench(right, [], verified=checked, **options).verified
    assert ran == ["again", "again"]


@pytest.mark.parametrize(
    "lacking",
    [
        {"name": "another"},
        {"only": "sample 7"},
        {"checks": ["determinism"]},
    ],
)
def test_a_record_that_covers_less_does_not_count(lacking: dict) -> None:
    """One of another operator, of some cases, of another check: what is wrong is found all the same."""

    def wrong(x: Tensor) -> Tensor:
        return x * 2.1

    options = {"reference": lambda x: x * 2, "samples": [(torch.ones(3),)]}
    chosen = {"checks": lacking["checks"]} if "checks" in lacking else {}
    record = opwright.verify(lambda x: x * 2, **options, **chosen)
    assert record.passed
    record.name = lacking.get("name", "wrong")
    record.only = lacking.get("only", "")
    with pytest.raises(NotVerifiedError, match="does not pass verify"):
        opwright.bench(wrong, [], verified=record, directions=["forward"], **options)


def test_a_slice_is_measured_as_a_slice(verified, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every set and in the backward: a clone would be aligned and contiguous."""
    seen: set[tuple] = set()

    def double(x: Tensor) -> Tensor:
        seen.add((tuple(x.shape), x.stride(), x.storage_offset()))
        return x * 2

    x = torch.randn(4, 9)[:, 1:]
    options = {"reference": lambda x: x * 2, "samples": [(x,)], "directions": ["forward", "backward"]}
    measure(monkeypatch, double, **options)
    assert seen == {((4, 8), (9, 1), 1)}


def test_sets_of_a_declared_sample_own_their_memory() -> None:
    x, w = torch.randn(4, 9)[:, 1:], torch.randn(8)
    (plan,) = plans(scale.operator, [(x, w)], None, None, (), CPU)
    assert plan.axes == {"elements": 32}
    first, second = plan.make(0).values[0], plan.make(1).values[0]
    assert torch.equal(first, second)
    assert first.stride() == second.stride()
    assert first.data_ptr() == x.data_ptr() != second.data_ptr()


def test_inputs_for_a_gpu_have_the_shapes_and_dtypes_of_those_for_the_cpu() -> None:
    """On `meta`, which stands for a device that is not the CPU, up to the generator of random numbers."""
    contract = scale.operator.contract
    import torch._dynamo  # of which a generator is a part: it is imported before there is another one

    sizes = {"n": 6}
    wanted = DeviceSweep(contract, CPU).make("bench", torch.bfloat16, sizes, (2, 3), {"by": 2.0})
    there = DeviceSweep(contract, torch.device("meta"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", lambda device=None: type("G", (), {"manual_seed": lambda s, n: None})())
        made = there.make("bench", torch.bfloat16, sizes, (2, 3), {"by": 2.0})
    for a, b in zip(made.values, wanted.values, strict=True):
        if isinstance(a, Tensor):
            assert (a.shape, a.dtype, a.device.type) == (b.shape, b.dtype, "meta")
        else:
            assert a == b


def test_device_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "template <typename T> void on_gpu();\n"

    @opwright.operator("bench_tests::on_gpu", cuda=source)
    def on_gpu(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        return x * 2

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert api.choose_device("f", on_gpu.operator, None, None) == torch.device("cuda")
    assert api.choose_device("f", on_gpu.operator, None, "cpu") == CPU
    assert api.choose_device("f", scale.operator, None, None) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert api.choose_device("f", on_gpu.operator, None, None) == CPU
    assert api.choose_device("f", None, [(torch.ones(2),)], None) == CPU


PROGRAM = """
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("bench_cli::twice")
def twice(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x * 2

twice.sweep(batch=[(64,)])
"""


@pytest.mark.parametrize("verb", ["verify", "bench"])
def test_the_commands_take_a_device(verb: str, run_python, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(PROGRAM)
    flags = {"verify": ["--check", "numerics"], "bench": ["--against", "eager", "--seconds", "0.01"]}[verb]

    def command(device: str):
        arguments = ["opwright", verb, "twice.py", *flags, "--device", device]
        program = f"import sys; sys.argv = {arguments!r}\nfrom opwright.cli import main; main()"
        return run_python(program, check=False)

    good = command("cpu")
    assert good.returncode == 0, good.stderr
    assert {"verify": "numerics", "bench": "us"}[verb] in good.stdout
    bad = command("cuda:77")
    assert bad.returncode == 2
    assert "`cuda:77`: there is no such device here" in bad.stderr
    assert "Traceback" not in bad.stderr


def test_a_sweep_names_arguments_and_sizes_that_belong_together() -> None:
    @opwright.operator("bench_sweep::kept")
    def kept(
        x: Float[Tensor, "*batch n"],
        w: Float[Tensor, "n m"],
        bias: Float[Tensor, "m"] | None = None,
        *,
        keep: int = 0,
    ) -> tuple[Float[Tensor, "*batch m"], Float[Tensor, "keep*n"]]:
        product = x @ w if bias is None else x @ w + bias
        return product, w[:, 0].repeat(keep)

    kept.sweep(
        {"batch": [(2,)], "n": [3], "m": [4], "bias": [None]},
        {"batch": [(5,), (6,)], "n": [30], "m": [40], "keep": [0, 1]},
    )
    planned = plans(kept.operator, None, None, None, (torch.float32,), CPU)
    found = [
        (
            *(None if v is None else tuple(v.shape) for v in plan.make(0).values[:3]),
            plan.make(0).options["keep"],
        )
        for plan in planned
    ]
    assert found[0] == ((2, 3), (3, 4), None, 0)
    assert found[1:] == [((rows, 30), (30, 40), (40,), keep) for rows in (5, 6) for keep in (0, 1)]
    assert [plan.axes["keep"] for plan in planned] == [0, 0, 1, 0, 1]
    weight = planned[1].make(0).values[1]
    assert weight.std().item() == pytest.approx(40**-0.5, rel=0.1)  # products stay in the scale of x


TASK = """
import torch

class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.linear = torch.nn.Linear(n, n)

    def forward(self, x):
        return self.linear(x).relu()

class ModelNew(Model):
    def forward(self, x):
        return torch.clamp_min(self.linear(x), 0) + OFFSET

OFFSET = 0.0

def get_inputs():
    return [torch.randn(8, 16)]

def get_init_inputs():
    return [16]
"""


def test_a_task_is_measured_as_it_is_verified(tmp_path: Path) -> None:
    path = tmp_path / "linear_relu.py"
    path.write_text(TASK)
    record = opwright.bench(Task(path, path), ["eager"], seconds=0.0)
    assert record.name == "linear_relu"
    assert [(m.direction, m.case) for m in record.measurements] == [
        ("forward", "f32[8, 16]"),
        ("backward", "f32[8, 16]"),
    ]
    path.write_text(TASK.replace("OFFSET = 0.0", "OFFSET = 1.0"))
    with pytest.raises(NotVerifiedError, match="does not pass verify"):
        opwright.bench(Task(path, path), ["eager"], seconds=0.0)


def test_sizes_of_axes_and_dtypes_are_refused_where_inputs_are_given(tmp_path: Path) -> None:
    """Dtypes had no effect."""
    path = tmp_path / "linear_relu.py"
    path.write_text(TASK)
    with pytest.raises(CheckError, match="a task has inputs of its own"):
        opwright.bench(Task(path, path), ["eager"], sweep={"n": [11]}, seconds=0.0)
    with pytest.raises(CheckError, match="so `--dtype` has no effect"):
        opwright.bench(Task(path, path), ["eager"], dtypes=[torch.bfloat16], seconds=0.0)
    with pytest.raises(CheckError, match="omit `sweep`, or omit `samples`"):
        opwright.bench(scale, samples=[(torch.ones(3), torch.ones(3))], sweep={"n": [11]}, seconds=0.0)


def test_a_derived_gradient_is_noted_with_what_it_costs(capsys: pytest.CaptureFixture) -> None:
    options = {"seconds": 0.0, "sweep": {"batch": [(3,)], "n": [5]}, "dtypes": [torch.float32]}
    record = opwright.bench(scale, ["eager"], **options)
    assert record.notes == ["backward: autograd of the reference: as slow as without an operator"]
    print_bench(record)
    assert f"{record.notes[0]}\n" in capsys.readouterr().out
    assert opwright.bench(scale, ["eager"], directions=["forward"], **options).notes == []


THRICE = '''
import torch
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("bench_commands::thrice", cpu="""
#include <opwright/kernel.h>
template <typename T>
void thrice(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = T(x(i) * 3);
}
OPWRIGHT_KERNEL(thrice, float, double)
""")
def thrice(x: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    return x * 3
'''


@pytest.mark.compiler
def test_the_commands_bench_and_report(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(THRICE)
    (tmp_path / "bad.py").write_text(THRICE.replace("x(i) * 3", "x(i) * T(3.01)"))

    def command(*arguments: str) -> Any:
        return run_opwright(*arguments, cwd=tmp_path, env={"CI": "1"})

    bad = command("bench", "bad.py", "--against", "eager")
    assert bad.returncode == 1
    assert "does not pass verify" in bad.stderr
    good = command("bench", "good.py", "--against", "eager", "--seconds", "0.01", "--out", "records", "--json")
    assert good.returncode == 0, good.stderr
    (record,) = json.loads(good.stdout)
    assert {m["direction"] for m in record["measurements"]} == {"forward", "backward"}
    assert all(t["median_us"] > 0 for m in record["measurements"] for t in m["timings"])
    page = command("report", "records", "--out", "page.html")
    assert page.returncode == 0, page.stderr
    assert "bench_commands::thrice" in (tmp_path / "page.html").read_text()
    assert re.search(r"forward (no visible difference from|[\d.]+x (faster|slower) than) eager", page.stderr)
    assert command("report", "nothing_here").returncode == 5


SHARED = """
from jaxtyping import Float
from torch import Tensor
from opwright import operator

@operator("bench_ranks::twice")
def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2
"""


def bench_on_two_ranks(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "shared.py").write_text(SHARED)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "opwright", "bench"]
    command = [*ranks, "shared.py", *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)


def test_ranks_of_torchrun_share_the_inputs(tmp_path: Path) -> None:
    asked = ["--axis", "n=8,16,32", "--dtype", "f32", "--direction", "forward", "--against", "eager"]
    result = bench_on_two_ranks(tmp_path, *asked, "--seconds", "0.1", "--out", "records", "--json")
    assert result.returncode == 0, result.stderr
    (record,) = json.loads(result.stdout)
    assert [m["case"] for m in record["measurements"]] == ["f32[8]", "f32[16]", "f32[32]"]
    assert [m["device"].partition(" ")[2] for m in record["measurements"]] == ["cpu:0", "cpu:1", "cpu:0"]
    assert any("2 processes of this machine measured at the same time" in text for text in record["warnings"])
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["twice.bench.json"]


def test_what_is_wrong_with_a_request_is_said_once_by_all_ranks(tmp_path: Path) -> None:
    result = bench_on_two_ranks(tmp_path, "--axis", "m=8")
    assert result.returncode != 0
    assert result.stderr.count("error: `") == 1, result.stderr
