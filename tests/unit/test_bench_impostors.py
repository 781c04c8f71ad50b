"""Candidates that look fast and are not: each is refused by the name of what it does."""

from __future__ import annotations

import queue
import sys
import threading
import time

import pytest
import torch
from bench_cases import bench, reference, verified_elsewhere  # noqa: F401
from torch import Tensor

import opwright
from opwright.bench import gates, judges, run, timing
from opwright.bench.clocks import perf_counter, replaced
from opwright.bench.workload import Workload
from opwright.errors import CheckError, NotVerifiedError
from opwright.records import Limits, Timing
from opwright.spec.cost import Cost

# Of machines: one where copying a row takes a microsecond, one on which everything is too fast, one where nothing is.
MODEST = Limits(1.0, 1.0, 1.0, {"f32": 1.0}, 1.0, None, 1, 0.0)
FAST = Limits(1e3, 1e3, 1e3, {"f32": 1e-3}, 1.0, None, 1, 0.0)
SLOW = Limits(1e-3, 1e-3, 1e-3, {"f32": 1.0}, 1.0, None, 1, 0.0)


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
    with pytest.raises(NotVerifiedError, match="did not compute its result"):
        bench(other, **options)


def test_a_cache_by_the_address_of_the_input() -> None:
    kept: dict[int, Tensor] = {}

    def cached(x: Tensor, w: Tensor) -> Tensor:
        if x.data_ptr() not in kept:
            kept[x.data_ptr()] = reference(x, w)
        return kept[x.data_ptr()]

    with pytest.raises(NotVerifiedError, match="did not compute its result from the inputs of that moment"):
        bench(cached)


def test_a_cache_by_the_shape_of_the_input() -> None:
    kept: list[Tensor] = []

    def cached(x: Tensor, w: Tensor) -> Tensor:
        kept.append(reference(x, w) if len(kept) < 5 else kept[-1])
        return kept[-1]

    with pytest.raises(NotVerifiedError, match="did not compute its result"):
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
    with pytest.raises(NotVerifiedError, match="did not compute its result") as caught:
        bench(Stale.apply, directions=[direction])
    assert direction in str(caught.value)


def test_nothing_is_done_once_it_is_timed() -> None:
    calls = 0

    def tired(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return reference(x, w) if calls < 20 else torch.zeros_like(x)

    with pytest.raises(NotVerifiedError, match="did not compute its result"):
        bench(tired)


def slowly(x: Tensor, w: Tensor) -> Tensor:
    time.sleep(0.003)
    return reference(x, w)


def test_a_cache_that_knows_when_its_input_was_written() -> None:
    """Between two writes every call but the first is free, and right."""
    kept: dict[tuple[int, ...], Tensor] = {}

    def cached(x: Tensor, w: Tensor) -> Tensor:
        key = (x.data_ptr(), x._version, w.data_ptr(), w._version)
        if key not in kept:
            kept.clear()
            kept[key] = slowly(x, w)
        return kept[key]

    with pytest.raises(NotVerifiedError, match="fast only on values that it has seen before") as caught:
        bench(cached)
    assert "other values" in str(caught.value)
    assert bench(slowly).measurements


def test_a_cache_by_what_is_in_the_input() -> None:
    kept: dict[tuple[float, ...], Tensor] = {}

    def cached(x: Tensor, w: Tensor) -> Tensor:
        key = (float(x.view(torch.int32).sum()), float(w.view(torch.int32).sum()))
        if key not in kept:
            kept.clear()
            kept[key] = slowly(x, w)
        return kept[key].clone()

    with pytest.raises(NotVerifiedError, match="fast only on values that it has seen before"):
        bench(cached)


def test_one_that_looks_who_calls_it() -> None:
    def knowing(x: Tensor, w: Tensor) -> Tensor:
        frame = sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "once":
                return torch.zeros_like(x)
            frame = frame.f_back
        return reference(x, w)

    with pytest.raises(NotVerifiedError, match="has not returned what the same call returns alone"):
        bench(knowing)


def test_one_that_computes_only_when_it_is_left_in_peace() -> None:
    last = 0.0

    def hurried(x: Tensor, w: Tensor) -> Tensor:
        nonlocal last
        gap = perf_counter() - last
        result = reference(x, w) if gap > 1e-4 else torch.zeros_like(x)
        last = perf_counter()
        return result

    with pytest.raises(NotVerifiedError, match=r"did not compute its result|returns alone|results changed"):
        bench(hurried)


def test_work_in_a_thread_that_goes_on_when_the_call_has_returned() -> None:
    jobs: queue.Queue = queue.Queue()

    def work() -> None:
        while (job := jobs.get()) is not None:
            out, x, w = job
            time.sleep(0.001)
            out.copy_(reference(x, w))

    def deferred(x: Tensor, w: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        jobs.put((out, x, w))
        return out

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with pytest.raises(NotVerifiedError, match=r"did not compute its result|returns alone|results changed"):
            bench(deferred)
    finally:
        with jobs.mutex:
            jobs.queue.clear()
        jobs.put(None)
        thread.join()


class Lazy(Tensor):
    """A tensor that could compute whenever it likes."""


def test_a_result_of_a_class_of_its_own() -> None:
    with pytest.raises(NotVerifiedError, match="may compute later") as caught:
        bench(lambda x, w: reference(x, w).as_subclass(Lazy))
    assert "Lazy" in str(caught.value)


def test_a_result_of_a_class_of_its_own_once_it_is_timed() -> None:
    calls = 0

    def later(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return reference(x, w) if calls < 10 else reference(x, w).as_subclass(Lazy)

    with pytest.raises(NotVerifiedError, match="may compute later"):
        bench(later)


def test_a_judge_that_was_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def bribing(x: Tensor, w: Tensor) -> Tensor:
        monkeypatch.setattr(Workload, "difference", lambda *args: "")
        monkeypatch.setattr(timing, "perf_counter", lambda: 0.001 * perf_counter())
        return torch.zeros_like(x)

    with pytest.raises(NotVerifiedError, match="functions that time and judge were replaced") as caught:
        bench(bribing)
    assert "opwright.bench.timing.perf_counter" in str(caught.value)
    assert "opwright.bench.workload.Workload.difference" in str(caught.value)


def test_one_that_slows_down_what_it_is_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = torch.nn.functional.gelu

    def eager(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x)

    def slow(x: Tensor) -> Tensor:
        time.sleep(0.001)
        return quick(x)

    def slowing(x: Tensor) -> Tensor:
        monkeypatch.setattr(torch.nn.functional, "gelu", slow)
        return quick(x)

    with pytest.raises(NotVerifiedError, match="changes what it, and what it is compared with, runs in") as caught:
        opwright.bench(
            slowing, ["eager"], reference=eager, samples=[(torch.randn(30),)], directions=["forward"], seconds=0.0
        )
    assert "`torch.nn.functional.gelu` was replaced" in str(caught.value)
    assert torch.nn.functional.gelu is quick


def test_one_that_sets_the_threads_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()

    def setting(x: Tensor, w: Tensor) -> Tensor:
        torch.set_num_threads(before + 1)
        return reference(x, w)

    with pytest.raises(NotVerifiedError, match=r"torch\.get_num_threads\(\) was"):
        bench(setting)
    assert torch.get_num_threads() == before


def test_a_timer_that_was_replaced_is_named_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replaced() == []

    def slow_clock() -> float:
        return 0.0

    monkeypatch.setattr(time, "perf_counter", slow_clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    assert replaced() == ["time.perf_counter", "torch.cuda.synchronize"]
    assert perf_counter() > 0.0
    with pytest.raises(NotVerifiedError, match="functions that time and judge were replaced") as caught:
        bench(reference)
    assert "time.perf_counter" in str(caught.value)


def test_a_timer_that_is_replaced_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def replacing(x: Tensor, w: Tensor) -> Tensor:
        monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda self, other: 1e-6)
        return reference(x, w)

    with pytest.raises(NotVerifiedError, match=r"torch\.cuda\.Event\.elapsed_time"):
        bench(replacing)


def test_a_timer_that_is_another_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.time)
    assert replaced() == ["time.perf_counter"]


def test_faster_than_the_machine_says_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "limits_of", lambda place, machine, again=False: SLOW)
    with pytest.raises(NotVerifiedError, match="faster than this machine can be") as caught:
        bench(reference, samples=[(torch.randn(1000, 1000), torch.randn(1000))])
    text = str(caught.value)
    assert "1e+06 us: 4000000 bytes at 4 times the measured 0.001 GB/s" in text
    assert "measured" in text


def test_limits_of_a_busy_machine_are_measured_again_before_anyone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def limits_of(place, machine, again=False) -> Limits:
        asked.append(again)
        return FAST if again else SLOW

    monkeypatch.setattr(run, "limits_of", limits_of)
    record = bench(reference, samples=[(torch.randn(1000, 1000), torch.randn(1000))])
    assert asked == [False, True]
    assert (record.limits.copy_gb_s, record.limits.gemm_gflops["f32"]) == (1e3, 1.0)


def test_what_is_not_known_to_be_moved_is_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view moves nothing, and of a table only the rows that are asked for."""
    monkeypatch.setattr(run, "limits_of", lambda place, machine, again=False: MODEST)
    x = torch.randn(1000, 1000)
    assert bench(lambda x: x.t(), reference=lambda x: x.t(), samples=[(x,)]).measurements[0].floor_us == 0.0
    table = {"reference": lambda x, i: x[i], "samples": [(x, torch.tensor([3]))]}
    assert bench(lambda x, i: x[i], **table).measurements[0].floor_us == pytest.approx(1.0)


def test_the_floor_follows_from_bytes_and_flop() -> None:
    limits = Limits(10.0, 10.0, 50.0, {"f32": 100.0, "bf16": 800.0}, 1.0, None, 1, 0.0)
    assert gates.floor_us(Cost(10**9), limits) == pytest.approx(1e6 / 200)
    assert gates.floor_us(Cost(1, 16 * 10**11), limits) == pytest.approx(1e6)
    with pytest.raises(NotVerifiedError, match="1600000000000 FLOP at 2 times the measured 800 GFLOP/s"):
        gates.refuse_too_fast("f", "f32[3]", 5.0, Cost(1, 16 * 10**11), limits)


@pytest.mark.parametrize(("wall", "graph", "is_fine"), [(60.0, 41.0, True), (400.0, 41.0, False), (60.0, 300.0, False)])
def test_clocks_of_a_gpu_that_do_not_agree(wall: float, graph: float, is_fine: bool) -> None:
    timing = Timing("opwright", 50.0, 50.0, 0.0, [50.0], warm_us=40.0, host_us=8.0, wall_us=wall, graph_us=graph)
    if is_fine:
        gates.refuse_clocks_apart("f", "f32[3]", timing)
    else:
        with pytest.raises(NotVerifiedError, match="two clocks do not agree"):
            gates.refuse_clocks_apart("f", "f32[3]", timing)


# --- other values at the same addresses ---------------------------------------------------------------------------


def test_fresh_values_are_others_at_the_same_addresses() -> None:
    x = torch.randn(4, 9)[:, 1:]
    index, expanded = torch.tensor([1, 2]), torch.ones(1, 3).expand(4, 3)
    work = Workload("forward", [(x, index), {"y": expanded}], None)
    (mine, _), named = work.values
    address = mine.data_ptr()
    assert (mine.stride(), named["y"].stride()) == (x.stride(), expanded.stride())
    seen = [mine.clone()]
    for _ in range(3):
        work.refresh()
        assert mine.data_ptr() == address
        assert torch.equal(mine.sign(), x.sign())
        assert bool((mine.abs() <= x.abs()).all())
        assert all(not torch.equal(mine / mine[0, 0], other / other[0, 0]) for other in seen)  # no mere factor
        seen.append(mine.clone())
    work.restore()
    assert torch.equal(mine, x)


def test_the_difference_is_in_units_of_what_pytorch_errs() -> None:
    x = torch.randn(1000)
    work = Workload("forward", [(x,), {}], None)
    assert work.difference([torch.exp(x)], torch.exp) == ""
    assert "error" in work.difference([torch.exp(x) * (1 + 1e-5)], torch.exp)
    assert "shape" in work.difference([torch.exp(x)[:-1]], torch.exp)
    assert "2 results" in work.difference([x, x], torch.exp)
    assert work.difference([x.argmax()], torch.argmax) == ""
    assert "1 of 1 elements differ" in work.difference([x.argmax() + 1], torch.argmax)


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


def test_what_torch_compile_takes_away_again_was_no_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    from opwright.verify import calls

    with monkeypatch.context() as patched:
        patched.setattr(calls, "__compiled_fn_1", lambda: 0, raising=False)
        judges.remember()
    assert judges.replaced() == []
    monkeypatch.setattr(calls, "judge_call", lambda *_: None)
    assert judges.replaced() == ["opwright.verify.calls.judge_call"]
