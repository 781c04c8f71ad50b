"""A library that calls the glue of one operator up to a step, to be timed from outside."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

from opwright.build.compile import ensure_built
from opwright.build.glue import glue_text
from opwright.build.load import load
from opwright.build.request import make_request
from opwright.build.store import Store
from opwright.contract.declaration import Declaration

# The steps of probe.c, each with all before it.
STEPS = ("stack", "read", "check", "allocate", "view", "empty launch", "whole call")


def load_probe(unit: Sequence[Declaration], declaration: Declaration, backend: str) -> ctypes._CFuncPtr:
    """Builds and loads the probe of an operator.

    Args:
        unit: the operators that share its source.

    Returns:
        A function of the arguments as the glue takes them, the number of the last step and how many times. It returns
        None, or what is wrong.

    Raises:
        BuildError: there is no compiler, or it refuses the source.
    """
    request = make_request(unit, [backend])
    tables = glue_text(unit, [backend]).replace('#include "glue.h"', '#include "probe.c"')
    name = declaration.name
    text = f"""{tables}
__attribute__((visibility("default"))) const char *opwright_probe(const u64 *given, i32 last, i64 count) {{
  return probe(&{name}_operator, {name}_{backend}_kernels, given, last, count);
}}
"""
    entry, _ = ensure_built(replace(request, glue=text, has_own_runtime=True), Store())
    function = load(entry).handle.opwright_probe
    function.restype = ctypes.c_char_p
    function.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_int32, ctypes.c_int64]
    return function
