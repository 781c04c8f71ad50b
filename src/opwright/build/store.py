"""The store of builds: content-addressed, safe under any number of processes, never trusted blindly.

    <root>/CACHEDIR.TAG                           marks the directory as the store's
    <root>/entries/<request>/<build>/library.so   the library (objects/, extensions/: other products)
                                     record.json  digest, files that were read, compiler, seconds
                                     build.log    what the compilers said
    <root>/headers/<key>/         precompiled headers of extensions
    <root>/support/<key>/         objects that every build of one compiler links, with their digests
    <root>/locks/<request>.lock                   held while a request is built
    <root>/work/build-<random>/                   a build in progress, which holds build-<random>.lock
    <root>/compilers/                             identities of compilers seen
    <root>/limits/<key>.json                      what a machine can do at best, measured by the benchmark
    <root>/triton/<key>.opk                       a compiled Triton kernel, or the description of one

A *request* is the SHA-256 of everything that is known before the compiler runs: sources, glue, flags,
machine, target ABI. A *build* adds what only the compiler knows: its identity and the files that it
read. So a hit needs no compiler, and several compilers can share a store.

The root is a directory of the store alone, inside the one that OPWRIGHT_CACHE_DIR names. Only what has the form
of the store's own names is ever removed, and symbolic links are not followed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from opwright import settings
from opwright.errors import BuildError, StoreError
from opwright.store_root import check_marker, check_owner, make_directory, make_root

_PRODUCTS = {"entries": "library.so", "objects": "object.o", "extensions": "extension.so"}
_STALE_SECONDS = 24 * 3600  # a work directory this old, and not locked, belongs to a build that was killed

# The forms of the names that the store makes. Nothing else is removed.
_REQUEST, _BUILD, _WORK = r"[0-9a-f]{40}", r"[0-9a-f]{32}", r"build-[0-9a-f]{16}"
_LOCK = _WORK + r"\.lock"
_FILES = {
    "compilers": r"([0-9a-f]{32}|host-[\w-]+)(\.\d+)?",
    "limits": r"[0-9a-f]{32}\.([0-9a-f]{8}|json)",
    "triton": r"[0-9a-f]{32}\.opk|\.[0-9a-f]{32}\.opk\.\w+",
}


# Named tuples, which are made in a tenth of a dataclass's time: every process that loads a build makes them.


class BuildRecord(NamedTuple):
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
    starts: Mapping[str, float] = {}


class Entry(NamedTuple):
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
        self.root = root or settings.store_dir()
        self._folder = folder
        self.product = _PRODUCTS[folder]

    @property
    def identities(self) -> Path:
        """Where identities of compilers are remembered."""
        return self.root / "compilers"

    def find(self, request: str, compiler: str | None, roots: Sequence[Path] = (), subject: str = "") -> Entry | None:
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
        for place in (self.root, folder.parent, folder):
            check_owner(place)
        for name in candidates:
            entry = self._described(folder / name)
            if entry is None or compiler not in (None, entry.record.compiler):
                continue
            if subject and entry.record.operators not in ([], [subject]):
                continue
            if is_current(entry, roots) and is_whole(entry):  # last, as it reads the library
                with contextlib.suppress(OSError):  # a store that others fill may be read-only
                    os.utime(entry.path / "record.json")  # for `shrink`
                return entry
        return None

    def _described(self, path: Path) -> Entry | None:
        """Returns the build that a record describes; it may be damaged."""
        try:
            check_owner(path)
        except OSError:
            return None
        entry = described_entry(path, self.product)
        # An entry that was copied from another address is whole, and still the wrong library.
        return entry if entry and entry.record.request == path.parent.name else None

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
            make_root(self.root)
            make_directory(self.root / "locks")
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
            BuildError: another file cannot be used inside the block.
        """
        import filelock

        path = self.root / "work" / f"build-{os.urandom(8).hex()}"
        lock = filelock.FileLock(f"{path}.lock")
        try:
            make_root(self.root)
            make_directory(path.parent)
            self._sweep(_STALE_SECONDS)
            lock.acquire()  # what is locked is in use, however old it looks
            path.mkdir(mode=0o700)
            yield path
        except OSError as error:
            raise _store_error(self.root, error) from error
        finally:
            shutil.rmtree(path, ignore_errors=True)
            if lock.is_locked:
                with contextlib.suppress(OSError):
                    os.unlink(lock.lock_file)
                lock.release()

    def publish(self, work: Path, request: str, record: BuildRecord) -> Entry:
        """Moves a finished build into place, all at once."""
        (work / "record.json").write_text(json.dumps(record._asdict()))
        for name in (self.product, "record.json"):
            with open(work / name, "rb") as f:
                os.fsync(f.fileno())
        target = self.root / self._folder / request / _build_name(record)
        if target.exists():  # an earlier build that was found damaged or out of date
            self._discard(target)
        self.put(work, target)
        return Entry(target, record, self.product)

    def put(self, staged: Path, target: Path) -> None:
        """Moves a finished directory into its place, all at once."""
        while True:
            for folder in (target.parent.parent, target.parent):
                make_directory(folder)
            try:
                staged.rename(target)
                return
            except FileNotFoundError:  # `clean` has removed the empty folder just now
                if not staged.exists():
                    raise

    def alias(self, entry: Entry, request: str, compiler: str) -> None:
        """Makes a build the answer to another request too, one for a part of it, where it has none yet."""
        record = entry.record._replace(request=request, compiler=compiler)
        with self.work() as staged:
            try:
                os.link(entry.library, staged / "library.so")
            except OSError:  # a file system without hard links
                shutil.copyfile(entry.library, staged / "library.so")
            (staged / "record.json").write_text(json.dumps(record._asdict()))
            with contextlib.suppress(OSError):  # there is one
                self.put(staged, self.root / "entries" / request / _build_name(record))

    def support(self, key: str) -> Path | None:
        """Returns the directory of the objects that every build links, or None when it is not whole."""
        folder = self.root / "support" / key
        try:
            check_owner(folder)
            digests = json.loads((folder / "digests.json").read_bytes())
            whole = all(digest_of((folder / name).read_bytes()) == d for name, d in digests.items())
        except (OSError, ValueError, TypeError, AttributeError):  # missing, no JSON, another layout
            return None
        return folder if whole else None

    def publish_support(self, work: Path, key: str, names: Sequence[str]) -> Path:
        """Moves freshly built objects into place, and returns where they are."""
        target = self.root / "support" / key
        with self.work() as staged:
            digests = {}
            for name in names:
                (work / name).rename(staged / name)
                digests[name] = digest_of((staged / name).read_bytes())
            (staged / "digests.json").write_text(json.dumps(digests))
            try:
                if target.exists() and self.support(key) is None:
                    self._discard(target)  # damaged
                self.put(staged, target)
            except OSError:  # another build was first
                if self.support(key) is None:
                    raise
        return target

    def entries(self) -> Iterator[Entry]:
        """Yields every whole entry."""
        for path in self._builds(self._folder):
            entry = self._described(path)
            if entry and is_whole(entry):
                yield entry

    def size_bytes(self) -> int:
        """Returns the bytes that the store takes."""
        return _size_of(self.root) if self._exists() else 0

    def prune(self, older_than_days: float) -> int:
        """Removes entries made before that many days ago and what killed builds left; returns a count.

        Raises:
            StoreError: the store cannot be written.
            StoreOwnerError: the store's directory is not the store's.
        """
        count = 0
        limit = time.time() - older_than_days * 86400
        for folder, product in _PRODUCTS.items():
            for path in self._builds(folder):
                entry = described_entry(path, product)
                if entry is None or entry.record.created < limit or not is_whole(entry):
                    count += self._remove(path)
        for path in self._named("headers", _REQUEST):
            with contextlib.suppress(OSError):
                if (path / "prefix.h").stat().st_mtime < limit:  # its last use
                    count += self._remove(path)
        for path in self._named("triton", _FILES["triton"], is_file=True):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < limit:
                    count += self._remove(path)
        self._sweep(_STALE_SECONDS)
        return count

    def shrink(self, max_bytes: int) -> int:
        """Removes what was used least recently, until the store takes at most so many bytes; returns a count.

        Raises:
            StoreError: the store cannot be written.
            StoreOwnerError: the store's directory is not the store's.
        """
        found: list[tuple[float, Path]] = []
        for path in [path for folder in _PRODUCTS for path in self._builds(folder)]:
            found.append((_last_use(path / "record.json"), path))
        found += [(_last_use(path / "prefix.h"), path) for path in self._named("headers", _REQUEST)]
        for path in self._named("triton", _FILES["triton"], is_file=True):
            # No one touches these; the system notes when they were read, on most file systems once a day.
            found.append((max(_last_use(path), _last_use(path, "st_atime")), path))
        total, count = self.size_bytes(), 0
        for _, path in sorted(found):
            if total <= max_bytes:
                break
            size = _size_of(path)
            if self._remove(path):
                total -= size
                count += 1
        return count

    def clean(self) -> int:
        """Removes every entry, except builds in progress; returns how many there were.

        Raises:
            StoreError: the store cannot be written.
            StoreOwnerError: the store's directory is not the store's.
        """
        count = sum(self._remove(path) for folder in _PRODUCTS for path in self._builds(folder))
        for folder in ("headers", "support"):
            for path in self._named(folder, _REQUEST):
                self._remove(path)
        for folder, form in _FILES.items():
            for path in self._named(folder, form, is_file=True):
                self._remove(path)
        self._sweep(0)
        return count

    def drop_oldest_headers(self, kept: int) -> None:
        """Removes precompiled headers, except those that were used last."""

        def used(path: Path) -> float:
            try:
                return (path / "prefix.h").stat().st_mtime
            except OSError:
                return time.time()

        for path in sorted(self._named("headers", _REQUEST), key=used, reverse=True)[kept:]:
            self._remove(path)

    def check(self) -> None:
        """Raises StoreOwnerError if builds cannot go into what is there."""
        if self._exists():
            for folder in (*_PRODUCTS, "headers", "support", "locks", "work", "compilers", "triton"):
                with contextlib.suppress(FileNotFoundError):
                    check_owner(self.root / folder)

    def _exists(self) -> bool:
        """Returns whether there is a store; one that is not Opwright's is an error."""
        if not os.path.lexists(self.root):
            return False
        check_owner(self.root)
        if os.listdir(self.root):
            check_marker(self.root)
        return True

    # --- what there is to remove --------------------------------------------------------------------------

    def _named(self, folder: str, form: str, *, is_file: bool = False) -> list[Path]:
        """Returns what lies in a folder of the store and has a name of the store; links are skipped."""
        place = self.root / folder
        return _listed(place, form, is_file) if self._exists() and not place.is_symlink() else []

    def _builds(self, folder: str) -> list[Path]:
        return [path for request in self._named(folder, _REQUEST) for path in _listed(request, _BUILD)]

    def _remove(self, path: Path) -> bool:
        """Removes a file or a directory; returns whether it is gone.

        Raises:
            StoreError: the store cannot be written.
        """
        is_folder = path.is_dir()
        try:
            shutil.rmtree(path) if is_folder else path.unlink()
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                # What `rmtree` names has no folder.
                raise _store_error(self.root, OSError(error.errno, error.strerror, str(path))) from error
            # Another process removes it at the same time, or has its library open on a network file system.
            shutil.rmtree(path, ignore_errors=True)
        if is_folder:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # the last build of a request
        return not path.exists()

    def _discard(self, path: Path) -> None:
        """Takes a directory out of its place, all at once."""
        doomed = self.root / "work" / f"build-{os.urandom(8).hex()}"
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _sweep(self, age_seconds: float) -> None:
        """Removes what killed builds left in `work`. Their locks are free: the system releases those of the dead."""
        import filelock

        left = {path.with_suffix("") for path in self._named("work", _LOCK, is_file=True)}
        for path in left.union(self._named("work", _WORK)):
            lock = f"{path}.lock"
            with contextlib.suppress(OSError, filelock.Timeout):
                age = time.time() - os.lstat(path if path.exists() else lock).st_mtime
                if age < age_seconds:
                    continue
                with filelock.FileLock(lock, timeout=0):
                    shutil.rmtree(path, ignore_errors=True)
                    os.unlink(lock)


def _size_of(path: Path) -> int:
    """Returns the bytes of a file, or of the files in a directory; links are not followed."""
    files = [path] if path.is_file() else [os.path.join(folder, n) for folder, _, names in os.walk(path) for n in names]
    total = 0
    for file in files:
        with contextlib.suppress(OSError):  # removed at this moment
            total += os.lstat(file).st_size
    return total


def _last_use(path: Path, time: str = "st_mtime") -> float:
    """Returns when what a file stands for was used last; 0, the first to go, where there is no such file."""
    try:
        return getattr(path.stat(), time)
    except OSError:
        return 0.0


def _listed(folder: Path, form: str, is_file: bool = False) -> list[Path]:
    try:
        with os.scandir(folder) as found:
            return sorted(
                Path(entry.path)
                for entry in found
                if re.fullmatch(form, entry.name)
                and (entry.is_file if is_file else entry.is_dir)(follow_symlinks=False)
            )
    except OSError:
        return []


def described_entry(path: Path, product: str = "library.so") -> Entry | None:
    """Returns the build in a directory, or None when it has no record."""
    try:
        return Entry(path, BuildRecord(**json.loads((path / "record.json").read_bytes())), product)
    except (OSError, ValueError, TypeError):  # missing, no JSON, another layout
        return None


def is_whole(entry: Entry) -> bool:
    """Returns whether what was built is there and undamaged."""
    try:
        return digest_of(entry.library.read_bytes()) == entry.record.library
    except OSError:
        return False


def _build_name(record: BuildRecord) -> str:
    parts = [record.compiler, record.files, *record.operators]
    return digest_of(json.dumps(parts).encode())[:32]


def is_current(entry: Entry, roots: Sequence[Path] = ()) -> bool:
    """Returns whether the files that a build has read are what they were then."""
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


def _store_error(root: Path, error: OSError) -> BuildError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_named = error.filename and not isinstance(error.filename, int)  # a file descriptor
    place = Path(os.fsdecode(error.filename if is_named else root))
    roots = (root, Path(os.path.realpath(root)))
    is_elsewhere = place.is_absolute() and not any(place.is_relative_to(r) or r.is_relative_to(place) for r in roots)
    if is_elsewhere and not full:
        return BuildError(
            str(place),
            "the build cannot use this file",
            rows=[("reason", error.strerror or str(error))],
            hint=f"`ls -l {place}` shows who may read or run it",
        )
    if is_elsewhere:
        return StoreError(
            str(place),
            "the disk of temporary files is full",
            rows=[("cache", f"{root}, which has space")],
            hint="`export TMPDIR=/a/larger/disk`",
        )
    return StoreError(
        str(root),
        "the disk of the cache is full" if full else "the cache cannot be written",
        rows=[("reason", error.strerror or str(error)), ("at", str(place))],
        hint="`opwright cache prune`" if full else "`export OPWRIGHT_CACHE_DIR=/path/to/another`",
    )
