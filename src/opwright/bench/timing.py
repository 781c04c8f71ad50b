"""Times candidates against each other on one input, by the clock of the host."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from opwright.bench.allocator import give_back
from opwright.bench.clocks import perf_counter, thread_time
from opwright.bench.comparison import FEWEST_BLOCKS, compare
from opwright.records import Comparison, Timing

_SAMPLE_SECONDS = 1e-3  # a sample repeats a call for about this long, so that the clock does not show
_MOST_ROUNDS = 400
_FIRST_ROUNDS, _MOST_ROUNDS_IN_BLOCK = 3, 20  # of one block
_FRESH_SAMPLES, _FRESH_SECONDS = 7, 2.0

_T = TypeVar("_T")


@dataclass
class Timed:
    """What timing candidates on one input has given.

    Attributes:
        stopped: "noise" or "time", as in a Measurement.
        copy_us: as in a Measurement.
    """

    timings: list[Timing]
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
    before_sample: Callable[[str], object] = lambda _: None,
    before_block: Callable[[], object] = lambda: None,
    after_block: Callable[[object], object] = lambda result: None,
) -> Timed:
    """Times candidates in turn, round after round, so that all meet the same moods of the machine.

    Ends when every comparison with the first candidate sees differences of `precision`, or at the limit
    of time; not before eight blocks of rounds are there.

    Args:
        seconds: the limit, for each candidate.
        precision: the smallest visible difference that is small enough; 0 takes all the time.
        repeats: calls in a sample; by default as many as take a millisecond.
        before_sample: called, untimed, with the name of the candidate before each of its samples.
        before_block: called, untimed, before each block of rounds.
        after_block: called once in each block, after one more sample of the first candidate, with what one of its
            calls has returned. When that is, and which call, nobody knows before; the sample is not counted.
    """
    counts = {}
    for name, call in candidates.items():
        before_sample(name)
        counts[name] = repeats or calls_in_sample(call)
    blocks: dict[str, list[list[Sample]]] = {name: [] for name in candidates}
    ours, *others = candidates
    spent, rounds, stopped = 0.0, 0, "time"
    in_block = _FIRST_ROUNDS
    comparisons: list[Comparison] = []
    with no_garbage_collection():
        while rounds + in_block <= _MOST_ROUNDS:
            before_block()
            block: dict[str, list[Sample]] = {name: [] for name in candidates}
            before = spent
            for name, looks in turns_of_block(candidates, rounds, in_block):
                before_sample(name)
                sample, result = once(candidates[name], counts[name], any_call(counts[name]) if looks else -1)
                if looks:
                    after_block(result)
                    continue
                block[name].append(sample)
                spent += sample.wall_us * counts[name] / 1e6
            rounds += in_block
            for name, samples in block.items():
                blocks[name].append(samples)
            if len(blocks[ours]) == 1:  # as many rounds in a block as let eight of them fill the time
                fitting = seconds * len(candidates) / FEWEST_BLOCKS / max((spent - before) / in_block, 1e-9)
                in_block = int(min(max(fitting, 1), _MOST_ROUNDS_IN_BLOCK))
            if len(blocks[ours]) < FEWEST_BLOCKS:
                continue
            comparisons = [compare(name, _walls(blocks[ours]), _walls(blocks[name])) for name in others]
            if others and all(c.visible <= precision for c in comparisons):
                stopped = "noise"
                break
            if spent > seconds * len(candidates):
                break
    timings = []
    for name, found in blocks.items():
        samples = [sample for block in found for sample in block]
        timing = summarize(name, [s.wall_us for s in samples])
        timing.thread_us = statistics.median(s.thread_us for s in samples)
        timing.page_faults = statistics.fmean(s.page_faults for s in samples)
        timings.append(timing)
    return Timed(timings, comparisons, stopped)


def time_fresh(
    candidates: Mapping[str, Callable[[], object]],
    before_sample: Callable[[str], object] = lambda _: None,
) -> dict[str, float]:
    """Returns the times of calls for which the allocator has no memory left over, in microseconds.

    All free memory is given back to the system before each call, so that the pages of its outputs are
    new: they are cleared by the system when the call first writes to them.
    """
    if not give_back():
        return {}
    found: dict[str, list[float]] = {name: [] for name in candidates}
    begun = perf_counter()
    with no_garbage_collection():
        for round_index in range(_FRESH_SAMPLES):
            if round_index and perf_counter() - begun > _FRESH_SECONDS:
                break
            for name, call in in_turn(candidates, round_index):
                before_sample(name)
                give_back()
                found[name].append(once(call, 1)[0].wall_us)
    return {name: statistics.median(times) for name, times in found.items()}


def calls_in_sample(call: Callable[[], object]) -> int:
    """Warms a call up, and returns how often a sample repeats it."""
    call()
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


def turns_of_block(candidates: Mapping[str, object], first_round: int, rounds: int) -> list[tuple[str, bool]]:
    """Returns the names of some rounds, in order; somewhere among them once more the first, to be looked at."""
    turns = [(name, False) for i in range(rounds) for name, _ in in_turn(candidates, first_round + i)]
    turns.insert(_any_below(len(turns) + 1), (next(iter(candidates)), True))
    return turns


def any_call(repeats: int) -> int:
    """Returns the number of a call of a sample: as often the last, whose work may not be done, as any other."""
    return repeats - 1 if _any_below(2) else _any_below(repeats)


def _any_below(limit: int) -> int:
    # Not from `random`: a candidate could seed it.
    return int.from_bytes(os.urandom(8), "little") % limit


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


def _walls(blocks: list[list[Sample]]) -> list[list[float]]:
    return [[sample.wall_us for sample in block] for block in blocks]


def once(call: Callable[[], object], repeats: int, looked_at: int = -1) -> tuple[Sample, object]:
    """Takes one sample, and returns it with what one of its calls has returned, by default the last."""
    looked_at %= repeats
    faults, spent = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, thread_time()
    start = perf_counter()
    for _ in range(looked_at):
        call()
    result = call()
    for _ in range(repeats - 1 - looked_at):
        call()
    wall = perf_counter() - start
    spent = thread_time() - spent
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return Sample(wall / repeats * 1e6, spent / repeats * 1e6, faults / repeats), result


def summarize(candidate: str, samples_us: Sequence[float]) -> Timing:
    """Returns median, minimum and noise of samples in microseconds."""
    median = statistics.median(samples_us)
    low, _, high = statistics.quantiles(samples_us, n=4)
    return Timing(
        candidate=candidate,
        median_us=median,
        min_us=min(samples_us),
        noise=(high - low) / 2 / median,
        samples_us=[round(s, 4) for s in samples_us],
    )
