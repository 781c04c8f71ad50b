"""What a device can do at best: measured, not looked up; kept in the store, and measured again when asked."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from opwright.bench.environment import affinity
from opwright.bench.timers import Gpu, Timed, once, time_fresh, time_interleaved, time_on_gpu
from opwright.build.store import Store, digest_of
from opwright.contract.dtypes import short_name
from opwright.errors import StoreError
from opwright.records import Limits, Machine, Timing
from opwright.typed_json import decode

_COPY_BYTES = 128 << 20  # of each tensor: far above any last-level cache that a process can claim
_GPU_COPY_BYTES = 1 << 30
# Of each tensor: both are in the L2 cache of a core, and PyTorch takes one thread for so few elements.
_CACHE_COPY_BYTES = 96 << 10
_GEMM = {torch.float32: 1024, torch.bfloat16: 1024, torch.float64: 512}
_GPU_GEMM = {torch.float32: 4096, torch.bfloat16: 8192, torch.float16: 8192, torch.float64: 4096}
_HOST_CALLS = 100  # of a small operator: fewer than a GPU's queue has room for, whatever it launches
_HOST_SECONDS = 0.2  # for all small calls together
# How often a limit of the CPU is timed, the warm-up included, and for how long: a bfloat16 product takes 2.4 s where
# AVX-512 is missing.
_MAX_SAMPLES, _MAX_SECONDS = 10, 0.5
Calls = Mapping[str, Sequence[Callable[[], object]]]


class CpuBench:
    """Measures on the CPU."""

    device = torch.device("cpu")

    def measure_limits(self) -> Limits:
        """Measures what the device can do at best; takes a few seconds."""
        source = torch.ones(_COPY_BYTES // 4)
        other, target = torch.ones_like(source), torch.empty_like(source)
        copy = 2 * _COPY_BYTES / _best(lambda: target.copy_(source)) / 1e9
        triad = 3 * _COPY_BYTES / _best(lambda: torch.add(source, other, alpha=3.0, out=target)) / 1e9
        parts = torch.get_num_threads()
        small, one = torch.ones(_CACHE_COPY_BYTES // 4), torch.ones(1)
        into, into_one = torch.empty_like(small), torch.empty_like(one)
        alone = _best(lambda: into.copy_(small), 200) - _best(lambda: into_one.copy_(one), 200)
        cached = parts * 2 * _CACHE_COPY_BYTES / max(alone, 1e-7) / 1e9
        gemm = {}
        for dtype, size in _GEMM.items():
            a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
            gemm[short_name(dtype)] = 2 * size**3 / _best(lambda a=a, b=b: torch.mm(a, b)) / 1e9
        (empty,) = time_interleaved({"add": lambda: torch.add(one, one)}, 0.05).timings
        return Limits(copy, triad, cached, gemm, empty.min_us, None, parts, time.time())

    def cache_bytes(self) -> int:
        """Returns the size of the largest cache of the first core; 32 MiB where the system does not say."""
        sizes = []
        for path in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
            with open(path) as f:
                text = f.read().strip()
            sizes.append(int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1))
        return max(sizes, default=32 << 20)

    def input_sets(self, bytes_moved: int, candidates: int) -> int:
        """Returns how many sets of inputs the candidates go through in turn."""
        return 1

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Makes this the current device."""
        return contextlib.nullcontext()

    def time(
        self, calls: Calls, bytes_moved: int, seconds: float, precision: float = 0.0, **hooks: Callable[..., object]
    ) -> Timed:
        """Times candidates in turn, with a warm cache: on the same input again and again.

        Args:
            hooks: `before_block` and `on_result` of `time_interleaved`.
        """
        first = {name: sets[0] for name, sets in calls.items()}
        timed = time_interleaved(first, seconds, precision=precision, **hooks)
        fresh = time_fresh(first)
        for timing in timed.timings:
            timing.fresh_us = fresh.get(timing.candidate)
        return timed

    def host_us(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Returns what a call on a small input costs by the host's clock."""
        return {t.candidate: t.min_us for t in time_interleaved(calls, _HOST_SECONDS).timings}


class GpuBench:
    """Measures on one GPU."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        with self.current():
            self.gpu = Gpu(self.device)

    def measure_limits(self) -> Limits:
        free, _ = torch.cuda.mem_get_info(self.device)
        size = min(_GPU_COPY_BYTES, free // 8)
        copy = 2 * size / self._time_alone(_copies(size, 1, self.device)).median_us / 1e3
        a, b, c = (torch.ones(size // 4, device=self.device) for _ in range(3))
        triad = 3 * size / self._time_alone([lambda: torch.add(a, b, alpha=3.0, out=c)]).median_us / 1e3
        del a, b, c
        cache = self.gpu.l2_bytes // 8
        cached = 2 * cache / self._time_alone(_copies(cache, 1, self.device)).warm_us / 1e3
        gemm = {}
        for dtype, size in _GPU_GEMM.items():
            x, y = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
            took_us = self._time_alone([lambda x=x, y=y: torch.mm(x, y)]).median_us
            gemm[short_name(dtype)] = 2 * size**3 / took_us / 1e3
        one = torch.ones(1, device=self.device)
        empty = self.host_us({"add": lambda: torch.add(one, one)})["add"]
        launch = self._time_alone([lambda: one.zero_()]).warm_us
        return Limits(copy, triad, cached, gemm, empty, launch, torch.get_num_threads(), time.time())

    def _time_alone(self, calls: Sequence[Callable[[], object]]) -> Timing:
        return time_on_gpu({"": calls}, 0.1, self.gpu).timings[0]

    def cache_bytes(self) -> int:
        return self.gpu.l2_bytes

    def input_sets(self, bytes_moved: int, candidates: int) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        # A backward keeps about as much again as it moves.
        fitting = free // (4 * max(bytes_moved * candidates, 1))
        wanted = 2 + self.gpu.l2_bytes // max(bytes_moved, 1)
        return max(1, min(wanted, fitting, 4))

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.device)

    def time(
        self, calls: Calls, bytes_moved: int, seconds: float, precision: float = 0.0, **hooks: Callable[..., object]
    ) -> Timed:
        sets = len(next(iter(calls.values())))
        copies = {"copy of as many bytes": _copies(bytes_moved // 2, sets, self.device)}
        return time_on_gpu(calls, seconds, self.gpu, precision=precision, beside=copies, **hooks)

    def host_us(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        timed = time_interleaved(calls, _HOST_SECONDS, repeats=_HOST_CALLS, before_sample=self.gpu.wait)
        return {t.candidate: t.min_us for t in timed.timings}


def bench_on(device: torch.device) -> CpuBench | GpuBench:
    """Returns what measures on a device."""
    return GpuBench(device) if device.type == "cuda" else CpuBench()


def _copies(size: int, count: int, device: torch.device) -> list[Callable[[], object]]:
    """Returns copies of so many bytes, each between tensors of its own."""

    def one() -> Callable[[], object]:
        source = torch.randint(0, 255, (max(size, 1),), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return [one() for _ in range(count)]


def _best(call: Callable[[], object], repeats: int = 1) -> float:
    """Returns the least seconds of a call; of several in a row, where one is too short for the clock."""
    times: list[float] = []
    while len(times) < _MAX_SAMPLES and sum(times) * repeats < _MAX_SECONDS:
        times.append(once(call, repeats)[0].wall_us / 1e6)
    return min(times)


_FORMAT = 1  # changes when the way to measure does


def limits_of(place: CpuBench | GpuBench, machine: Machine, *, again: bool = False) -> Limits:
    """Returns the limits of a device, measured at the first time.

    They are kept for the model of the CPU, its usable cores, the threads, the versions of PyTorch and the driver, and
    the GPU. A store that cannot be written does not prevent the measurement.

    Args:
        again: measure them now, whatever is kept.
    """
    path = _path(place.device, machine)
    if not again and (found := _read(path)) is not None:
        return found
    return _keep(path, place.measure_limits())


def measure_limits_again(place: CpuBench | GpuBench, machine: Machine, known: Limits) -> Limits:
    """Measures exceeded limits again and keeps the better of each: other work may have slowed the first measurement."""
    new = place.measure_limits()
    better = {name: max(getattr(known, name), getattr(new, name)) for name in ("copy_gb_s", "triad_gb_s", "cache_gb_s")}
    shared = {dtype: max(known.gemm_gflops.get(dtype, 0.0), rate) for dtype, rate in new.gemm_gflops.items()}
    found = replace(new, **better, gemm_gflops=known.gemm_gflops | shared)
    return _keep(_path(place.device, machine), found)


def _path(device: torch.device, machine: Machine) -> Path:
    cores = len(affinity()) or os.cpu_count()
    gpu = [machine.device, machine.driver, machine.multiprocessors] if device.type == "cuda" else []
    key = [_FORMAT, machine.cpu, cores, torch.get_num_threads(), machine.torch, *gpu]
    return Store().root / "limits" / f"{digest_of(json.dumps(key).encode())[:32]}.json"


def _read(path: Path) -> Limits | None:
    """Returns what is kept; None where there is nothing, or nothing whole, or someone else's."""
    try:
        if os.stat(path).st_uid != os.geteuid():
            return None
        return decode(Limits, json.loads(path.read_bytes()), "limits")
    except (OSError, ValueError):
        return None


def _keep(path: Path, limits: Limits) -> Limits:
    # The lock makes the store, and refuses one that is not ours.
    with contextlib.suppress(StoreError, OSError), Store().lock(f"limits-{path.stem}"):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        staged = path.with_suffix(".new")
        staged.write_text(json.dumps(asdict(limits)))
        staged.rename(path)
    return limits
