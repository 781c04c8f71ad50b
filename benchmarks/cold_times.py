"""Times on a GPU whose second-level cache is cold."""

from __future__ import annotations

from collections.abc import Callable

import triton


def micros(call: Callable[[], object], rep: int = 80) -> float:
    """Returns the median time of a call in microseconds; `rep` milliseconds are measured."""
    return 1000 * triton.testing.do_bench(call, warmup=20, rep=rep, return_mode="median")
