"""Where a record was made, and of which version it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

VERSION = 2  # 1: before conditions, limits, comparisons and the records of calls

NULL_IS_INFINITE = {"null": math.inf}  # metadata of a field: JSON has no infinity


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

    def __post_init__(self) -> None:
        for name in ("copy_gb_s", "compute_gflops"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"its machine has {getattr(self, name):g} for {name}")
