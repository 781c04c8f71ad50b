"""Is it fast? `opwright.bench(operator)` answers with a record."""

from __future__ import annotations

import sys
import types
from typing import Any

from opwright.bench.api import bench
from opwright.bench.call_split import where_a_call_goes
from opwright.records import BenchRecord, CallRecord

__all__ = ["BenchRecord", "CallRecord", "bench", "where_a_call_goes"]


class _CallableModule(types.ModuleType):
    """The package and the function of the same name at once; see `opwright.verify`."""

    def __call__(self, *args: Any, **kwargs: Any) -> BenchRecord:
        return bench(*args, **kwargs)


__wrapped__ = bench  # whose signature is shown
sys.modules[__name__].__class__ = _CallableModule
