"""What a cubin says about the parameters that its kernel takes, read from its section `.nv.info.<kernel>`.

NVIDIA documents neither the section nor its attributes. The layout below is what ptxas 12.8 to 13.4 writes, and
what `cuobjdump -elf` prints as EIATTR_*; a cubin that does not follow it is refused.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from .errors import WorkerError

_HAS_PAYLOAD = 4  # of the formats of an attribute only this one carries bytes, as many as its value says
_REQNTID = 0x10
_KPARAM_INFO = 0x17
_SECTION = struct.Struct("<IIQQQQIIQQ")
_PARAMETER = struct.Struct("<IHHI")


@dataclass(frozen=True)
class CubinKernel:
    """A kernel's parameters as (offset, size) in bytes, and its threads per block if it requires a number."""

    parameters: tuple[tuple[int, int], ...]
    required_threads: int | None


def read_cubin(cubin: bytes, symbol: str) -> CubinKernel:
    """Returns what a cubin says about one of its kernels.

    Raises:
        WorkerError: The bytes are not a cubin, or have no such kernel.
    """
    try:
        return _read(cubin, symbol)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise WorkerError("contract", f"The cubin of `{symbol}` cannot be read: {error}.") from None


def _read(cubin: bytes, symbol: str) -> CubinKernel:
    if cubin[:4] != b"\x7fELF":
        raise ValueError("it is not an ELF file")
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [_SECTION.unpack_from(cubin, sections_at + index * size) for index in range(count)]
    names_at = sections[names_index][4]
    for section in sections:
        start = names_at + section[0]
        if cubin[start : cubin.index(b"\0", start)].decode() == f".nv.info.{symbol}":
            return _read_attributes(cubin, section[4], section[4] + section[5])
    raise ValueError("it has no section of that kernel")


def _read_attributes(cubin: bytes, at: int, end: int) -> CubinKernel:
    parameters: dict[int, tuple[int, int]] = {}
    required_threads = None
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form != _HAS_PAYLOAD:
            continue
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, word = _PARAMETER.unpack_from(cubin, at)
            parameters[ordinal] = (offset, (word >> 18) & 0x3FFF)
        elif attribute == _REQNTID:
            x, y, z = struct.unpack_from("<III", cubin, at)
            required_threads = x * y * z
        at += value
    if sorted(parameters) != list(range(len(parameters))):
        raise ValueError("its parameters are not numbered without a gap")
    return CubinKernel(tuple(parameters[ordinal] for ordinal in sorted(parameters)), required_threads)
