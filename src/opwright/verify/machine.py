"""The machine card."""

from __future__ import annotations

import os
import platform

import torch

from opwright.build.store import Store
from opwright.build.toolchain import find_compiler
from opwright.records import Machine


def machine_card() -> Machine:
    """Returns what this machine is; bandwidths are left to the benchmark."""
    compiler = find_compiler(Store().identities)
    return Machine(
        cpu=_cpu_name(),
        cores=torch.get_num_threads(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        compiler=compiler.identity if compiler else "",
        load=os.getloadavg()[0],
    )


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            for line in f:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
