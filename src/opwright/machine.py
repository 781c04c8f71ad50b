"""The machine card."""

from __future__ import annotations

import os
import platform
import re

import torch

from opwright.backends.cuda import driver_version
from opwright.backends.toolchain import find_compiler
from opwright.build.store import Store
from opwright.records import Machine


def machine_card(device: torch.device | None = None) -> Machine:
    """Returns what this machine is; bandwidths are left to the benchmark.

    Args:
        device: the GPU to describe; by default the current one, if there is any.
    """
    compiler = find_compiler(Store().identities)
    card = Machine(
        cpu=_cpu_name(),
        cores=torch.get_num_threads(),
        device="",
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        compiler=compiler.identity if compiler else "",
        load=os.getloadavg()[0],
    )
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(device if device is not None and device.type == "cuda" else None)
        card.device, card.driver = gpu.name, _driver()
        card.gpu_memory_bytes, card.gpu_l2_bytes = gpu.total_memory, gpu.L2_cache_size
        card.multiprocessors = gpu.multi_processor_count
    return card


def _driver() -> str:
    knows = f"CUDA {driver_version()}"
    try:
        with open("/proc/driver/nvidia/version") as f:
            found = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", f.read())
    except OSError:
        found = None
    return f"{found[1]} ({knows})" if found else knows


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
