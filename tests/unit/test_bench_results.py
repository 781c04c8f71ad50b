"""Timed calls whose results are wrong are refused; what else looks odd is a warning beside the figures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_cases import bench, reference, verified_elsewhere  # noqa: F401
from jaxtyping import Float, Int64
from torch import Tensor

import opwright
from opwright.bench import api, environment, measure, roofline, timers
from opwright.bench.api import BenchRecord
from opwright.bench.roofline import CpuBench, measure_limits_again
from opwright.bench.workload import Workload, most_elements, one_element, plans
from opwright.contract.cost import Cost
from opwright.errors import CheckError, NotVerifiedError
from opwright.records import Conditions, Limits, Timing

# The limits of a machine where copying a row takes a microsecond, and of one that nothing is as slow as.
MODEST = Limits(1.0, 1.0, 1.0, {"f32": 1.0}, 1.0, None, 1, 0.0)
FAST = Limits(1e3, 1e3, 1e3, {"f32": 1e-3}, 1.0, None, 1, 0.0)
SLOW = Limits(1e-3, 1e-3, 1e-3, {"f32": 1.0}, 1.0, None, 1, 0.0)
WRONG = "a timed call returned a wrong result"


def test_an_honest_candidate_is_measured_in_every_direction_and_its_samples_stay_as_they_were() -> None:
    x, w = torch.randn(40, 30), torch.randn(30)
    before = x.clone(), w.clone()
    options = {"samples": [(x, w)], "directions": ["forward", "backward", "step"]}
    record = bench(lambda x, w: w * torch.tanh(x), **options)
    assert [m.direction for m in record.measurements] == ["forward", "backward", "step"]
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


def test_a_module_with_parameters_is_held_to_its_reference_in_float64() -> None:
    linear = torch.nn.Linear(30, 20)
    other = torch.nn.Linear(30, 20)
    options = {"reference": linear, "samples": [(torch.randn(40, 30),)], "directions": ["forward", "backward"]}
    assert len(bench(linear, **options).measurements) == 2
    assert linear.weight.dtype == torch.float32
    with pytest.raises(NotVerifiedError, match=WRONG):
        bench(other, **options)


def test_a_cache_by_the_address_of_the_input() -> None:
    kept: dict[int, Tensor] = {}

    def cached(x: Tensor, w: Tensor) -> Tensor:
        if x.data_ptr() not in kept:
            kept[x.data_ptr()] = reference(x, w)
        return kept[x.data_ptr()]

    with pytest.raises(NotVerifiedError, match=WRONG):
        bench(cached)


def test_a_cache_by_the_shape_of_the_input() -> None:
    kept: list[Tensor] = []

    def cached(x: Tensor, w: Tensor) -> Tensor:
        kept.append(reference(x, w) if len(kept) < 5 else kept[-1])
        return kept[-1]

    with pytest.raises(NotVerifiedError, match=WRONG):
        bench(cached)


class Stale(torch.autograd.Function):
    """Its gradient is kept from the first backward."""

    kept: Tensor | None = None

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return reference(x, w)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, w = ctx.saved_tensors
        if Stale.kept is None:
            Stale.kept = grad * w * (1 - torch.tanh(x) ** 2)
        return Stale.kept, (grad * torch.tanh(x)).sum(0)


@pytest.mark.parametrize("direction", ["backward", "step"])
def test_a_gradient_that_is_kept(direction: str) -> None:
    Stale.kept = None
    with pytest.raises(NotVerifiedError, match=WRONG) as caught:
        bench(Stale.apply, directions=[direction])
    assert direction in str(caught.value)


def test_nothing_is_done_once_it_is_timed() -> None:
    calls = 0

    def tired(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return reference(x, w) if calls < 4 else torch.zeros_like(x)

    with pytest.raises(NotVerifiedError, match=WRONG):
        bench(tired)


def test_the_message_says_by_how_much_and_where() -> None:
    calls = 0

    def wrong_later(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        result = reference(x, w)
        if calls > 5:
            result[7, 3] = 100.0
        return result

    with pytest.raises(NotVerifiedError, match=r"result 0: 1 of 1,200 elements is wrong; worst at \[7, 3\]: got 100"):
        bench(wrong_later)


@pytest.mark.parametrize("size", [100, 2**19 + 8])
def test_last_bits_may_differ_from_call_to_call_and_no_more(size: int) -> None:
    """Of large inputs the oracle is asked only where PyTorch's own result is not near."""
    calls = 0

    def varying(x: Tensor, scale: float = 0.0) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.exp(x) * (1 + (1 + calls % 2) * scale)

    options = {"reference": torch.exp, "samples": [(torch.randn(size),)]}
    assert bench(lambda x: varying(x, 1e-7), **options).measurements
    with pytest.raises(NotVerifiedError, match=WRONG):
        bench(lambda x: varying(x, 1e-5), **options)


def test_a_sum_in_another_order_is_right() -> None:
    """As are the sums of a norm over thousands of rows, whose last bits no two orders share."""
    x, w = torch.randn(4096, 64), torch.randn(64)

    def rms_norm(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    def in_parts(x: Tensor, w: Tensor) -> Tensor:
        squares = sum((part * part).sum(-1, keepdim=True) for part in x.split(8, -1))
        return x / torch.sqrt(squares / x.shape[-1] + 1e-6) * w

    options = {"reference": rms_norm, "samples": [(x, w)], "directions": ["forward", "backward", "step"]}
    assert len(bench(in_parts, **options).measurements) == 3


def test_a_step_that_changes_its_arguments_starts_from_the_same_values_in_every_block() -> None:
    @opwright.operator("bench_results::double_")
    def double_(x: opwright.Mutates[Float[Tensor, "n"]]) -> None:
        x.mul_(2.0)

    record = opwright.bench(double_, [], samples=[(torch.ones(64),)], seconds=0.0)
    assert [m.case for m in record.measurements] == ["f32[64]"]


# --- warnings -------------------------------------------------------------------------------------------------------


def test_a_time_below_the_floor_is_a_warning_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "limits_of", lambda place, machine, again=False: SLOW)
    (found,) = bench(reference, samples=[(torch.randn(1000, 1000), torch.randn(1000))]).measurements
    (warning,) = found.warnings
    assert "is less than the 1.00 s that 4000000 bytes at 4.00 MB/s (4 times the measured cache) take" in warning
    number, unit = warning.split()[:2]
    assert float(number) * {"µs": 1.0, "ms": 1e3}[unit] == pytest.approx(found.ours.median_us, rel=0.01)


def test_limits_that_were_exceeded_are_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a busy machine has given is too low; the better of each limit is kept."""
    monkeypatch.setattr(api, "limits_of", lambda place, machine, again=False: SLOW)
    monkeypatch.setattr(api, "measure_limits_again", measure_limits_again)
    monkeypatch.setattr(CpuBench, "measure_limits", lambda self: FAST)
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path))
    record = bench(reference, samples=[(torch.randn(1000, 1000), torch.randn(1000))])
    assert record.measurements[0].warnings == []
    assert (record.limits.copy_gb_s, record.limits.gemm_gflops["f32"]) == (1e3, 1.0)
    assert record.machine.copy_gb_s == 1e3


@pytest.mark.parametrize(("seconds", "calls"), [((0.01, 0.004, 0.01), 10), ((2.4, 2.0), 1), ((0.3, 0.2), 2)])
def test_slow_calls_are_timed_less_often(seconds: tuple, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without products in bfloat16 took 25 s to measure them."""
    now, made = [0.0], []

    def call() -> None:
        made.append(seconds[min(len(made), len(seconds) - 1)])
        now[0] += made[-1]

    monkeypatch.setattr(timers, "perf_counter", lambda: now[0])
    assert roofline._best(call) == pytest.approx(min(made))
    assert len(made) == calls


def test_the_floor_follows_from_bytes_and_flop() -> None:
    limits = Limits(10.0, 10.0, 50.0, {"f32": 100.0, "bf16": 800.0}, 1.0, None, 1, 0.0)
    assert measure._floor(Cost(10**9), limits)[0] == pytest.approx(1e6 / 200)
    least_us, reason = measure._floor(Cost(1, 16 * 10**11), limits)
    assert least_us == pytest.approx(1e6)
    assert reason == "1600000000000 FLOP at 1.60 TFLOP/s (2 times the measured matrix product)"


@pytest.mark.parametrize(("wall", "graph", "count"), [(60.0, 41.0, 0), (400.0, 41.0, 1), (60.0, 300.0, 1)])
def test_clocks_of_a_gpu_that_differ_are_a_warning(wall: float, graph: float, count: int) -> None:
    timing = Timing("opwright", 50.0, 50.0, 0.0, [50.0], warm_us=40.0, host_us=8.0, wall_us=wall, graph_us=graph)
    warnings = measure._warn_of_clocks(timing)
    assert len(warnings) == count
    assert all("timed by events it takes 40.0 µs" in warning for warning in warnings)


def test_long_times_in_a_warning_are_written_as_in_a_table() -> None:
    """They were `2.38e+04 us`."""
    timing = Timing("opwright", 23812.4, 23812.4, 0.0, [23812.4], warm_us=23812.4, host_us=8.0, wall_us=1234567.0)
    (warning,) = measure._warn_of_clocks(timing)
    assert warning.startswith("timed by events it takes 23.8 ms, by the host's clock 1.23 s: work")


def warnings_of(widths: list[float], load: float) -> list[str]:
    record = bench(reference)
    (one,) = record.measurements
    one.comparisons = []
    record.conditions = Conditions("own", [0, 1], "keeps", load, load)
    record.measurements = []
    for width in widths:
        timing = Timing("opwright", 1.0, 1.0, 0.0, [1.0], interval=width)
        record.measurements.append(measure.Measurement("forward", "f32[1]", {}, "f32", 8, None, [timing], None, True))
    return api._warn(record)


def test_a_busy_machine_is_a_warning_where_it_shows() -> None:
    assert warnings_of([0.01, 0.3], load=8.1) == [
        "the machine is busy (load 8.1 on 2 cores): confidence intervals reach ±30 %"
    ]
    assert warnings_of([124.0], load=8.1) == [
        "the machine is busy (load 8.1 on 2 cores): confidence intervals are wider than ±100 %"
    ]
    assert warnings_of([0.02, 0.03], load=8.1) == []
    assert warnings_of([0.01, 0.3], load=0.5) == [
        "times vary: on 1 of 2 inputs confidence intervals are wider than ±20 %; `--seconds 60` measures longer"
    ]


@pytest.mark.parametrize(
    ("asked", "share", "threads"), [(None, 0.3, 1), (None, 0.9, 2), (2, 0.3, 2), (1, 0.9, 1)], ids=str
)
def test_threads_wait_for_no_core_that_other_work_has(
    asked: int | None, share: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_share_of_cores", lambda threads: share)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        record = bench(reference, samples=[(torch.randn(100, 10), torch.randn(10))], threads=asked)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert record.threads == threads
    text = "the machine is busy: 2 threads got 0.6 cores, so everything was timed on one thread; `--threads 2` uses 2"
    assert (text in record.warnings) == (asked is None and share < 0.5)


def test_a_record_has_the_warnings_of_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "limits_of", lambda place, machine, again=False: SLOW)
    record: BenchRecord = bench(reference, samples=[(torch.randn(1000, 1000), torch.randn(1000))])
    (found,) = [w for w in record.all_warnings if "is less than" in w]
    assert found.startswith("forward f32[1000, 1000] f32[1000]: ")


def test_what_is_not_known_to_be_moved_is_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view moves nothing, and of a table only the rows that are asked for."""
    monkeypatch.setattr(api, "limits_of", lambda place, machine, again=False: MODEST)
    x = torch.randn(1000, 1000)
    assert bench(lambda x: x.t(), reference=lambda x: x.t(), samples=[(x,)]).measurements[0].floor_us == 0.0
    table = {"reference": lambda x, i: x[i], "samples": [(x, torch.tensor([3]))]}
    assert bench(lambda x, i: x[i], **table).measurements[0].floor_us == pytest.approx(1.0)


# --- other values at the same addresses ---------------------------------------------------------------------------


def test_new_values_are_others_at_the_same_addresses() -> None:
    x = torch.randn(4, 9)[:, 1:]
    index, expanded = torch.tensor([1, 2]), torch.ones(1, 3).expand(4, 3)
    work = Workload("forward", [(x, index), {"y": expanded}], None)
    (mine, _), named = work.values
    address = mine.data_ptr()
    assert (mine.stride(), named["y"].stride()) == (x.stride(), expanded.stride())
    work.keep()
    work.refresh()
    assert mine.data_ptr() == address
    assert torch.equal(mine.sign(), x.sign())
    assert bool((mine.abs() <= x.abs()).all())
    assert not torch.allclose(mine / mine[0, 0], x / x[0, 0])  # a norm would not see a mere factor
    work.restore()
    assert torch.equal(mine, x)


def test_the_difference_is_that_of_verify() -> None:
    x = torch.randn(1000)
    work = Workload("forward", [(x,), {}], None)
    assert work.difference([torch.exp(x)], torch.exp) == ""
    assert "elements are wrong" in work.difference([torch.exp(x) * (1 + 1e-5)], torch.exp)
    assert "shape [999], expected [1000]" in work.difference([torch.exp(x)[:-1]], torch.exp)
    assert "2 results, expected 1" in work.difference([x, x], torch.exp)
    assert work.difference([x.argmax()], torch.argmax) == ""
    assert "1 of 1 element is wrong" in work.difference([x.argmax() + 1], torch.argmax)


def test_tensors_in_named_arguments_and_lists_are_compared_too() -> None:
    def weigh(parts: list[Tensor], *, by: Tensor) -> Tensor:
        return sum(parts) * by

    x, y, by = torch.randn(3, 8, 5)
    work = Workload("forward", [([x, y],), {"by": by}], None)
    assert work.difference([weigh([x, y], by=by)], weigh) == ""
    assert work.difference([weigh([x, x], by=by)], weigh)


def test_gradients_come_in_where_ours_has_them() -> None:
    """The reference has one more output that a gradient could flow through, and one fewer where nothing needs it."""

    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor):
            ctx.save_for_backward(x)
            result, gates = x * x, x * 3
            ctx.mark_non_differentiable(gates)
            return result, gates

        @staticmethod
        def backward(ctx, grad: Tensor, _):
            return 2 * ctx.saved_tensors[0] * grad

    for direction in ("backward", "step"):
        work = Workload(direction, [(torch.randn(50),), {}], None)
        ours, theirs = work.bind(Two.apply), work.bind(lambda x: (x * x, x * 3))
        work.refresh()
        assert torch.allclose(ours()[-1], theirs()[-1])
        assert work.difference(ours(), lambda x: (x * x, x * 3)) == ""
        assert "result" in work.difference([*ours()[:-1], ours()[-1] * 1.001], lambda x: (x * x, x * 3))


# --- bad input --------------------------------------------------------------------------------------------------------


def test_an_operator_is_verified_on_its_own_inputs_where_samples_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle took 80 s for one sample of 2^25 elements, and bench verified it before it measured."""
    from opwright_ops import bias_gelu

    seen: list[Any] = []

    def verify(target: Any, reference: Any = None, samples: Any = None, **_: Any) -> Any:
        seen.append(samples)
        if samples is None and len(seen) == 4:
            raise CheckError("bias_gelu", "its reference takes none of its inputs")
        return SimpleNamespace(failures=[])

    monkeypatch.setattr(api, "verify", verify)
    small, large = [(torch.ones(8), torch.ones(8))], [(torch.ones(2**20), torch.ones(2**20))]
    for target, samples in ((bias_gelu, small), (bias_gelu, large), (torch.add, large), (bias_gelu, large)):
        api.refuse_unverified(target, None, samples, torch.device("cpu"), None)
    assert [each if each is None else each is large for each in seen] == [False, None, True, None, True]


def test_no_samples() -> None:
    with pytest.raises(CheckError, match="there are no samples to measure it on"):
        bench(reference, samples=[])
    with pytest.raises(CheckError, match="a callable is measured against a reference"):
        bench(reference, samples=None)


def test_samples_that_come_once_are_enough() -> None:
    assert bench(reference, samples=iter([(torch.randn(2, 3), torch.randn(3))])).measurements


def test_samples_on_two_devices() -> None:
    samples = [(torch.randn(2, 3), torch.randn(3, device="meta"))]
    with pytest.raises(CheckError, match="on more than one device") as caught:
        bench(reference, samples=samples)
    assert "cpu, meta" in str(caught.value)


def test_a_backward_of_what_has_no_gradient() -> None:
    def count(x: Tensor, w: Tensor) -> Tensor:
        return (x > 0).sum()

    for direction in ("backward", "step"):
        with pytest.raises(CheckError, match=f'no gradient, so there is no "{direction}" to measure'):
            bench(count, reference=count, directions=[direction])


def test_a_direction_that_does_not_exist() -> None:
    with pytest.raises(CheckError, match="there is no direction 'sideways'"):
        bench(reference, directions=["sideways"])


def test_samples_are_measured_where_the_reference_refuses_other_inputs() -> None:
    """As of a sparse matrix, whose parts must fit together; bench ended with the error of the reference."""

    @opwright.operator("bench_results::parts")
    def parts(x: Float[Tensor, "n"], starts: Int64[Tensor, "b"]) -> Float[Tensor, "b"]:
        if int(starts[0]) != 0 or bool((starts.diff() <= 0).any()):
            raise ValueError("starts must be sorted, from 0 on")
        return x[starts]

    parts.samples(lambda: [(torch.randn(n), torch.arange(n)) for n in (1, 2, 3, 4, 5)])
    cpu = torch.device("cpu")
    found = [plan.make(0).values[0] for plan in plans(parts.operator, None, None, None, None, cpu)]
    assert [(len(x), x.dtype) for x in found] == [(n, t) for t in (torch.float32, torch.bfloat16) for n in (2, 3, 4, 5)]
    assert len(one_element(parts.operator, cpu).values[0]) == 1


@pytest.mark.parametrize(("seconds", "most"), [(1e-9, 2**23), (1e-6, 2**17), (1e-3, 2**11)])
def test_inputs_are_as_large_as_a_slow_reference_allows(
    monkeypatch: pytest.MonkeyPatch, seconds: float, most: int
) -> None:
    """One that loops in Python took minutes on 8 million elements, and nothing was measured."""
    now = [0.0]
    for clock in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"opwright.bench.workload.{clock}", lambda: now[0])

    @opwright.operator("bench_results::slow")
    def slow(x: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
        now[0] += seconds * x.numel()
        return x * 2

    cpu = torch.device("cpu")
    found = most_elements(slow.operator, slow.operator.declaration.reference, cpu)
    assert found == most
    sizes = [plan.axes["elements"] for plan in plans(slow.operator, None, None, None, [torch.float32], cpu, found)]
    assert max(sizes) <= most
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize("axes", ["128 128", "*batch 128 128", "n 64 64", "*batch"])
@pytest.mark.parametrize("seconds", [1e-9, 1e-6])
def test_inputs_with_fixed_axes(monkeypatch: pytest.MonkeyPatch, seconds: float, axes: str) -> None:
    """Rows of 16,384 elements counted as one element each."""
    now = [0.0]
    for clock in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"opwright.bench.workload.{clock}", lambda: now[0])

    def slow(x):
        now[0] += seconds * x.numel()
        return x * 2

    slow.__annotations__ = {"x": Float[Tensor, axes], "return": Float[Tensor, axes]}
    operator, cpu = opwright.operator("bench_results::fixed")(slow).operator, torch.device("cpu")
    most = most_elements(operator, operator.declaration.reference, cpu)
    found = plans(operator, None, None, None, [torch.float32], cpu, most)
    sizes = [plan.axes["elements"] for plan in found]
    assert max(sizes) <= max(most, 128 * 128)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(("least", "found"), [(1, 1), (3, 4), (99, None)])
def test_the_smallest_input_is_one_that_the_reference_takes(least: int, found: int | None) -> None:
    """As of a norm, which refuses one element; bench ended with its error after all inputs were measured."""

    @opwright.operator("bench_results::spread")
    def spread(x: Float[Tensor, "n"]) -> Float[Tensor, ""]:
        if len(x) < least:
            raise ValueError("too few elements")
        return x.max() - x.min()

    smallest = one_element(spread.operator, torch.device("cpu"))
    assert (smallest and len(smallest.values[0])) == found
    settings = SimpleNamespace(operator=spread.operator, on_run=lambda *_: None, place=CpuBench())
    assert bool(measure.host_times(spread, spread.operator.declaration.reference, settings)) == (found is not None)
