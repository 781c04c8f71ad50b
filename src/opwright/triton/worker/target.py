"""Compiles for a target that is not the machine's, beside a host that may be using Triton for its own at the same time.

Triton reads the target from the active driver in two modules of its language (`target_info`, `semantic`), and whether to
keep line information from its settings, which are the process's. Both get objects here that answer for the
compiling thread only; every other thread sees what was there before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _TargetDriver:
    """An active driver that knows its target and can do nothing."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target


class _DriverOfThread:
    """Stands in for `triton.runtime.driver`."""

    def __init__(self, driver: Any, target: Any) -> None:
        self._driver = driver
        self._ours = _TargetDriver(target)
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name == "active" and threading.get_ident() == self._thread:
            return self._ours
        return getattr(self._driver, name)


class _TrueInThread:
    """Stands in for a setting that is a bool."""

    def __init__(self, otherwise: bool) -> None:
        self._otherwise = otherwise
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread or self._otherwise


@contextmanager
def compiling_for(target: Any) -> Iterator[dict[str, str]]:
    """Makes this thread compile for a target and without line information.

    Line information doubles the time and the size; TRITON_DISABLE_LINE_INFO=0 keeps it.

    Yields:
        The environment variables that belong to the key of Triton's own cache.
    """
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.language import semantic, target_info

    variables = dict(get_cache_invalidating_env_vars())
    modules = [module for module in (semantic, target_info) if hasattr(module, "driver")]
    drivers = [module.driver for module in modules]
    settings = vars(knobs.compilation)
    strips = os.environ.get("TRITON_DISABLE_LINE_INFO", "") not in ("0", "false", "off")
    previous = {name: settings[name] for name in ("disable_line_info",) if name in settings}
    try:
        for module, driver in zip(modules, drivers):
            module.driver = _DriverOfThread(driver, target)
        if strips:
            # Written past the attribute, whose setter would also set the variable for the whole process.
            settings["disable_line_info"] = _TrueInThread(bool(knobs.compilation.disable_line_info))
            variables["TRITON_DISABLE_LINE_INFO"] = "true"
        yield variables
    finally:
        for module, driver in zip(modules, drivers):
            module.driver = driver
        if strips:
            settings.pop("disable_line_info")
            settings.update(previous)
