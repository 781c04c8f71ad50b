"""Devices: on which of them something is verified, whether one still works, and graphs of a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from opwright.backends.registry import backend_of_device, device_types, gpu_types
from opwright.dispatch.operator import Operator
from opwright.errors import CheckError

CPU = torch.device("cpu")


class DeviceLost(BaseException):
    """A call left its device in a state in which it accepts no more work until the process ends.

    It is not an Exception: a check that reports whatever a call may raise is over as well.
    """


def parse_device(name: str | torch.device) -> torch.device:
    """Returns the device of that name.

    Raises:
        CheckError: there is no such device, or not here.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise CheckError(str(name), "unknown device", hint='"cpu", "cuda" or "cuda:1"') from None
    if device.type not in device_types():
        known = " and on ".join(backend_of_device(each).devices for each in device_types())
        hint = " or ".join(f'"{each}"' for each in device_types())
        raise CheckError(str(name), f"kernels run on {known} only", hint=hint)
    backend = backend_of_device(device.type)
    if backend.is_gpu:
        count = backend.count_devices()
        if (device.index or 0) >= count:
            raise CheckError(
                str(name),
                "there is no such device here",
                rows=[("GPUs", str(count)), ("torch", str(torch.__version__))],
                hint="`opwright doctor`" if count == 0 else f"`{device.type}:0` to `{device.type}:{count - 1}`",
            )
    return device


def devices_for(operator: Operator, samples: Sequence[torch.Tensor]) -> list[torch.device]:
    """Returns the devices on which an operator has something to check.

    Args:
        samples: the tensors of the samples that the caller gave; they decide when one is on a GPU.
    """
    given = dict.fromkeys(t.device for t in samples if is_gpu(t.device))
    return list(given) or [CPU, *gpus_of(operator)]


def is_gpu(device: torch.device) -> bool:
    """Returns whether a device runs kernels behind the host's back: a call returns before its kernel has run."""
    return device.type in gpu_types()


def gpus_of(operator: Operator) -> list[torch.device]:
    """Returns the GPUs here that the operator or its backward has a kernel for, one of each type."""
    behind = [o for o in (operator, operator.backward_operator) if o is not None]
    types = [name for name in gpu_types() if any(o.declaration.sources.get(name) is not None for o in behind)]
    return [torch.device(name) for name in types if backend_of_device(name).is_device_here()]


def device_of(samples: Sequence[torch.Tensor]) -> torch.device:
    """Returns where the samples of a callable are."""
    return next((t.device for t in samples if is_gpu(t.device)), CPU)


def wait_for(device: torch.device) -> None:
    """Waits until a device has done its work, so that a fault shows at the call that caused it."""
    if is_gpu(device):
        torch.get_device_module(device).synchronize(device)


def gpu_peak(call: Callable[[], object], device: torch.device) -> int:
    """Returns the most memory of PyTorch's allocator that a call holds at once, beyond what is held before."""
    wait_for(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = call()
    wait_for(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - before


def is_lost(device: torch.device) -> bool:
    """Returns whether a device accepts no more work: after an illegal address, say."""
    try:
        wait_for(device)
    except Exception:  # CUDA answers every call with the same error from then on
        return True
    return False


def raise_if_lost(device: torch.device, error: Exception) -> None:
    """Raises DeviceLost if a device accepts no more work since a call raised an error."""
    if is_lost(device):
        raise DeviceLost(str(error)) from error


_Result = TypeVar("_Result")


def capture(
    call: Callable[[], _Result], stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """Captures a call into a graph on the current device, and returns the graph and what the call returned.

    Raises:
        Exception: the call's own, or that of a capture that failed; the process is as before.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            result = call()
    except Exception:
        # Ends what is left: the default generator, which draws for a capture until one succeeds.
        with contextlib.suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()):
            torch.empty(1, device="cuda").zero_()
        raise
    return graph, result
