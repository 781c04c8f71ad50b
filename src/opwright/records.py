"""What verify and bench write down: typed, versioned, read back by the report.

Times are in microseconds, sizes in bytes, rates in GB/s (1e9 bytes per second).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from opwright.errors import RecordError
from opwright.typed_json import decode, finite

VERSION = 2  # 1: before conditions, limits, comparisons and the records of calls


@dataclass
class Machine:
    """The machine card: where a record was made.

    Attributes:
        cpu: model name of the CPU; `cores` of them can be used.
        device: name of the GPU, or "" on a CPU.
        load: load average of the last minute, when the record was made.
        copy_gb_s: measured bandwidth of copying a tensor far larger than the caches, read plus written
            bytes, on the device of the record; None where it was not measured.
        compute_gflops: measured rate of a float32 matrix product there; None where it was not measured.
        driver: version of the GPU's driver.
        gpu_memory_bytes, gpu_l2_bytes, multiprocessors: of the GPU; None on a CPU.
    """

    cpu: str
    cores: int
    device: str
    system: str
    python: str
    torch: str
    compiler: str
    load: float
    copy_gb_s: float | None = None
    compute_gflops: float | None = None
    driver: str = ""
    gpu_memory_bytes: int | None = None
    gpu_l2_bytes: int | None = None
    multiprocessors: int | None = None


@dataclass
class CaseError:
    """How far one case is from the oracle.

    Attributes:
        case: the input, as in a Failure; its label in parentheses comes last.
        ulp, ratio: as in a Check; a ratio of None is infinite: a NaN or infinity too many or too few.
    """

    case: str
    ulp: float | None
    ratio: float | None


@dataclass
class Check:
    """One kind of check, over all its cases.

    Attributes:
        name: "numerics", "gradcheck", "opcheck", "compile", ...
        outcome: "passed", "failed" or "skipped".
        cases: how many inputs were tried.
        reason: why it was skipped.
        worst_ulp: largest error seen, in units in the last place of the output's dtype.
        worst_ratio: largest error over allowance; below 1 passes.
        seconds: how long it took.
        device: "cpu", "cuda" or "cuda:1"; "" in records of before there was a choice: the CPU.
        errors: of each case, where the check compares numbers; empty where nobody kept them.
    """

    name: str
    outcome: str
    cases: int = 0
    reason: str = ""
    worst_ulp: float | None = None
    worst_ratio: float | None = None
    seconds: float = 0.0
    device: str = ""
    errors: list[CaseError] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The name, with the device in front where that is not the CPU."""
        return _titled(self.name, self.device)


@dataclass
class Failure:
    """One failed case, the smallest of its kind.

    Attributes:
        check: the name of the check.
        case: the input, as `f32[7, 13] sliced, approximate='tanh'`.
        message: what is wrong, with the worst element and error against allowance.
        pattern: what the wrong elements have in common, if anything.
        repeat: a command that repeats the case.
        device: as in the check.
    """

    check: str
    case: str
    message: str
    pattern: str = ""
    repeat: str = ""
    device: str = ""

    @property
    def title(self) -> str:
        """The name of the check, with the device in front where that is not the CPU."""
        return _titled(self.check, self.device)


def _titled(name: str, device: str) -> str:
    return name if device in ("", "cpu") else f"{device}: {name}"


@dataclass
class VerifyRecord:
    """The result of verifying one operator or callable.

    Attributes:
        backends: what ran: "cpu", "cuda", "reference" (on one of the devices at least), or "callable".
        effort: "quick", "default" or "full".
        only: the text that the cases were chosen by; "" for all of them.
        in_process: why the candidate ran in the process of its caller, where a crash would have ended both;
            "" when it had a process of its own.
    """

    name: str
    checks: list[Check]
    failures: list[Failure]
    backends: list[str]
    machine: Machine
    created: float
    seconds: float
    version: int = VERSION
    effort: str = "default"
    only: str = ""
    in_process: str = ""

    @property
    def passed(self) -> bool:
        """Whether every check that ran has passed, and at least one ran."""
        return not self.failures and any(check.outcome == "passed" for check in self.checks)


@dataclass
class Mutant:
    """An operator made wrong in one way, and what verify said.

    Attributes:
        kind: what is wrong with it; "unchanged" is the operator itself.
        operator: of which it is a mutant; a backward counts as an operator.
        outcome: "killed", "survived", or "none" where there is no such mutant; of the operator itself "passed" or
            "accused".
        check: the check that failed.
        reason: what it found; for "none", why there is no such mutant.
    """

    kind: str
    operator: str
    outcome: str
    check: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclass
class MutantsRecord:
    """Which mutants of one operator verify has caught."""

    name: str
    mutants: list[Mutant]
    machine: Machine
    created: float
    seconds: float
    version: int = VERSION

    @property
    def survivors(self) -> list[Mutant]:
        """The mutants that were not caught, and the operator itself where it was accused."""
        return [m for m in self.mutants if m.outcome in ("survived", "accused")]


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


@dataclass
class Comparison:
    """One candidate beside Opwright, from samples taken in turns.

    Attributes:
        candidate: who is compared.
        ratio: its time over Opwright's: above 1, Opwright is faster.
        visible: smallest visible difference, relative: a ratio nearer to 1 than this says nothing.
        blocks: stretches of samples that the two numbers come from.
    """

    candidate: str
    ratio: float
    visible: float
    blocks: int

    @property
    def verdict(self) -> str:
        """"faster", "same" or "slower": what Opwright is beside the candidate."""
        if abs(self.ratio - 1) <= self.visible:
            return "same"
        return "faster" if self.ratio > 1 else "slower"


@dataclass
class Measurement:
    """All candidates on one input.

    Attributes:
        direction: "forward", "backward" (the backward of autograd, bias gradients and all) or "step" (both).
        case: the input, as `f32[512, 4096] f32[4096] approximate='tanh'`.
        axes: sizes and options that vary over the sweep, for plots: {"elements": 2097152, ...}.
        dtype: the dtype of the operator's floating-point tensors.
        bytes_moved: the least a call has to read and write.
        flop: the least operations; None where nobody said.
        timings: one for each candidate, Opwright's first.
        roof_share: bytes_moved over time, as a share of the machine's measured copy bandwidth.
        in_cache: whether the data fit the last-level cache, so that the share may pass 1.
        copy_us: on a GPU, device time of copying as many bytes as the input moves, in the same rounds, cold.
        comparisons: each other candidate beside Opwright.
        output_bytes: memory of the results: what a call must hold at least.
        floor_us: the least time that the machine's limits allow. What is faster is refused.
        stopped: why sampling ended: "noise" (the smallest visible difference is small enough) or "time".
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
        witnessed: whether another process has timed the calls by its own clock, and agrees.
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
    witnessed: bool = False


@dataclass
class Limits:
    """What a device can do at best: measured once, and kept in the store.

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
        device: where it was measured: "cpu", "cuda" or "cuda:1".
        conditions, limits: how it was measured, and what the device can do; None in records of version 1.
        commit: of the repository of the operator's source, with "+" when it had changes; "" outside of one.
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

    @property
    def on_gpu(self) -> bool:
        """Whether the times are device times of a GPU."""
        return self.device not in ("", "cpu")


@dataclass
class CallPart:
    """One part of the host's time of a call.

    Attributes:
        name: "python", "dispatcher", "checks", "allocation", "views", "launch", "kernel"; on a GPU "device, stream"
            and "launch" in place of the last two; without a kernel "python, dispatcher" and "reference".
        us: its time.
        uncertainty_us: half-width of the 95 % interval. A part that is smaller may be nothing at all.
        obtained: how, as the difference of two variants of the call: "operator - kernel's entry".
    """

    name: str
    us: float
    uncertainty_us: float
    obtained: str


@dataclass
class CallRecord:
    """Where one tiny call of an operator spends the host's time.

    Attributes:
        case: the input, as `f32[1, 1] f32[1] approximate='tanh'`.
        parts: in the order of the call; together they are `total_us`, up to their uncertainties.
        total_us: the whole call, from Python.
        peers_us: other calls by the same clock: "torch.add".
        device_us: on a GPU, how long the kernel runs behind the host; None on a CPU.
        rounds: how many times each variant was timed, in turns.
        device: as in a BenchRecord.
    """

    name: str
    case: str
    parts: list[CallPart]
    total_us: float
    peers_us: dict[str, float]
    device_us: float | None
    rounds: int
    machine: Machine
    created: float
    seconds: float
    version: int = VERSION
    device: str = "cpu"


@dataclass
class BaseRow:
    """One input, measured with two versions of an operator.

    Attributes:
        direction, case: as in a Measurement.
        base_us, now_us: interleaved: of the fastest sample of each process, the median; of records: the medians.
        ratio: base over now: above 1, it has become faster.
        visible: smallest visible difference of the ratio from 1, at 95 % for all rows together.
        verdict: "faster", "same" or "slower".
    """

    direction: str
    case: str
    base_us: float
    now_us: float
    ratio: float
    visible: float
    verdict: str


@dataclass
class BaseRecord:
    """An operator as it is, compared with an earlier version of it.

    Attributes:
        base: what it was compared with: a commit, or the file of a record.
        method: "interleaved" (both versions measured in turns) or "record".
        is_hint: the base was measured on another machine or in another way, so the verdicts prove nothing.
        reason: why it is only a hint.
        rows: one for each input that both have.
        missing: inputs that only one of them has.
    """

    name: str
    base: str
    method: str
    rows: list[BaseRow]
    machine: Machine
    created: float
    seconds: float
    version: int = VERSION
    device: str = "cpu"
    is_hint: bool = False
    reason: str = ""
    missing: list[str] = field(default_factory=list)

    @property
    def slower(self) -> list[BaseRow]:
        """The rows that have become slower; none where the base is only a hint."""
        return [] if self.is_hint else [row for row in self.rows if row.verdict == "slower"]


@dataclass
class BuildStep:
    """One command of a build, in seconds from its beginning."""

    name: str
    start: float
    seconds: float


@dataclass
class KernelUse:
    """What one GPU kernel takes, as ptxas reports it.

    Attributes:
        kernel: its name, with template arguments.
        architecture: as "sm_90".
        registers: of a thread; at most 255.
        spill_bytes: stored to memory because registers ran out, for each thread.
        stack_bytes, shared_bytes: of a thread, of a block; dynamic shared memory is not known to the compiler.
    """

    kernel: str
    architecture: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


@dataclass
class BuildRecord:
    """How the library of one operator, its backward included, was built.

    Attributes:
        operators: qualified names of all operators inside.
        compiler: identities of the compilers.
        library_bytes: size of the library.
        steps: in the order in which they began; empty where the build did not keep them.
        kernels: of the GPU; empty for a library without CUDA C++.
        built: when the library was built, which may be long before the record: seconds since 1970.
    """

    name: str
    operators: list[str]
    compiler: str
    library_bytes: int
    steps: list[BuildStep]
    kernels: list[KernelUse]
    machine: Machine
    built: float
    created: float
    seconds: float
    version: int = VERSION


Record = VerifyRecord | MutantsRecord | BenchRecord | CallRecord | BaseRecord | BuildRecord
_KINDS = {
    "verify": VerifyRecord,
    "mutants": MutantsRecord,
    "bench": BenchRecord,
    "call": CallRecord,
    "base": BaseRecord,
    "build": BuildRecord,
}


def builtins_of(record: Any) -> Any:
    """Returns a record, or a part of one, as dicts and lists that JSON knows."""
    return finite(asdict(record))


def encodable(value: Any) -> Any:
    """Returns records, lists of them or plain data as what is written to JSON."""
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    kind = next((name for name, type_ in _KINDS.items() if type(value) is type_), None)
    return finite(value) if kind is None else {"type": kind, **builtins_of(value)}


def save(record: Record, path: Path) -> None:
    """Writes a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(encodable(record), indent=2) + "\n")


def read(path: Path) -> Record:
    """Reads a record.

    Raises:
        RecordError: the file is damaged, or written by a newer version.
    """
    try:
        return decoded(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise RecordError(str(path), "this record cannot be read", rows=[("reason", str(error))]) from None


def decoded(content: Any) -> Record:
    """Returns the record that `encodable` has made JSON of.

    Raises:
        ValueError: it is none, or of a newer version.
    """
    content = dict(content) if isinstance(content, dict) else {}
    kind, version = content.pop("type", None), content.get("version", 1)
    if isinstance(version, int) and version > VERSION:
        raise ValueError(f"it has version {version}, and this Opwright reads up to {VERSION}")
    if kind not in _KINDS:
        raise ValueError(f"it is of no known kind: {kind!r}")
    return decode(_KINDS[kind], content, "record")
