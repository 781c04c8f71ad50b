"""What the library was compiled for. In place of `backends/cuda.py`."""

from __future__ import annotations

import ctypes

from opwright.dispatch.kernels import project, provenance


def architectures() -> tuple[str, ...]:
    """Returns the architectures that the library has machine code for, as "90"."""
    return tuple(name.removeprefix("sm_") for name in provenance()["architectures"] if name.startswith("sm_"))


def driver_version() -> str:
    """Returns the newest CUDA that the driver knows, as "13.0"."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def remedy(error: int, architecture: str) -> str:
    """Returns what to do where CUDA finds no code for a GPU, from the number of its error."""
    if error != 209:
        return "update the driver of the GPU"
    return f"a version of {project()} whose wheel has code for sm_{architecture}, `architectures` among the options of its build"
