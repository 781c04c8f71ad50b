"""The directory of the store: marked as Opwright's, private to its user, with nothing else in it.

The C++ runtime of Triton kernels makes the same one (`native/src/triton/obtain.cpp`).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from opwright.errors import StoreOwnerError

MARKER = "CACHEDIR.TAG"  # https://bford.info/cachedir/: tools for backups skip such a directory
_MARKER_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# Builds of Opwright, made again when they are needed. `opwright cache clean` removes them.
"""


def make_root(root: Path) -> None:
    """Makes the store's directory, and marks it.

    Raises:
        StoreOwnerError: there is a directory of this name that Opwright has not made.
    """
    make_directory(root)
    # Listed before the marker is looked for: another process that makes the store writes the marker first.
    if os.listdir(root):
        check_marker(root)
    else:
        with contextlib.suppress(FileExistsError), open(root / MARKER, "x") as f:
            f.write(_MARKER_TEXT)


def make_directory(path: Path) -> None:
    """Makes a directory of the store, unless it is there.

    Raises:
        StoreOwnerError: it is a link, belongs to another user, or others may write to it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(path)


def check_marker(root: Path) -> None:
    """Raises StoreOwnerError for a directory with files that Opwright has not made."""
    if not (root / MARKER).exists():
        raise StoreOwnerError(
            str(root),
            "the directory has files, and Opwright has not made it",
            rows=[("expected", f"an empty directory, or a cache with its {MARKER}")],
            hint="`export OPWRIGHT_CACHE_DIR=/path/to/another`",
        )


def check_owner(path: Path) -> None:
    """Raises StoreOwnerError for a link, for what belongs to another user, and for what others may write to."""
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise StoreOwnerError(
            str(path),
            "a directory of the cache is a symbolic link or a file",
            rows=[("expected", "a directory"), ("links to", os.path.realpath(path))],
            hint="`export OPWRIGHT_CACHE_DIR=/path/to/another`; that directory itself may be a link",
        )
    if info.st_uid != os.geteuid():
        raise StoreOwnerError(
            str(path),
            "the cache belongs to another user",
            rows=[("owner", str(info.st_uid)), ("you", str(os.geteuid()))],
            hint="`export OPWRIGHT_CACHE_DIR=~/.cache/opwright`",
        )
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreOwnerError(
            str(path),
            "others may write to the cache",
            rows=[("mode", oct(info.st_mode & 0o777)), ("expected", "0o700")],
            hint=f"`chmod -R go-w {path}`",
        )
