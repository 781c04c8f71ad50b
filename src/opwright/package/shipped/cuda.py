"""What the library was compiled for. In place of `build/cuda.py`."""

from __future__ import annotations

import torch

from opwright.dispatch.kernels import provenance


def architectures() -> tuple[str, ...]:
    """Returns the architectures that the library has machine code for, as "90"."""
    return tuple(name.removeprefix("sm_") for name in provenance()["architectures"] if name.startswith("sm_"))


def driver_version() -> str:
    """Returns the newest CUDA that the driver knows, as "13.0"."""
    version = torch._C._cuda_getDriverVersion()
    return f"{version // 1000}.{version % 1000 // 10}"
