"""Timing on a GPU, against a GPU that is simulated: what belongs into a sample, and what does not."""

from __future__ import annotations

import pytest

from opwright.bench.gpu_timing import time_on_gpu


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
    assert cold[:8] == ["a0", "b0", "b1", "a1", "a0", "b0", "b1", "a1"]
