"""Puts what was built into the caller's `build_directory`, from which it is loaded.

The path that `load` returns, a module's `__file__` and `$ORIGIN` are then one place. `import` and
`torch.ops.load_library` of that path find the library that is loaded, and do not load another copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from opwright.build.store import Entry, digest_of
from opwright.errors import ExtensionError

_loaded: dict[Path, str] = {}  # digests of the libraries that this process has loaded, by path


@contextlib.contextmanager
def put(entry: Entry, folder: Path, name: str, *, is_program: bool) -> Iterator[Path]:
    """Puts a copy into a directory, and yields its path; no other process replaces it inside the block.

    `<name>.so` is always the newest version. The loader takes a path that it has seen before for the library that
    was there then, so a later version in the same process is also put beside it as `<name>_v1.so`, as PyTorch does.

    Raises:
        ExtensionError: the directory cannot be written.
    """
    suffix = "" if is_program else ".so"
    newest = name + suffix
    folder = _make(folder, newest)
    with _alone_in(folder):
        names = itertools.chain([newest], (f"{name}_v{number}{suffix}" for number in itertools.count(1)))
        file = next(file for file in names if is_program or _is_free(folder / file, entry))
        for each in {newest, file}:
            _put(entry, folder, each)
        yield folder / file
        if not is_program:
            _loaded[folder / file] = entry.record.library


def _make(folder: Path, name: str) -> Path:
    """Makes a directory; returns its real path, by which `torch.ops.load_library` calls what lies in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _error(name, folder, error) from error
    return Path(os.path.realpath(folder))


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keeps other processes from putting their version into a directory before this one has loaded its own."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a directory that cannot be read; a network's, which may have no locks
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _is_free(path: Path, entry: Entry) -> bool:
    """Returns whether loading a path would load this library: nothing else was loaded from there."""
    if path in _loaded:
        return _loaded[path] == entry.record.library
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
    except OSError:
        return True
    return _holds(path, entry)  # someone else has loaded it


def _holds(path: Path, entry: Entry) -> bool:
    try:
        return digest_of(path.read_bytes()) == entry.record.library
    except OSError:
        return False


def _put(entry: Entry, folder: Path, name: str) -> None:
    """Puts a copy into a directory, all at once: a process that has the old file open keeps it."""
    if _holds(folder / name, entry):
        return
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        os.close(handle)
        shutil.copy(entry.library, temporary)
        os.replace(temporary, folder / name)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise _error(name, folder, error) from error


def _error(name: str, folder: Path, error: OSError) -> ExtensionError:
    return ExtensionError(
        name,
        "it cannot be put into `build_directory`",
        rows=[("got", str(folder)), ("reason", error.strerror or str(error))],
        hint="another `build_directory`, or none: it is in the cache",
    )
