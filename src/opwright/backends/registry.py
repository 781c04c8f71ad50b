"""The backends that there are: three of the toolkit, and those that installed packages bring."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.metadata import EntryPoint, distributions

from opwright.backends.protocol import Backend

GROUP = "opwright.backends"  # of entry points, each the name of a module's `Backend`
# Of a source checkout no metadata tell. Of two for one device, the first is preferred where a folder has both.
_OWN = ("opwright.backends.cpu", "opwright.backends.cuda", "opwright.backends.triton")


@functools.cache
def all_backends() -> dict[str, Backend]:
    """Returns the backends by name, in the order of preference."""
    found = [import_module(name).BACKEND for name in _OWN]
    brought = sorted(_entry_points(), key=lambda point: point.name)
    found += [point.load() for point in brought if point.module not in _OWN]
    return {backend.name: backend for backend in found}


def _entry_points() -> list[EntryPoint]:
    """Returns the entry points of the group.

    `importlib.metadata.entry_points` reads the name of every package first, which takes many times as long.
    """
    named = [found for found in distributions() if GROUP in (found.read_text("entry_points.txt") or "")]
    return [point for found in named for point in found.entry_points if point.group == GROUP]


@functools.cache
def device_types() -> tuple[str, ...]:
    """Returns PyTorch's types of the devices that kernels can be written for."""
    return tuple(dict.fromkeys(backend.device_type for backend in all_backends().values()))


def backend_of_device(device_type: str) -> Backend:
    """Returns the preferred backend of a type of device."""
    return next(backend for backend in all_backends().values() if backend.device_type == device_type)


def dispatch_keys() -> dict[str, str]:
    """Returns the dispatcher's keys of these devices, by their types."""
    return {name: backend_of_device(name).dispatch_key for name in device_types()}


def gpu_types() -> tuple[str, ...]:
    """Returns the types of device that are GPUs, and may be absent."""
    return tuple(name for name in device_types() if backend_of_device(name).is_gpu)
