"""Is it fast? `opwright.bench(operator)` answers with a record."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

from opwright.records import BenchRecord, CallRecord

if TYPE_CHECKING:
    from opwright.bench.api import bench
    from opwright.bench.call_split import where_a_call_goes

__all__ = ["BenchRecord", "CallRecord", "bench", "where_a_call_goes"]


class _CallableModule(types.ModuleType):
    """The package and the function of the same name at once; see `opwright.verify`."""

    def __call__(self, *args: Any, **kwargs: Any) -> BenchRecord:
        return self.bench(*args, **kwargs)


def __getattr__(name: str) -> Any:  # so that the command starts without PyTorch
    if name in ("bench", "__wrapped__"):  # the latter is whose signature is shown
        from opwright.bench.api import bench

        return bench
    if name == "where_a_call_goes":
        from opwright.bench.call_split import where_a_call_goes

        return where_a_call_goes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = _CallableModule
