"""What verify and bench write down: typed, versioned, read back by the report.

Times are in microseconds, sizes in bytes, rates in GB/s (1e9 bytes per second).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from opwright.errors import RecordError

VERSION = 1


class Machine(msgspec.Struct, forbid_unknown_fields=True):
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


class Check(msgspec.Struct, forbid_unknown_fields=True):
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
    """

    name: str
    outcome: str
    cases: int = 0
    reason: str = ""
    worst_ulp: float | None = None
    worst_ratio: float | None = None
    seconds: float = 0.0
    device: str = ""

    @property
    def title(self) -> str:
        """The name, with the device in front where that is not the CPU."""
        return _titled(self.name, self.device)


class Failure(msgspec.Struct, forbid_unknown_fields=True):
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


class VerifyRecord(msgspec.Struct, forbid_unknown_fields=True, tag="verify"):
    """The result of verifying one operator or callable.

    Attributes:
        backends: what ran: "cpu", "cuda", "reference" (on one of the devices at least), or "callable".
    """

    name: str
    checks: list[Check]
    failures: list[Failure]
    backends: list[str]
    machine: Machine
    created: float
    seconds: float
    version: int = VERSION

    @property
    def passed(self) -> bool:
        """Whether every check that ran has passed, and at least one ran."""
        return not self.failures and any(check.outcome == "passed" for check in self.checks)


class Timing(msgspec.Struct, forbid_unknown_fields=True):
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
    """

    candidate: str
    median_us: float
    min_us: float
    noise: float
    samples_us: list[float]
    warm_us: float | None = None
    host_us: float | None = None
    waits: bool = False


class Measurement(msgspec.Struct, forbid_unknown_fields=True):
    """All candidates on one input.

    Attributes:
        direction: "forward" or "backward" (the backward of autograd, bias gradients and all).
        case: the input, as `f32[512, 4096] f32[4096] approximate='tanh'`.
        axes: sizes and options that vary over the sweep, for plots: {"elements": 2097152, ...}.
        dtype: the dtype of the operator's floating-point tensors.
        bytes_moved: the least a call has to read and write.
        flop: the least operations; None where nobody said.
        timings: one for each candidate, Opwright's first.
        roof_share: bytes_moved over time, as a share of the machine's measured copy bandwidth.
        in_cache: whether the data fit the last-level cache, so that the share may pass 1.
        copy_us: on a GPU, device time of copying as many bytes as the input moves, in the same rounds, cold.
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


class BenchRecord(msgspec.Struct, forbid_unknown_fields=True, tag="bench"):
    """The result of benchmarking one operator or callable.

    Attributes:
        host_us: time of one call on the smallest input, by candidate: what a call costs before any work.
            On a GPU the call's work is not waited for.
        device: where it was measured: "cpu", "cuda" or "cuda:1".
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

    @property
    def on_gpu(self) -> bool:
        """Whether the times are device times of a GPU."""
        return self.device not in ("", "cpu")


Record = VerifyRecord | BenchRecord


def save(record: Record, path: Path) -> None:
    """Writes a record as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")


def read(path: Path) -> Record:
    """Reads a record.

    Raises:
        RecordError: the file is damaged, or written by a newer version.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=VerifyRecord | BenchRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise RecordError(str(path), "this record cannot be read", rows=[("reason", str(error))]) from None
