"""Readable names of C++ symbols."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def demangle(name: str) -> str:
    """Returns `c10::Error::~Error()` for `_ZN3c105ErrorD1Ev`, and any other name as it is."""
    if not name.startswith("_Z"):
        return name
    return _demangler()(name)


@functools.cache
def _demangler() -> Callable[[str], str]:
    # By ctypes: c++filt comes with a compiler, and a machine that only runs extensions has none.
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return str
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    function = library.__cxa_demangle
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_void_p

    def call(name: str) -> str:
        text = function(name.encode(), None, None, None)
        if not text:
            return name
        try:
            return ctypes.string_at(text).decode(errors="replace")
        finally:
            free(text)

    return call
