"""The settings of Opwright: environment variables, each the twin of a flag.

OPWRIGHT_CACHE_DIR        --cache-dir        where builds are kept
OPWRIGHT_CXX              --cxx              the C++ compiler
OPWRIGHT_CXXFLAGS         --cxxflags         flags added after Opwright's own
OPWRIGHT_JOBS             --jobs             compilers running at the same time
OPWRIGHT_REQUIRE_KERNELS  --require-kernels  1: a kernel that cannot be built is an error
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from opwright.errors import SettingError


def cache_dir() -> Path:
    """Returns the directory of the store; nothing is created."""
    named = os.environ.get("OPWRIGHT_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("opwright"))


def cxx() -> str | None:
    """Returns the compiler that the user named, if any."""
    return os.environ.get("OPWRIGHT_CXX") or None


def cxxflags() -> tuple[str, ...]:
    """Returns the user's additional compiler flags."""
    return tuple(shlex.split(os.environ.get("OPWRIGHT_CXXFLAGS", "")))


def jobs() -> int:
    """Returns how many compilers may run at the same time."""
    text = os.environ.get("OPWRIGHT_JOBS")
    if not text:
        return os.cpu_count() or 1
    if not text.isdigit() or int(text) < 1:
        raise SettingError("OPWRIGHT_JOBS", "must be a positive number", rows=[("got", repr(text))])
    return int(text)


def require_kernels() -> bool:
    """Returns whether a kernel that cannot be built is an error."""
    text = os.environ.get("OPWRIGHT_REQUIRE_KERNELS", "0").lower()
    if text in ("0", "", "false", "no"):
        return False
    if text in ("1", "true", "yes"):
        return True
    raise SettingError("OPWRIGHT_REQUIRE_KERNELS", "must be 0 or 1", rows=[("got", repr(text))])
