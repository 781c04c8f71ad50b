"""The cache that the C++ runtime fills and reads: one pack file for each key that was compiled here."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from opwright import settings
from opwright.store_root import make_directory, make_root

from ..worker.packfile import Entry, PackError, read_pack


class Cache:
    """Compiled keys of this machine, by Python, file, function, architecture and key."""

    def __init__(self) -> None:
        self.folder = settings.store_dir() / "triton"
        self._digests: dict[str, str | None] = {}

    def create(self) -> None:
        """Makes the folder, private to its user.

        Raises:
            StoreOwnerError: It belongs to another user: what is in it would be run.
        """
        make_root(self.folder.parent)
        make_directory(self.folder)

    def path(self, python: str, file: str, function: str, arch: int, key: str) -> Path:
        """Returns where a key is kept; the same text is digested in `obtain.cpp`."""
        text = "\n".join([python, "kernel", file, function, str(arch), key])
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.opk"

    def find(self, path: Path, arch: int, key: str) -> list[Entry] | None:
        """Returns what a file of the cache holds, if that is the key and its sources are unchanged."""
        try:
            if path.stat().st_uid != os.geteuid():
                return None
            entries = read_pack(path)
        except (OSError, PackError):
            return None
        kernels = [e for e in entries if e.record.get("key") == key and e.record.get("arch") == arch]
        is_whole = len(kernels) == 1 and len(entries) == 2
        return entries if is_whole and all(self._is_unchanged(e.record["sources"]) for e in entries) else None

    def _is_unchanged(self, sources: list[list[str]]) -> bool:
        return bool(sources) and all(self._digest(path) == digest for path, digest in sources)

    def _digest(self, path: str) -> str | None:
        if path not in self._digests:
            try:
                self._digests[path] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            except OSError:
                self._digests[path] = None
        return self._digests[path]
