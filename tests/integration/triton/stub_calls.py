"""The stub through ctypes, and a cubin written by hand: for programs that run above the stub, in processes of their own.

Not for the process of the tests: a later dlopen("libcuda.so.1") in it would find the stub.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

_FUNCTION_SYMBOL, _ENTRY = 0x12, 0x10


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class Driver:
    """`driver.cuInit(0)` returns the CUresult; `driver.make("cuDeviceGet", 0)` checks it and returns the first out value."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def make(self, name: str, *arguments: Any, out: Any = ctypes.c_void_p) -> Any:
        value = out()
        status = getattr(self.library, name)(ctypes.byref(value), *arguments)
        assert status == 0, f"{name} returned {status}"
        return value

    def start(self, device: int = 0) -> ctypes.c_void_p:
        """Initialises the driver and makes a device's primary context current."""
        assert self.cuInit(0) == 0
        context = self.make("cuDevicePrimaryCtxRetain", device)
        assert self.cuCtxSetCurrent(context) == 0
        return context

    def load(self, cubin: bytes, name: str = "kernel") -> ctypes.c_void_p:
        module = self.make("cuModuleLoadData", cubin)
        return self.make("cuModuleGetFunction", module, name.encode())

    def launch(self, function: Any, params: list[Any] | None = None, **changes: Any) -> int:
        """Launches 4 x 128 threads, but for the changes; returns the CUresult."""
        config = LaunchConfig((4, 1, 1), (128, 1, 1), 0, None, None, 0)
        attributes = changes.pop("attributes", [])
        for name, value in changes.items():
            setattr(config, name, value)
        config.attributes = (LaunchAttribute * max(1, len(attributes)))(*attributes)
        config.num_attributes = len(attributes)
        pointers = (ctypes.c_void_p * (len(params) + 1))(*map(ctypes.addressof, params)) if params else None
        return self.cuLaunchKernelEx(ctypes.byref(config), function, pointers, None)


def cluster(x: int) -> LaunchAttribute:
    """CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION."""
    return LaunchAttribute(4, 0, (x, 1, 1))


def make_cubin(
    *,
    arch: int = 90,
    params: tuple[tuple[int, int], ...] = ((0, 8), (8, 4)),
    threads: int = 128,
    clusters: int = 0,
    static_shared: int = 0,
) -> bytes:
    """Returns an ELF with what a driver reads of a cubin, laid out as ptxas 12.8 does.

    Args:
        params: Offset and size of each.
        threads: .reqntid, 0 for none.
    """

    def sized(attribute: int, *words: int) -> bytes:
        return struct.pack("<BBH", 4, attribute, 4 * len(words)) + struct.pack(f"<{len(words)}I", *words)

    info = sized(0x37, 128)
    for ordinal, (offset, size) in reversed(list(enumerate(params))):
        info += sized(0x17, 0, offset << 16 | ordinal, size << 18 | 0x1F000)
    info += struct.pack("<BBH", 3, 0x1B, 255)  # a short form between the sized ones
    if threads:
        info += sized(0x10, threads, 1, 1)
    if clusters:
        info += sized(0x3D, clusters, 1, 1)
    strings = b"\0kernel\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, _FUNCTION_SYMBOL, _ENTRY, 1, 0, 64)
    sections = [  # name, type, bytes, size, link
        (".text.kernel", 1, bytes(64), 64, 0),
        (".strtab", 3, strings, len(strings), 0),
        (".symtab", 2, symbols, len(symbols), 2),
        (".nv.info", 0x70000000, sized(0x2F, 1, 40), 12, 3),
        (".nv.info.kernel", 0x70000000, info, len(info), 3),
        (".nv.shared.kernel", 8, b"", static_shared, 0),
    ]
    names = b"\0"
    body = b""
    rows = [bytes(64)]
    for title, kind, content, size, link in [*sections, (".shstrtab", 3, None, 0, 0)]:
        title_at = len(names)
        names += title.encode() + b"\0"
        if content is None:
            content, size = names, len(names)
        body += bytes(-len(body) % 8)
        rows.append(struct.pack("<IIQQQQIIQQ", title_at, kind, 0, 0, 64 + len(body), size, link, 0, 8, 0))
        body += content
    body += bytes(-len(body) % 8)
    flags = arch | arch << 16 | 0x500
    identity = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(7)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        identity,
        2,
        190,
        1,
        0,
        0,
        64 + len(body),
        flags,
        64,
        56,
        0,
        64,
        len(rows),
        len(rows) - 1,
    )
    return header + body + b"".join(rows)
