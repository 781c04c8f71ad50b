"""What a device can do at best: measured, not looked up. One class for each kind of device, with the same methods."""

from __future__ import annotations

import contextlib
import glob
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from opwright.bench.gpu_timing import Gpu, time_on_gpu
from opwright.bench.timing import time_interleaved
from opwright.records import Timing

_COPY_BYTES = 128 << 20  # of each tensor: far above any last-level cache that a process can claim
_GPU_COPY_BYTES = 1 << 30
_HOST_CALLS = 100  # of a small operator: fewer than a GPU's queue has room for, whatever it launches

Calls = Mapping[str, Sequence[Callable[[], object]]]


class CpuBench:
    """Measures on the CPU."""

    device = torch.device("cpu")

    def copy_gb_s(self) -> float:
        """Returns the bandwidth of copying a large tensor, bytes read plus bytes written, in GB/s."""
        source = torch.ones(_COPY_BYTES // 4)
        target = torch.empty_like(source)
        return 2 * _COPY_BYTES / _best(lambda: target.copy_(source)) / 1e9

    def compute_gflops(self) -> float:
        """Returns the rate of a float32 matrix product in GFLOP/s."""
        size = 1024
        a, b = torch.randn(size, size), torch.randn(size, size)
        return 2 * size**3 / _best(lambda: torch.mm(a, b)) / 1e9

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

    def time(self, calls: Calls, bytes_moved: int, seconds: float) -> tuple[list[Timing], float | None]:
        """Times candidates in turn; the second result is the time of a copy, where it was timed with them."""
        return time_interleaved({name: sets[0] for name, sets in calls.items()}, seconds), None

    def host_us(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Returns what a call on a small input costs by the host's clock."""
        return {t.candidate: t.min_us for t in time_interleaved(calls, 0.1)}


class GpuBench:
    """Measures on one GPU."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        with self.current():
            self.gpu = Gpu(self.device)

    def copy_gb_s(self) -> float:
        free, _ = torch.cuda.mem_get_info(self.device)
        size = min(_GPU_COPY_BYTES, free // 8)
        return 2 * size / self._time_alone(_copies(size, 1, self.device)) / 1e3

    def compute_gflops(self) -> float:
        size = 4096
        a, b = (torch.randn(size, size, device=self.device) for _ in range(2))
        return 2 * size**3 / self._time_alone([lambda: torch.mm(a, b)]) / 1e3

    def _time_alone(self, calls: Sequence[Callable[[], object]]) -> float:
        (timing,) = time_on_gpu({"": calls}, 0.1, self.gpu)
        return timing.median_us

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

    def time(self, calls: Calls, bytes_moved: int, seconds: float) -> tuple[list[Timing], float | None]:
        sets = len(next(iter(calls.values())))
        copies = _copies(bytes_moved // 2, sets, self.device)
        *timings, copy = time_on_gpu({**calls, "copy of as many bytes": copies}, seconds, self.gpu)
        return timings, copy.median_us

    def host_us(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        timings = time_interleaved(calls, 0.1, repeats=_HOST_CALLS, before_sample=self.gpu.wait)
        return {t.candidate: t.min_us for t in timings}


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


def _best(call: Callable[[], object]) -> float:
    call()
    times = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
