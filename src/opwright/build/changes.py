"""Notices files that change while compilers read them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from opwright.build.store import digest_of
from opwright.errors import CompileError

_Product = TypeVar("_Product")
_MAX_ATTEMPTS = 8
_TICK_NS = 20_000_000  # times of changes are those of a clock that advances in steps of up to 10 ms


class FileChanged(Exception):
    """A file may have changed after a build began, so its product must not be kept.

    Attributes:
        path: which.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


class Watch:
    """Tells whether files are still what they were when it began, or when they were last looked at.

    A file system may set other times than this machine's clock. A file that seems to be changed is
    therefore compared with itself when it is looked at again, after compilers have run once more.
    """

    def __init__(self) -> None:
        self._began = time.time_ns() - _TICK_NS
        self._seen: dict[Path, tuple[int | str, ...]] = {}

    def look(self, path: Path) -> tuple[str, bool]:
        """Returns the digest of a file, and whether it has been the same file with the same text since then.

        Raises:
            FileChanged: it is gone.
        """
        try:
            digest = digest_of(path.read_bytes())
            info = os.stat(path)
        except FileNotFoundError:
            raise FileChanged(path) from None
        stamp = (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns, digest)
        is_same = info.st_ctime_ns < self._began or self._seen.get(path) == stamp
        self._seen[path] = stamp
        return digest, is_same

    def digests(self, paths: Iterable[Path]) -> dict[Path, str]:
        """Returns the digests of files that compilers have read.

        Raises:
            FileChanged: one of them may have held something else when they did.
        """
        found = {path: self.look(path) for path in paths}
        for path, (_, is_same) in found.items():
            if not is_same:
                raise FileChanged(path)
        return {path: digest for path, (digest, _) in found.items()}


def build_unchanged(subject: str, build: Callable[[Watch], _Product]) -> _Product:
    """Returns what `build` makes in a run during which no file changed.

    Args:
        subject: what errors are about.
        build: reads the sources, and raises FileChanged where the watch says so.

    Raises:
        CompileError: a file changed in each of several runs.
    """
    watch = Watch()
    for _ in range(_MAX_ATTEMPTS):
        try:
            return build(watch)
        except FileChanged as changed:
            path = changed.path
            time.sleep(0.01)  # some editors remove a file before they write it
    raise CompileError(
        subject,
        "a file changed whenever it was compiled",
        rows=[("file", str(path)), ("attempts", str(_MAX_ATTEMPTS))],
        hint="call again when the file is saved",
    )
