"""opwright cache"""

from __future__ import annotations

import math
import re

from opwright.cli.console import say
from opwright.cli.help import make_app
from opwright.errors import CheckError, plural

cache_app = make_app("cache")


def _store():
    from opwright.build.store import Store

    return Store()


@cache_app.command
def dir() -> int:
    """Print where the cache is."""
    print(_store().root)
    return 0


@cache_app.command
def size(*, bytes: bool = False) -> int:
    """Print how much space the cache takes.

    Args:
        bytes: Print the number of bytes, for a script.
    """
    size = _store().size_bytes()
    print(size if bytes else f"{size / 2**20:.1f} MiB")
    return 0


@cache_app.command
def prune(*, days: float = 30.0, max_size: str = "") -> int:
    """Remove old builds, damaged ones, and what interrupted builds left behind.

    Args:
        days: Remove builds made before that many days ago.
        max_size: Then remove the builds used least recently, until the cache takes at most this, such as 500MB.
    """
    if not math.isfinite(days) or days < 0:
        raise CheckError(
            "--days",
            f"invalid value `{days:g}`",
            rows=[("expected", "a finite number, 0 or more")],
            hint="`opwright cache prune --days 30`",
        )
    max_bytes = _bytes_of(max_size) if max_size else None
    count = _store().prune(days)
    if max_bytes is not None:
        count += _store().shrink(max_bytes)
    say(f"Removed {plural(count, 'build')}")
    return 0


def _bytes_of(text: str) -> int:
    """Returns the bytes of `500MB` or `1.5 GiB`; `0` needs no unit.

    Raises:
        CheckError: this is not a size with a unit.
    """
    if text.strip() == "0":
        return 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kMGT]?)(i?)B", text.strip(), re.IGNORECASE)
    if found is None:
        raise CheckError(
            "--max-size",
            f"invalid value `{text}`",
            rows=[("expected", "a number and a unit, as 500MB or 2GiB, or 0")],
            hint="`opwright cache prune --max-size 500MB`",
        )
    number, prefix, is_binary = found.groups()
    return int(float(number) * (1024 if is_binary else 1000) ** " kmgt".index(prefix.lower() or " "))


@cache_app.command
def clean() -> int:
    """Remove every build. They are made again when they are needed."""
    count = _store().clean()
    say(f"Removed {plural(count, 'build')}")
    return 0
