"""Times candidates against each other on one input: by the clock of the host, and by the events of a GPU."""

from __future__ import annotations

import contextlib
import gc
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any, NamedTuple, TypeVar

import torch

from opwright import _torch
from opwright.bench.environment import give_back
from opwright.bench.statistics import MIN_BLOCKS, compare_all, interval_of_blocks
from opwright.records import Comparison, Timing
from opwright.verify.devices import capture

_SAMPLE_SECONDS = 1e-3  # a sample repeats a call for about this long, so that the clock does not show
_MAX_ROUNDS, _MAX_ROUNDS_IN_BLOCK = 400, 20
_MIN_SLOW_BLOCKS = 3  # of calls that take so long that eight blocks take twice the time
_FRESH_SAMPLES, _FRESH_SECONDS = 5, 0.05

_T = TypeVar("_T")


# A call that takes longer is timed by itself, and needs no further warm-up.
_LONG_SECONDS = 0.05


@dataclass
class Timed:
    """What timing candidates on one input has given.

    Attributes:
        timings: one for each candidate, the first one's first.
        blocks: for each block of rounds the samples of each candidate, in microseconds.
        comparisons: each other candidate beside the first.
        stopped: "precision" or "time", as in a Measurement.
        copy_us: as in a Measurement.
    """

    timings: list[Timing]
    blocks: list[dict[str, list[float]]] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    stopped: str = ""
    copy_us: float | None = None


class Sample(NamedTuple):
    """One sample, for a call on average."""

    wall_us: float
    thread_us: float
    page_faults: float


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    precision: float = 0.0,
    repeats: int | None = None,
    before_block: Callable[[int], object] = lambda number: None,
    before_sample: Callable[[], object] = lambda: None,
    on_result: Callable[[int, object], object] = lambda number, result: None,
) -> Timed:
    """Times candidates in turn, round after round, so that what else the machine does disturbs all of them alike.

    Ends when every comparison with the first candidate is known to `precision`, or at the limit of time, but not before
    there are eight blocks of rounds: of calls that take long, three.

    Args:
        seconds: the limit for all candidates together.
        precision: the half-width of the confidence interval of a ratio that is small enough; 0 takes all the time.
        repeats: calls in a sample; by default as many as take a millisecond.
        before_block: called, untimed, with the number of a block before it.
        before_sample: called, untimed, before each sample.
        on_result: called with the number of each block and what its first timed call of the first candidate returned.
    """
    counts = {name: repeats or calls_in_sample(call) for name, call in candidates.items()}
    samples: list[dict[str, list[Sample]]] = []
    ours, *others = candidates
    spent, rounds, stopped, in_block = 0.0, 0, "time", 1
    comparisons: list[Comparison] = []
    with no_garbage_collection():
        while rounds + in_block <= _MAX_ROUNDS:
            before_block(len(samples))
            block: dict[str, list[Sample]] = {name: [] for name in candidates}
            before = spent
            for name, call in (turn for i in range(in_block) for turn in in_turn(candidates, rounds + i)):
                before_sample()
                sample, result = once(call, counts[name])
                if name == ours and not block[name]:
                    on_result(len(samples), result)
                block[name].append(sample)
                spent += sample.wall_us * counts[name] / 1e6
            rounds += in_block
            samples.append(block)
            if len(samples) == 1:  # as many rounds in a block as let eight of them fill the time
                fitting = seconds / MIN_BLOCKS / max((spent - before) / in_block, 1e-9)
                in_block = int(min(max(fitting, 1), _MAX_ROUNDS_IN_BLOCK))
            if len(samples) < (MIN_BLOCKS if spent < 2 * seconds else _MIN_SLOW_BLOCKS):
                continue
            comparisons = compare_all(_walls(samples))
            if others and all(c.visible <= precision for c in comparisons):
                stopped = "precision"
                break
            if spent > seconds:
                break
    blocks = _walls(samples)
    timings = []
    for name in candidates:
        timing = summarize(name, blocks)
        timing.thread_us = statistics.median(s.thread_us for block in samples for s in block[name])
        timing.page_faults = statistics.fmean(s.page_faults for block in samples for s in block[name])
        timings.append(timing)
    return Timed(timings, blocks, comparisons, stopped)


def join(visits: Sequence[Timed]) -> Timed:
    """Returns what several times of timing the same candidates have given together."""
    *_, last = visits
    if len(visits) == 1:
        return last
    blocks = [block for timed in visits for block in timed.blocks]
    found: dict[str, list[Timing]] = {}
    for timing in (timing for timed in visits for timing in timed.timings):
        found.setdefault(timing.candidate, []).append(timing)
    timings = []
    for name, several in found.items():
        timing = summarize(name, blocks)
        for what in _BESIDE:
            known = [value for each in several if (value := getattr(each, what)) is not None]
            setattr(timing, what, statistics.median(known) if known else None)
        timing.waits = any(each.waits for each in several)
        timings.append(timing)
    copies = [timed.copy_us for timed in visits if timed.copy_us is not None]
    copy_us = statistics.median(copies) if copies else None
    return Timed(timings, blocks, compare_all(blocks), last.stopped, copy_us)


# What is measured of a candidate beside its samples.
_BESIDE = ("warm_us", "host_us", "fresh_us", "thread_us", "page_faults", "graph_us", "wall_us")


def time_fresh(candidates: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the times of calls for which the allocator has no memory left over, in microseconds.

    All free memory is given back to the system before each call, so that the pages of its outputs are
    new: they are cleared by the system when the call first writes to them.
    """
    if not give_back():
        return {}
    found: dict[str, list[float]] = {name: [] for name in candidates}
    started = perf_counter()
    with no_garbage_collection():
        for round_index in range(_FRESH_SAMPLES):
            if round_index and perf_counter() - started > _FRESH_SECONDS:
                break
            for name, call in in_turn(candidates, round_index):
                give_back()
                found[name].append(once(call, 1)[0].wall_us)
    return {name: statistics.median(times) for name, times in found.items()}


def calls_in_sample(call: Callable[[], object]) -> int:
    """Warms a call up, and returns how many calls a sample has."""
    if once(call, 1)[0].wall_us > _LONG_SECONDS * 1e6:
        return 1
    call()
    return max(1, round(_SAMPLE_SECONDS / max(once(call, 1)[0].wall_us / 1e6, 1e-7)))


def in_turn(candidates: Mapping[str, _T], round_index: int) -> list[tuple[str, _T]]:
    """Returns the order of one round. Every other one runs backwards, and each begins with another candidate: whoever
    follows a large one finds a cold cache."""
    order = list(candidates.items())
    if len(order) > 2:
        first = round_index // 2 % len(order)
        order = order[first:] + order[:first]
    return order[:: 1 if round_index % 2 == 0 else -1]


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keeps the collector of cycles from running in the middle of a sample."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _walls(blocks: Sequence[Mapping[str, Sequence[Sample]]]) -> list[dict[str, list[float]]]:
    return [{name: [s.wall_us for s in samples] for name, samples in block.items()} for block in blocks]


def once(call: Callable[[], object], repeats: int) -> tuple[Sample, object]:
    """Takes one sample, and returns it with what its last call has returned."""
    faults, spent = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, thread_time()
    start = perf_counter()
    for _ in range(repeats - 1):
        call()
    result = call()
    wall = perf_counter() - start
    spent = thread_time() - spent
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return Sample(wall / repeats * 1e6, spent / repeats * 1e6, faults / repeats), result


def summarize(candidate: str, blocks: Sequence[Mapping[str, Sequence[float]]]) -> Timing:
    """Returns median, minimum, noise and confidence interval of the samples of a candidate, in microseconds."""
    own = [block[candidate] for block in blocks if candidate in block]
    samples_us = [sample for block in own for sample in block]
    median = statistics.median(samples_us)
    low, _, high = statistics.quantiles(samples_us, n=4) if len(samples_us) > 1 else [median] * 3
    return Timing(
        candidate=candidate,
        median_us=median,
        min_us=min(samples_us),
        noise=(high - low) / 2 / median,
        samples_us=[round(s, 4) for s in samples_us],
        interval=interval_of_blocks(own),
    )


_ROUNDS_IN_BLOCK, _MAX_GPU_ROUNDS = 3, 200
_MIN_HOLD_US, _MAX_HOLD_US = 50.0, 50_000.0
_WARM_SAMPLES, _WALL_SAMPLES = 7, 5
# Calls in a warm sample: about two milliseconds of work, and few enough that a call of twenty kernels does
# not fill the queue of a thousand launches, which would make the host wait.
_WARM_US, _MIN_WARM_CALLS, _MAX_WARM_CALLS = 2000.0, 4, 40


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
        _torch.keep_gpu_busy(1_000_000)
        start = self.mark()
        _torch.keep_gpu_busy(10_000_000)
        end = self.mark()
        self.wait()
        self._cycles_per_us = 10_000_000 / self.elapsed_us(start, end)

    def flush(self) -> None:
        """Fills the L2 cache with something else."""
        self._other.zero_()

    def hold(self, microseconds: float) -> None:
        """Keeps the GPU busy for so long."""
        _torch.keep_gpu_busy(int(microseconds * self._cycles_per_us))

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
        """Returns the call as a graph to be replayed, or None where it cannot be one."""
        if torch.is_grad_enabled():
            # A backward runs on the stream of its forward, not on the one that is captured. After a capture that
            # failed, PyTorch's allocator still acts as if it went on.
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
    gpu: Gpu,
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
        while rounds + _ROUNDS_IN_BLOCK <= _MAX_GPU_ROUNDS:
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
    step = _ROUNDS_IN_BLOCK
    count = min(len(lanes[name].cold_us) for name in names) // step
    return [{name: lanes[name].cold_us[i * step : (i + 1) * step] for name in names} for i in range(count)]


class _Lane:
    def __init__(self, calls: Sequence[Callable[[], object]], gpu: Gpu) -> None:
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
            fitting = min(max(fitting, _MIN_WARM_CALLS), _MAX_WARM_CALLS)
            # The host has to be done with all of them in one hold.
            covered = _MAX_HOLD_US / 2 / max(self._call_us, 1.0) - 2
            self.batch = max(round(min(fitting, covered)), 1)
            self._hold_us = min(self._hold_us * self.batch, _MAX_HOLD_US)

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
                self._hold_us = min(max(3 * enqueued, _MIN_HOLD_US), _MAX_HOLD_US)
                if self.waits:
                    self._hold_us = _MIN_HOLD_US
                return gpu.elapsed_us(start, end), host_end - host_start
            if self._hold_us >= _MAX_HOLD_US:
                self.waits = True
            self._hold_us = min(2 * self._hold_us, _MAX_HOLD_US)

    def summarize(self, name: str) -> Timing:
        timing = summarize(
            name,
            [{name: self.cold_us[i : i + _ROUNDS_IN_BLOCK]} for i in range(0, len(self.cold_us), _ROUNDS_IN_BLOCK)],
        )
        timing.warm_us, timing.host_us = statistics.median(self.warm_us), statistics.median(self.host_us)
        timing.waits, timing.wall_us, timing.graph_us = self.waits, self.wall_us, self.graph_us
        return timing
