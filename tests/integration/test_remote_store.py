"""A store for many machines: what is fetched, what is refused, and who builds."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import io
import json
import os
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from jaxtyping import Float
from torch import Tensor

from opwright import operator
from opwright.build import compile, remote
from opwright.build.compile import ensure_built
from opwright.build.remote import RemoteStore
from opwright.build.request import Request, make_request
from opwright.build.store import Store
from opwright.dispatch import kernels

pytestmark = pytest.mark.compiler

DOUBLED = """
#include <opwright/kernel.h>
template <typename T> void doubled(opwright::View<const T, 1> x, opwright::View<T, 1> output) {
  for (int64_t i = 0; i < x.size(0); ++i) output(i) = 2 * x(i);
}
OPWRIGHT_KERNEL(doubled, float)
"""
DOUBLED_ON_CUDA = """
#include <opwright/kernel.h>
template <typename T>
void doubled(opwright::View<const T, 1> x, opwright::View<T, 1> output, cudaStream_t) {}
OPWRIGHT_KERNEL(doubled, float)
"""


@pytest.fixture
def request_(ns) -> Request:
    @operator(f"{ns}::doubled", cpu=DOUBLED)
    def doubled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 2 * x

    (keys,) = kernels.libraries_of([doubled.operator])
    return make_request(kernels.unit_of(keys[0]), ["cpu"])


@pytest.fixture
def build(request_, tmp_path, monkeypatch) -> Callable[..., bool]:
    """Returns a function that asks a new machine for the library, and says whether it compiled."""
    monkeypatch.setenv("OPWRIGHT_REMOTE_PUSH", "1")
    machines = iter(range(100))

    def build(url: str | Path) -> bool:
        monkeypatch.setenv("OPWRIGHT_REMOTE_STORE", str(url))
        remote._made.cache_clear()
        entry, has_compiled = ensure_built(request_, Store(tmp_path / f"machine{next(machines)}"))
        assert entry.library.stat().st_size > 0
        return has_compiled

    return build


@pytest.fixture
def served(tmp_path) -> Iterator[tuple[str, Path]]:
    """Yields the URL of a folder behind an HTTP server, and the folder."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()


@pytest.fixture
def bucket(monkeypatch) -> Iterator[str]:
    """Yields the URL of a bucket on a server that speaks the protocol of S3."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("kernels")
    yield "s3://kernels/opwright"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def test_one_machine_builds_and_the_others_fetch(build, tmp_path, monkeypatch) -> None:
    assert build(tmp_path / "remote")
    assert not list((tmp_path / "remote" / "claims").rglob("*.*"))
    monkeypatch.setattr(compile, "_require", lambda tools, request: pytest.fail("a compiler is asked for"))
    assert not build(tmp_path / "remote")
    assert not build(f"file://{tmp_path}/remote")


def test_a_bucket(build, bucket) -> None:
    assert build(bucket)
    assert not build(bucket)


def test_a_web_server_is_read_and_never_written(build, served) -> None:
    url, folder = served
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(url)
        assert not list(folder.iterdir())
        assert build(folder)
        assert not build(url)


def test_a_fetched_kernel_computes(ns, tmp_path, run_python) -> None:
    program = (
        "import torch\nfrom jaxtyping import Float\nfrom torch import Tensor\nfrom opwright import operator\n"
        f"SOURCE = {DOUBLED!r}\n"
        f"@operator('{ns}::doubled', cpu=SOURCE)\n"
        "def doubled(x: Float[Tensor, 'n']) -> Float[Tensor, 'n']:\n    return 2 * x\n"
        "assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.0))\n"
        "from opwright.dispatch import kernels\nassert kernels.is_loaded(doubled.operator, 'cpu')\n"
    )
    (tmp_path / "program.py").write_text(program)
    for machine, path in (("a", os.environ["PATH"]), ("b", "/nonexistent")):
        env = {
            "OPWRIGHT_CACHE_DIR": str(tmp_path / machine),
            "OPWRIGHT_REMOTE_STORE": str(tmp_path / "remote"),
            "OPWRIGHT_REMOTE_PUSH": "1",
            "OPWRIGHT_REQUIRE_KERNELS": "1",
            "PATH": path,
        }
        run_python(f"exec(compile(open({str(tmp_path / 'program.py')!r}).read(), 'program.py', 'exec'))", env=env)


def test_nothing_is_written_without_leave(build, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OPWRIGHT_REMOTE_PUSH", "0")
    assert build(tmp_path / "remote")
    assert not (tmp_path / "remote").exists()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/kernels", "nothing://kernels", "/proc/kernels"])
def test_a_store_that_cannot_be_reached_is_a_warning_and_a_local_build(build, url) -> None:
    with pytest.warns(RuntimeWarning, match=r"OPWRIGHT_REMOTE_STORE=.*so kernels are built here") as caught:
        assert build(url)
    assert len(caught) == 1


# --- what is not what it says ---------------------------------------------------------------------------------------


def change(archive: Path, **parts: bytes | None) -> None:
    """Replaces files of an archive, or takes them out."""
    names = {"library": "library.so", "record": "record.json", "signature": "signature"}
    with zipfile.ZipFile(archive) as found:
        held = {name: found.read(name) for name in found.namelist()}
    held |= {names[part]: data for part, data in parts.items()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, data in held.items():
            if data is not None:
                made.writestr(name, data)
    archive.write_bytes(buffer.getvalue())


def record_of(archive: Path) -> dict:
    with zipfile.ZipFile(archive) as found:
        return json.loads(found.read("record.json"))


LIES = {
    "another library": (lambda a: change(a, library=b"\x7fELF"), "its library is not the one in its record"),
    "another request": (
        lambda a: change(a, record=json.dumps(record_of(a) | {"request": "0" * 40}).encode()),
        "it was made for another request",
    ),
    "no record": (lambda a: change(a, record=None), "it is damaged"),
    "a record of another form": (lambda a: change(a, record=b'{"files": 3}'), "it is damaged"),
    "cut short": (lambda a: a.write_bytes(a.read_bytes()[:1000]), "it is damaged"),
    "empty": (lambda a: a.write_bytes(b""), "it is damaged"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_store_that_lies_is_a_warning_and_a_local_build(build, tmp_path, lie) -> None:
    assert build(tmp_path / "remote")
    (archive,) = (tmp_path / "remote" / "entries").iterdir()
    spoil, message = LIES[lie]
    spoil(archive)
    with pytest.warns(RuntimeWarning, match=f"is not used: {message}"):
        assert build(tmp_path / "remote")
    assert not build(tmp_path / "remote")  # what was built here is there now


def test_a_build_from_other_files_is_not_used(build, tmp_path, monkeypatch) -> None:
    header = tmp_path / "header.h"
    header.write_text("// one\n")
    assert build(tmp_path / "remote")
    (archive,) = (tmp_path / "remote" / "entries").iterdir()
    record = record_of(archive)
    change(archive, record=json.dumps(record | {"files": {str(header): "0" * 64}}).encode())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # another header is not a fault
        assert build(tmp_path / "remote")


def key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    key, private, public = Ed25519PrivateKey.generate(), folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_with_a_key_only_what_it_has_signed_is_used(build, tmp_path, monkeypatch) -> None:
    private, public = key_pair(tmp_path, "ours")
    theirs, _ = key_pair(tmp_path, "theirs")
    monkeypatch.setenv("OPWRIGHT_REMOTE_KEY", str(public))
    assert build(tmp_path / "remote")  # unsigned, since there is no key to sign with
    monkeypatch.setenv("OPWRIGHT_REMOTE_SIGNING_KEY", str(theirs))
    with pytest.warns(RuntimeWarning, match="it is not signed"):
        assert build(tmp_path / "remote")
    monkeypatch.setenv("OPWRIGHT_REMOTE_SIGNING_KEY", str(private))
    with pytest.warns(RuntimeWarning, match="its signature is not by the key that is set"):
        assert build(tmp_path / "remote")
    assert not build(tmp_path / "remote")
    (archive,) = (tmp_path / "remote" / "entries").iterdir()
    change(archive, record=json.dumps(record_of(archive) | {"created": 0.0}).encode())
    with pytest.warns(RuntimeWarning, match="its signature is not by the key that is set"):
        assert build(tmp_path / "remote")


@pytest.mark.parametrize("name", ["OPWRIGHT_REMOTE_KEY", "OPWRIGHT_REMOTE_SIGNING_KEY"])
@pytest.mark.parametrize("kind", ["missing", "of another kind"])
def test_a_file_that_holds_no_key_is_said(build, tmp_path, monkeypatch, name, kind) -> None:
    assert build(tmp_path / "remote")
    file = tmp_path / "key.pem"
    if kind == "of another kind":
        key = X25519PrivateKey.generate()
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        file.write_bytes(private if name == "OPWRIGHT_REMOTE_SIGNING_KEY" else public)
    monkeypatch.setenv(name, str(file))
    (archive,) = (tmp_path / "remote" / "entries").iterdir()
    if name == "OPWRIGHT_REMOTE_SIGNING_KEY":
        archive.unlink()
    with pytest.raises(remote.SettingError, match=f"`{name}`: must be the file of an Ed25519 key"):
        build(tmp_path / "remote")


def test_a_key_without_the_package_that_reads_it(build, tmp_path, monkeypatch) -> None:
    assert build(tmp_path / "remote")
    monkeypatch.setenv("OPWRIGHT_REMOTE_KEY", str(tmp_path / "key.pem"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(remote.SettingError, match="needs the package `cryptography`") as caught:
        build(tmp_path / "remote")
    assert caught.value.hint == '`pip install "opwright[remote]"`'


# --- who builds -----------------------------------------------------------------------------------------------------


def test_the_later_of_two_machines_waits_for_the_earlier_one(build, request_, tmp_path, monkeypatch) -> None:
    assert build(tmp_path / "remote")
    (archive,) = (tmp_path / "remote" / "entries").iterdir()
    data = archive.read_bytes()
    archive.unlink()
    claims = tmp_path / "remote" / "claims" / request_.key
    claims.mkdir(parents=True, exist_ok=True)
    (claims / "earlier").touch()
    os.utime(claims / "earlier", (time.time() - 5, time.time() - 5))
    monkeypatch.setattr(remote, "_POLL_SECONDS", 0.05)
    threading.Timer(0.5, archive.write_bytes, [data]).start()
    assert not build(tmp_path / "remote")
    assert [claim.name for claim in claims.iterdir()] == ["earlier"]


def test_a_machine_that_has_died_is_not_waited_for(build, request_, tmp_path) -> None:
    claims = tmp_path / "remote" / "claims" / request_.key
    claims.mkdir(parents=True)
    (claims / "dead").touch()
    os.utime(claims / "dead", (time.time() - 3600, time.time() - 3600))
    assert build(tmp_path / "remote")


def test_a_claim_that_ends_while_claims_are_listed(tmp_path, monkeypatch, recwarn) -> None:
    (tmp_path / "ended").touch()
    store = remote.RemoteStore(str(tmp_path), may_write=True)

    def modified(self, entry) -> float:
        raise FileNotFoundError(entry["name"])

    monkeypatch.setattr(remote.RemoteStore, "_modified", modified)
    assert store._first_claim(str(tmp_path)) == ""
    assert not store._is_lost
    assert not recwarn.list


def test_many_machines_at_once_build_once(request_, tmp_path, monkeypatch) -> None:
    """Each with a store of its own, and all at the same moment."""
    monkeypatch.setattr(remote, "_POLL_SECONDS", 0.05)
    monkeypatch.setenv("OPWRIGHT_REMOTE_PUSH", "1")
    monkeypatch.setenv("OPWRIGHT_REMOTE_STORE", str(tmp_path / "remote"))
    remote._made.cache_clear()
    found: list[bool] = []

    def run(number: int) -> None:
        found.append(ensure_built(request_, Store(tmp_path / f"machine{number}"))[1])

    threads = [threading.Thread(target=run, args=[number]) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False] * 15 + [True]


def test_torchrun_writes_by_default(monkeypatch) -> None:
    from opwright import settings

    monkeypatch.delenv("OPWRIGHT_REMOTE_PUSH", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not settings.pushes()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert settings.pushes()
    monkeypatch.setenv("OPWRIGHT_REMOTE_PUSH", "0")
    assert not settings.pushes()


def test_a_store_is_made_once_for_each_setting(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("OPWRIGHT_REMOTE_STORE", str(tmp_path))
    assert isinstance(remote.remote_store(), RemoteStore)
    assert remote.remote_store() is remote.remote_store()
    monkeypatch.delenv("OPWRIGHT_REMOTE_STORE")
    assert remote.remote_store() is None


def test_pushing_needs_a_store_to_push_to(monkeypatch, tmp_path, run_python) -> None:
    monkeypatch.delenv("OPWRIGHT_REMOTE_STORE", raising=False)
    program = (
        "import sys\nfrom opwright.cli import main\n"
        "sys.argv = ['opwright', 'build', 'opwright_ops.softmax', '--push']\nsys.exit(main())\n"
    )
    result = run_python(program, check=False)
    assert result.returncode == 2
    assert "`OPWRIGHT_REMOTE_STORE`: must name the remote store that `--push` writes to" in result.stderr


@pytest.mark.parametrize(
    ("sources", "count"),
    [({}, 1), pytest.param({"cuda.cu": DOUBLED_ON_CUDA}, 3, marks=pytest.mark.nvcc)],
    ids=["for CPUs", "and its parts for one backend each"],
)
def test_a_library_of_the_local_store_is_pushed(tmp_path, run_python, sources, count) -> None:
    for name, text in sources.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "op.py").write_text(
        "from jaxtyping import Float\nfrom torch import Tensor\nfrom opwright import operator\n"
        f"@operator('pushed::doubled', cpu={DOUBLED!r})\n"
        "def doubled(x: Float[Tensor, 'n']) -> Float[Tensor, 'n']:\n    return 2 * x\n"
    )
    program = "import sys\nfrom opwright.cli import main\nsys.argv = ['opwright', 'build', {}]\nsys.exit(main())\n"
    env = {"OPWRIGHT_CACHE_DIR": str(tmp_path / "local"), "OPWRIGHT_REMOTE_STORE": str(tmp_path / "remote")}
    file = str(tmp_path / "op.py")
    run_python(program.format(repr(file)), env=env)
    assert not (tmp_path / "remote").exists()
    run_python(program.format(f"{file!r}, '--push'"), env=env)
    assert len(list((tmp_path / "remote" / "entries").iterdir())) == count


def test_the_build_by_the_compiler_here_is_pushed(request_, tmp_path, monkeypatch) -> None:
    """Where the local store had builds by several compilers, that whose folder comes first by name was pushed."""
    store, remote_ = Store(tmp_path / "local"), RemoteStore(str(tmp_path / "remote"), may_write=True)
    for number in (1, 2, 1):
        path = tmp_path / f"c++{number}"
        path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo {number} || exec c++ "$@"\n')
        path.chmod(0o755)
        monkeypatch.setenv("OPWRIGHT_CXX", str(path))
        entry, _ = ensure_built(request_, store)
        compile.push(entry, request_, store, remote_)
        with zipfile.ZipFile(tmp_path / "remote" / "entries" / f"{request_.key}.zip") as archive:
            assert json.loads(archive.read("record.json"))["compiler"] == str(number)
