"""The GPU code inside a library: which architectures it has machine code and PTX for.

nvcc puts a chain of containers into the section .nv_fatbin. Each has a header of 16 bytes and entries of
its own headers; an entry's header names kind and architecture, so nothing has to be unpacked. NVIDIA
does not document it: the layout is what nvcc 13.0 was seen to write for sm_80 to sm_121.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes that follow
# kind, version, bytes of this header, bytes that follow, packed bytes, options; then the minor and major
# version (of the PTX language, for PTX), the architecture, the name's place and length; then flags
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")
_PTX, _MACHINE_CODE = 1, 2
_ONLY_THIS, _FAMILY = 1 << 20, 1 << 21  # sm_90a, sm_100f
_RELEASE = re.compile(rb"release (\d+\.\d+), V[\d.]+")
_SEARCHED_BYTES = 16 << 20  # the release is noted in every piece of code that is not packed


@dataclass(frozen=True)
class DeviceCode:
    """The GPU code of a library.

    Attributes:
        machine_code: the architectures it has machine code for, as "90", "90a", "100f".
        ptx: those it has PTX for.
        toolkit: the CUDA of the compiler, as "13.0"; "" where the code does not tell.
    """

    machine_code: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()
    toolkit: str = ""

    def __bool__(self) -> bool:
        return bool(self.machine_code or self.ptx)

    def __str__(self) -> str:
        return " ".join([*(f"sm_{name}" for name in self.machine_code), *(f"compute_{n}" for n in self.ptx)])

    def way_to_run_on(self, gpu: str) -> str:
        """Returns how a GPU ("86") runs it: "machine code", "PTX" (compiled by the driver), or ""."""
        if any(_runs_on(name, gpu) for name in self.machine_code):
            return "machine code"
        # PTX of sm_90a or sm_100f is as particular as its machine code.
        if any(int(n) <= int(gpu) if n.isdigit() else _runs_on(n, gpu) for n in self.ptx):
            return "PTX"
        return ""


def _runs_on(name: str, gpu: str) -> bool:
    number, suffix = int(name.rstrip("af")), name[-1]
    if suffix == "a":
        return number == int(gpu)
    return number // 10 == int(gpu) // 10 and number <= int(gpu)


def read_device_code(data: bytes | mmap.mmap, regions: Sequence[tuple[int, int]]) -> DeviceCode:
    """Returns what the sections .nv_fatbin and __nv_relfatbin of a file, given as (begin, end), hold."""
    machine_code, ptx, toolkit = set(), set(), ""
    for begin, end in regions:
        for kind, name, version in _entries(data, begin, end):
            if kind == _MACHINE_CODE:
                machine_code.add(name)
            elif kind == _PTX:
                ptx.add(name)
                toolkit = toolkit or _toolkit_of(version)
        release = _RELEASE.search(data, begin, min(end, begin + _SEARCHED_BYTES))
        toolkit = release[1].decode() if release else toolkit
    return DeviceCode(_ordered(machine_code), _ordered(ptx), toolkit)


def _entries(data: bytes | mmap.mmap, begin: int, end: int) -> Iterator[tuple[int, str, tuple[int, int]]]:
    """Yields kind, architecture and version of each entry; stops at what it cannot read."""
    start = data.find(_MAGIC, begin, end)
    while start >= 0 and start + _CONTAINER.size <= end:
        _, _, header, size = _CONTAINER.unpack_from(data, start)
        at, last = start + header, min(start + header + size, end)
        while at + _ENTRY.size <= last:
            kind, _, own, following, _, _, minor, major, number, _, _, flags = _ENTRY.unpack_from(data, at)
            if own < _ENTRY.size:
                break
            suffix = "a" if flags & _ONLY_THIS else "f" if flags & _FAMILY else ""
            yield kind, f"{number}{suffix}", (major, minor)
            at += own + following
        start = data.find(_MAGIC, max(last, start + _CONTAINER.size), end)


def _toolkit_of(ptx: tuple[int, int]) -> str:
    """Returns the first CUDA that writes a version of the PTX language: 7.x is 11.x, 8.x 12.x, 9.x 13.x."""
    major, minor = ptx
    if not 7 <= major <= 9:
        return ""
    return f"{major + 4}.{minor + 1 if (major, minor) > (8, 5) and major == 8 else minor}"  # 12.6 kept 8.5


def _ordered(names: set[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (int(name.rstrip("af")), name)))
