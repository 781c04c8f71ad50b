"""What bench writes down: times, what they are compared with, under which conditions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opwright.records.case import OnCase
from opwright.records.machine import NULL_IS_INFINITE, VERSION, Machine

DIRECTIONS = ("forward", "backward", "step")
_MAX_LOG = 700.0  # the exponential of a larger number overflows float64


def relative_width(half: float) -> float:
    """Returns the half-width of a confidence interval relative to its center, from that of the logarithm."""
    return math.expm1(half) if half < _MAX_LOG else math.inf


@dataclass
class Timing:
    """How long one candidate took on one input.

    On a GPU the samples are of device time: nothing of the host, and nothing of the input in the L2.

    Attributes:
        candidate: "opwright", "eager", "compile", or the name of a peer.
        median_us, min_us: over the samples; on a CPU a sample is the mean of several calls, on a GPU one call.
        noise: relative half-width of the middle half of the samples, (p75 - p25) / 2 / median.
        samples_us: the samples themselves.
        warm_us: on a GPU, device time of a call on the same input again and again; else None.
        host_us: on a GPU, time until a call returns, its work not yet done; else None.
        waits: on a GPU, whether the call waits for the GPU by itself: its times have the host's in them.
        fresh_us: on a CPU, time of a call whose outputs come from fresh pages of the system; else None.
        thread_us: on a CPU, CPU time of the calling thread for a call. Less than the time: it waited, for other
            threads or for a turn.
        page_faults: on a CPU, pages that the system had to provide during a call, on average.
        peak_bytes: the most memory of PyTorch's allocator that a call held at once, beyond its inputs.
        graph_us: on a GPU, time of a forward replayed as a CUDA graph; None where it cannot be captured.
        wall_us: on a GPU, time of a call by the host's clock, over many until the whole device is idle.
        interval: relative half-width of the 95 % confidence interval of the time. None is infinite: too few blocks. Older
            records do not have it.
    """

    candidate: str
    median_us: float
    min_us: float
    noise: float
    samples_us: list[float]
    warm_us: float | None = None
    host_us: float | None = None
    waits: bool = False
    fresh_us: float | None = None
    thread_us: float | None = None
    page_faults: float | None = None
    peak_bytes: int | None = None
    graph_us: float | None = None
    wall_us: float | None = None
    interval: float | None = field(default=None, metadata=NULL_IS_INFINITE)


def contains_one(ratio: float, visible: float) -> bool:
    """Whether the confidence interval, from the ratio over 1 + visible to the ratio times that, contains 1."""
    return ratio <= 1 + visible and ratio * (1 + visible) >= 1


def _verdict_of(ratio: float, visible: float) -> str:
    if contains_one(ratio, visible):
        return "same"
    return "faster" if ratio > 1 else "slower"


@dataclass
class Comparison:
    """One candidate beside Opwright, from samples taken in turns.

    Attributes:
        candidate: who is compared.
        ratio: its time over Opwright's: above 1, Opwright is faster.
        visible: smallest visible difference: relative half-width of the 95 % confidence interval of the ratio. None is
            infinite: too few blocks.
        blocks: stretches of samples that the two numbers come from.
    """

    candidate: str
    ratio: float
    visible: float = field(metadata=NULL_IS_INFINITE)
    blocks: int

    @property
    def verdict(self) -> str:
        """ "faster", "same" or "slower": what Opwright is beside the candidate."""
        return _verdict_of(self.ratio, self.visible)


@dataclass
class Measurement(OnCase):
    """All candidates on one input.

    Attributes:
        direction: "forward", "backward" (the backward of autograd, bias gradients and all) or "step" (both).
        case: the input, as `f32[512, 4096] f32[4096] approximate='tanh'`.
        axes: sizes and options that vary over the sweep, for plots: {"elements": 2097152, ...}.
        dtype: the dtype of the operator's floating-point tensors.
        bytes_moved: the least a call has to read and write.
        flop: the least operations; None where nobody said.
        timings: one for each candidate, Opwright's first.
        roof_share: bytes_moved over time, as a share of the machine's measured copy bandwidth; None if a call
            leaves most of an argument that it mutates as it is, and declares no cost.
        in_cache: whether the data fit the last-level cache, so that the share may pass 1.
        copy_us: on a GPU, device time of copying as many bytes as the input moves, in the same rounds, cold.
        comparisons: each other candidate beside Opwright.
        output_bytes: memory of the results: what a call must hold at least.
        floor_us: the least time that the machine's limits allow. A time below it is a warning.
        stopped: why sampling ended: "precision" (the confidence intervals are small enough) or "time".
        warnings: what makes its times doubtful.
        named_case: the case with the names of the tensors; "" in older records.
        device: where it was measured, if the record is of several devices: "cuda:1"; else "".
    """

    direction: str
    case: str
    axes: dict[str, Any]
    dtype: str
    bytes_moved: int
    flop: int | None
    timings: list[Timing]
    roof_share: float | None
    in_cache: bool
    copy_us: float | None = None
    comparisons: list[Comparison] = field(default_factory=list)
    output_bytes: int | None = None
    floor_us: float | None = None
    stopped: str = ""
    warnings: list[str] = field(default_factory=list)
    named_case: str = ""
    device: str = ""

    @property
    def ours(self) -> Timing:
        """The timing of the operator itself."""
        return self.timings[0]

    def comparison_with(self, candidate: str) -> Comparison | None:
        """Returns the comparison with a candidate; None when it was not timed."""
        return next((c for c in self.comparisons if c.candidate == candidate), None)

    @property
    def precision(self) -> float:
        """The widest confidence interval of a ratio; without another candidate, that of the time."""
        widest = max((c.visible for c in self.comparisons), default=self.ours.interval)
        return math.inf if widest is None else widest

    @property
    def copy_share(self) -> float | None:
        """The time of a copy of as many bytes over Opwright's: the share of what that size allows."""
        return self.copy_us / self.timings[0].median_us if self.copy_us else None

    def time_of(self, candidate: str) -> float | None:
        """Returns the median of a candidate in microseconds, or None when it was not timed."""
        return next((t.median_us for t in self.timings if t.candidate == candidate), None)

    def speedup_over(self, candidate: str) -> float | None:
        """Returns how many times faster Opwright is than a candidate."""
        other = self.time_of(candidate)
        return other / self.timings[0].median_us if other else None


@dataclass(frozen=True)
class Summary:
    """One direction beside one candidate, over all inputs on which both were timed.

    Attributes:
        ratio: the geometric mean of the ratios: above 1, Opwright is faster.
        visible: relative half-width of its 95 % confidence interval, as far as the times vary; which inputs there are is
            not part of it. None: the record has no intervals, so the ratio is that of the medians.
        inputs: how many there are; on `faster` and `slower` of them a difference is visible.
    """

    direction: str
    candidate: str
    ratio: float
    visible: float | None
    inputs: int
    faster: int
    slower: int

    @property
    def verdict(self) -> str:
        """ "faster", "same" or "slower", as in a Comparison; "" without an interval."""
        return "" if self.visible is None else _verdict_of(self.ratio, self.visible)


@dataclass
class Conditions:
    """Under which conditions was measured.

    Attributes:
        process: "own" (a process for nothing else, started by `opwright bench`) or "caller".
        affinity: the CPUs that the process may run on.
        allocator: "keeps" (memory that is freed stays with the process) or "default" (the system's way).
        load_before, load_after: load average of the last minute, when measuring began and ended.
        clock_mhz_before, clock_mhz_after: mean clock of those CPUs as the system says; None where it does not.
        gpu_clock_mhz_before, gpu_clock_mhz_after: of the GPU's multiprocessors; None on a CPU or where not said.
        governor: who chooses the clock of those CPUs, as "performance"; "" where the system does not say.
    """

    process: str
    affinity: list[int]
    allocator: str
    load_before: float
    load_after: float
    clock_mhz_before: float | None = None
    clock_mhz_after: float | None = None
    gpu_clock_mhz_before: float | None = None
    gpu_clock_mhz_after: float | None = None
    governor: str = ""


@dataclass
class Limits:
    """The limits of a device: measured once, and kept in the store.

    Attributes:
        copy_gb_s: copying a tensor far larger than the caches, bytes read plus written.
        triad_gb_s: a = b + c on such tensors, bytes read plus written.
        cache_gb_s: the same copy between tensors that stay in the cache: on a CPU that of a core, times the threads.
        gemm_gflops: rate of a matrix product by dtype, as "f32".
        empty_call_us: host time of `torch.add` on one element: a call without work.
        launch_us: on a GPU, device time from one empty kernel to the next; else None.
        threads: of PyTorch, when it was measured.
        measured: seconds since 1970.
    """

    copy_gb_s: float
    triad_gb_s: float
    cache_gb_s: float
    gemm_gflops: dict[str, float]
    empty_call_us: float
    launch_us: float | None
    threads: int
    measured: float


@dataclass
class BenchRecord:
    """The result of benchmarking one operator or callable.

    Attributes:
        host_us: time of one call on the smallest input, by candidate: what a call costs before any work.
            On a GPU the call's work is not waited for.
        device: where it was measured: "cpu", "cuda" or "cuda:1"; of several devices their type.
        conditions, limits: how it was measured, and what the device can do; None in records of version 1.
        commit: of the repository of the operator's source, with "+" when it had changes; "" outside of one.
        refused: why it was not measured, or not to the end; "" when all is there.
        hint: what to do about a refusal, where the error says so.
        left_out: what was not measured, and why: inputs on which a call takes too long, candidates without time.
        warnings: what makes the times doubtful, of all inputs.
        notes: what else is to be known: that a gradient is derived, and what it runs again.
    """

    name: str
    measurements: list[Measurement]
    host_us: dict[str, float]
    verified: bool
    threads: int
    machine: Machine
    created: float
    seconds: float
    version: int = VERSION
    device: str = "cpu"
    conditions: Conditions | None = None
    limits: Limits | None = None
    commit: str = ""
    refused: str = ""
    hint: str = ""
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, host_us in self.host_us.items():
            if host_us < 0:
                raise ValueError(f"it has {host_us:g} for the host time of {name}")
        if len(first := {m.timings[0].candidate for m in self.measurements if m.timings}) > 1:
            raise ValueError(f"its measurements begin with different candidates: {', '.join(sorted(first))}")

    @staticmethod
    def merge(parts: Mapping[str, BenchRecord]) -> BenchRecord:
        """Merges the records of one operator whose inputs were assigned round-robin to several devices.

        What belongs to a machine (its card, limits, conditions) is that of the first device.

        Args:
            parts: the records by the name of their device, the first device first.
        """
        dealt = [[replace(m, device=device) for m in part.measurements] for device, part in parts.items()]
        measurements = [m for turn in itertools.zip_longest(*dealt) for m in turn if m is not None]
        order = list(dict.fromkeys(m.direction for m in measurements))
        first, *_ = parts.values()
        models = list(dict.fromkeys(part.machine.device or part.machine.cpu for part in parts.values()))
        mixed = [f"the devices differ, so only their ratios compare: {', '.join(models)}"] if len(models) > 1 else []
        return replace(
            first,
            measurements=sorted(measurements, key=lambda m: order.index(m.direction)),
            verified=all(part.verified for part in parts.values()),
            created=min(part.created for part in parts.values()),
            seconds=max(part.seconds for part in parts.values()),
            device=first.device.partition(":")[0],
            refused=next((part.refused for part in parts.values() if part.refused), ""),
            hint=next((part.hint for part in parts.values() if part.refused), ""),
            left_out=[f"{device}: {text}" for device, part in parts.items() for text in part.left_out],
            warnings=mixed + [f"{device}: {text}" for device, part in parts.items() for text in part.warnings],
            notes=list(dict.fromkeys(note for part in parts.values() for note in part.notes)),
        )

    @property
    def has_comparisons(self) -> bool:
        """Whether samples were compared in turns. Records of version 1 have the medians alone."""
        return any(m.comparisons for m in self.measurements)

    def summarize(self) -> list[Summary]:
        """Returns what all inputs say together, for each direction and candidate."""
        if not self.has_comparisons:
            return self._summarize_medians()
        groups: dict[tuple[str, str], list[Comparison]] = {}
        for m in self.measurements:
            for comparison in m.comparisons:
                groups.setdefault((m.direction, comparison.candidate), []).append(comparison)
        found = []
        for (direction, candidate), several in groups.items():
            count = len(several)
            ratio = math.exp(sum(math.log(c.ratio) for c in several) / count)
            half = math.hypot(*(math.log1p(c.visible) for c in several)) / count
            visible = relative_width(half)
            verdicts = [c.verdict for c in several]
            found.append(
                Summary(direction, candidate, ratio, visible, count, verdicts.count("faster"), verdicts.count("slower"))
            )
        return found

    def _summarize_medians(self) -> list[Summary]:
        groups: dict[tuple[str, str], list[float]] = {}
        for m in self.measurements:
            for timing in m.timings[1:]:
                if timing.median_us > 0 and m.ours.median_us > 0:
                    groups.setdefault((m.direction, timing.candidate), []).append(timing.median_us / m.ours.median_us)
        return [
            Summary(direction, candidate, math.exp(sum(map(math.log, ratios)) / len(ratios)), None, len(ratios), 0, 0)
            for (direction, candidate), ratios in groups.items()
        ]

    @property
    def all_warnings(self) -> list[str]:
        """Those of the run and those of its inputs, with their inputs."""
        return [*self.warnings, *(f"{m.direction} {m.input}: {w}" for m in self.measurements for w in m.warnings)]

    @property
    def on_gpu(self) -> bool:
        """Whether the times are device times of a GPU."""
        return self.device not in ("", "cpu")
