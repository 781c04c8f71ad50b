"""A store for many machines: builds behind a URL of fsspec, fetched by their request, checked, and published locally.

    <url>/entries/<request>.zip       library.so, record.json, build.log, and a signature where there is a key
    <url>/claims/<request>/<random>   written by the machine that builds, while it does

What is fetched counts for nothing until it is checked: the digest of the library, the files that it was built from, the
compiler, and the signature where a key is set. A store that cannot be reached, or lies, is a warning and a local build.

Of machines that miss a build at the same time the one with the earliest claim builds it, and the others wait for its
archive. Times are those of the shared store, in whole seconds: so each waits for one before it looks who was first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import secrets
import time
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from opwright import settings
from opwright.build.store import BuildRecord, Entry, Store, digest_of, is_current
from opwright.errors import SettingError

_SIGNED = b"opwright build\n"  # signed with the record, so that no signature made for another purpose fits
_LIBRARY, _RECORD, _LOG, _SIGNATURE = "library.so", "record.json", "build.log", "signature"
_POLL_SECONDS = _SETTLE_SECONDS = 1.0
_MAX_CLAIM_SECONDS = 900.0  # a machine that has died leaves its claim
_MAX_BYTES = 2**30


class RemoteStore:
    """The store behind a URL.

    Args:
        url: of fsspec: a path, `s3://bucket/prefix`, `gs://...`, `https://...`, which is read only.
        may_write: whether builds made here are written.
    """

    def __init__(self, url: str, may_write: bool) -> None:
        self._url, self._is_lost = url.rstrip("/"), False
        self._may_write = may_write and not url.startswith(("http://", "https://"))

    @functools.cached_property
    def _files(self) -> tuple[Any, str]:
        """The file system and the path of the URL in it."""
        from fsspec.core import url_to_fs

        return url_to_fs(self._url, use_listings_cache=False)

    def fetch(self, store: Store, request: str, compiler: str | None) -> Entry | None:
        """Returns a build from there, published here; None where there is none that fits.

        Args:
            compiler: identity of the compiler here; None accepts a build by any.
        """
        archive = self._read(request)
        if archive is None:
            return None
        try:
            record, library, log = _check(archive, request)
        except _Refused as refused:
            self._warn(f"its build {request} is not used: {refused}")
            return None
        entry = Entry(Path(), record)
        if compiler not in (None, record.compiler) or not is_current(entry):
            return None
        with store.work() as work:
            (work / _LIBRARY).write_bytes(library)
            (work / _LOG).write_bytes(log)
            return store.publish(work, request, record)

    @contextlib.contextmanager
    def claim(self, store: Store, request: str, compiler: str | None) -> Iterator[Entry | None]:
        """Yields what another machine, which was first, has built; None: it is to be built here."""
        if not self._may_write or self._is_lost:
            yield None
            return
        own = secrets.token_hex(8)
        folder = self._path("claims", request)
        try:
            self._write(f"{folder}/{own}", b"", is_staged=False)
            yield self._await(store, request, compiler, folder, own)
        finally:
            with contextlib.suppress(Exception):  # of the library for that store; a claim that is left ends by itself
                self._files[0].rm_file(f"{folder}/{own}")

    def _await(self, store: Store, request: str, compiler: str | None, folder: str, own: str) -> Entry | None:
        deadline = time.monotonic() + _MAX_CLAIM_SECONDS
        time.sleep(_SETTLE_SECONDS)
        while time.monotonic() < deadline and not self._is_lost:
            first = self._first_claim(folder)
            entry = self.fetch(store, request, compiler)
            if entry is not None or first == own:
                return entry
            time.sleep(_POLL_SECONDS)
            archive, claim = self._archive(request), f"{folder}/{first}"
            # By another compiler, for example. The machine with the claim replaces it, and then drops the claim.
            does_not_fit = self._exists(archive)
            while first and time.monotonic() < deadline and self._exists(claim):
                if not does_not_fit and self._exists(archive):
                    break
                time.sleep(_POLL_SECONDS)
        return None

    def _first_claim(self, folder: str) -> str:
        """Returns the name of the earliest claim that is not too old; "" if claims have changed meanwhile."""
        with self._reported("cannot be listed"), contextlib.suppress(FileNotFoundError):
            found = {
                entry["name"].rsplit("/", 1)[-1]: self._modified(entry) for entry in self._files[0].ls(folder, True)
            }
            latest = max(found.values(), default=0.0)  # by the clock that claims have: it is about now
            recent = [name for name, at in found.items() if at > latest - _MAX_CLAIM_SECONDS]
            return min(recent, key=lambda name: (int(found[name]), name), default="")
        return ""

    def _modified(self, entry: dict[str, Any]) -> float:
        """Returns when a file was written, in seconds; most listings have it, under a name of their own."""
        at = next((entry[name] for name in ("mtime", "LastModified", "updated") if name in entry), None)
        at = self._files[0].modified(entry["name"]) if at is None or isinstance(at, str) else at
        return at.timestamp() if hasattr(at, "timestamp") else float(at)

    def _exists(self, path: str) -> bool:
        with self._reported("cannot be read"):
            return self._files[0].exists(path)
        return False

    def push(self, entry: Entry) -> bool:
        """Writes a build there; returns whether it was written."""
        if not self._may_write or self._is_lost:
            return False
        record = json.dumps(entry.record._asdict()).encode()
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_RECORD, record)
            archive.writestr(_LIBRARY, entry.library.read_bytes())
            log = entry.path / _LOG
            archive.writestr(_LOG, log.read_bytes() if log.exists() else b"")
            if (key := settings.remote_signing_key()) is not None:
                archive.writestr(_SIGNATURE, _sign(key, record))
        return self._write(self._archive(entry.record.request), buffer.getvalue())

    def _path(self, *parts: str) -> str:
        return "/".join((self._files[1].rstrip("/"), *parts))

    def _archive(self, request: str) -> str:
        return self._path("entries", f"{request}.zip")

    def _read(self, request: str) -> bytes | None:
        if self._is_lost:
            return None
        with self._reported("cannot be read"):
            try:
                return self._files[0].cat_file(self._archive(request))
            except FileNotFoundError:
                return None
        return None

    def _write(self, path: str, data: bytes, is_staged: bool = True) -> bool:
        with self._reported("cannot be written"):
            files = self._files[0]
            files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            # Where files can be moved, one is there all at once; an object store has no half objects.
            if is_staged and "file" in files.protocol:
                staged = f"{path}.{secrets.token_hex(8)}"
                files.pipe_file(staged, data)
                files.mv(staged, path)
            else:
                files.pipe_file(path, data)
            return True
        return False

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Turns whatever the library for that store raises into a warning, and the store off for this process."""
        try:
            yield
        except Exception as error:
            self._is_lost = True
            text = str(error).partition("\n")[0]
            self._warn(f"it {what}, so kernels are built here ({type(error).__name__}: {text})")

    def _warn(self, text: str) -> None:
        warnings.warn(f"OPWRIGHT_REMOTE_STORE={self._url}: {text}", RuntimeWarning, stacklevel=2)


def remote_store() -> RemoteStore | None:
    """Returns the store that the settings name, the same one each time; None without one."""
    url = settings.remote_store()
    return _made(url, settings.pushes()) if url else None


_made = functools.cache(RemoteStore)


class _Refused(Exception):
    """What was fetched is not a build of the request; the text says why."""


def _check(archive: bytes, request: str) -> tuple[BuildRecord, bytes, bytes]:
    """Returns the record, the library and the log in an archive.

    Raises:
        _Refused: it is damaged, of another request, or not signed by the key that is set.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as found:
            if sum(member.file_size for member in found.infolist()) > _MAX_BYTES:
                raise _Refused("it is too large")
            parts = {name: found.read(name) for name in found.namelist() if name in _PARTS}
        record = BuildRecord(**json.loads(parts[_RECORD]))
        library = parts[_LIBRARY]
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError) as error:
        raise _Refused(f"it is damaged ({type(error).__name__})") from None
    if (key := settings.remote_key()) is not None:
        _check_signature(key, parts.get(_SIGNATURE), parts[_RECORD])
    if record.request != request:
        raise _Refused("it was made for another request")
    if digest_of(library) != record.library:
        raise _Refused("its library is not the one in its record")
    return record, library, parts.get(_LOG, b"")


_PARTS: Sequence[str] = (_LIBRARY, _RECORD, _LOG, _SIGNATURE)


def _sign(key: Path, record: bytes) -> bytes:
    """Returns the signature of a record, which holds the digest of the library, by an Ed25519 key."""
    _require_cryptography("OPWRIGHT_REMOTE_SIGNING_KEY")
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise _key_error("OPWRIGHT_REMOTE_SIGNING_KEY", key, str(error)) from None
    if not isinstance(private, Ed25519PrivateKey):
        raise _key_error("OPWRIGHT_REMOTE_SIGNING_KEY", key, "it is a key of another kind")
    return private.sign(_SIGNED + record)


def _check_signature(key: Path, signature: bytes | None, record: bytes) -> None:
    _require_cryptography("OPWRIGHT_REMOTE_KEY")
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public = load_pem_public_key(key.read_bytes())
    except (OSError, ValueError) as error:
        raise _key_error("OPWRIGHT_REMOTE_KEY", key, str(error)) from None
    if not isinstance(public, Ed25519PublicKey):
        raise _key_error("OPWRIGHT_REMOTE_KEY", key, "it is a key of another kind")
    if signature is None:
        raise _Refused("it is not signed")
    try:
        public.verify(signature, _SIGNED + record)
    except InvalidSignature:
        raise _Refused("its signature is not by the key that is set") from None


def _require_cryptography(name: str) -> None:
    if importlib.util.find_spec("cryptography") is None:
        raise SettingError(
            name, "needs the package `cryptography`, which is not installed", hint='`pip install "opwright[remote]"`'
        )


def _key_error(name: str, key: Path, reason: str) -> SettingError:
    return SettingError(
        name,
        "must be the file of an Ed25519 key in PEM form",
        rows=[("got", str(key)), ("reason", reason.partition("\n")[0])],
        hint="`openssl genpkey -algorithm ed25519 -out key.pem`; `openssl pkey -in key.pem -pubout -out public.pem`",
    )
