"""Rows of a table of measurements: what they are looked up by, which configuration they choose, for which GPU.

Imported here and by the process that measures, which has no Opwright: nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def row_key(
    names: Sequence[str], values: Mapping[str, Any], classes: Sequence[str], write: Callable[[Any], str]
) -> list[str]:
    """Returns what a row is looked up by: the decorator's key arguments, then the dtypes of the pointers in order.

    Args:
        names: The `key` of `@triton.autotune`.
        values: The kernel's arguments by name, defaults among them.
        classes: The class of each argument, in order.
        write: Writes a VALUE text.

    Raises:
        ValueError: A key argument has no text, as a tensor.
    """
    texts = [write(values[name]) for name in names if name in values]
    return texts + [text[1:].removesuffix(":16") for text in classes if text.startswith("*")]


def runs_on(arch: int, gpu: int) -> bool:
    """Whether a GPU runs Triton's kernels of an architecture; below sm_90 newer GPUs of a generation do, too."""
    return arch == gpu or (arch < gpu < 90 and arch // 10 == gpu // 10)


def fastest(microseconds: Sequence[float | None]) -> int:
    """Returns the index of the least time; the first of equals. None is a configuration that cannot run.

    Raises:
        ValueError: None can run.
    """
    times = [(time, index) for index, time in enumerate(microseconds) if time is not None]
    if not times:
        raise ValueError("no configuration can run")
    return min(times)[1]


def make_rows(measured: Iterable[tuple[list[str], Sequence[float | None]]]) -> list[dict[str, Any]]:
    """Returns the rows of a table, sorted by key.

    Cases of one key are added up: the runtime cannot tell them apart, so one configuration serves them all.

    Raises:
        ValueError: A key has no configuration that can run.
    """
    sums: dict[tuple[str, ...], list[float | None]] = {}
    for key, times in measured:
        known = sums.get(tuple(key))
        sums[tuple(key)] = (
            list(times) if known is None else [None if a is None or b is None else a + b for a, b in zip(known, times)]
        )
    return [
        {
            "key": list(key),
            "config": fastest(times),
            "microseconds": [None if time is None else round(time, 3) for time in times],
        }
        for key, times in sorted(sums.items())
    ]
