"""Times candidates against each other on one input, by the clock of the host."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from opwright.records import Timing

_SAMPLE_SECONDS = 1e-3  # a sample repeats a call for about this long, so that the clock does not show
_MIN_SAMPLES, _MAX_SAMPLES = 15, 400

_T = TypeVar("_T")


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
    seconds: float,
    *,
    repeats: int | None = None,
    before_sample: Callable[[], object] = lambda: None,
) -> list[Timing]:
    """Times candidates in turn, round after round, so that all meet the same moods of the machine.

    Args:
        seconds: roughly how long to measure each candidate.
        repeats: calls in a sample; by default as many as take a millisecond.
        before_sample: called, untimed, before each sample.
    """
    counts: dict[str, int] = {}
    for name, call in candidates.items():
        call()
        call()
        counts[name] = repeats or max(1, round(_SAMPLE_SECONDS / max(_once(call, 1), 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    spent = 0.0
    with no_garbage_collection():
        for round_index in range(_MAX_SAMPLES):
            for name, call in in_turn(candidates, round_index):
                before_sample()
                took = _once(call, counts[name])
                samples[name].append(took * 1e6)
                spent += took * counts[name]
            if spent > seconds * len(candidates) and round_index + 1 >= _MIN_SAMPLES:
                break
    return [summarize(name, found) for name, found in samples.items()]


def in_turn(candidates: Mapping[str, _T], round_index: int) -> list[tuple[str, _T]]:
    """Returns the order of one round. Every other one runs backwards: whoever follows a large candidate finds
    a cold cache."""
    return list(candidates.items())[:: 1 if round_index % 2 == 0 else -1]


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


def _once(call: Callable[[], object], repeats: int) -> float:
    clock = time.perf_counter
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


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
