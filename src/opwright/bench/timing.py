"""Times candidates against each other on one input, by the clock of the host."""

from __future__ import annotations

import contextlib
import gc
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import NamedTuple, TypeVar

from opwright.bench.allocator import give_back
from opwright.bench.comparison import MIN_BLOCKS, compare_all, interval_of_blocks
from opwright.records import Comparison, Timing

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
