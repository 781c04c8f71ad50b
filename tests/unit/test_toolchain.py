"""Which C++ compiler is taken."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from opwright.backends.toolchain import find_compiler, header_folders, is_of_c_library, remember


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that calls itself "mine"."""
    monkeypatch.delenv("OPWRIGHT_CXX", raising=False)
    made = tmp_path / "my-c++"
    made.write_text("#!/bin/sh\necho mine\n")
    made.chmod(0o755)
    return made


@pytest.mark.parametrize("command", ["{}", "ccache {}", "/usr/lib/ccache/ccache {}", "sccache {} -m64"])
def test_a_compiler_behind_a_launcher(
    command: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For `CXX="ccache clang++"`, the compiler `c++` was taken."""
    monkeypatch.setenv("CXX", command.format(program))
    compiler = find_compiler(tmp_path / "identities")
    assert compiler is not None
    assert (compiler.path, compiler.identity) == (str(program), "mine")


@pytest.mark.parametrize("command", ["{} c++", "env X=1 {}", "{} 'an open quote"])
def test_a_command_that_begins_with_another_program_is_not_a_compiler(
    command: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", command.format(program))
    compiler = find_compiler(tmp_path / "identities")
    assert compiler is None or compiler.identity != "mine"


@pytest.mark.parametrize(
    ("header", "is_known"),
    [
        ("math.h", True),
        ("x86_64-linux-gnu/bits/math-vector.h", True),
        ("linux/limits.h", True),
        ("syscall.h", True),
        ("x86_64-linux-gnu/python3.11/pyconfig.h", True),
        ("x86_64-linux-gnu/sys/types.h", True),
        ("sys/acl.h", False),
        ("sys/capability.h", False),
        ("x86_64-linux-gnu/sys/sdt.h", False),
        ("x86_64-linux-gnu/cblas.h", False),
        ("eigen3/Eigen/Core", False),
        ("eigen3/bits/stdint.h", False),
        ("zlib.h", False),
    ],
)
def test_headers_of_the_c_library_among_those_of_packages(header: str, is_known: bool) -> None:
    """A build did not notice that a package in /usr/include was updated."""
    assert is_of_c_library(f"/usr/include/{header}") == is_known
    assert not is_of_c_library(f"/usr/local/include/{header}")


def test_folders_of_a_compiler_are_those_that_packages_do_not_share(program: Path, tmp_path: Path) -> None:
    own = ["/usr/include/c++/12", "/usr/include/x86_64-linux-gnu/c++/12", "/usr/lib/gcc/x86_64-linux-gnu/12/include"]
    listed = "\n ".join([*own, "/usr/local/include", "/usr/include/x86_64-linux-gnu", "/usr/include"])
    text = f"#include <...> search starts here:\n {listed}\nEnd of search list.\n"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'E'\n{text}E\n")
    assert header_folders(str(program), tmp_path / "identities") == tuple(map(Path, own))


def test_folders_of_a_compiler_that_failed_once_are_asked_for_again(program: Path, tmp_path: Path) -> None:
    """The headers of the C++ library went into every record until the compiler was updated."""
    identities = tmp_path / "store" / "compilers"
    text = "#include <...> search starts here:\n /usr/lib/own/include\nEnd of search list.\n"
    program.write_text(f"#!/bin/sh\n[ -e {tmp_path}/works ] || exit 1\ncat >&2 <<'E'\n{text}E\n")
    assert header_folders(str(program), identities) == ()
    (tmp_path / "works").touch()
    header_folders.cache_clear()  # the next process
    assert header_folders(str(program), identities) == (Path("/usr/lib/own/include"),)


def test_compilers_behind_links_to_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them counted as the first one that was asked, and for as long as the launcher stayed the same."""
    folders = {name: tmp_path / name for name in ("links", "real")}
    monkeypatch.setenv("PATH", ":".join([*map(str, folders.values()), "/usr/bin", "/bin"]))
    for folder in folders.values():
        folder.mkdir()
    launcher = tmp_path / "ccache"
    launcher.write_text(f'#!/bin/sh\nexec "{folders["real"]}/$(basename "$0")" "$@"\n')
    launcher.chmod(0o755)

    def identity(name: str, version: str) -> str:
        program = folders["real"] / name
        program.write_text(f"#!/bin/sh\necho {name} {version}\n")
        program.chmod(0o755)
        if not (folders["links"] / name).exists():
            (folders["links"] / name).symlink_to(launcher)
        monkeypatch.setenv("OPWRIGHT_CXX", name)
        compiler = find_compiler(tmp_path / "store" / "compilers")
        assert compiler is not None
        assert compiler.path == str(folders["links"] / name)
        return compiler.identity

    assert [identity("one", "1"), identity("two", "1"), identity("one", "1.1")] == ["one 1", "two 1", "one 1.1"]


def test_threads_that_ask_at_once_write_their_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One moved the file that the other was still writing, so half an answer was remembered."""
    written, both = [], threading.Barrier(2)
    monkeypatch.setattr(Path, "rename", lambda path, target: written.append(path.name))

    def ask() -> str:
        both.wait(60)
        return "answer"

    threads = [threading.Thread(target=remember, args=("question", tmp_path, ask)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(written)) == 2
