"""What a process that measures is doing, in memory that another one reads.

No message: to write one before each sample would wake the other process in the middle of what is timed.
"""

from __future__ import annotations

import mmap

_COUNT_BYTES, _TEXT_BYTES = 8, 1016
SIZE = _COUNT_BYTES + _TEXT_BYTES


class Pulse:
    """A counter, and who runs on what.

    Args:
        descriptor: of a file of `SIZE` bytes that both processes have open.
    """

    def __init__(self, descriptor: int) -> None:
        self._cells = mmap.mmap(descriptor, SIZE)
        self._count = 0

    def beat(self, who: str, what: str) -> None:
        """Writes down who runs next, "" for nobody in particular, and on what."""
        text = f"{who}\n{what}".encode()[:_TEXT_BYTES]
        self._cells[_COUNT_BYTES:] = text.ljust(_TEXT_BYTES, b"\0")
        self._count += 1
        self._cells[:_COUNT_BYTES] = self._count.to_bytes(_COUNT_BYTES, "little")

    def read(self) -> tuple[int, str, str]:
        """Returns the count, who runs, and on what."""
        cells = self._cells[:]
        text = cells[_COUNT_BYTES:].rstrip(b"\0").decode(errors="replace")
        who, _, what = text.partition("\n")
        return int.from_bytes(cells[:_COUNT_BYTES], "little"), who, what
