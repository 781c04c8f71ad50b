"""What the machine can do at best: measured, not looked up."""

from __future__ import annotations

import glob
import time

import torch

_COPY_BYTES = 128 << 20  # of each tensor: far above any last-level cache that a process can claim


def copy_gb_s() -> float:
    """Returns the bandwidth of copying a large tensor, bytes read plus bytes written, in GB/s."""
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _best(lambda: target.copy_(source)) / 1e9


def compute_gflops() -> float:
    """Returns the rate of a float32 matrix product in GFLOP/s."""
    size = 1024
    a, b = torch.randn(size, size), torch.randn(size, size)
    return 2 * size**3 / _best(lambda: torch.mm(a, b)) / 1e9


def _best(call) -> float:
    call()
    times = []
    for _ in range(9):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def last_level_cache_bytes() -> int:
    """Returns the size of the largest cache of the first core; 32 MiB where the system does not say."""
    sizes = []
    for path in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
        with open(path) as f:
            text = f.read().strip()
        sizes.append(int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1))
    return max(sizes, default=32 << 20)
