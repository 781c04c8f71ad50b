"""opwright cache"""

from __future__ import annotations

from cyclopts import App

from opwright.cli.console import say

cache_app = App(name="cache")


def _store():
    from opwright.build.store import Store

    return Store()


@cache_app.command
def dir() -> int:
    """Print where the store is."""
    print(_store().root)
    return 0


@cache_app.command
def size() -> int:
    """Print how many bytes the store takes."""
    print(_store().size_bytes())
    return 0


@cache_app.command
def prune(*, days: float = 30.0) -> int:
    """Remove old builds, damaged ones, and what interrupted builds left behind.

    Args:
        days: Remove builds made before that many days ago.
    """
    count = _store().prune(days)
    say(f"Removed {count} {'build' if count == 1 else 'builds'}")
    return 0


@cache_app.command
def clean() -> int:
    """Remove every build. They are made again when they are needed."""
    count = _store().clean()
    say(f"Removed {count} {'build' if count == 1 else 'builds'}")
    return 0
