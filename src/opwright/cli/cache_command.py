"""opwright cache"""

from __future__ import annotations

from opwright.cli.console import say
from opwright.cli.help import make_app
from opwright.errors import plural

cache_app = make_app("cache")


def _store():
    from opwright.build.store import Store

    return Store()


@cache_app.command
def dir() -> int:
    """Print where the store is."""
    print(_store().root)
    return 0


@cache_app.command
def size(*, bytes: bool = False) -> int:
    """Print how much space the store takes.

    Args:
        bytes: Print the number of bytes, for a script.
    """
    size = _store().size_bytes()
    print(size if bytes else f"{size / 2**20:.1f} MiB")
    return 0


@cache_app.command
def prune(*, days: float = 30.0) -> int:
    """Remove old builds, damaged ones, and what interrupted builds left behind.

    Args:
        days: Remove builds made before that many days ago.
    """
    count = _store().prune(days)
    say(f"Removed {plural(count, 'build')}")
    return 0


@cache_app.command
def clean() -> int:
    """Remove every build. They are made again when they are needed."""
    count = _store().clean()
    say(f"Removed {plural(count, 'build')}")
    return 0
