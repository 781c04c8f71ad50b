"""The store of builds: content-addressed, safe under any number of processes, never trusted blindly.

    <root>/entries/<request>/<build>/library.so   the library (objects/, extensions/: other products)
                                     record.json  digest, files that were read, compiler, seconds
                                     build.log    what the compilers said
    <root>/headers/<key>/         precompiled headers of extensions
    <root>/support/<key>/         objects that every build of one compiler links, with their digests
    <root>/locks/<request>.lock                   held while a request is built
    <root>/work/<random>/                         a build in progress
    <root>/compilers/                             identities of compilers seen
    <root>/limits/<key>.json                      what a machine can do at best, measured by the benchmark

A *request* is the SHA-256 of everything that is known before the compiler runs: sources, glue, flags,
machine, target ABI. A *build* adds what only the compiler knows: its identity and the files that it
read. So a hit needs no compiler, and several compilers can share a store.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from opwright import settings
from opwright.errors import StoreError, StoreOwnerError

_PRODUCTS = {"entries": "library.so", "objects": "object.o", "extensions": "extension.so"}
_STALE_SECONDS = 24 * 3600  # a work directory this old belongs to a build that was killed


@dataclass(frozen=True)
class BuildRecord:
    """What is kept beside a library.

    Attributes:
        request: the address that it was built for.
        library: SHA-256 of library.so.
        compiler: identity of the compiler; "" when no source needed one.
        files: SHA-256 of each file that was read beside the sources, by path.
        operators: qualified names of the operators inside.
        seconds: how long each step took.
        starts: when each began, in seconds from the beginning of the build.
    """

    request: str
    library: str
    compiler: str
    files: dict[str, str]
    operators: list[str]
    seconds: dict[str, float]
    created: float
    starts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """One build in the store."""

    path: Path
    record: BuildRecord
    product: str = "library.so"

    @property
    def library(self) -> Path:
        """What was built: a library, for some kinds of build an object or a program."""
        return self.path / self.product


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Store:
    """The store under one root. Nothing is created before the first build.

    Args:
        folder: which kind of build: "entries" (libraries of operators), "objects" or "extensions".
    """

    def __init__(self, root: Path | None = None, folder: str = "entries") -> None:
        self.root = root or settings.cache_dir()
        self._folder = folder
        self.product = _PRODUCTS[folder]

    @property
    def identities(self) -> Path:
        """Where identities of compilers are remembered."""
        return self.root / "compilers"

    def find(
        self, request: str, compiler: str | None, roots: Sequence[Path] = (), subject: str = ""
    ) -> Entry | None:
        """Returns a build of `request` that is whole and up to date, or None.

        Args:
            compiler: identity of the compiler here; None accepts a build by any.
            roots: directories that `@0/...`, `@1/...` among the files of a record stand for.
            subject: a build that depends on its name was made under this one.

        Raises:
            StoreOwnerError: the store or the entry belongs to someone else.
        """
        folder = self.root / self._folder / request
        try:
            candidates = sorted(os.listdir(folder))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _store_error(self.root, error) from error
        self._check_owner(self.root)
        self._check_owner(folder)
        for name in candidates:
            entry = self._read(folder / name)
            if entry is None or compiler not in (None, entry.record.compiler):
                continue
            if subject and entry.record.operators not in ([], [subject]):
                continue
            if _is_current(entry, roots):
                return entry
        return None

    def _read(self, path: Path) -> Entry | None:
        try:
            self._check_owner(path)
        except OSError:
            return None
        entry = read_entry(path, self.product)
        # An entry that was copied from another address is whole, and still the wrong library.
        return entry if entry and entry.record.request == path.parent.name else None

    def _check_owner(self, path: Path) -> None:
        info = os.stat(path)
        if info.st_uid != os.geteuid():
            raise StoreOwnerError(
                str(path),
                "the store belongs to another user",
                rows=[("owner", str(info.st_uid)), ("you", str(os.geteuid()))],
                hint="`export OPWRIGHT_CACHE_DIR=~/.cache/opwright`",
            )
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise StoreOwnerError(
                str(path),
                "others may write to the store",
                rows=[("mode", oct(info.st_mode & 0o777)), ("expected", "0o700")],
                hint=f"`chmod -R go-w {self.root}`",
            )

    @contextlib.contextmanager
    def lock(self, request: str, *, wait: bool = True) -> Iterator[bool]:
        """Holds the lock of a request, and yields True. The system releases it when its holder dies.

        Args:
            wait: False: yields False when someone else holds it.

        Raises:
            StoreError: the store cannot be written.
        """
        import filelock

        try:
            self._make(self.root)
            self._make(self.root / "locks")
            lock = filelock.FileLock(self.root / "locks" / f"{request}.lock")
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=-1 if wait else 0)
        except OSError as error:
            raise _store_error(self.root, error) from error
        try:
            yield lock.is_locked
        finally:
            lock.release()

    @contextlib.contextmanager
    def work(self) -> Iterator[Path]:
        """Yields an empty directory to build in; it is gone afterwards, unless it was published.

        Raises:
            StoreError: the disk is full or read-only, also when that shows inside the block.
        """
        path = self.root / "work" / secrets.token_hex(8)
        try:
            self._make(path.parent)
            self._sweep(path.parent)
            path.mkdir(mode=0o700)
            yield path
        except OSError as error:
            raise _store_error(self.root, error) from error
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def publish(self, work: Path, request: str, record: BuildRecord) -> Entry:
        """Moves a finished build into place, all at once."""
        (work / "record.json").write_text(json.dumps(asdict(record)))
        for name in (self.product, "record.json"):
            with open(work / name, "rb") as f:
                os.fsync(f.fileno())
        folder = self.root / self._folder / request
        self._make(folder.parent)
        self._make(folder)
        target = folder / _build_name(record)
        if target.exists():  # an earlier build that was found damaged or out of date
            doomed = self.root / "work" / secrets.token_hex(8)
            target.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        work.rename(target)
        return Entry(target, record, self.product)

    def alias(self, entry: Entry, request: str, compiler: str) -> None:
        """Makes a build the answer to another request too, one for a part of it, where it has none yet."""
        record = replace(entry.record, request=request, compiler=compiler)
        with self.work() as staged:
            os.link(entry.library, staged / "library.so")
            (staged / "record.json").write_text(json.dumps(asdict(record)))
            target = self.root / "entries" / request / _build_name(record)
            self._make(target.parent)
            with contextlib.suppress(OSError):  # there is one
                staged.rename(target)

    def support(self, key: str) -> Path | None:
        """Returns the directory of the objects that every build links, or None when it is not whole."""
        folder = self.root / "support" / key
        try:
            self._check_owner(folder)
            digests = json.loads((folder / "digests.json").read_bytes())
            whole = all(digest_of((folder / name).read_bytes()) == d for name, d in digests.items())
        except (OSError, ValueError, TypeError, AttributeError):  # missing, no JSON, another layout
            return None
        return folder if whole else None

    def publish_support(self, work: Path, key: str, names: Sequence[str]) -> Path:
        """Moves freshly built objects into place, and returns where they are."""
        staged = self.root / "work" / secrets.token_hex(8)
        target = self.root / "support" / key
        self._make(target.parent)
        staged.mkdir(mode=0o700)
        digests = {}
        for name in names:
            (work / name).rename(staged / name)
            digests[name] = digest_of((staged / name).read_bytes())
        (staged / "digests.json").write_text(json.dumps(digests))
        try:
            if target.exists() and self.support(key) is None:
                target.rename(self.root / "work" / secrets.token_hex(8))  # damaged
            staged.rename(target)
        except OSError:  # another build was first
            if self.support(key) is None:
                raise
            shutil.rmtree(staged, ignore_errors=True)
        return target

    def entries(self) -> Iterator[Entry]:
        """Yields every whole entry."""
        for path in sorted((self.root / self._folder).glob("*/*")):
            entry = self._read(path)
            if entry:
                yield entry

    def size_bytes(self) -> int:
        """Returns the bytes that the store takes."""
        return sum(p.stat().st_size for p in self.root.rglob("*") if p.is_file())

    def prune(self, older_than_days: float) -> int:
        """Removes entries made before that many days ago and what killed builds left; returns a count."""
        count = 0
        limit = time.time() - older_than_days * 86400
        for path in [path for folder in _PRODUCTS for path in (self.root / folder).glob("*/*")]:
            entry = read_entry(path, _PRODUCTS[path.parent.parent.name])
            if entry is None or entry.record.created < limit:
                shutil.rmtree(path, ignore_errors=True)
                count += 1
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
        for path in (self.root / "headers").glob("*"):
            with contextlib.suppress(OSError):
                if (path / "prefix.h").stat().st_mtime < limit:  # its last use
                    shutil.rmtree(path, ignore_errors=True)
                    count += 1
        self._sweep(self.root / "work")
        return count

    def clean(self) -> int:
        """Removes every entry; returns how many there were."""
        count = sum(len(list((self.root / folder).glob("*/*"))) for folder in _PRODUCTS)
        for name in (*_PRODUCTS, "headers", "work", "compilers", "support", "limits"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        return count

    def _make(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_owner(path)

    def _sweep(self, work: Path) -> None:
        for path in work.glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)


def read_entry(path: Path, product: str = "library.so") -> Entry | None:
    """Returns the build in a directory, or None when it is not whole."""
    try:
        record = BuildRecord(**json.loads((path / "record.json").read_bytes()))
        whole = digest_of((path / product).read_bytes()) == record.library
    except (OSError, ValueError, TypeError, AttributeError):  # missing, no JSON, another layout
        return None
    return Entry(path, record, product) if whole else None


def _build_name(record: BuildRecord) -> str:
    parts = [record.compiler, record.files, *record.operators]
    return digest_of(json.dumps(parts).encode())[:32]


def _is_current(entry: Entry, roots: Sequence[Path]) -> bool:
    for name, digest in entry.record.files.items():
        try:
            if digest_of(_resolve(name, roots).read_bytes()) != digest:
                return False
        except OSError:
            return False
    return True


def _resolve(name: str, roots: Sequence[Path]) -> Path:
    if not name.startswith("@"):
        return Path(name)
    number, _, rest = name[1:].partition("/")
    return roots[int(number)] / rest


def _store_error(root: Path, error: OSError) -> StoreError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return StoreError(
        str(root),
        "the disk of the store is full" if full else "the store cannot be written",
        rows=[("reason", error.strerror or str(error)), ("at", str(error.filename or root))],
        hint="`opwright cache prune`" if full else "`export OPWRIGHT_CACHE_DIR=/a/directory/of/yours`",
    )
