"""Timing on a GPU, against a GPU that is simulated: what belongs into a sample, and what does not."""

from __future__ import annotations

import pytest

from opwright.bench.measure import _warn_of_clocks
from opwright.bench.timers import time_on_gpu


class SimulatedGpu:
    """A queue behind a host; both have clocks of their own, in microseconds.

    Attributes:
        free_at: when the GPU has done all that is enqueued.
        cached: the names of the data in the cache.
    """

    FLUSH_US = 30.0

    def __init__(self) -> None:
        self.now = 0.0
        self.free_at = 0.0
        self.cached: set[str] = set()
        self.flushes = 0

    def enqueue(self, microseconds: float, host: float = 2.0) -> None:
        self.now += host
        self.free_at = max(self.free_at, self.now) + microseconds

    def kernel(self, data: str, cold: float, warm: float, host: float):
        def call() -> None:
            self.enqueue(warm if data in self.cached else cold, host)
            self.cached.add(data)

        return call

    def flush(self) -> None:
        self.flushes += 1
        self.enqueue(self.FLUSH_US)
        self.cached.clear()

    def hold(self, microseconds: float) -> None:
        self.enqueue(microseconds)

    def mark(self) -> float:
        self.enqueue(0.0, host=1.0)
        return self.free_at

    def has_passed(self, mark: float) -> bool:
        return self.now >= mark

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        self.now = max(self.now, self.free_at)

    def host_us(self) -> float:
        return self.now

    def captured(self, call):
        return None


@pytest.mark.parametrize("host", [3.0, 700.0, 9000.0])
def test_samples_hold_device_time_cold_and_nothing_of_the_host(host: float) -> None:
    gpu = SimulatedGpu()
    slow = [gpu.kernel(f"a{i}", 40.0, 25.0, host) for i in range(2)]
    (timing,) = time_on_gpu({"slow host": slow}, 0.01, gpu).timings
    assert set(timing.samples_us) == {40.0}
    assert timing.warm_us == pytest.approx(25.0)
    assert timing.host_us == pytest.approx(host)
    assert not timing.waits
    assert gpu.flushes >= len(timing.samples_us)


def test_without_holding_back_the_host_would_be_in_it() -> None:
    """The simulation itself: an idle GPU waits for a slow host between two marks."""
    gpu = SimulatedGpu()
    start = gpu.mark()
    gpu.kernel("a", 40.0, 40.0, 700.0)()
    assert gpu.elapsed_us(start, gpu.mark()) > 700


def test_a_call_that_waits_is_named_and_does_not_hang() -> None:
    gpu = SimulatedGpu()

    def waits() -> None:
        gpu.enqueue(40.0)
        gpu.wait()
        gpu.enqueue(10.0)

    held = [gpu.kernel("b", 20.0, 20.0, 3.0)]
    waiting, other = time_on_gpu({"waits": [waits], "other": held}, 0.01, gpu).timings
    assert waiting.waits
    assert waiting.median_us > 50
    assert not other.waits
    assert set(other.samples_us) == {20.0}


def test_one_slow_turn_of_the_host_costs_no_sample() -> None:
    """A host that is interrupted once, for ten milliseconds, repeats the sample."""
    gpu = SimulatedGpu()
    turns = iter(range(10**6))

    def call() -> None:
        gpu.enqueue(40.0, host=10_000.0 if next(turns) == 12 else 3.0)

    (timing,) = time_on_gpu({"interrupted": [call]}, 0.01, gpu).timings
    assert set(timing.samples_us) == {40.0}
    assert not timing.waits


def test_work_on_another_stream_is_in_the_time_by_the_host() -> None:
    """Events are on one stream and see nothing of it; a wait for the whole device does."""
    gpu = SimulatedGpu()
    elsewhere = 0.0

    def hiding() -> None:
        nonlocal elsewhere
        gpu.enqueue(1.0)
        elsewhere = max(elsewhere, gpu.now) + 500.0

    waits = gpu.wait

    def wait_for_all() -> None:
        waits()
        gpu.now = max(gpu.now, elsewhere)

    gpu.wait = wait_for_all
    honest = gpu.kernel("a", 40.0, 25.0, 3.0)
    hidden, shown = time_on_gpu({"hidden": [hiding], "honest": [honest]}, 0.01, gpu).timings
    assert hidden.median_us < 10
    assert hidden.wall_us > 400
    assert shown.wall_us == pytest.approx(25.0, rel=0.2)
    assert len(_warn_of_clocks(hidden)) == 1
    assert _warn_of_clocks(shown) == []


def test_a_graph_is_timed_where_there_can_be_one() -> None:
    gpu = SimulatedGpu()
    gpu.captured = lambda call: lambda: gpu.enqueue(21.0, host=1.0)
    calls = {"a": [gpu.kernel("a", 40.0, 25.0, 3.0)], "b": [gpu.kernel("b", 40.0, 25.0, 3.0)]}
    a, b = time_on_gpu(calls, 0.01, gpu).timings
    assert a.graph_us == pytest.approx(21.0)
    assert b.graph_us is None


def test_a_copy_beside_takes_turns_and_is_no_candidate() -> None:
    gpu = SimulatedGpu()
    told: list[str] = []
    calls = {"a": [gpu.kernel("a", 40.0, 25.0, 3.0)], "b": [gpu.kernel("b", 80.0, 25.0, 3.0)]}
    copies = {"copy": [gpu.kernel("c", 30.0, 25.0, 3.0)]}
    timed = time_on_gpu(
        calls, 1.0, gpu, precision=0.01, before_block=lambda number: told.append("block"), beside=copies
    )
    assert [t.candidate for t in timed.timings] == ["a", "b"]
    assert timed.copy_us == 30.0
    assert (timed.comparisons[0].ratio, timed.stopped) == (pytest.approx(2.0), "precision")
    assert len(told) == timed.comparisons[0].blocks == 8


def test_sets_of_inputs_and_candidates_take_turns() -> None:
    gpu = SimulatedGpu()
    calls: list[str] = []

    def named(name: str):
        def call() -> None:
            calls.append(name)
            gpu.enqueue(5.0)

        return call

    time_on_gpu({"a": [named("a0"), named("a1")], "b": [named("b0"), named("b1")]}, 0.0, gpu)
    cold = calls[8:]  # behind two warm-up calls of each
    # A block has three rounds, and begins with the first set.
    assert cold[:8] == ["a0", "b0", "b1", "a1", "a0", "b0", "b0", "a0"]
