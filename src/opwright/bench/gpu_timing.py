"""Times candidates against each other on a GPU: device time apart from host time, a cold cache and a warm one.

A GPU runs behind its host. Were the host still enqueuing when the GPU reaches the first of two events,
the time between them would be the host's. So every sample begins by keeping the GPU busy until the host
has enqueued the rest of it, and counts only if the first event had not been reached by then.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch

from opwright.bench.comparison import MIN_BLOCKS, compare_all
from opwright.bench.timing import Timed, in_turn, no_garbage_collection, summarize
from opwright.records import Timing
from opwright.verify.capture import capture

_ROUNDS_IN_BLOCK, _MAX_ROUNDS = 3, 200
_SHORTEST_HOLD_US, _LONGEST_HOLD_US = 50.0, 50_000.0
_WARM_SAMPLES, _WALL_SAMPLES = 7, 5
# Calls in a warm sample: about two milliseconds of work, and few enough that a call of twenty kernels does
# not fill the queue of a thousand launches, which would make the host wait.
_WARM_US, _FEWEST_WARM_CALLS, _MOST_WARM_CALLS = 2000.0, 4, 40


class Clock(Protocol):
    """What timing needs of a GPU."""

    def flush(self) -> None:
        """Fills the L2 cache with something else."""

    def hold(self, microseconds: float) -> None:
        """Keeps the GPU busy for so long."""

    def mark(self) -> Any:
        """Returns an event at this place of the stream."""

    def has_passed(self, mark: Any) -> bool:
        """Returns whether the GPU has reached an event."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Returns the time between two events."""

    def wait(self) -> None:
        """Waits for all work."""

    def host_us(self) -> float:
        """Returns the time of the host's clock."""

    def captured(self, call: Callable[[], object]) -> Callable[[], object] | None:
        """Returns the call as a graph to be replayed, or None where it cannot be one."""


class Gpu:
    """The clock of one GPU, which has to be the current device while it is used.

    Attributes:
        l2_bytes: size of the last-level cache.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size) or 64 << 20
        # Written, not read: what runs next pays for evicting it, as it would behind any other operator.
        self._other = torch.empty(2 * self.l2_bytes // 4, dtype=torch.int32, device=device)
        torch.cuda._sleep(1_000_000)
        start = self.mark()
        torch.cuda._sleep(10_000_000)
        end = self.mark()
        self.wait()
        self._cycles_per_us = 10_000_000 / self.elapsed_us(start, end)

    def flush(self) -> None:
        self._other.zero_()

    def hold(self, microseconds: float) -> None:
        torch.cuda._sleep(int(microseconds * self._cycles_per_us))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e3

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def host_us(self) -> float:
        return perf_counter() * 1e6

    def captured(self, call: Callable[[], object]) -> Callable[[], object] | None:
        if torch.is_grad_enabled():
            # A backward runs on the stream of its forward, not on the one that is captured; and a capture that
            # fails leaves PyTorch's allocator believing in it.
            return None
        try:
            graph, _ = capture(call)
        except RuntimeError:  # it waits for the GPU, or allocates by itself
            self.wait()
            return None
        return graph.replay


def time_on_gpu(
    candidates: Mapping[str, Sequence[Callable[[], object]]],
    seconds: float,
    gpu: Clock,
    *,
    precision: float = 0.0,
    before_block: Callable[[int], object] = lambda number: None,
    on_result: Callable[[int, object], object] = lambda number, result: None,
    beside: Mapping[str, Sequence[Callable[[], object]]] | None = None,
) -> Timed:
    """Times candidates in turn, round after round.

    Ends as `time_interleaved` does: when ratios are known to `precision`, or at the limit of time.

    Args:
        candidates: for each the same call on several sets of inputs, which take turns.
        seconds: the limit for all candidates, with all that a sample needs around it.
        before_block: called with the number of a block of rounds before it.
        on_result: called with the number of each block and what its first timed call of the first candidate returned.
        beside: takes turns with the candidates without being one: a copy, whose time is `copy_us`.
    """
    lanes = {name: _Lane(calls, gpu) for name, calls in {**candidates, **(beside or {})}.items()}
    ours, *others = candidates
    for lane in lanes.values():
        lane.warm_up()
    started, stopped, rounds = gpu.host_us(), "time", 0
    with no_garbage_collection():
        while rounds + _ROUNDS_IN_BLOCK <= _MAX_ROUNDS:
            number = rounds // _ROUNDS_IN_BLOCK
            before_block(number)
            for i in range(_ROUNDS_IN_BLOCK):
                for name, lane in in_turn(lanes, rounds + i):
                    lane.sample_cold(i)
                    if name == ours and i == 0:  # on the first set of inputs
                        on_result(number, lane.result)
            rounds += _ROUNDS_IN_BLOCK
            if number + 1 < MIN_BLOCKS:
                continue
            comparisons = compare_all(_blocks(lanes, candidates))
            if others and all(c.visible <= precision for c in comparisons):
                stopped = "precision"
                break
            if gpu.host_us() - started > seconds * 1e6:
                break
        for round_index in range(_WARM_SAMPLES):
            for _, lane in in_turn(lanes, round_index):
                lane.sample_warm()
        for lane in lanes.values():
            lane.sample_wall()
    lanes[ours].replay()
    timings = [lane.summarize(name) for name, lane in lanes.items()]
    copy_us = timings[-1].median_us if beside else None
    return Timed(timings[: len(candidates)], _blocks(lanes, candidates), comparisons, stopped, copy_us)


def _blocks(lanes: Mapping[str, _Lane], names: Mapping[str, Any]) -> list[dict[str, list[float]]]:
    """Returns the cold samples by blocks of rounds."""
    step = _ROUNDS_IN_BLOCK
    count = min(len(lanes[name].cold_us) for name in names) // step
    return [{name: lanes[name].cold_us[i * step : (i + 1) * step] for name in names} for i in range(count)]


class _Lane:
    """One candidate and its samples."""

    def __init__(self, calls: Sequence[Callable[[], object]], gpu: Clock) -> None:
        self.calls, self.gpu = calls, gpu
        self.cold_us: list[float] = []
        self.warm_us: list[float] = []
        self.host_us: list[float] = []
        self.wall_us: float | None = None
        self.graph_us: float | None = None
        self.waits = False
        self.batch = 0
        self._hold_us = 1000.0
        self.result: object = None  # of the last call that was timed
        self._call_us = 0.0  # what the last cold call cost the host

    def warm_up(self) -> None:
        for call in self.calls:
            call()
            call()
        self.gpu.wait()

    def sample_cold(self, number: int) -> None:
        call = self.calls[number % len(self.calls)]
        took_us, self._call_us = self._time(self.gpu.flush, lambda: None, call, 1)
        self.cold_us.append(took_us)

    def sample_warm(self) -> None:
        call = self.calls[0]
        if not self.batch:
            fitting = _WARM_US / max(statistics.median(self.cold_us), 1.0)
            fitting = min(max(fitting, _FEWEST_WARM_CALLS), _MOST_WARM_CALLS)
            # The host has to be done with all of them in one hold.
            covered = _LONGEST_HOLD_US / 2 / max(self._call_us, 1.0) - 2
            self.batch = max(round(min(fitting, covered)), 1)
            self._hold_us = min(self._hold_us * self.batch, _LONGEST_HOLD_US)

        def twice() -> None:
            call()
            call()

        took_us, host_us = self._time(lambda: None, twice, call, self.batch)
        self.warm_us.append(took_us / self.batch)
        self.host_us.append(host_us / self.batch)

    def sample_wall(self) -> None:
        """Times as many calls as a warm sample has by the host's clock, until the whole device is idle.

        Work on another stream is in it, and no event of PyTorch's has a say in it. The least of some: another process
        may have the GPU meanwhile.
        """
        gpu = self.gpu
        took_us = []
        for _ in range(_WALL_SAMPLES):
            gpu.wait()
            start = gpu.host_us()
            for _ in range(self.batch):
                self.calls[0]()
            gpu.wait()
            took_us.append(gpu.host_us() - start)
        self.wall_us = min(took_us) / self.batch

    def replay(self) -> None:
        """Times the call as a graph, where it can be one: without the host between its kernels."""
        replay = None if self.waits else self.gpu.captured(self.calls[0])
        if replay is not None:
            took_us, _ = self._time(lambda: None, replay, replay, self.batch)
            self.graph_us = took_us / self.batch

    def _time(
        self,
        before_hold: Callable[[], object],
        before_start: Callable[[], object],
        call: Callable[[], object],
        repeats: int,
    ) -> tuple[float, float]:
        """Returns the device time of the calls and the time that the host took to enqueue them.

        A call that no hold can cover waits for the GPU by itself: it is timed with what it costs the host.
        """
        gpu = self.gpu
        while True:
            before_hold()
            gpu.hold(self._hold_us)
            begun = gpu.host_us()
            before_start()
            start = gpu.mark()
            host_start = gpu.host_us()
            for _ in range(repeats - 1):
                call()
            self.result = call()
            host_end = gpu.host_us()
            end = gpu.mark()
            is_held = not gpu.has_passed(start)
            enqueued = gpu.host_us() - begun
            gpu.wait()
            if is_held or self.waits:
                # The host's next turn will take about as long as this one.
                self._hold_us = min(max(3 * enqueued, _SHORTEST_HOLD_US), _LONGEST_HOLD_US)
                if self.waits:
                    self._hold_us = _SHORTEST_HOLD_US
                return gpu.elapsed_us(start, end), host_end - host_start
            if self._hold_us >= _LONGEST_HOLD_US:
                self.waits = True
            self._hold_us = min(2 * self._hold_us, _LONGEST_HOLD_US)

    def summarize(self, name: str) -> Timing:
        timing = summarize(
            name,
            [{name: self.cold_us[i : i + _ROUNDS_IN_BLOCK]} for i in range(0, len(self.cold_us), _ROUNDS_IN_BLOCK)],
        )
        timing.warm_us, timing.host_us = statistics.median(self.warm_us), statistics.median(self.host_us)
        timing.waits, timing.wall_us, timing.graph_us = self.waits, self.wall_us, self.graph_us
        return timing
