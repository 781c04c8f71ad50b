"""Is it right? `opwright.verify(operator)` answers with a record."""

from __future__ import annotations

import sys
import types
from typing import Any

from opwright.records import VerifyRecord
from opwright.verify.api import verify

__all__ = ["VerifyRecord", "verify"]


class _CallableModule(types.ModuleType):
    """`opwright.verify` is this package and the function of the same name at once.

    Importing a submodule binds the package's name in `opwright`, over the function; a package that can
    be called is right either way.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> VerifyRecord:
        return verify(*args, **kwargs)


__wrapped__ = verify  # whose signature is shown
sys.modules[__name__].__class__ = _CallableModule
