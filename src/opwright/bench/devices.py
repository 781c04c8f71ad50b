"""One run on several devices or machines: inputs are assigned round-robin, and the records are merged.

Each device has a process that measures. `measure_on` starts those of one machine; under torchrun each rank has one, and
the first rank gets the records of the others.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from opwright.bench.worker import Current, Watcher, measure
from opwright.errors import OpwrightError
from opwright.isolation import describe_error, rebuild_error
from opwright.records import BenchRecord, CallRecord, decoded, encodable

_TICK_SECONDS = 0.1
_GATHER_TIMEOUT = timedelta(days=7)  # a rank that has finished waits here for the slowest one


def measure_on(
    request: dict[str, Any], devices: Sequence[str], threads: int | None, watcher: Watcher
) -> tuple[list[Any], int]:
    """Measures with one process for each device, as `measure` does with one; records are merged.

    Raises:
        OpwrightError: one of the processes could not do what was asked; the others are ended.
    """
    together = _Together(devices, watcher)
    threads = threads or max(1, len(os.sched_getaffinity(0)) // len(devices))
    codes: dict[int, int] = {}
    errors: list[OpwrightError] = []

    def measure_part(i: int) -> None:
        code = 1
        part = {**request, "device": devices[i], "part": [i, len(devices)]}
        try:
            _, code = measure(part, threads, _Part(together, i))
        except OpwrightError as error:
            errors.append(error)
            together.is_stopped = True
        finally:
            codes[i] = code

    for i in range(len(devices)):
        threading.Thread(target=measure_part, args=[i]).start()
    while len(codes) < len(devices):
        try:
            time.sleep(_TICK_SECONDS)  # not `join`: if Ctrl-C interrupts it, Python 3.11 marks the thread as finished
        except KeyboardInterrupt:
            together.is_stopped = True
    if errors:
        raise errors[0]
    together.finish_all()
    return together.records, max(codes.values())


class _Together:
    """What the processes of all devices have measured so far.

    Attributes:
        records: those of the operators that are done.
        is_stopped: whether all are to stop.
    """

    def __init__(self, devices: Sequence[str], watcher: Watcher) -> None:
        self.records: list[Any] = []
        self.is_stopped = False
        self._devices, self._watcher, self._lock = devices, watcher, threading.RLock()
        self._said: set[str] = set()
        self._shown = _Joint(devices)
        self._waiting: dict[str, dict[int, BenchRecord]] = {}

    def say(self, text: str) -> None:
        with self._lock:
            if text not in self._said:
                self._said.add(text)
                self._watcher.say(text)

    def watch(self, i: int, current: Current, what: str) -> None:
        with self._lock:
            if current.name and (not self._shown.name or self._shown.name == current.name):
                self._shown.take_part(i, current)
                self._watcher.watch(self._shown, f"{self._devices[i]}: {what}")

    def finish(self, i: int, record: BenchRecord) -> None:
        with self._lock:
            parts = self._waiting.setdefault(record.name, {})
            parts[i] = record
            if len(parts) == len(self._devices):
                self._merge(record.name)

    def finish_all(self) -> None:
        """Merges operators that not every device has finished, as after an interruption."""
        for name in list(self._waiting):
            self._merge(name)

    def _merge(self, name: str) -> None:
        parts = self._waiting.pop(name)
        record = BenchRecord.merge({self._devices[i]: parts[i] for i in sorted(parts)})
        self.records.append(record)
        self._shown = _Joint(self._devices)
        self._watcher.finish(record)


class _Joint(Current):
    """One operator on all devices."""

    def __init__(self, devices: Sequence[str]) -> None:
        super().__init__()
        self._devices, self._parts = devices, dict[int, Current]()

    def take_part(self, i: int, part: Current) -> None:
        self._parts[i] = part
        self.name = part.name
        self.started = min(each.started for each in self._parts.values())
        self.inputs = sum(each.inputs for each in self._parts.values())
        count = len(self._devices)
        self.measured = {i + count * n: m for i, each in self._parts.items() for n, m in dict(each.measured).items()}

    def partial(self, error: OpwrightError | None = None) -> BenchRecord:
        return BenchRecord.merge({self._devices[i]: self._parts[i].partial(error) for i in sorted(self._parts)})


class _Part(Watcher):
    def __init__(self, together: _Together, i: int) -> None:
        self._together, self._i = together, i

    def is_interrupted(self) -> bool:
        return self._together.is_stopped

    def say(self, text: str) -> None:
        self._together.say(text)

    def watch(self, current: Current, what: str) -> None:
        self._together.watch(self._i, current, what)

    def finish(self, record: BenchRecord | CallRecord) -> None:
        assert isinstance(record, BenchRecord)
        self._together.finish(self._i, record)


# --- under torchrun -----------------------------------------------------------------------------------------------


def is_one_of_several_ranks() -> bool:
    """Whether torchrun has started this process and others."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and {"RANK", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys()


def measure_as_rank(request: dict[str, Any], threads: int | None, watcher: Watcher) -> tuple[list[Any], int]:
    """Measures this rank's part, on the GPU of its local rank; returns the merged records on the first rank.

    Raises:
        OpwrightError: a rank could not do what was asked; the first rank raises it.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=_GATHER_TIMEOUT)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    local, neighbors = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    part = {**request, "part": [rank, ranks], "env": _see_one_gpu(local)}
    quiet = _Rank(watcher if rank == 0 else Watcher())
    sent: dict[str, Any] = {"host": platform.node(), "local": local, "neighbors": neighbors, "code": 0, "records": []}
    try:
        found, sent["code"] = measure(part, threads or max(1, len(os.sched_getaffinity(0)) // neighbors), quiet)
        sent["records"] = encodable(found)
    except OpwrightError as error:
        sent["error"] = describe_error(error)
    sent["said"] = quiet.said if rank else []
    gathered: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(sent, gathered)
    dist.destroy_process_group()
    if gathered is None:
        return [], 0  # torchrun reports every rank that does not end with 0, and the first one's code says it all
    return _merge_ranks(gathered, watcher)


class _Rank(Watcher):
    """The watcher of one rank: what it has measured is shown when all ranks are done.

    Attributes:
        said: the lines for the person who waits.
    """

    def __init__(self, watcher: Watcher) -> None:
        self.said: list[str] = []
        self._watcher = watcher

    def say(self, text: str) -> None:
        self.said.append(text)
        self._watcher.say(text)

    def watch(self, current: Current, what: str) -> None:
        self._watcher.watch(current, what)


def _merge_ranks(gathered: Sequence[dict[str, Any]], watcher: Watcher) -> tuple[list[Any], int]:
    parts: dict[str, dict[str, BenchRecord]] = {}
    for rank, sent in enumerate(gathered):
        if "error" in sent:
            raise rebuild_error(sent["error"])
        for text in sent["said"]:
            watcher.say(f"rank {rank}: {text}")
        for record in map(decoded, sent["records"]):
            assert isinstance(record, BenchRecord)
            name = f"{sent['host']} {record.device}:{sent['local']}"
            if sent["neighbors"] > 1 and not record.on_gpu:
                record.warnings.append(f"{sent['neighbors']} processes of this machine measured at the same time")
            parts.setdefault(record.name, {})[name] = record
    merged = [BenchRecord.merge(each) for each in parts.values()]
    for record in merged:
        watcher.finish(record)
    return merged, max(sent["code"] for sent in gathered)


def _see_one_gpu(local: int) -> dict[str, str]:
    """Returns the environment in which a process sees one of the GPUs that this one sees."""
    name = "CUDA_VISIBLE_DEVICES"
    visible = os.environ.get(name)
    listed = [str(local)] if visible is None else visible.split(",")[local : local + 1]
    return {name: "".join(listed)}
