"""What CUDA says went wrong, as an error that names the operator, the GPU and the remedy."""

from __future__ import annotations

import os
import re

import torch

from opwright.contract.dtypes import describe
from opwright.dispatch import kernels, registry
from opwright.errors import ArchitectureError, DeviceFaultError, KernelError

# Numbers of cudaError_t.
_OUT_OF_MEMORY = 2
_NO_CODE = {
    35: "the driver is older than the CUDA runtime of its library",
    200: "its library holds no valid code for this GPU",
    209: "its library holds no code for this GPU",
    218: "the driver cannot compile its PTX",
    222: "the driver is older than its PTX",
    803: "the driver does not fit the GPU",
}
_FAULTS = frozenset({700, 702, 710, 714, 715, 716, 717, 718, 719})
_DEBUG = "`CUDA_LAUNCH_BLOCKING=1` shows which call it was, `compute-sanitizer python program.py` which line"


def device_error(name: str, text: str, tensors: list[torch.Tensor]) -> Exception | None:
    """Returns the error for a call on CUDA tensors that failed with this text; None: it is another matter."""
    device = next((t.device for t in tensors if t.is_cuda), None)
    if device is None:
        return None
    gpu = ("GPU", _gpu(device))
    found = re.search(r"CUDA error (\d+), (\w+): (.*)", text)
    code = int(found[1]) if found else None
    shown = ("CUDA", f"{found[2]}: {found[3]}") if found else ("CUDA", text)
    if code in _NO_CODE:
        return _no_code(name, code, device, [gpu, shown])
    if code in _FAULTS or (code is None and not _is_alive(device)):
        return _fault(name, device, gpu, shown)
    if code == _OUT_OF_MEMORY or text.startswith(("cannot allocate", "out of memory for scratch")):
        return _out_of_memory(name, text, device, tensors)
    if code is None:
        return None
    hint = "a block has at most 1024 threads, and the y and z of a grid at most 65535 blocks"
    return KernelError(name, "its kernel cannot be launched", rows=[gpu, shown], hint=hint)


def _fault(name: str, device: torch.device, gpu: tuple[str, str], shown: tuple[str, str]) -> DeviceFaultError:
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        return DeviceFaultError(name, "its kernel faulted", rows=[gpu, shown], hint=_DEBUG.partition(", ")[2])
    others = [o.declaration.name for o in registry.operators.values() if kernels.is_loaded(o, device.type)]
    rows = [gpu, shown, ("suspects", ", ".join(others))]
    return DeviceFaultError(name, "it, or a kernel launched before it, faulted", rows=rows, hint=_DEBUG)


def _out_of_memory(name: str, text: str, device: torch.device, tensors: list[torch.Tensor]) -> Exception:
    memory = torch.cuda.mem_get_info(device) if not torch.cuda.is_current_stream_capturing() else (0, 0)
    held = torch.cuda.memory_reserved(device)
    asked = re.search(r"cannot allocate (.*)", text)
    error = KernelError(
        name,
        "the GPU has not enough memory left",
        rows=[
            ("asked for", asked[1] if asked else "scratch space"),
            *(("given", describe(tensor)) for tensor in tensors),
            (str(device), f"{memory[0] >> 20} of {memory[1] >> 20} MiB free, {held >> 20} held by PyTorch"),
        ],
        hint="smaller batches, or `torch.cuda.empty_cache()`",
    )
    return torch.OutOfMemoryError(str(error))


def _is_alive(device: torch.device) -> bool:
    try:
        if not torch.cuda.is_current_stream_capturing():  # waiting would end the capture
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _gpu(device: torch.device) -> str:
    try:
        found = torch.cuda.get_device_properties(device)
    except (RuntimeError, AssertionError):
        return str(device)
    return f"{device}, {found.name}, sm_{found.major}{found.minor}"


def _no_code(name: str, code: int, device: torch.device, rows: list[tuple[str, str]]) -> ArchitectureError:
    from opwright.backends import cuda

    wanted = ", ".join(f"sm_{name}" for name in cuda.architectures())
    rows[1:1] = [("compiled for", wanted), ("driver", f"for CUDA {cuda.driver_version()}")]
    major, minor = torch.cuda.get_device_capability(device)
    return ArchitectureError(name, _NO_CODE[code], rows=rows, hint=cuda.remedy(code, f"{major}{minor}"))
