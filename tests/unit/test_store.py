"""The store removes what it has made, and nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from opwright.build.store import BuildRecord, Entry, Store, digest_of
from opwright.cli import main
from opwright.errors import BuildError, StoreError, StoreOwnerError
from opwright.store_root import MARKER, make_root

DAY = 24 * 3600


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the directory that OPWRIGHT_CACHE_DIR names."""
    monkeypatch.setenv("OPWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def build(store: Store, request: str = "a" * 40, text: bytes = b"library") -> Entry:
    with store.work() as work:
        (work / store.product).write_bytes(text)
        record = BuildRecord(request, digest_of(text), "g++", {}, ["m::op"], {}, time.time())
        return store.publish(work, request, record)


def make_old(path: Path, days: float = 2) -> None:
    """Makes a directory and what is in it that old."""
    then = time.time() - days * DAY
    for each in [*path.rglob("*"), path]:
        os.utime(each, (then, then), follow_symlinks=False)


def make_project(folder: Path) -> Path:
    (folder / "thesis").mkdir(parents=True)
    (folder / "thesis" / "data.txt").write_text("years of work")
    make_old(folder)
    return folder / "thesis" / "data.txt"


def cache_command(verb: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    monkeypatch.setattr(sys, "argv", ["opwright", "cache", verb, *flags])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


NAMES = ["work", "objects", "entries", "extensions", "headers", "support", "compilers", "locks", "limits"]


@pytest.mark.parametrize("name", NAMES)
def test_a_project_beside_the_store_stays(cache: Path, name: str) -> None:
    """OPWRIGHT_CACHE_DIR may name a directory that is used for other things too."""
    data = make_project(cache / name)
    build(Store())
    assert Store().prune(0) == 1
    build(Store())
    assert Store().clean() == 1
    assert data.read_text() == "years of work"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_store_has_not_made_inside_it_stays(cache: Path, name: str) -> None:
    entry = build(Store())
    data = make_project(Store().root / name)
    beside = make_project(entry.path.parent / "mine")
    assert Store().prune(0) == 1
    build(Store())
    assert Store().clean() == 1
    assert data.exists()
    assert beside.exists()


@pytest.mark.parametrize("name", ["work", "objects", "entries", "headers", "limits", "compilers"])
def test_a_link_in_the_store_is_not_followed(cache: Path, tmp_path: Path, name: str) -> None:
    other = Store(tmp_path / "other", "objects")
    entry = build(other)
    (other.root / "work").rename(tmp_path / "work")
    target = tmp_path / "target"
    for folder in ("a" * 40, "build-" + "b" * 16):
        make_project(target / folder / ("c" * 32))
    (target / ("d" * 32)).write_text("identity")
    (target / ("d" * 32 + ".json")).write_text("limits")
    entry.path.parent.rename(target / ("e" * 40))
    make_old(target)
    make_root(Store().root)
    (Store().root / name).symlink_to(target)
    before = sorted(target.rglob("*"))
    size = Store().size_bytes()
    assert size < 1000
    Store().prune(0)
    Store().clean()
    assert sorted(target.rglob("*")) == before


def test_links_below_the_folders_are_not_followed(cache: Path, tmp_path: Path) -> None:
    data = make_project(tmp_path / "target")
    build(Store())
    for place in (f"entries/{'b' * 40}", f"entries/{'a' * 40}/{'c' * 32}", f"work/build-{'d' * 16}"):
        (Store().root / place).symlink_to(tmp_path / "target")
    make_old(Store().root)
    assert Store().prune(0) == 1
    assert Store().clean() == 0
    assert data.exists()


def test_a_store_that_is_a_link_is_refused(cache: Path, tmp_path: Path) -> None:
    real = Store(tmp_path / "real")
    entry = build(real)
    cache.mkdir()
    (cache / "opwright-store").symlink_to(real.root)
    for act in (Store().clean, Store().size_bytes, lambda: Store().prune(0), lambda: build(Store())):
        with pytest.raises(StoreOwnerError, match="symbolic link") as caught:
            act()
        assert "OPWRIGHT_CACHE_DIR" in caught.value.hint
    assert entry.library.exists()


def test_a_cache_directory_that_is_a_link_is_used(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    cache.symlink_to(tmp_path / "scratch")
    build(Store())
    assert (tmp_path / "scratch" / "opwright-store" / "entries").is_dir()
    assert Store().clean() == 1


def test_a_directory_of_the_stores_name_that_is_someone_elses_is_refused(cache: Path) -> None:
    data = make_project(cache / "opwright-store" / "work")
    for act in (Store().clean, Store().size_bytes, lambda: Store().prune(0), lambda: build(Store())):
        with pytest.raises(StoreOwnerError, match="Opwright has not made it"):
            act()
    assert data.exists()
    assert not (cache / "opwright-store" / MARKER).exists()


def test_an_empty_directory_becomes_the_store(cache: Path) -> None:
    (cache / "opwright-store").mkdir(parents=True)
    (cache / "opwright-store").chmod(0o700)
    build(Store())
    assert (cache / "opwright-store" / MARKER).read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")


def test_identities_of_compilers_make_a_whole_store(cache: Path) -> None:
    """They are remembered before anything is built."""
    from opwright.backends.toolchain import remember

    assert remember("subject", Store().identities, lambda: "answer") == "answer"
    assert remember("subject", Store().identities, lambda: "another") == "answer"
    assert (Store().root / MARKER).exists()
    build(Store())


def test_what_a_killed_build_left_is_swept_after_a_day(cache: Path) -> None:
    program = """
import os
from opwright.build.store import Store
work = Store().work()
path = work.__enter__()
(path / "unit.o").touch()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    (left,) = (path for path in (Store().root / "work").iterdir() if path.is_dir())
    build(Store())
    assert left.exists()  # it may be a build on another machine that shares the disk
    make_old(left)
    build(Store())
    assert list((Store().root / "work").iterdir()) == []


def test_an_error_of_another_file_during_a_build_is_not_one_of_the_cache(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"absent`: the build cannot use this file .*\n\n  reason  No such") as caught:
        with Store().work():
            (tmp_path / "absent").read_bytes()
    assert not isinstance(caught.value, StoreError)
    with pytest.raises(StoreError), Store().work() as work:
        (work / "absent").read_bytes()


def test_errors_of_the_cache_behind_a_link_and_of_open_files(tmp_path: Path) -> None:
    """The former was taken for an error of another file; the latter ended in a `TypeError`."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    store = Store(tmp_path / "link" / "store")
    with pytest.raises(StoreError), store.work() as work:
        (work.resolve() / "absent").read_bytes()
    with pytest.raises(StoreError), store.work():
        raise OSError(errno.EIO, "Input/output error", 3)


def test_only_a_library_that_may_be_loaded_is_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of all compilers were read before their records were looked at."""
    store = Store()
    for compiler in ("one", "two"):
        with store.work() as work:
            text = compiler.encode()
            (work / "library.so").write_bytes(text)
            record = BuildRecord("a" * 40, digest_of(text), compiler, {}, ["op"], {}, 0.0)
            store.publish(work, "a" * 40, record)
    read = []
    monkeypatch.setattr("opwright.build.store.digest_of", lambda data: read.append(data) or digest_of(data))
    entry = store.find("a" * 40, "two")
    assert entry is not None
    assert (entry.record.compiler, read) == ("two", [b"two"])
    entry.library.write_bytes(b"damaged")
    assert store.find("a" * 40, "two") is None


def test_a_file_system_without_hard_links(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for several devices ended with an error of the cache."""

    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    entry = build(Store())
    Store().alias(entry, "b" * 40, entry.record.compiler)
    found = Store().find("b" * 40, None)
    assert found is not None
    assert found.library.read_bytes() == entry.library.read_bytes()


def test_a_live_build_keeps_its_folder_however_old_it_looks(cache: Path) -> None:
    program = """
import sys
from opwright.build.store import Store
with Store().work() as path:
    print(path, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        path = Path(process.stdout.readline().strip())
        (path / "unit.o").touch()
        make_old(path, days=400)
        build(Store())
        Store().prune(0)
        Store().clean()
        assert (path / "unit.o").exists()
        process.communicate("")
    assert not path.exists()
    assert list((Store().root / "work").iterdir()) == []


def test_what_was_used_least_recently_goes_first(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`cache prune` knew ages alone: a store of builds of this week grew."""
    text = b"x" * 100_000
    kept, used, other = (build(Store(folder=f), c * 40, text) for f, c in zip(["entries", "entries", "objects"], "abc"))
    header = Store().root / "headers" / ("d" * 40) / "prefix.h"
    pack = Store().root / "triton" / f"{'e' * 32}.opk"
    for file in (header, pack):
        file.parent.mkdir(parents=True)
        file.write_bytes(text)
    for path, days in ((used.path, 5), (other.path, 4), (header.parent, 3), (kept.path, 1)):
        make_old(path, days)
    os.utime(pack, (time.time() - 2 * DAY,) * 2)
    assert Store().find("b" * 40, None) == used  # now it is the one that was used last
    left = {"c": other.path, "d": header, "e": pack, "a": kept.path, "b": used.path}
    for size, gone in (("1GB", ""), ("450kB", "c"), ("450kB", ""), ("400KB", "d"), ("0.15 MB", "ea"), ("0B", "b")):
        assert not cache_command("prune", monkeypatch, "--max-size", size)
        assert f"Removed {len(gone)} build" in capsys.readouterr().err
        assert not any(left.pop(name).exists() for name in gone)
        assert all(path.exists() for path in left.values())


@pytest.mark.parametrize("size", ["500", "MB", "-1MB", "1e3MB", "5 apples"])
def test_a_size_without_a_unit_is_refused(
    size: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = build(Store())
    assert cache_command("prune", monkeypatch, "--days", "0", f"--max-size={size}") == 2
    assert f"invalid value `{size}`" in capsys.readouterr().err
    assert entry.path.exists()


def test_a_size_of_0_needs_no_unit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = build(Store())
    assert not cache_command("prune", monkeypatch, "--max-size=0")
    assert not entry.path.exists()


@pytest.mark.parametrize("days", ["-1", "nan", "inf"])
def test_days_that_are_not_a_number_from_0_are_refused(
    days: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--days=-1` removed every build."""
    entry = build(Store())
    assert cache_command("prune", monkeypatch, f"--days={days}") == 2
    error = capsys.readouterr().err
    assert f"`--days`: invalid value `{days}`" in error
    assert "expected  a finite number, 0 or more" in error
    assert "hint: `opwright cache prune --days 30`" in error
    assert entry.path.exists()


def test_the_cache_commands(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_project(cache / "work")
    entry = build(Store())
    size = Store().size_bytes()
    assert size > entry.library.stat().st_size
    for words, out in (
        (["dir"], f"{cache}/opwright-store"),
        (["size"], f"{size / 2**20:.1f} MiB"),
        (["size", "--bytes"], f"{size}"),
    ):
        assert not cache_command(words[0], monkeypatch, *words[1:])
        assert capsys.readouterr().out == f"{out}\n"
    assert not cache_command("prune", monkeypatch)
    assert entry.library.exists()
    assert not cache_command("prune", monkeypatch, "--days", "0")
    assert "Removed 1 build\n" in capsys.readouterr().err
    assert not entry.library.exists()
    entry = build(Store())
    assert not cache_command("clean", monkeypatch)
    assert "Removed 1 build\n" in capsys.readouterr().err
    assert data.exists()
    assert not entry.library.exists()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("verb", ["clean", "prune --days 0", "prune --days 9 --max-size 0B"])
@pytest.mark.parametrize("kind", ["build", "headers", "triton"])
def test_a_cache_that_cannot_be_written_is_an_error_of_the_cache_commands(
    code: int, verb: str, kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`clean` ended with a traceback, and `prune` had "Removed 1 build" though it was still there."""
    path = Store().root / {"headers": f"headers/{'d' * 40}/prefix.h", "triton": f"triton/{'e' * 32}.opk"}.get(kind, "")
    if kind == "build":
        path = build(Store()).library
    else:
        make_root(Store().root)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    make_old(Store().root)

    def refuse(path: object, **_: object) -> None:
        raise OSError(code, os.strerror(code), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        patched.setattr(os, "rmdir", refuse)
        ended = cache_command(*verb.split()[:1], patched, *verb.split()[1:])
    err = capsys.readouterr().err
    assert (ended, "Removed" in err, "Traceback" in err) == (2, False, False)
    assert "OPW204" in err
    assert os.strerror(code) in err
    assert f"at      {Store().root}/" in err
    assert path.exists()


def test_a_build_that_another_process_removes_at_the_same_time_is_no_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = build(Store())
    unlink = os.unlink

    def lose(path: str, **how: int) -> None:
        unlink(path, **how)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", lose)
        assert Store().clean() == 1
    assert not entry.path.exists()
