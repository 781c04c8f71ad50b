"""What verify and bench write down: typed, versioned, read back by the report.

Times are in microseconds, sizes in bytes, rates in GB/s (1e9 bytes per second).
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from opwright.errors import RecordError

VERSION = 1


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
    in_process: str = ""

    @property
    def passed(self) -> bool:
        """Whether every check that ran has passed, and at least one ran."""
        return not self.failures and any(check.outcome == "passed" for check in self.checks)


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
    """

    candidate: str
    median_us: float
    min_us: float
    noise: float
    samples_us: list[float]
    warm_us: float | None = None
    host_us: float | None = None
    waits: bool = False


@dataclass
class Measurement:
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


@dataclass
class BenchRecord:
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
_KINDS = {"verify": VerifyRecord, "bench": BenchRecord}


def builtins_of(record: Any) -> Any:
    """Returns a record, or a part of one, as dicts and lists that JSON knows."""
    return _finite(asdict(record))


def encodable(value: Any) -> Any:
    """Returns records, lists of them or plain data as what is written to JSON."""
    if isinstance(value, (list, tuple)):
        return [encodable(item) for item in value]
    kind = next((name for name, type_ in _KINDS.items() if type(value) is type_), None)
    return _finite(value) if kind is None else {"type": kind, **builtins_of(value)}


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
        content = json.loads(path.read_bytes())
        kind = content.pop("type") if isinstance(content, dict) and "type" in content else None
        if kind not in _KINDS:
            raise ValueError(f"it is of no known kind: {kind!r}")
        return _decode(_KINDS[kind], content, "record")
    except (OSError, ValueError) as error:
        raise RecordError(str(path), "this record cannot be read", rows=[("reason", str(error))]) from None


def _finite(value: Any) -> Any:
    """Replaces what JSON has no number for by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@cache
def _types_of(type_: type) -> dict[str, Any]:
    return get_type_hints(type_)


def _decode(type_: Any, value: Any, at: str) -> Any:
    """Returns JSON's value as the annotated type; a value of another type is a ValueError."""
    if type_ is Any:
        return value
    if get_origin(type_) is UnionType:
        if value is None and NoneType in get_args(type_):
            return None
        return _decode(get_args(type_)[0], value, at)
    if is_dataclass(type_) and isinstance(value, dict):
        return _decode_fields(type_, value, at)
    if get_origin(type_) is list and isinstance(value, list):
        return [_decode(get_args(type_)[0], item, f"{at}[{i}]") for i, item in enumerate(value)]
    if get_origin(type_) is dict and isinstance(value, dict):
        return {key: _decode(get_args(type_)[1], item, f"{at}.{key}") for key, item in value.items()}
    if type_ is float and type(value) is int:
        return float(value)
    if type(value) is not type_:
        raise ValueError(f"{at} is {type(value).__name__}, not {getattr(type_, '__name__', type_)}")
    return value


def _decode_fields(type_: type, value: dict[str, Any], at: str) -> Any:
    known = {field.name: field for field in fields(type_)}
    unknown = sorted(value.keys() - known.keys())
    missing = [
        name
        for name, field in known.items()
        if name not in value and field.default is MISSING and field.default_factory is MISSING
    ]
    if unknown or missing:
        raise ValueError(f"{at} has {'no' if missing else 'an unknown'} field `{(missing or unknown)[0]}`")
    types = _types_of(type_)
    return type_(**{name: _decode(types[name], item, f"{at}.{name}") for name, item in value.items()})
